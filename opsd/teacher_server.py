"""A teacher behind a vLLM server (`teacher_kind=model`, `teacher_model=http://…`): it returns its likeliest entries of every token.

Data flow: all sequences of a step (opsd/trainer.py) -> prompt log-probabilities of the server -> `TopKScores` -> fused_divergence.py, which
compares `loss_top_k` entries and, with `loss_tail`, all the others as one. A server's log-probabilities are those at temperature 1, so
another temperature is possible only where the kept entries are renormalised (no tail). The key is the rollout servers'.
"""

import json
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from opsd.teacher_scores import TopKScores
from opsd.vllm_client import RequestRefused, Server

logger = logging.getLogger(__name__)

IN_FLIGHT = 16  # sequences scored at once
PROBE = "Solve 12 + 7. The answer is \\boxed{19}."


class TeacherServer:
    """The server at `url`, asked for the `top_k` likeliest entries of every completion token."""

    def __init__(self, url: str, api_key: str | None, top_k: int, vocab_size: int, tokenizer):
        """Raises ValueError without a key, or for a server whose tokenizer is not the student's."""
        if not api_key:
            raise ValueError(
                f"OPSD_VLLM_API_KEY is not set, and teacher_model={url} needs it; export the key that the server was started with"
            )
        self._server = Server(url, api_key, None)
        self._top_k, self._vocab_size = top_k, vocab_size
        try:
            self._server.model = self._server.served_name = self._server.base_model()["id"]
            body = {"model": self._server.model, "prompt": PROBE, "add_special_tokens": False}
            theirs = json.loads(self._server.ask("/tokenize", body, timeout=60.0))["tokens"]
        except RequestRefused as error:
            raise ValueError(f"teacher_model={url}: {error}") from None
        ours = tokenizer(PROBE, add_special_tokens=False)["input_ids"]
        if theirs != ours:
            raise ValueError(
                f"teacher_model={url} reads {PROBE!r} as other ids than the student ({theirs[:8]}… and {ours[:8]}…): a teacher must share "
                "the student's vocabulary"
            )
        logger.info("teacher: %s at %s, top %d entries a token", self._server.model, url, top_k)

    def score(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[TopKScores]:
        """The scores of every sequence's completion tokens, on the CPU, in order. Raises EngineDied when the server stays away."""
        with ThreadPoolExecutor(max_workers=IN_FLIGHT) as pool:
            return list(pool.map(self._score_one, prompts, completions))

    def _score_one(self, prompt: Sequence[int], completion: Sequence[int]) -> TopKScores:
        choice = self._server.complete(
            [*prompt, *completion], max_tokens=1, temperature=0.0, prompt_logprobs=self._top_k
        )
        tokens = choice["prompt_logprobs"][len(prompt) :]
        rows = []
        for entries in tokens:
            ranked = sorted((entry["rank"], int(token), entry["logprob"]) for token, entry in entries.items())
            rows.append([(token, logp) for rank, token, logp in ranked if rank <= self._top_k][: self._top_k])
        if len(rows) != len(completion) or any(len(row) != self._top_k for row in rows):
            raise RuntimeError(
                f"{self._server.url} returned {len(rows)} positions of {len(completion)}, not all with {self._top_k} entries; is "
                "loss_top_k above the server's --max-logprobs?"
            )
        ids = torch.tensor([[token for token, _ in row] for row in rows])
        if int(ids.max()) >= self._vocab_size:
            raise RuntimeError(
                f"{self._server.url} scores entry {int(ids.max())}, the student has {self._vocab_size}: a teacher must share its vocabulary"
            )
        return TopKScores(ids, torch.tensor([[logp for _, logp in row] for row in rows]))
