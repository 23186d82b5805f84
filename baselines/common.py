"""What the two baselines share before training: arguments, caps, rows, student, exactly as in `opsd_train.py`.

Data flow: `parse` -> `prepare` -> `read_rows` -> a trainer of TRL -> baselines/training.py. The student is loaded, the adapter made and
the rows selected by the functions that OPSD uses, so that a table can hold all three side by side.
"""

import copy
import logging
from dataclasses import dataclass
from pathlib import Path

from trl import ModelConfig

from opsd import prompts
from opsd.args import DataArgs, HandoffArgs, OneLineParser, eval_regime
from opsd.data import load_rows
from opsd.handoff import Handoff
from opsd.method_args import option
from opsd.model import check_model_args, end_token_ids, load_config, load_student, load_tokenizer
from opsd.recipe import check_caps, read_caps
from opsd.setup_run import configure_logging, resolve_world

ROOT = Path(__file__).resolve().parent.parent

logger = logging.getLogger("opsd.baselines")


@dataclass
class BaselineArgs:
    """What TRL's configurations do not say."""

    student_thinking: bool = option(
        False, "Chat template's enable_thinking in the training prompt; evaluate with eval_thinking equal to it."
    )


@dataclass(frozen=True)
class Run:
    """The parsed arguments of a baseline, after the world is built."""

    data: DataArgs
    args: object  # SFTConfig or GRPOConfig
    handoff: object  # HandoffArgs
    model: ModelConfig
    own: BaselineArgs
    evaluator: Handoff

    @property
    def output_dir(self) -> Path:
        return Path(self.args.output_dir)


def parse(config_class: type, argv: list[str]) -> tuple:
    """(DataArgs, config, HandoffArgs, ModelConfig, BaselineArgs) from flags and a `--config` file of TrlParser (YAML).

    bf16 that is not given follows the model's dtype, as in `opsd_train.py`.
    """
    model_args = OneLineParser((ModelConfig,), allow_abbrev=False).parse_args_and_config(
        argv, return_remaining_strings=True
    )[0]
    parser = OneLineParser((DataArgs, config_class, HandoffArgs, ModelConfig, BaselineArgs), allow_abbrev=False)
    shared = {"logging_steps": 1, "report_to": ["none"], "save_strategy": "no", "bf16": model_args.dtype == "bfloat16"}
    parser.set_defaults(**shared)
    return parser.parse_args_and_config(argv)


def sequences_per_step(args) -> int:
    """Sequences of one optimizer step over all processes: what the cap on rollouts counts."""
    return args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size


def prepare(parsed: tuple, cache_dir: Path) -> Run:
    """Checks the caps before anything is built, then builds the world. Raises ValueError above the caps of `train_capped.sh`."""
    data_args, args, handoff, model_args, own = parsed
    step_cap, rollout_cap = read_caps(ROOT / "train_capped.sh")
    sequences = sequences_per_step(args)
    if sequences > rollout_cap:
        raise ValueError(
            f"per_device_train_batch_size={args.per_device_train_batch_size} x gradient_accumulation_steps="
            f"{args.gradient_accumulation_steps} x {args.world_size} processes are {sequences} sequences a step, more than the cap of "
            f"{rollout_cap} in the header of train_capped.sh; lower one of them"
        )
    check_caps(args.max_steps, sequences, step_cap, rollout_cap)
    regime = eval_regime(handoff)
    configure_logging()
    with args.main_process_first(desc="building the world"):
        resolve_world(data_args, handoff, model_args, cache_dir)
    check_model_args(model_args)
    if not model_args.use_peft:
        raise ValueError("use_peft=false must be true: the baselines train and save an adapter")
    if data_args.evaluate_after and regime.thinking != own.student_thinking:
        logger.warning(
            "eval_thinking=%s differs from student_thinking=%s: the adapter is scored in a mode that it was not trained in",
            regime.thinking, own.student_thinking,
        )  # fmt: skip
    evaluator = Handoff(ROOT / "eval_aime.py", model_args, handoff, regime, Path(args.output_dir) / "eval", args.bf16)
    return Run(data_args, args, handoff, model_args, own, evaluator)


@dataclass(frozen=True)
class Rows:
    """The selected rows: chat messages, student prompt ids, and the text of one more column (solution or answer)."""

    messages: list[list[dict]]
    prompt_ids: list[list[int]]
    texts: list[str]
    counts: dict


def read_rows(run: Run, tokenizer, column: str) -> Rows:
    """The rows that `opsd_train.py` would train on, with `column` in place of the privileged context.

    A prompt above `max_prompt_length` stops the run or drops the row, as `overlong` says. Rows whose `column` is empty are bad rows.
    """
    thinking = run.own.student_thinking
    prompts.check_thinking_switch(tokenizer, thinking, thinking)
    selection = copy.copy(
        run.data
    )  # not dataclasses.replace: a resolved world no longer passes the checks of its arguments
    selection.privileged_column = column
    rows, counts = load_rows(selection)
    messages = [prompts.student_messages(row.values["problem"]) for row in rows]
    ids = [list(p) for p in prompts.render_ids_batch(tokenizer, messages, enable_thinking=thinking)]
    kept = within([len(p) for p in ids], run.data.max_prompt_length, "max_prompt_length", run.data.overlong)
    counts |= {"examples": len(kept), "longest_prompt_ids": max(len(ids[i]) for i in kept)}
    return Rows([messages[i] for i in kept], [ids[i] for i in kept], [rows[i].values[column] for i in kept], counts)


def within(lengths: list[int], limit: int, field: str, overlong: str) -> list[int]:
    """Indices of the rows of at most `limit` tokens; one that is longer is an error unless `overlong` is drop. Nothing is ever cut."""
    kept = [i for i, length in enumerate(lengths) if length <= limit]
    if len(kept) < len(lengths) and (overlong == "error" or not kept):
        raise ValueError(
            f"{field}={limit} tokens is exceeded by {len(lengths) - len(kept)} of {len(lengths)} rows (longest {max(lengths)}); "
            f"raise {field}, or use overlong=drop"
        )
    return kept


def load(run: Run):
    """(student with a fresh adapter, tokenizer), loaded as `opsd_train.py` loads them."""
    name, revision = run.model.model_name_or_path, run.model.model_revision
    tokenizer = load_tokenizer(name, revision)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    attention = run.model.attn_implementation or "sdpa"
    model = load_student(run.model, attn_implementation=attention, seed=run.args.seed, device=run.args.device)
    return model, tokenizer


def end_ids(run: Run, tokenizer) -> set[int]:
    return end_token_ids(run.model.model_name_or_path, tokenizer, run.model.model_revision)


def check_context(run: Run, tokens: int, remedy: str) -> None:
    """Raises ValueError when a sequence of `tokens` does not fit into the model's context."""
    context = load_config(run.model.model_name_or_path, run.model.model_revision).get_text_config()
    if tokens > context.max_position_embeddings:
        raise ValueError(
            f"the longest sequence has {tokens} tokens, more than the model's context of {context.max_position_embeddings}; {remedy}"
        )
