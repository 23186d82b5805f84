"""Writes every logged scalar once, one JSON line per optimizer step, to `metrics.jsonl` in the run's folder.

A resumed run continues the file: lines of steps that are trained again are cut first, so that every step stands there once.
"""

from pathlib import Path

from transformers import TrainerCallback

from opsd.runinfo import append_jsonl, open_append_jsonl, read_jsonl, write_jsonl


class MetricsJsonl(TrainerCallback):
    def __init__(self, path: Path):
        self.path = Path(path)
        self._handle = None

    def on_train_begin(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        if self.path.exists():
            kept = [row for row in read_jsonl(self.path) if row["step"] <= state.global_step and state.global_step > 0]
            write_jsonl(self.path, kept)
        self._handle = open_append_jsonl(self.path)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self._handle is not None and any(name.startswith("loss/") for name in logs):
            append_jsonl(self._handle, {"step": state.global_step, **logs})

    def on_train_end(self, args, state, control, **kwargs):
        if self._handle is not None:
            self._handle.close()
            self._handle = None
