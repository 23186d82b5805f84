"""Every argument of training and evaluation, with its default, unit and off-value. First file of the data flow.

`DataArgs` says which rows, `OPSDConfig` how to train (arXiv 2601.18734; the method's own arguments are in opsd/method_args.py),
`EvalRegime` how a score is sampled. Everything is validated here, before a model or a data set is opened. Library defaults are neutral;
the published values stand in `recipe.env` and `recipes/paper.env`.
"""

import dataclasses
import math
import re
from dataclasses import dataclass, field, fields

from transformers import TrainingArguments
from trl import ModelConfig, TrlParser

from opsd.loop_args import PlainCpu, check_loop
from opsd.method_args import MethodArgs, check_address
from opsd.method_args import check as _check
from opsd.method_args import check_choice as _check_choice
from opsd.method_args import option as _option

EVAL_PREFIX = "eval_"


def _check_sampling(temperature: float, top_p: float, top_k: int, prefix: str = "") -> None:
    _check(
        temperature >= 0 and math.isfinite(temperature),
        f"{prefix}temperature={temperature} must be finite and >= 0; use 0 for greedy decoding",
    )
    _check(0 < top_p <= 1, f"{prefix}top_p={top_p} must be in (0, 1]; use 1.0 to disable")
    _check(top_k >= 0, f"{prefix}top_k={top_k} must be >= 0; use 0 to disable")


WORLDS = ("none", "tiny", "tiny_swapped", "smollm2")


@dataclass
class DataArgs:
    """Which rows are trained on. Columns are read by name; the names are those of siyanzhao/Openthoughts_math_30k_opsd."""

    dataset_name: str | None = _option(None, "Hub id of the training set; unset when train_file or world is used.")
    dataset_split: str = _option("train", "Split of dataset_name.")
    train_file: str | None = _option(
        None, "Local training rows: .jsonl, .json, .parquet or a folder written by datasets.save_to_disk."
    )
    world: str = _option(
        "none",
        "Built-in model and data made on first use: the tiny world, its swapped control, or SmolLM2; none = off.",
        WORLDS,
    )
    world_seed: int = _option(0, "Seed of the tiny world's problems and pretraining.")
    privileged_column: str = _option("solution", "Column that only the teacher sees.")
    answer_pattern: str = _option(
        "", "Regular expression that `Answer` must match in full (spaces and $ stripped first); empty = keep all rows."
    )
    min_trace_tokens: int = _option(0, "Smallest generated_token_count kept, in tokens; 0 = keep all rows.")
    on_bad_row: str = _option(
        "error",
        "A row without problem, privileged context or a needed column: stop, or drop and count it.",
        ("error", "drop"),
    )
    overlong: str = _option(
        "error", "A prompt longer than its limit: stop, or drop and count it. Never cut.", ("error", "drop")
    )
    max_prompt_length: int = _option(2048, "Longest student prompt, in tokens.")
    max_teacher_prompt_length: int = _option(20000, "Longest teacher prompt, in tokens.")
    max_train_rows: int | None = _option(None, "Use only the first N rows that pass the filter; unset = all.")
    evaluate_before: bool = _option(False, "Evaluate the base model on eval_benchmark before training.")
    evaluate_after: bool = _option(False, "Evaluate what was trained on eval_benchmark after training.")

    def __post_init__(self):
        given = [name for name in ("dataset_name", "train_file") if getattr(self, name)]
        if self.world in ("tiny", "tiny_swapped"):
            _check(
                not given, f"{' and '.join(given)} contradict world={self.world}, which brings its own rows; remove one"
            )
        elif self.world == "smollm2":
            _check("dataset_name" not in given, "dataset_name contradicts world=smollm2; give train_file")
            _check("train_file" in given, "world=smollm2 needs train_file, the rows to train on")
        else:
            _check(
                len(given) == 1,
                f"dataset_name={self.dataset_name!r}, train_file={self.train_file!r}: exactly one of the two must be given",
            )
        _check_choice("world", self.world, WORLDS)
        _check_choice("on_bad_row", self.on_bad_row, ("error", "drop"))
        _check_choice("overlong", self.overlong, ("error", "drop"))
        try:
            re.compile(self.answer_pattern)
        except re.error as error:
            raise ValueError(
                f"answer_pattern={self.answer_pattern!r} is not a regular expression: {error}; empty = keep all"
            ) from None
        _check(self.min_trace_tokens >= 0, f"min_trace_tokens={self.min_trace_tokens} must be >= 0; use 0 to disable")
        _check(self.world_seed >= 0, f"world_seed={self.world_seed} must be >= 0")
        _check(
            bool(self.dataset_name) or self.dataset_split == "train",
            f"dataset_split={self.dataset_split} has no effect without dataset_name; remove it",
        )
        _check(self.max_prompt_length > 0, f"max_prompt_length={self.max_prompt_length} must be > 0 tokens")
        _check(
            self.max_teacher_prompt_length > 0,
            f"max_teacher_prompt_length={self.max_teacher_prompt_length} must be > 0 tokens",
        )
        _check(
            self.max_train_rows is None or self.max_train_rows > 0,
            f"max_train_rows={self.max_train_rows} must be > 0 rows; leave it unset for all rows",
        )


