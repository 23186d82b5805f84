"""Keeps every rollout on disk, `rollouts.jsonl`: token ids, text, why it stopped, and the step and example it belongs to.

Also shows one completion with its loss mask once, at the start of a run.
"""

import logging
from pathlib import Path

from transformers import TrainerCallback

from opsd.runinfo import append_jsonl, open_append_jsonl, read_jsonl, write_jsonl

logger = logging.getLogger(__name__)


class RolloutLog(TrainerCallback):
    """Reads the step's micro-batches from the trainer; each process writes a file of its own."""

    def __init__(self, trainer, path: Path, tokenizer, *, write: bool):
        self._trainer = trainer
        self._tokenizer = tokenizer
        self._path = Path(path)
        self._write = write
        self._handle = None
        self._shown = False

    def on_train_begin(self, args, state, control, **kwargs):
        if self._write:
            if self._path.exists():
                kept = [
                    row for row in read_jsonl(self._path) if row["step"] <= state.global_step and state.global_step > 0
                ]
                write_jsonl(self._path, kept)
            self._handle = open_append_jsonl(self._path)

    def on_step_end(self, args, state, control, **kwargs):
        pairs = [p for m in self._trainer.micro_batches for p in zip(m.examples, m.rollouts, strict=True)]
        if not self._shown and state.is_world_process_zero:
            self._show(*pairs[0])
            self._shown = True
        if self._handle is None:
            return
        for number, (example, rollout) in enumerate(pairs, start=1):
            record = {
                "step": state.global_step,
                "example_id": example["example_id"],
                "finish_reason": rollout.finish_reason,
                "completion_ids": list(rollout.completion_ids),
                "text": self._tokenizer.decode(rollout.completion_ids),
            }
            # on disk before a checkpoint of this step can be, so that a resumed file has no hole
            append_jsonl(self._handle, record, durable=number == len(pairs))

    def _show(self, example: dict, rollout) -> None:
        tokens = self._tokenizer.convert_ids_to_tokens(list(rollout.completion_ids))
        masked = [f"{token}|1" for token in tokens]
        prompt_tail = [f"{t}|0" for t in self._tokenizer.convert_ids_to_tokens(list(rollout.prompt_ids)[-8:])]
        logger.info(
            "first rollout (example %s, %s), token|loss mask: … %s %s",
            example["example_id"],
            rollout.finish_reason,
            " ".join(prompt_tail),
            " ".join(masked),
        )

    def on_train_end(self, args, state, control, **kwargs):
        if self._handle is not None:
            self._handle.close()
            self._handle = None
