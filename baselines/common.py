"""What the two baselines share: arguments, caps, rows, tokens, the run's record and its end, exactly as in `opsd_train.py`.

Data flow: `parse` -> `prepare` -> `Rows` -> a trainer of TRL -> `finish`. The student is loaded, the adapter made and the rows selected by
the functions that OPSD uses, so that a table can hold all three side by side.
"""

import copy
import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from trl import ModelConfig

from opsd import prompts
from opsd.args import DataArgs, HandoffArgs, OneLineParser, eval_regime
from opsd.checkpoint import save_complete, staging_dir
from opsd.data import load_rows
from opsd.handoff import Handoff
from opsd.method_args import option
from opsd.model import base_hash, check_model_args, end_token_ids, load_config, load_student, load_tokenizer
from opsd.recipe import check_caps, read_caps
from opsd.runinfo import append_jsonl, open_append_jsonl, write_json
from opsd.setup_run import configure_logging, resolve_world, run_record

ROOT = Path(__file__).resolve().parent.parent
LOG_NAMES = {
    "loss": "loss/objective",
    "grad_norm": "optim/grad_norm",
    "learning_rate": "optim/learning_rate",
    "entropy": "policy/student_entropy",
    "completions/mean_length": "rollout/mean_length",
    "completions/clipped_ratio": "rollout/truncated_fraction",
    "step_time": "time/step_s",
}  # TRL's names -> ours; every other scalar stands under trl/

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
    if data_args.evaluate_after and regime.thinking != own.student_thinking:
        logger.warning(
            "eval_thinking=%s differs from student_thinking=%s: the adapter is scored in a mode that it was not trained in",
            regime.thinking, own.student_thinking,
        )  # fmt: skip
    evaluator = Handoff(ROOT / "eval_aime.py", model_args, handoff, regime, Path(args.output_dir) / "eval")
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


class Progress(ProgressCallback):
    """The progress bar without the dictionaries: metrics.jsonl has every number."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        return


class StepLog(TrainerCallback):
    """Every scalar TRL logs, one line per optimizer step in metrics.jsonl, under this project's names."""

    def __init__(self, path: Path):
        self._path = path

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero and state.global_step == 0:
            self._path.unlink(missing_ok=True)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            row = {LOG_NAMES.get(name, f"trl/{name}"): value for name, value in logs.items()}
            with open_append_jsonl(self._path) as handle:
                append_jsonl(handle, {"step": state.global_step, **row})


def train_and_save(run: Run, trainer, counts: dict, argv: list[str], generated_tokens, *, base_may_move: bool) -> Path:
    """Trains, writes `adapter/` and run.json; returns the adapter's folder.

    `generated_tokens()` gives this process's sampled tokens at the end. run.json counts tokens over all processes: sampled, and through the
    trained model (prompts included). `base_may_move`: the engine is fed by merging in place, so a changed base is recorded, not refused.
    """
    for own in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(own)
    if not run.args.disable_tqdm:
        trainer.add_callback(Progress())
    trainer.add_callback(StepLog(run.output_dir / "metrics.jsonl"))
    record = run_record(argv, (run.data, run.args, run.handoff, run.model, run.own), counts)
    record |= {"trainer": type(trainer).__name__, "base_sha256_before": base_hash(trainer.model)}
    zero = trainer.is_world_process_zero()
    if zero:
        write_json(run.output_dir / "run.json", record | {"status": "running"})
    started = time.perf_counter()
    trainer.train(resume_from_checkpoint=run.args.resume_from_checkpoint)
    seconds = time.perf_counter() - started
    adapter_dir = save_complete(
        trainer, "adapter", lambda: trainer.save_model(str(staging_dir(run.output_dir) / "adapter"))
    )
    sampled = torch.tensor(generated_tokens(), device=trainer.accelerator.device)
    record |= {
        "steps": trainer.state.global_step,
        "tokens_generated": int(trainer.accelerator.reduce(sampled, reduction="sum")),
        "tokens_trained": int(trainer.state.num_input_tokens_seen),
        "wall_seconds": seconds,
        "gpu_seconds": seconds * run.args.world_size if torch.cuda.is_available() else 0.0,
        "base_sha256_after": base_hash(trainer.model),
    }
    if zero:
        write_json(run.output_dir / "run.json", record | {"status": "finished"})
    if record["base_sha256_after"] != record["base_sha256_before"]:
        if not base_may_move:
            raise RuntimeError(
                "the base weights changed during training, so the adapter is incomplete; discard this run"
            )
        logger.warning(
            "the base weights drifted: TRL merges the adapter into them for vLLM; run.json holds both hashes"
        )
    return adapter_dir


def evaluate(run: Run, adapter_dir: Path | None) -> None:
    """The hand-off of `opsd_train.py`: without an adapter before training, with it after training, and then the comparison."""
    if run.args.process_index != 0:
        return
    if adapter_dir is None:
        if run.data.evaluate_before:
            run.evaluator.run("before", adapter=None)
    elif run.data.evaluate_after:
        run.evaluator.run("after", adapter=adapter_dir)
        if run.data.evaluate_before:
            run.evaluator.compare("before", "after")
