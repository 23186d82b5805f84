"""Arguments of `eval_aime.py` besides the regime: what is evaluated, where results go, which engine, and the modes that do not generate."""

import dataclasses
import difflib
import glob
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

from opsd.args import EvalRegime, OneLineParser

DEFAULT_SEQS = {
    "vllm": 512,
    "transformers": 32,
}  # max_num_seqs; vLLM admits what its KV cache holds, transformers all of it
ENGINES = tuple(DEFAULT_SEQS)
DTYPES = ("auto", "bfloat16", "float16", "float32")
EXPORTS = ("lm-eval", "lighteval")
# Fields of the regime in which samples of one score may differ: more samples or another run seed is still the same measurement.
NOT_IN_HASH = ("samples_per_problem", "seed")


def _option(default, help: str, choices: tuple[str, ...] | None = None):
    metadata = {"help": help} if choices is None else {"help": help, "choices": list(choices)}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class EvalArgs:
    """What `eval_aime.py` evaluates, and with what. The sampling settings are `EvalRegime`'s."""

    model: str | None = _option(None, "Base or merged model: a hub id or a local folder.")
    adapter: list[str] = _option(
        [], "LoRA adapter folders, or quoted patterns such as 'run/checkpoint-*'; empty = the base model."
    )
    benchmark: str = _option("aime24", "A benchmark's name, or a local .jsonl or .parquet file (problem, answer, id).")
    allow_changed_benchmark: bool = _option(
        False, "Accept a named benchmark whose row count or content hash is not the recorded one."
    )
    max_problems: int | None = _option(None, "Use only the first N problems; unset = all.")
    output_dir: str | None = _option(
        None,
        "Folder of samples.jsonl, result.json and report.html; one sub-folder per adapter when there are several. With "
        "--compare: where comparison.json and its report go (unset = only printed).",
    )
    name: str | None = _option(None, "Name of the result in tables; unset = from the model and the adapter.")
    resume: bool = _option(True, "Go on with the samples in output_dir; false = refuse a folder that has some.")

    engine: str = _option("vllm", "What samples: vllm, or transformers on machines without it.", ENGINES)
    dtype: str = _option("auto", "Precision of weights and activations; auto = the model's own.", DTYPES)
    tensor_parallel_size: int = _option(
        1, "GPUs per engine; the visible GPUs divided by it is the number of engines. 1 = one engine per GPU."
    )
    gpu_memory_utilization: float = _option(0.92, "Fraction of GPU memory for weights and KV cache.")
    max_num_seqs: int | None = _option(
        None, "Largest number of sequences that one engine decodes at once; unset = 512 for vllm, 32 for transformers."
    )
    enforce_eager: bool = _option(False, "Run vLLM without CUDA graphs, as the published evaluator does (slower).")
    load_format: str = _option("auto", "vLLM's load_format; dummy = random weights, for benchmarks only.")
    ignore_eos: bool = _option(False, "Sample past the end token, for benchmarks only; false = stop at it.")

    report: bool = _option(True, "Write report.html and its figures beside result.json.")
    dry_run: bool = _option(False, "Check the input, print an estimate of time and memory, and stop.")
    regrade: str | None = _option(None, "A samples.jsonl to grade again without generating; unset = generate.")
    compare: list[str] = _option(
        [], "Two sides of result.json files or their folders, separated by --: A... -- B...; empty = off."
    )
    allow_different_regime: bool = _option(
        False, "Let --compare go on, with a warning, when the two sides were sampled differently."
    )
    table: list[str] = _option([], "result.json files, or their folders, to print as one table; empty = off.")
    export: str | None = _option(None, "Write a finished output_dir's result in another tool's form.", EXPORTS)

    def __post_init__(self):
        modes = [name for name in ("regrade", "compare", "table", "dry_run", "export") if getattr(self, name)]
        if len(modes) > 1:
            raise ValueError(f"{' and '.join('--' + m for m in modes)} cannot be combined; give one of them")
        if self.regrade or self.compare or self.table:
            return
        needed = ["output_dir"] if self.export else ["model"] if self.dry_run else ["model", "output_dir"]
        for name in needed:
            if not getattr(self, name):
                raise ValueError(f"{name} is not given; use --{name}, see --help")
        if self.max_num_seqs is None:
            self.max_num_seqs = DEFAULT_SEQS[self.engine]
        for name in ("tensor_parallel_size", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 1")
        if self.max_problems is not None and self.max_problems < 1:
            raise ValueError(f"max_problems={self.max_problems} must be >= 1; leave it unset for all problems")
        if not 0 < self.gpu_memory_utilization < 1:
            raise ValueError(f"gpu_memory_utilization={self.gpu_memory_utilization} must be in (0, 1)")
        if self.engine == "transformers":
            changed = [
                f.name
                for f in dataclasses.fields(self)
                if f.name in ("tensor_parallel_size", "enforce_eager", "load_format")
                and getattr(self, f.name) != f.default
            ]
            if changed:
                raise ValueError(f"{changed[0]}={getattr(self, changed[0])} needs engine=vllm; remove it")


def parse_eval_args(argv: list[str]) -> tuple[EvalArgs, EvalRegime, tuple[list[str], list[str]]]:
    """(arguments, regime, the two sides of --compare). Raises ValueError of one line for unknown or bad flags."""
    argv, sides = _split_compare(argv)
    parser = OneLineParser((EvalArgs, EvalRegime), allow_abbrev=False, description="avg@k of a model on a benchmark")
    unknown = [word for word in parser.parse_known_args(argv)[1] if word.startswith("-")]
    if unknown:
        known = [option for action in parser._actions for option in action.option_strings]
        near = difflib.get_close_matches(unknown[0].split("=")[0], known, n=1)
        raise ValueError(f"unknown argument {unknown[0]!r}; {f'did you mean {near[0]}?' if near else 'see --help'}")
    args, regime = parser.parse_args_into_dataclasses(argv, look_for_args_file=False)
    if args.engine == "transformers" and regime.kv_cache_dtype != "auto":
        raise ValueError(f"kv_cache_dtype={regime.kv_cache_dtype} needs engine=vllm; use auto")
    return args, regime, sides


def _split_compare(argv: list[str]) -> tuple[list[str], tuple[list[str], list[str]]]:
    """Takes `A... -- B...` behind --compare apart, since argparse gives `--` a meaning of its own. `A B` is short for `A -- B`."""
    if "--compare" not in argv:
        return argv, ([], [])
    start = argv.index("--compare") + 1
    end = start
    while end < len(argv) and (argv[end] == "--" or not argv[end].startswith("--")):
        end += 1
    given = argv[start:end]
    if given.count("--") == 1:
        middle = given.index("--")
        sides = given[:middle], given[middle + 1 :]
    else:
        sides = given[:1], given[1:]
        if "--" in given or len(given) != 2:
            raise ValueError(
                f"compare has {len(given)} files and no single -- between its sides; write --compare A... -- B..."
            )
    if not sides[0] or not sides[1]:
        raise ValueError("compare needs at least one result.json on each side of --")
    return [*argv[:start], *sides[0], *sides[1], *argv[end:]], sides


def expand_adapters(patterns: list[str]) -> list[Path]:
    """Adapter folders in the order given; a pattern's matches in natural order (checkpoint-25 before checkpoint-100)."""
    folders: list[Path] = []
    for pattern in patterns:
        matches = sorted(map(Path, glob.glob(pattern)), key=_natural) if glob.has_magic(pattern) else [Path(pattern)]
        if not matches:
            raise FileNotFoundError(
                f"adapter={pattern} matches no folder; give the folders that hold adapter_config.json"
            )
        folders += matches
    twice = [str(f) for f in folders if sum(f.resolve() == other.resolve() for other in folders) > 1]
    if twice:
        raise ValueError(f"adapter={twice[0]} is given twice; name every adapter once")
    return folders


def _natural(path: Path) -> list:
    digits = ""
    parts: list = []
    for character in str(path) + "\0":
        if character.isdigit():
            digits += character
            continue
        if digits:
            parts.append((1, int(digits), ""))
            digits = ""
        parts.append((0, 0, character))
    return parts


def regime_hash(regime: EvalRegime) -> str:
    """16 hex digits over the regime without the run seed and the number of samples: equal hash, comparable scores."""
    values = {k: v for k, v in dataclasses.asdict(regime).items() if k not in NOT_IN_HASH}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def device_groups(environment: dict[str, str], gpus: list[str], tensor_parallel_size: int) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of every engine; [None] without a GPU. `gpus` is what the machine has, one entry each."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    devices = [str(i) for i in range(len(gpus))] if chosen is None else [d for d in chosen.split(",") if d.strip()]
    if not gpus or not devices:
        if tensor_parallel_size > 1:
            raise ValueError(f"tensor_parallel_size={tensor_parallel_size} needs GPUs, and none is visible; use 1")
        return [None]
    if len(devices) % tensor_parallel_size:
        raise ValueError(
            f"tensor_parallel_size={tensor_parallel_size} must divide the {len(devices)} visible GPUs; change it or "
            "CUDA_VISIBLE_DEVICES"
        )
    return [
        ",".join(devices[start : start + tensor_parallel_size])
        for start in range(0, len(devices), tensor_parallel_size)
    ]
