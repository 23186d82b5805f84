"""One run of a baseline on a trainer of TRL: metrics.jsonl while it trains, then adapter/ and run.json, then the hand-off."""

import logging
import time
from pathlib import Path

import torch
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from baselines.common import Run
from opsd.checkpoint import save_complete, staging_dir
from opsd.model import base_hash
from opsd.runinfo import append_jsonl, open_append_jsonl, write_json
from opsd.setup_run import run_record

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
            run.evaluator.run("before")
        elif run.data.evaluate_after:
            run.evaluator.check()
    elif run.data.evaluate_after:
        run.evaluator.run("after", adapter_dir)
        if run.data.evaluate_before:
            run.evaluator.compare("before", "after")
