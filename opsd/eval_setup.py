"""From parsed arguments to a checked plan: model, adapters, prompts, engine settings, manifests; nothing slow comes before it.

Between eval_args.py, benchmarks.py and eval_runner.py. Reads the model's config, tokenizer and hashes; no weights are loaded.
"""

import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from opsd.adapter import CONFIG, check_adapter, check_adapter_fits, plain_names, read_adapter_config
from opsd.args import EvalRegime
from opsd.benchmarks import Benchmark, load_benchmark
from opsd.eval_args import EvalArgs, expand_adapters, regime_hash
from opsd.eval_estimate import linear_shapes
from opsd.eval_store import read_record
from opsd.eval_worker import EngineSettings
from opsd.grading import grader_version
from opsd.model import end_token_ids, load_config, load_tokenizer
from opsd.prompts import check_thinking_switch, evaluation_messages, render_ids, render_text
from opsd.rollout import SamplingSettings, vllm_lora_rank
from opsd.runinfo import git_state, hardware, package_versions, sha256_file

logger = logging.getLogger(__name__)

MANIFEST_SCHEMA = "opsd-eval-manifest/1"
CANARY_TOKENS = 64
RUN_FIELDS = (
    "schema",
    "status",
    "commit",
    "dirty",
    "command",
    "wall_seconds",
    "base_sha256_before",
    "base_sha256_after",
)
_OPEN_THINK = re.compile(r"<think(?:ing)?>\s*\Z")


@dataclass(frozen=True)
class Target:
    """One score to make: the base model or one adapter, with its folder and its manifest. `norm`: of the adapter's B matrices."""

    folder: Path
    adapter_dir: Path | None
    manifest: dict
    norm: float


@dataclass(frozen=True)
class Plan:
    """Everything a run needs. `prompt_ids[i]` belongs to `benchmark.problems[i]`; `text_prefix` is what the prompt has opened already."""

    benchmark: Benchmark
    regime: EvalRegime
    tokenizer: PreTrainedTokenizerBase
    config: PretrainedConfig
    parameters: int
    prompt_ids: list[list[int]]
    text_prefix: str
    settings: EngineSettings
    targets: list[Target]


def make_plan(args: EvalArgs, regime: EvalRegime) -> Plan:
    """Checks everything that can be checked without loading weights. Raises ValueError or FileNotFoundError with one line."""
    config = load_config(args.model)
    adapters = expand_adapters(args.adapter)
    configs = [_check_adapter_config(folder, args.model) for folder in adapters]
    benchmark = load_benchmark(
        args.benchmark, allow_changed=args.allow_changed_benchmark, max_problems=args.max_problems
    )
    tokenizer = load_tokenizer(args.model)
    prompt_ids, first_prompt = _render(tokenizer, benchmark, regime)
    longest = max(range(len(prompt_ids)), key=lambda i: len(prompt_ids[i]))
    _check_context(config, len(prompt_ids[longest]), benchmark.problems[longest].id, regime.max_new_tokens)
    shapes, parameters = linear_shapes(config)
    digests, norms = zip(*(check_adapter(folder) for folder in adapters), strict=True) if adapters else ((), ())
    for folder in adapters:
        check_adapter_fits(folder, args.model, shapes)
    dtype = _dtype(args.dtype, config)
    settings = EngineSettings(
        kind=args.engine,
        model=args.model,
        dtype=dtype,
        max_model_len=len(prompt_ids[longest]) + regime.max_new_tokens,
        max_num_seqs=args.max_num_seqs,
        sampling=SamplingSettings(
            regime.temperature, regime.top_p, regime.top_k, regime.max_new_tokens, ignore_eos=args.ignore_eos
        ),
        canary_ids=tuple(prompt_ids[0][:CANARY_TOKENS]),
        eos_ids=tuple(sorted(end_token_ids(args.model, tokenizer))),
        pad_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        max_lora_rank=max((config["r"] for config in configs), default=None),
        lora_targets=lora_targets(configs),
        gpu_memory_utilization=args.gpu_memory_utilization,
        enforce_eager=args.enforce_eager or not hardware()["gpus"],
        load_format=args.load_format,
        kv_cache_dtype=regime.kv_cache_dtype,
        tensor_parallel_size=args.tensor_parallel_size,
    )
    opened = _OPEN_THINK.search(first_prompt)
    text_prefix = opened[0] if opened else ""
    shared = {
        "schema": MANIFEST_SCHEMA,
        "model": args.model,
        "model_sha256": None if args.dry_run else model_sha256(args.model, config),
        "benchmark": benchmark.record(),
        "regime": dataclasses.asdict(regime),
        "regime_hash": regime_hash(regime),
        "run_seed": regime.seed,
        "engine": {
            "kind": args.engine,
            "dtype": dtype,
            "ignore_eos": args.ignore_eos,
            "load_format": args.load_format,
            "enforce_eager": settings.enforce_eager,
            "max_num_seqs": args.max_num_seqs,
            "max_model_len": settings.max_model_len,
            "tensor_parallel_size": args.tensor_parallel_size,
        },
        "prompt": first_prompt,
        "prompts_sha256": hashlib.sha256(json.dumps(prompt_ids).encode()).hexdigest(),
        "text_prefix": text_prefix,
        "problems": [dataclasses.asdict(problem) for problem in benchmark.problems],
        **git_state(),
        "versions": package_versions(),
        "hardware": hardware(),
        "grader_version": grader_version(),
    }
    targets = _targets(args, adapters, digests, norms, shared)
    return Plan(benchmark, regime, tokenizer, config, parameters, prompt_ids, text_prefix, settings, targets)


