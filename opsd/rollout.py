"""Engines that sample completions: vLLM in this process, vLLM servers, or transformers. Token ids in, token ids out.

Data flow: prompt ids (opsd/prompts.py) -> Rollout -> opsd/batch.py and opsd/evaluation.py. One interface, three implementations:
`generate`, `stream` (as completions finish), `sync` (serve the adapter of a step), `close`. What an engine serves is always named: the
base model or the adapter of one optimizer step, never whatever was loaded before (DESIGN.md section 3.1).
"""

import hashlib
import itertools
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from opsd.adapter import WEIGHTS, adapter_norm
from opsd.canary import Canary
from opsd.runinfo import sha256_file

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SamplingSettings:
    """How to sample. `top_p` 1.0 and `top_k` 0 are off; `temperature` 0 is greedy."""

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    ignore_eos: bool = False


@dataclass(frozen=True)
class Rollout:
    """One sampled completion.

    `completion_ids` holds the end token when the model stopped by itself. `per_token_logps` are the sampler's own log-probabilities in
    nats, after temperature, top-k and top-p, renormalised on what they keep.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    per_token_logps: tuple[float, ...]
    finish_reason: str  # "stop" or "length"

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


def derive_seed(*parts: int | str) -> int:
    """A 31-bit seed from any parts, e.g. (run seed, step, example id): the same on every machine and for every rank layout."""
    digest = hashlib.sha256("\x1f".join(str(p) for p in parts).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class EngineDied(RuntimeError):
    """An engine that ran elsewhere is gone; its work has to be asked for again after a restart."""


class VLLMEngine:
    """vLLM in this process. Adapters are served natively (never merged), each sync under a name and id of its own."""

    def __init__(
        self,
        model_path: str,
        *,
        canary_ids: list[int],
        eos_ids: set[int],
        max_model_len: int,
        dtype: str,
        max_num_seqs: int,
        gpu_memory_utilization: float,
        max_lora_rank: int | None,
        lora_targets: list[str] | None = None,
        enforce_eager: bool = False,
        sleep: bool = False,
        load_format: str = "auto",
        kv_cache_dtype: str = "auto",
        tensor_parallel_size: int = 1,
        with_logps: bool = True,
        tuning: dict | None = None,
        seed: int = 0,
    ):
        """`lora_targets`: names of the layers that adapters will change (None = any that vLLM can adapt, the output projection included,
        whose product with nothing is paid for at every token). `tuning`: further arguments of vLLM's `LLM` that change its speed, not what
        it computes."""
        import torch.distributed as dist
        from vllm import LLM
        from vllm.platforms import current_platform

        options = dict(tuning or {})
        if current_platform.is_cpu():
            # a prompt cut in two rewinds its request's generator, which torch cannot do on a CPU
            options["enable_chunked_prefill"] = False
        if max_lora_rank is not None:
            options |= {
                "enable_lora": True,
                "max_loras": 1,
                "max_cpu_loras": 1,
                "max_lora_rank": vllm_lora_rank(max_lora_rank),
                "lora_target_modules": lora_targets,
            }
        if dist.is_initialized() and dist.get_world_size() > 1:  # one engine per process, on that process's own GPU
            options["distributed_executor_backend"] = "external_launcher"
        self._llm = LLM(
            model=str(model_path),
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            gpu_memory_utilization=gpu_memory_utilization,
            enforce_eager=enforce_eager,
            enable_sleep_mode=sleep,
            load_format=load_format,
            kv_cache_dtype=kv_cache_dtype,
            tensor_parallel_size=tensor_parallel_size,
            seed=seed,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",  # sampling settings come from the caller alone
            **options,
        )
        self._sleep = sleep
        self._canary_ids = list(canary_ids)
        self._eos_ids = sorted(eos_ids)
        self._with_logps = with_logps
        self._submitted: dict[str, tuple[object, list[int]]] = {}
        self._lora_request = None
        self._lora_enabled = max_lora_rank is not None
        self._request_numbers = itertools.count()
        self._canary = Canary()
        self.served = "base model"

    def sync(self, adapter_dir: Path | None, step: int) -> None:
        """Serves the adapter in `adapter_dir` as the one of optimizer step `step` (None = the base model) and proves it.

        Raises ValueError for a folder that is not a complete adapter, RuntimeError when changed adapters keep leaving the engine's
        output on the canary prompt bit-for-bit the same.
        """
        from vllm.lora.request import LoRARequest

        if self._sleep:
            self._llm.wake_up()
        if adapter_dir is None:
            self._lora_request, digest, norm = None, "base", 0.0
            self.served = "base model"
        else:
            if not self._lora_enabled:
                raise RuntimeError(f"adapter_dir={adapter_dir} cannot be served: the engine was built without LoRA")
            with ThreadPoolExecutor(1) as pool:
                # beside the check and the load, which read the same file
                hashing = pool.submit(sha256_file, Path(adapter_dir) / WEIGHTS)
                norm = adapter_norm(adapter_dir)
                if self._lora_request is not None:
                    self._llm.llm_engine.remove_lora(self._lora_request.lora_int_id)
                number = next(self._request_numbers) + 1
                self._lora_request = LoRARequest(f"step-{step}-{number}", number, str(adapter_dir))
                self._llm.llm_engine.add_lora(self._lora_request)
                digest = hashing.result()
            self.served = f"adapter of step {step}"
        self._llm.reset_prefix_cache()
        self._prove(digest)
        logger.info("engine serves %s (norm %.6g, sha256 %s)", self.served, norm, digest[:12])

    def load_weights(self, weights, step: int) -> None:
        """Overwrites the engine's own weights by `weights` (opsd/merged_sync.py), which are those of step `step`, and proves it.

        The engine must be in this process, on a GPU and built without LoRA: vLLM on a CPU repacks its weights.
        """
        if self._sleep:
            self._llm.wake_up()
        self._llm.apply_model(lambda model: model.load_weights(iter(weights)))
        self.served = f"weights merged at step {step}"
        self._llm.reset_prefix_cache()
        self._prove(weights.digest)
        logger.info("engine serves %s (relative error %.3g)", self.served, weights.relative_error)

    def _prove(self, digest: str) -> None:
        """Compares the canary prompt's log-probabilities with those of the sync before."""
        from vllm import SamplingParams

        output = self._run_one(self._canary_ids, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
        logps = tuple(
            position[token].logprob
            for token, position in zip(self._canary_ids[1:], output.prompt_logprobs[1:], strict=True)
        )
        self._canary.check(digest, logps, self.served)

    @property
    def canary_logps(self) -> tuple[float, ...]:
        """Log-probabilities of the canary prompt under what is served, as of the last sync."""
        return self._canary.logps

    def _run_one(self, prompt_ids: list[int], params):
        engine = self._llm.llm_engine
        engine.add_request(
            f"canary-{next(self._request_numbers)}",
            {"prompt_token_ids": prompt_ids},
            params,
            lora_request=self._lora_request,
        )
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    return output
        raise RuntimeError("vLLM finished without answering the canary prompt")

    def submit(self, key, prompt_ids: list[int], sampling: SamplingSettings, seed: int) -> None:
        """Queues one request; a later `poll` answers it under `key`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_new_tokens,
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=[] if sampling.ignore_eos else self._eos_ids,
            seed=seed,
            logprobs=0 if self._with_logps else None,
            flat_logprobs=self._with_logps,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        name = f"rollout-{next(self._request_numbers)}"
        self._llm.llm_engine.add_request(
            name, {"prompt_token_ids": list(prompt_ids)}, params, lora_request=self._lora_request
        )
        self._submitted[name] = (key, list(prompt_ids))

    @property
    def pending(self) -> int:
        """Requests submitted and not answered yet."""
        return len(self._submitted)

    def poll(self) -> list[tuple[object, Rollout]]:
        """One engine step; (key, Rollout) of every request that finished in it."""
        finished = [output for output in self._llm.llm_engine.step() if output.finished]
        answers = []
        for output in finished:
            key, prompt_ids = self._submitted.pop(output.request_id)
            answers.append((key, self._to_rollout(prompt_ids, output)))
        return answers

    def stream(
        self, prompt_ids: list[list[int]], sampling: SamplingSettings, seeds: list[int]
    ) -> Iterator[tuple[int, Rollout]]:
        """Yields (index into `prompt_ids`, Rollout) in the order in which completions finish."""
        for index, (ids, seed) in enumerate(zip(prompt_ids, seeds, strict=True)):
            self.submit(index, ids, sampling, seed)
        while self.pending:
            yield from self.poll()

    def _to_rollout(self, prompt_ids: list[int], output) -> Rollout:
        sample = output.outputs[0]
        if list(output.prompt_token_ids) != list(prompt_ids):
            raise RuntimeError("vLLM answered another prompt than it was given: prompt ids differ")
        if sample.finish_reason not in ("stop", "length"):
            raise RuntimeError(
                f"vLLM ended a completion with finish_reason={sample.finish_reason!r}; stop or length expected"
            )
        logps = tuple(sample.logprobs.logprobs) if self._with_logps else ()
        return Rollout(tuple(prompt_ids), tuple(sample.token_ids), logps, sample.finish_reason)

    def generate(self, prompt_ids: list[list[int]], sampling: SamplingSettings, seeds: list[int]) -> list[Rollout]:
        """All completions, in the order of the prompts."""
        return in_order(self.stream(prompt_ids, sampling, seeds), len(prompt_ids))

    def rest(self) -> None:
        """Gives the engine's memory back until the next `sync`, when it was built with `sleep`."""
        if self._sleep:
            self._llm.sleep(level=1)

    def close(self) -> None:
        """Stops the engine. vLLM ends this process's `torch.distributed` group with it, so nothing collective may follow."""
        self._llm.llm_engine.engine_core.shutdown()


def in_order(stream: Iterator[tuple[int, Rollout]], count: int) -> list[Rollout]:
    """Collects a stream into a list by index; a missing or repeated index is an error."""
    collected: dict[int, Rollout] = {}
    for index, rollout in stream:
        if index in collected:
            raise RuntimeError(f"request {index} was answered twice")
        collected[index] = rollout
    if len(collected) != count:
        raise RuntimeError(f"{len(collected)} of {count} requests were answered")
    return [collected[i] for i in range(count)]


def vllm_lora_rank(rank: int) -> int:
    """The smallest rank vLLM reserves buffers for that holds `rank`."""
    supported = (8, 16, 32, 64, 128, 256, 320, 512)
    for candidate in supported:
        if rank <= candidate:
            return candidate
    raise ValueError(f"lora_r={rank} must be at most {supported[-1]}: vLLM serves no larger adapter")
