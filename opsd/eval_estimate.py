"""What an evaluation will cost, from the model's shape and the GPU, before anything loads (`--dry_run`); and the shapes adapters must fit.

Decoding reads the weights once a step and every sequence's KV cache once a token; both go through the GPU's memory bus, which is the floor.
"""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

GIB = 2**30
# Bandwidth of the memory bus in TB/s as the vendors state it, by a part of the name that nvidia-smi prints; the first match counts.
BANDWIDTH = {
    "B200": 8.0, "H200": 4.8, "GH200": 4.0, "H100 NVL": 3.9, "H100 PCIe": 2.0, "H100": 3.35, "A100-SXM4-40GB": 1.56, "A100-PCIE-40GB": 1.56,
    "A100": 2.0, "H20": 4.0, "L40S": 0.864, "L40": 0.864, "L4": 0.3, "A40": 0.696, "A10": 0.6, "RTX 5090": 1.79, "RTX 4090": 1.01,
    "RTX 3090": 0.936, "V100": 0.9, "T4": 0.32,
}  # fmt: skip
REACHED = 0.87  # share of the stated bandwidth that a plain copy reaches (4.18 of 4.8 TB/s measured on an H200)
OVERHEAD = 1.15  # time over the floor that this evaluator aims at with CUDA graphs
WORKSPACE = 3 * GIB  # activations, CUDA graphs and allocator slack beside weights and cache


def linear_shapes(config: PretrainedConfig) -> tuple[dict[str, tuple[int, int]], int]:
    """({name of every linear layer: (out, in) features}, number of parameters), from a model without memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {n: (m.out_features, m.in_features) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    return shapes, model.num_parameters()


@dataclass(frozen=True)
class Cost:
    """Bytes and seconds of one evaluation. Without a GPU of known bandwidth the times are None."""

    sequences: int
    weight_bytes: int
    kv_bytes_per_token: int
    cache_bytes: int | None  # per engine; None without a GPU
    concurrency: int  # sequences that one engine decodes at once, at the given length
    seconds: float | None


def kv_bytes_per_token(config: PretrainedConfig, cache_bytes_per_value: int) -> int:
    """Bytes that one token of one sequence occupies in the KV cache: keys and values of every layer."""
    text = config.get_text_config()
    head_dim = text.to_dict().get("head_dim") or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * text.num_key_value_heads * head_dim * cache_bytes_per_value


def estimate(
    *,
    parameters: int,
    dtype_bytes: int,
    kv_bytes: int,
    sequences: int,
    prompt_tokens: int,
    new_tokens: int,
    max_num_seqs: int,
    engines: int,
    gpus_per_engine: int,
    gpu_bytes: int | None,
    memory_utilization: float,
    bandwidth: float | None,
) -> Cost:
    """The cost of `sequences` completions that are all `new_tokens` long. `bandwidth` is one GPU's, in bytes a second."""
    weights = parameters * dtype_bytes
    per_sequence = kv_bytes * (prompt_tokens + new_tokens)
    share = -(-sequences // engines)
    cache, concurrency = None, min(max_num_seqs, share)
    if gpu_bytes is not None:
        cache = int(gpu_bytes * memory_utilization * gpus_per_engine) - weights - WORKSPACE * gpus_per_engine
        if cache < per_sequence:
            raise ValueError(
                f"one sequence of {prompt_tokens + new_tokens} tokens needs {per_sequence / GIB:.1f} GiB of KV cache, and "
                f"{max(cache, 0) / GIB:.1f} GiB are left beside {weights / GIB:.1f} GiB of weights; "
                "raise tensor_parallel_size or lower max_new_tokens"
            )
        # sequences grow while they run: on average a running one holds its prompt and half of its new tokens
        concurrency = min(concurrency, int(cache // (kv_bytes * (prompt_tokens + new_tokens / 2))))
    seconds = None
    if bandwidth is not None:
        cache_reads = share * kv_bytes * (prompt_tokens * new_tokens + new_tokens**2 / 2)
        weight_reads = -(-share // concurrency) * new_tokens * weights
        seconds = OVERHEAD * (cache_reads + weight_reads) / (bandwidth * REACHED * gpus_per_engine)
    return Cost(sequences, weights, kv_bytes, cache, concurrency, seconds)


def known_bandwidth(gpu: str) -> float | None:
    """Bytes a second of the GPU that nvidia-smi calls `gpu`; None when it is not in the table."""
    return next((value * 1e12 for name, value in BANDWIDTH.items() if name in gpu), None)


def gpu_memory_bytes(gpu: str) -> int:
    """Memory from a line such as `NVIDIA H200, 143771 MiB`."""
    return int(gpu.rsplit(",", 1)[1].split()[0]) * 2**20


def estimate_plan(plan, groups: list[str | None], gpus: list[str]) -> str:
    """What `--dry_run` prints for a plan of eval_setup.py: one line per assumed mean length of a completion."""
    settings, regime = plan.settings, plan.regime
    gpu = None if groups == [None] else gpus[0]
    dtype_bytes = torch.empty(0, dtype=getattr(torch, settings.dtype)).element_size()
    costs = {}
    for label, share in (
        ("all completions to the limit", 1.0),
        ("half of the limit on average", 0.5),
        ("a tenth", 0.1),
    ):
        new_tokens = max(1, int(regime.max_new_tokens * share))
        costs[f"{label} ({new_tokens} tokens)"] = estimate(
            parameters=plan.parameters,
            dtype_bytes=dtype_bytes,
            kv_bytes=kv_bytes_per_token(plan.config, 1 if settings.kv_cache_dtype == "fp8" else dtype_bytes),
            sequences=len(plan.prompt_ids) * regime.samples_per_problem * len(plan.targets),
            prompt_tokens=max(map(len, plan.prompt_ids)),
            new_tokens=new_tokens,
            max_num_seqs=settings.max_num_seqs,
            engines=len(groups),
            gpus_per_engine=settings.tensor_parallel_size,
            gpu_bytes=None if gpu is None else gpu_memory_bytes(gpu),
            memory_utilization=settings.gpu_memory_utilization,
            bandwidth=None if gpu is None else known_bandwidth(gpu),
        )
    return describe(costs, len(groups), gpu)


def describe(costs: dict[str, Cost], engines: int, gpu: str | None) -> str:
    """The text that `--dry_run` prints; `costs` maps a sentence about the length to its cost."""
    first = next(iter(costs.values()))
    lines = [
        f"{first.sequences} completions on {engines} engine{'s' if engines > 1 else ''} ({gpu or 'CPU'})",
        f"weights {first.weight_bytes / GIB:.2f} GiB, KV cache {first.kv_bytes_per_token / 1024:.1f} KiB a token"
        + ("" if first.cache_bytes is None else f", {first.cache_bytes / GIB:.1f} GiB of cache per engine"),
    ]
    for label, cost in costs.items():
        if cost.seconds is None:
            duration = "time unknown (no GPU of known memory bandwidth)"
        else:
            duration = f"about {_duration(cost.seconds)}"
        lines.append(f"{label}: {cost.concurrency} at once per engine, {duration}")
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 100
        else f"{seconds / 60:.0f} min"
        if seconds < 6000
        else f"{seconds / 3600:.1f} h"
    )