def _targets(
    args: EvalArgs, adapters: list[Path], digests: Sequence[str], norms: Sequence[float], shared: dict
) -> list[Target]:
    output_dir = Path(args.output_dir or ".")
    model = Path(args.model).name
    if not adapters:
        identity = {"name": args.name or model, "adapter": None, "adapter_sha256": None}
        identity["training"] = training_record(Path(args.model)) if Path(args.model).is_dir() else None
        return [Target(output_dir, None, identity | shared, 0.0)]
    labels = [folder.name for folder in adapters]
    if len(set(labels)) < len(labels):
        labels = [f"{folder.resolve().parent.name}-{folder.name}" for folder in adapters]
    if len(set(labels)) < len(labels):
        raise ValueError(
            f"adapters share the name {labels[0]}; evaluate them in separate calls with their own output_dir"
        )
    targets = []
    for folder, label, digest, norm in zip(adapters, labels, digests, norms, strict=True):
        if norm == 0:
            logger.warning("adapter=%s has only zeros in its B matrices: it is the base model", folder)
        several = len(adapters) > 1
        name = args.name or f"{model}+{folder.resolve().parent.name}/{folder.name}"
        identity = {
            "name": f"{name}-{label}" if several and args.name else name,
            "adapter": str(folder),
            "adapter_sha256": digest,
            "training": training_record(folder),
        }
        where = output_dir / label if several else output_dir
        targets.append(Target(where, folder.resolve(), identity | shared, norm))
    return targets


def lora_targets(configs: list[dict]) -> tuple[str, ...] | None:
    """Names of all layers that some adapter changes; None where an adapter names them by a pattern, or there is none."""
    names = [plain_names(config.get("target_modules") or "") for config in configs]
    return tuple(sorted(set().union(*names))) if names and all(names) else None


def _check_adapter_config(folder: Path, model: str) -> dict:
    """The adapter's configuration. A different base model by name is a warning, since folders move; different shapes are an error later."""
    config = read_adapter_config(folder)
    base = config.get("base_model_name_or_path")
    if base and Path(base).name != Path(model).name:
        logger.warning(
            "adapter=%s says base_model_name_or_path=%s, evaluated on model=%s", folder / CONFIG, base, model
        )
    vllm_lora_rank(config["r"])
    return config


def _render(tokenizer, benchmark: Benchmark, regime: EvalRegime) -> tuple[list[list[int]], str]:
    """Prompt ids of every problem and the text of the first one."""
    try:
        check_thinking_switch(tokenizer, regime.thinking, regime.thinking)
    except ValueError as error:
        raise ValueError(f"thinking={str(regime.thinking).lower()} cannot be rendered: {error}") from None
    messages = [evaluation_messages(p.problem, problem_prefix=regime.problem_prefix) for p in benchmark.problems]
    ids = [render_ids(tokenizer, m, enable_thinking=regime.thinking) for m in messages]
    return ids, render_text(tokenizer, messages[0], enable_thinking=regime.thinking)


def _check_context(config: PretrainedConfig, prompt_tokens: int, problem_id: str, max_new_tokens: int) -> None:
    context = config.get_text_config().max_position_embeddings
    if prompt_tokens + max_new_tokens > context:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} and the {prompt_tokens} prompt tokens of problem {problem_id} exceed the model's "
            f"context of {context} tokens; use --max_new_tokens {max(context - prompt_tokens, 0)} or less"
        )


def _dtype(wanted: str, config: PretrainedConfig) -> str:
    """The precision by name; `auto` is the one the weights are saved in (vLLM's own auto would cast float32 down)."""
    if wanted != "auto":
        return wanted
    own = config.dtype or config.get_text_config().dtype
    return "float32" if own is None else str(own).removeprefix("torch.")


def model_sha256(model: str, config: PretrainedConfig) -> str:
    """Digest over a local folder's config, tokenizer and weight files; for a hub model, its name and commit."""
    digest = hashlib.sha256()
    folder = Path(model)
    if not folder.is_dir():
        digest.update(f"{model}@{config._commit_hash}".encode())
        return digest.hexdigest()
    for path in sorted(folder.iterdir()):
        if path.suffix in (".safetensors", ".bin", ".json", ".jinja", ".txt", ".model") and path.is_file():
            digest.update(f"{path.name}={sha256_file(path)}\n".encode())
    return digest.hexdigest()


def training_record(trained: Path) -> dict | None:
    """The run.json beside or above what was trained and the step in the folder's name; None when it was trained elsewhere."""
    step = re.fullmatch(r"checkpoint-(\d+)", trained.name)
    for folder in (trained, trained.parent):
        if (folder / "run.json").is_file():
            run = read_record(folder / "run.json")
            kept = {name: run[name] for name in RUN_FIELDS if name in run}
            return {"run_dir": str(folder), "step": int(step[1]) if step else None, "run": kept}
    return None
