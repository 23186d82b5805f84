"""Stops a run that has gone wrong, with a checkpoint and the rows that were being trained on, before it spends the rest of its budget.

Always: a loss or gradient that is not finite, caught before the optimizer takes it, so that the checkpoint is the last good one. On
request (`guard_*` of opsd/method_args.py): completions or entropy that shrink, and divergence that grows, against the run's own first
steps. Both are what published runs showed before they collapsed. A guard compares means over `guard_window` log lines, so it needs two
windows to speak.
"""

import json
import math
from pathlib import Path

import torch
from accelerate.logging import get_logger
from transformers import TrainerCallback

from opsd.runinfo import write_json, write_jsonl

logger = get_logger(__name__)

FILE = "guards.json"


class TrainingStopped(RuntimeError):
    """A guard ended the run; the message says which, with the values, and what was saved."""


class Guards(TrainerCallback):
    """Needs the trainer for its micro-batches, its gradient norm and its checkpoints; saved through its `stateful` list."""

    def __init__(self, trainer):
        self._trainer = trainer
        args = trainer.args
        self._window = args.guard_window
        # scalar -> (argument, allowed multiple of the start, whether falling below it or rising above it is what stops)
        self._rules = {
            "rollout/mean_length": ("guard_min_length", args.guard_min_length, "below"),
            "policy/student_entropy": ("guard_min_entropy", args.guard_min_entropy, "below"),
            "loss/divergence": ("guard_max_divergence", args.guard_max_divergence, "above"),
        }
        self._rules = {name: rule for name, rule in self._rules.items() if 0 < rule[1] < math.inf}
        self._first: dict[str, list[float]] = {name: [] for name in self._rules}
        self._last: dict[str, list[float]] = {name: [] for name in self._rules}

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        loss, norm = float(self._trainer.step_loss), float(self._trainer.grad_norm)
        device = self._trainer.accelerator.device
        broken = torch.tensor(float(not (math.isfinite(loss) and math.isfinite(norm))), device=device)
        if self._trainer.accelerator.reduce(broken, reduction="sum") > 0:
            # DeepSpeed steps inside its backward pass: there the weights are lost, and only earlier checkpoints are good
            self._stop(
                f"step {state.global_step + 1}: loss {loss:g} or gradient norm {norm:g} is not finite on some process",
                save=not self._trainer.is_deepspeed_enabled,
            )

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss/objective" not in logs:
            return
        for name, (argument, multiple, side) in self._rules.items():
            first, last = self._first[name], self._last[name]
            if len(first) < self._window:
                first.append(logs[name])
                continue
            last.append(logs[name])
            del last[: -self._window]
            start, now = sum(first) / len(first), sum(last) / len(last)
            left = now < multiple * start if side == "below" else now > multiple * start
            if len(last) == self._window and left:
                self._stop(
                    f"step {state.global_step}: {name} is {now:.4g}, {side} {argument}={multiple:g} of its start {start:.4g} "
                    f"(means of {self._window} steps)",
                    save=True,
                )

    def _stop(self, reason: str, save: bool) -> None:
        trainer = self._trainer
        output_dir, step = Path(trainer.args.output_dir), trainer.state.global_step
        rank = "" if trainer.args.process_index == 0 else f".rank{trainer.args.process_index}"
        batch = output_dir / f"stopped_batch{rank}.jsonl"
        write_jsonl(batch, self._records())
        saved = f"{batch.name} in {output_dir} has its rows"
        if save and step > 0:
            trainer._save_checkpoint(trainer.model, trial=None)
            saved += f"; checkpoint-{step} is the run up to there"
        raise TrainingStopped(f"{reason}; {saved}")

    def _records(self) -> list[dict]:
        return [
            {
                "example_id": example["example_id"],
                "prompt_ids": list(rollout.prompt_ids),
                "teacher_prompt_ids": list(example["teacher_prompt_ids"]),
                "completion_ids": list(rollout.completion_ids),
                "per_token_logps": [lp if math.isfinite(lp) else str(lp) for lp in rollout.per_token_logps],
                "finish_reason": rollout.finish_reason,
            }
            for micro_batch in self._trainer.micro_batches
            for example, rollout in zip(micro_batch.examples, micro_batch.rollouts, strict=True)
        ]

    def save(self, folder: Path, step: int) -> None:
        """Writes the start and the latest window into a checkpoint."""
        if self._rules:
            write_json(folder / FILE, {"first": self._first, "last": self._last})

    def load(self, folder: Path) -> None:
        """Goes on with the windows of a checkpoint; a run that was started without guards starts its windows now."""
        if self._rules and (folder / FILE).is_file():
            state = json.loads((folder / FILE).read_text(encoding="utf-8"))
            for name in self._rules:
                self._first[name] = state["first"].get(name, [])
                self._last[name] = state["last"].get(name, [])
