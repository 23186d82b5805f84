"""The rollout engine for machines without vLLM: batched sampling with a KV cache on a transformers model.

Same interface as `opsd.rollout.VLLMEngine`. Every request has its own generator, so a completion does not depend on its neighbours.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from opsd.adapter import check_adapter
from opsd.attention import attention
from opsd.model import load_base
from opsd.rollout import Rollout, SamplingSettings, in_order

logger = logging.getLogger(__name__)


def keep_top(logits: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """Sets to -inf what top-k, then nucleus sampling on the renormalised rest, leave out. (B, V) -> (B, V)."""
    if top_k and top_k < logits.shape[-1]:
        threshold = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if top_p < 1.0:
        ascending, order = logits.sort(dim=-1)
        below = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        below[:, -1] = False
        logits = logits.masked_fill(below.scatter(-1, order, below), -torch.inf)
    return logits


class TransformersEngine:
    """Samples from `model`. With `live=True` the model is the trainer's own, so that a sync has nothing to load."""

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        *,
        eos_ids: set[int],
        pad_id: int,
        batch_size: int = 64,
        live: bool = False,
    ):
        self._model = model
        self._eos_ids = set(eos_ids)
        self._pad_id = pad_id
        self._batch_size = batch_size
        self._live = live
        self._waiting: list[tuple] = []  # (key, prompt ids, sampling, seed)
        self.served = "base model"

    @classmethod
    def from_pretrained(
        cls, model_path: str, *, dtype: str, device: str, eos_ids: set[int], pad_id: int, batch_size: int = 64
    ):
        """An engine with its own copy of the base model, for evaluation."""
        model = load_base(model_path, dtype=getattr(torch, dtype)).to(device)
        return cls(model, eos_ids=eos_ids, pad_id=pad_id, batch_size=batch_size)

    def sync(self, adapter_dir: Path | None, step: int) -> None:
        """Serves the adapter of optimizer step `step` from now on; None is the base model."""
        if self._live:
            self.served = f"the trainer's own weights at step {step}"
            return
        if isinstance(self._model, PeftModel):
            self._model = self._model.unload()
        self.served = "base model"
        if adapter_dir is not None:
            digest, norm = check_adapter(adapter_dir)
            self._model = PeftModel.from_pretrained(self._model, str(adapter_dir))
            self.served = f"adapter of step {step}"
            logger.info("engine serves %s (norm %.6g, sha256 %s)", self.served, norm, digest[:12])

    def load_weights(self, weights, step: int) -> None:
        """Overwrites this engine's own copy by `weights` (opsd/merged_sync.py), which are those of step `step`."""
        if self._live or isinstance(self._model, PeftModel):
            raise RuntimeError("merged weights need an engine with its own copy of the base model")
        own = dict(self._model.named_parameters())
        with torch.no_grad():
            for name, weight in weights:
                own[name].copy_(weight)
        self.served = f"weights merged at step {step}"
        logger.info("engine serves %s (relative error %.3g)", self.served, weights.relative_error)

    def submit(self, key, prompt_ids: list[int], sampling: SamplingSettings, seed: int) -> None:
        """Queues one request; a later `poll` answers it under `key`."""
        self._waiting.append((key, list(prompt_ids), sampling, seed))

    @property
    def pending(self) -> int:
        """Requests submitted and not answered yet."""
        return len(self._waiting)

    def poll(self) -> list[tuple[object, Rollout]]:
        """Samples the oldest waiting requests as one batch; (key, Rollout) of each."""
        sampling = self._waiting[0][2]
        batch = [request for request in self._waiting if request[2] == sampling][: self._batch_size]
        training = self._model.training
        self._model.eval()
        try:
            with torch.no_grad(), attention(self._model, "sdpa"):
                rollouts = self._sample([ids for _, ids, _, _ in batch], sampling, [seed for *_, seed in batch])
        finally:
            self._model.train(training)
        answered = {id(request) for request in batch}
        self._waiting = [request for request in self._waiting if id(request) not in answered]
        return [(request[0], rollout) for request, rollout in zip(batch, rollouts, strict=True)]

    def stream(
        self, prompt_ids: list[list[int]], sampling: SamplingSettings, seeds: list[int]
    ) -> Iterator[tuple[int, Rollout]]:
        """Yields (index into `prompt_ids`, Rollout), batch by batch."""
        for index, (ids, seed) in enumerate(zip(prompt_ids, seeds, strict=True)):
            self.submit(index, ids, sampling, seed)
        while self.pending:
            yield from self.poll()

    def _sample(self, prompts: list[list[int]], sampling: SamplingSettings, seeds: list[int]) -> list[Rollout]:
        device = self._model.device
        longest = max(map(len, prompts))
        ids = torch.tensor([[self._pad_id] * (longest - len(p)) + list(p) for p in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        generators = [torch.Generator(device=device).manual_seed(seed) for seed in seeds]
        tokens: list[list[int]] = [[] for _ in prompts]
        logps: list[list[float]] = [[] for _ in prompts]
        running = set(range(len(prompts)))
        cache = None
        for _ in range(sampling.max_new_tokens):
            output = self._model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = output.past_key_values
            chosen, chosen_logps = self._choose(output.logits[:, -1].float(), sampling, generators)
            for row, (token, logp) in enumerate(zip(chosen.tolist(), chosen_logps.tolist(), strict=True)):
                if row in running:
                    tokens[row].append(token)
                    logps[row].append(logp)
                    if token in self._eos_ids and not sampling.ignore_eos:
                        running.remove(row)
            if not running:
                break
            ids = chosen[:, None]
            mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
            positions = positions[:, -1:] + 1
        return [
            Rollout(tuple(p), tuple(t), tuple(lp), "length" if row in running else "stop")
            for row, (p, t, lp) in enumerate(zip(prompts, tokens, logps, strict=True))
        ]

    @staticmethod
    def _choose(logits: torch.Tensor, sampling: SamplingSettings, generators) -> tuple[torch.Tensor, torch.Tensor]:
        """Chosen token and its processed log-probability per row, (B,) each."""
        if sampling.temperature == 0:
            return logits.argmax(-1), logits.new_zeros(logits.shape[0])
        log_probs = keep_top(logits / sampling.temperature, sampling.top_p, sampling.top_k).log_softmax(-1)
        noise = torch.stack(
            [torch.empty(logits.shape[-1], device=logits.device).exponential_(generator=g) for g in generators]
        )
        chosen = (log_probs - noise.log()).argmax(-1)  # Gumbel-max: one draw per row from its own generator
        return chosen, log_probs.gather(-1, chosen[:, None]).squeeze(-1)

    def generate(self, prompt_ids: list[list[int]], sampling: SamplingSettings, seeds: list[int]) -> list[Rollout]:
        """All completions, in the order of the prompts."""
        return in_order(self.stream(prompt_ids, sampling, seeds), len(prompt_ids))

    def rest(self) -> None:
        """Nothing to give back: the weights are the trainer's, the cache lives only during a call."""

    def close(self) -> None:
        """Nothing to stop."""
