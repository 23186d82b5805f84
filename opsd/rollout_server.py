"""The rollout engine on other GPUs or hosts: one or more vLLM servers, adapters loaded at run time over HTTP, token ids in and out.

Same interface as `opsd.rollout.VLLMEngine`. A server is started with `python -m opsd.server_process` (or by hand with `vllm serve`: see
`server_command` and `server_environment` there) and serves one run at a time. It reads the adapter's folder by itself: the same host, or
a path on a file system that both see. Whoever has the key can make it read any folder, so it listens on loopback unless told otherwise,
and never without a key.
"""

import logging
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

from opsd.adapter import check_adapter
from opsd.rollout import Rollout, SamplingSettings, in_order
from opsd.server_process import StartedServer
from opsd.vllm_client import RequestRefused, Server

logger = logging.getLogger(__name__)

HEALTH_EVERY_S = 5.0
HEALTH_PATIENCE = 3  # health checks in a row that may fail
IN_FLIGHT = 256  # requests held open per server


class ServerEngine:
    """Samples from every server in `urls`; request i goes to server i modulo their number, so that a run can be repeated."""

    def __init__(
        self,
        urls: list[str],
        *,
        api_key: str,
        canary_ids: list[int],
        eos_ids: set[int],
        max_model_len: int,
        started: list[StartedServer] = (),
    ):
        by_url = {server.url: server for server in started}
        self._servers = [Server(url, api_key, by_url.get(url)) for url in urls]
        self._started = list(started)
        self._canary_ids = list(canary_ids)
        self._eos_ids = sorted(eos_ids)
        self.served = "base model"
        for server in self._servers:
            self._meet(server, max_model_len)

    def _meet(self, server: Server, max_model_len: int) -> None:
        """Refuses, by name, a server that this engine cannot use. Raises ValueError."""
        name = f"vllm_server_urls={server.url}"
        try:
            base = server.base_model()
        except RequestRefused as error:
            raise ValueError(f"{name}: {error}") from None
        if base["max_model_len"] < max_model_len:
            raise ValueError(
                f"{name} was started with max_model_len={base['max_model_len']}, and {max_model_len} tokens are needed; restart it"
            )
        server.model = server.served_name = base["id"]
        probe = server.complete(self._canary_ids, max_tokens=4, temperature=1.0, top_p=1.0, top_k=1, logprobs=0, seed=0)
        if min(probe["logprobs"]["token_logprobs"]) < -1e-3:  # one candidate is left, so its log-probability is 0
            raise ValueError(
                f"{name} returns log-probabilities from before top-k and top-p; restart it with --logprobs-mode processed_logprobs"
            )

    def sync(self, adapter_dir: Path | None, step: int) -> None:
        """Serves the adapter in `adapter_dir` as the one of optimizer step `step` (None = the base model) on every server.

        The name on the server comes from the weights, so that several training processes with equal adapters share one.
        """
        if adapter_dir is None:
            digest, norm = "base", 0.0
            self.served = "base model"
        else:
            digest, norm = check_adapter(adapter_dir)
            self.served = f"adapter of step {step}"
        for server in self._servers:
            old = server.served_name
            server.served_name = server.model if adapter_dir is None else self._load(server, adapter_dir, digest)
            if old not in (server.model, server.served_name):
                self._unload(server, old)
            choice = server.complete(
                self._canary_ids, max_tokens=1, temperature=0.0, top_p=1.0, top_k=0, prompt_logprobs=0
            )
            logps = tuple(
                position[str(token)]["logprob"]
                for token, position in zip(self._canary_ids[1:], choice["prompt_logprobs"][1:], strict=True)
            )
            server.canary.check(digest, logps, self.served)
        logger.info("engine serves %s (norm %.6g, sha256 %s)", self.served, norm, digest[:12])

    @staticmethod
    def _load(server: Server, adapter_dir: Path, digest: str) -> str:
        name = f"opsd-{digest[:32]}"
        path = str(Path(adapter_dir).resolve())
        try:
            # not load_inplace: the server would then read the folder again for every request
            server.ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
        except RequestRefused as error:
            if "already been loaded" in str(error):  # these weights, by another training process or an attempt before
                return name
            remedy = (
                "the folder must be readable on its host; start it with --enable-lora and a sufficient --max-lora-rank"
            )
            if error.status == 404 and "lora" not in str(error).lower():
                remedy = "start the server with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
            raise RuntimeError(f"vLLM server {server.url} could not load adapter={path}: {error}; {remedy}") from None
        return name

    @staticmethod
    def _unload(server: Server, name: str) -> None:
        try:
            server.ask("/v1/unload_lora_adapter", {"lora_name": name})
        except RequestRefused as error:
            if error.status != 404:  # another training process was first
                raise

    @property
    def canary_logps(self) -> tuple[float, ...]:
        """Log-probabilities of the canary prompt on the first server, as of the last sync."""
        return self._servers[0].canary.logps

    def stream(
        self, prompt_ids: list[list[int]], sampling: SamplingSettings, seeds: list[int]
    ) -> Iterator[tuple[int, Rollout]]:
        """Yields (index into `prompt_ids`, Rollout) as completions finish. Raises EngineDied when a server is gone."""
        waiting = [queue.SimpleQueue() for _ in self._servers]
        answers: queue.SimpleQueue = queue.SimpleQueue()
        stop = threading.Event()
        for index, (ids, seed) in enumerate(zip(prompt_ids, seeds, strict=True)):
            waiting[index % len(waiting)].put((index, ids, seed))

        def work(server: Server, requests: queue.SimpleQueue) -> None:
            while not stop.is_set():
                try:
                    index, ids, seed = requests.get_nowait()
                except queue.Empty:
                    return
                try:
                    answers.put((index, self._sample(server, ids, sampling, seed)))
                except (RuntimeError, ValueError, LookupError, TypeError, OSError) as error:  # the caller raises it
                    answers.put((None, error))
                    return

        for server, requests in zip(self._servers, waiting, strict=True):
            for _ in range(min(requests.qsize(), IN_FLIGHT)):
                threading.Thread(target=work, args=(server, requests), daemon=True).start()
        try:
            for _ in prompt_ids:
                yield self._next(answers)
        finally:
            stop.set()

    def _next(self, answers: queue.SimpleQueue) -> tuple[int, Rollout]:
        missed = [0] * len(self._servers)
        while True:
            try:
                index, answer = answers.get(timeout=HEALTH_EVERY_S)
            except queue.Empty:
                for number, server in enumerate(self._servers):
                    missed[number] = 0 if server.healthy() else missed[number] + 1
                    if missed[number] >= HEALTH_PATIENCE:
                        raise server.death("does not answer health checks") from None
                continue
            if index is None:
                raise answer
            return index, answer

    def _sample(self, server: Server, prompt_ids: list[int], sampling: SamplingSettings, seed: int) -> Rollout:
        choice = server.complete(
            prompt_ids,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_new_tokens,
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=[] if sampling.ignore_eos else self._eos_ids,
            seed=seed,
            logprobs=0,
        )
        if choice["finish_reason"] not in ("stop", "length"):
            raise RuntimeError(
                f"vLLM server {server.url} ended a completion with finish_reason={choice['finish_reason']!r}; stop or length expected"
            )
        logps = tuple(choice["logprobs"]["token_logprobs"])
        return Rollout(tuple(prompt_ids), tuple(choice["token_ids"]), logps, choice["finish_reason"])

    def generate(self, prompt_ids: list[list[int]], sampling: SamplingSettings, seeds: list[int]) -> list[Rollout]:
        """All completions, in the order of the prompts."""
        return in_order(self.stream(prompt_ids, sampling, seeds), len(prompt_ids))

    def rest(self) -> None:
        """Nothing to give back: the servers' memory is not the trainer's."""

    def close(self) -> None:
        """Takes the adapter off the servers and ends those that were started here."""
        for server in self._servers:
            if server.served_name != server.model and server.healthy():
                self._unload(server, server.served_name)
                server.served_name = server.model
        for started in self._started:
            started.stop()