ENGINES = ("vllm", "vllm_server", "transformers")
BOX_POLICIES = ("outside_unfinished_think", "after_think", "anywhere")  # tests hold them to opsd/grading.py's


@dataclass
class OPSDConfig(MethodArgs, PlainCpu, TrainingArguments):
    """How to train: rollouts, teacher, divergence, layout. Inherits schedule, optimizer, checkpoints and trackers from transformers."""

    # defaults of transformers that do not fit this trainer
    output_dir: str = _option(
        "runs/opsd", "Folder for checkpoints, the final adapter or model, metrics.jsonl and run.json."
    )
    logging_steps: float = _option(1, "Steps between two log lines.")
    remove_unused_columns: bool = _option(False, "Kept false: the collator reads our own columns.")
    report_to: list[str] | None = _option(
        None, "Trackers besides metrics.jsonl: tensorboard, wandb, trackio; none = off."
    )
    dataloader_pin_memory: bool = _option(False, "Kept false: rows are lists of token ids, not tensors.")
    logging_nan_inf_filter: bool = _option(
        False, "Kept false: a non-finite loss stops the run instead of being hidden."
    )
    gradient_checkpointing: bool = _option(False, "Same as recompute=true; leave it to recompute.")
    bf16: bool | None = _option(None, "bf16 autocast; unset = on when the model is loaded in bfloat16.")

    # rollouts
    rollouts_per_step: int = _option(32, "Completions sampled and trained on per optimizer step, one per problem.")
    micro_batch_size: int = _option(4, "Largest number of sequences in one forward pass.")
    max_completion_length: int = _option(1024, "New tokens per rollout.")
    temperature: float = _option(1.0, "Sampling temperature of rollouts.")
    top_p: float = _option(1.0, "Nucleus mass of rollouts; 1.0 = off.")
    top_k: int = _option(0, "Candidates kept per token in rollouts; 0 = off.")
    ignore_eos: bool = _option(False, "Sample past the end token, for benchmarks; false = stop at it.")
    student_thinking: bool = _option(False, "Chat template's enable_thinking in the student prompt.")
    rollout_engine: str = _option("vllm", "What samples: vllm in this process, vllm_server, or transformers.", ENGINES)
    vllm_gpu_memory_utilization: float = _option(0.3, "Fraction of GPU memory for the colocated engine.")
    vllm_enforce_eager: bool = _option(False, "Run vLLM without CUDA graphs.")
    vllm_sleep: str = _option(
        "auto", "Release the engine's memory while training: auto = only when needed.", ("auto", "true", "false")
    )
    vllm_server_urls: list[str] | None = _option(
        None,
        "Addresses of the servers of rollout_engine vllm_server, e.g. http://127.0.0.1:8001; key: OPSD_VLLM_API_KEY.",
    )
    vllm_load_format: str = _option("auto", "vLLM's load_format; dummy = random weights, for benchmarks.")
    rollout_sync: str = _option(
        "adapter",
        "What the engine serves: the native adapter, or weights merged in the model's dtype.",
        ("adapter", "merged"),
    )

    # layout
    recompute: str = _option(
        "auto",
        "Recompute activations in the backward pass: auto = only when the memory estimate asks for it.",
        ("auto", "true", "false"),
    )
    packing: str = _option(
        "auto",
        "Sequences of a micro-batch in one row without padding: auto = where attention allows.",
        ("auto", "true", "false"),
    )
    position_gap: bool = _option(False, "Right-pad prompts and leave the published gap in the positions (ablation).")
    first_token_from_padding: bool = _option(
        False, "Predict the first token from the last padded position, as published (ablation of position_gap)."
    )

    # records
    plot_lr: bool = _option(False, "Draw the learning rate of every step to learning_rate.png; false = off.")
    log_rollouts: bool = _option(True, "Write every rollout's token ids and text to rollouts.jsonl.")

    def __post_init__(self):
        for name in ("rollouts_per_step", "micro_batch_size", "max_completion_length"):
            _check(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be > 0")
        _check(self.max_steps > 0, f"max_steps={self.max_steps} must be > 0: the budget is counted in optimizer steps")
        _check(
            math.isfinite(self.learning_rate) and self.learning_rate > 0,
            f"learning_rate={self.learning_rate} must be finite and > 0",
        )
        _check_sampling(self.temperature, self.top_p, self.top_k)
        _check(self.temperature > 0, f"temperature={self.temperature} must be > 0: rollouts are sampled")
        for own in fields(OPSDConfig):
            if own.name in own_training_fields() and own.metadata.get("choices"):
                _check_choice(own.name, getattr(self, own.name), tuple(own.metadata["choices"]))
        self.check_method()
        _check(
            0 < self.vllm_gpu_memory_utilization < 1,
            f"vllm_gpu_memory_utilization={self.vllm_gpu_memory_utilization} must be in (0, 1)",
        )
        self._check_engine()
        _check(
            not (self.position_gap and self.packing == "true"),
            "position_gap=true contradicts packing=true: the gap comes from right padding; set packing=auto",
        )
        _check(
            not (self.reason_first_tokens and self.rollout_sync == "merged"),
            "reason_first_tokens > 0 needs rollout_sync=adapter: an engine with merged weights cannot serve the base model",
        )
        _check(
            self.position_gap or not self.first_token_from_padding,
            "first_token_from_padding=true has no effect without right padding; set position_gap=true",
        )
        _check(
            not self.logging_nan_inf_filter,
            "logging_nan_inf_filter=true must be false: it would hide a non-finite loss",
        )
        _check(
            0 <= self.wavg_last <= self.max_steps,
            f"wavg_last={self.wavg_last} must be in [0, max_steps={self.max_steps}]",
        )
        if self.report_to is None:
            self.report_to = ["none"]
        check_loop(self)
        super().__post_init__()

    def _check_engine(self):
        server = self.rollout_engine == "vllm_server"
        _check(
            server == bool(self.vllm_server_urls),
            f"vllm_server_urls={self.vllm_server_urls} must be given with rollout_engine=vllm_server, and with no other engine",
        )
        for url in self.vllm_server_urls or []:
            check_address("vllm_server_urls", url)
        for name in ("vllm_sleep", "vllm_load_format", "vllm_gpu_memory_utilization"):
            read = self.rollout_engine == "vllm" or getattr(self, name) == getattr(OPSDConfig, name)
            _check(read, f"{name}={getattr(self, name)} is read by rollout_engine=vllm only; leave it out")
        _check(
            not (server and self.rollout_sync == "merged"),
            "rollout_sync=merged is not possible with rollout_engine=vllm_server, which receives adapters only; use vllm",
        )
        _check(
            not (self.recompute == "false" and self.gradient_checkpointing),
            "gradient_checkpointing=true contradicts recompute=false; remove it",
        )


@dataclass(frozen=True)
class EvalRegime:
    """How a score is sampled and graded. Two scores with different regimes are not compared."""

    samples_per_problem: int = _option(12, "Completions per problem, the k of avg@k.")
    temperature: float = _option(1.0, "Sampling temperature; 0 = greedy.")
    top_p: float = _option(1.0, "Nucleus mass; 1.0 = off. The published code uses 0.95 when it is not given.")
    top_k: int = _option(0, "Candidates kept per token; 0 = off.")
    max_new_tokens: int = _option(38912, "New tokens per completion.")
    thinking: bool = _option(True, "Chat template's enable_thinking in the evaluation prompt.")
    problem_prefix: bool = _option(
        False, "Put `Problem: ` before the problem, as in training; the published evaluator does not."
    )
    seed: int = _option(42, "Run seed; each sample's seed is derived from it, the problem and the sample's index.")
    kv_cache_dtype: str = _option("auto", "Precision of the KV cache: auto = the model's, or fp8.", ("auto", "fp8"))
    box_policy: str = _option(BOX_POLICIES[0], "Which boxes count: see opsd/grading.py.", BOX_POLICIES)

    def __post_init__(self):
        _check(self.samples_per_problem > 0, f"samples_per_problem={self.samples_per_problem} must be > 0")
        _check_sampling(self.temperature, self.top_p, self.top_k)
        _check(self.max_new_tokens > 0, f"max_new_tokens={self.max_new_tokens} must be > 0 tokens")
        for own in fields(self):
            if own.metadata.get("choices"):
                _check_choice(own.name, getattr(self, own.name), tuple(own.metadata["choices"]))


def _handoff_fields() -> list[tuple]:
    """EvalRegime's fields as training arguments, each behind EVAL_PREFIX, with the same defaults and help texts."""
    own = [
        (
            "eval_benchmark",
            str | None,
            _option(None, "Benchmark of the hand-off: a name or a local file; unset = the world's, or aime24."),
        ),
        ("eval_max_problems", int | None, _option(None, "Use only the first N problems in the hand-off; unset = all.")),
    ]
    return own + [
        (EVAL_PREFIX + f.name, f.type, field(default=f.default, metadata=dict(f.metadata))) for f in fields(EvalRegime)
    ]


HandoffArgs = dataclasses.make_dataclass("HandoffArgs", _handoff_fields())
HandoffArgs.__module__ = __name__
HandoffArgs.__doc__ = (
    "The evaluation that opsd_train.py hands off to: a benchmark, and EvalRegime behind the prefix `eval_`."
)


def eval_regime(handoff) -> EvalRegime:
    """The frozen regime out of the prefixed arguments of `HandoffArgs`; its refusals name the arguments with their prefix."""
    limit = handoff.eval_max_problems
    _check(limit is None or limit > 0, f"eval_max_problems={limit} must be >= 1; leave it unset for all problems")
    try:
        return EvalRegime(**{f.name: getattr(handoff, EVAL_PREFIX + f.name) for f in fields(EvalRegime)})
    except ValueError as error:
        raise ValueError(f"{EVAL_PREFIX}{error}") from None


TRAINING_DATACLASSES = (DataArgs, OPSDConfig, HandoffArgs, ModelConfig)


class OneLineParser(TrlParser):
    """A `TrlParser` whose errors are ValueErrors of one line, without argparse's usage text."""

    def error(self, message: str):
        raise ValueError(f"{message}; see --help")


def training_parser() -> TrlParser:
    """The parser of `opsd_train.py`: our dataclasses and TRL's `ModelConfig`; abbreviations are off."""
    return OneLineParser(TRAINING_DATACLASSES, allow_abbrev=False)


def parse_training_args(argv: list[str]) -> tuple:
    """(DataArgs, OPSDConfig, HandoffArgs, ModelConfig) from flags. `bf16` that is not given follows the model's dtype.

    It is decided before transformers sets up mixed precision, which happens while `OPSDConfig` is made.
    """
    parser = training_parser()
    unknown = parser.parse_known_args(argv)[1]
    _check(not unknown, f"unknown argument {' '.join(unknown[:1])!r}; see --help")
    parsed = parser.parse_args_into_dataclasses(argv, look_for_args_file=False)
    if parsed[1].bf16 is None:
        argv = [*argv, f"--bf16={str(parsed[3].dtype == 'bfloat16').lower()}"]
        parsed = parser.parse_args_into_dataclasses(argv, look_for_args_file=False)
    return parsed


def training_fields() -> dict[str, type]:
    """Every argument name of `opsd_train.py` -> the dataclass that owns it; `own_fields` are those declared in this file."""
    owners: dict[str, type] = {}
    for owner in TRAINING_DATACLASSES:
        for f in fields(owner):
            if f.init:
                _check(f.name not in owners, f"argument {f.name} is declared by {owners.get(f.name)} and {owner}")
                owners[f.name] = owner
    return owners


def own_training_fields() -> list[str]:
    """The names of `OPSDConfig` that this project declares, in reading order."""
    return list(OPSDConfig.__annotations__) + [f.name for f in fields(MethodArgs)]


def own_fields() -> list[str]:
    """The arguments this project declares itself, in reading order."""
    return [f.name for f in fields(DataArgs)] + own_training_fields() + [f.name for f in fields(HandoffArgs)]
