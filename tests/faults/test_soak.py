"""Many steps with checkpoints: memory, file handles, threads, shared memory and disk stay flat (slow).

SOAK_STEPS=2000 TRUST_SOAK=soak.json python -m pytest -q -m slow tests/faults/test_soak.py
"""

import os
import threading
from pathlib import Path

import pytest
from random_qwen3 import save_model
from test_trainer import make_trainer
from transformers import AutoTokenizer, TrainerCallback

from opsd.checkpoint import ADAPTERS, LOCK
from opsd.runinfo import write_json

STEPS = int(os.environ.get("SOAK_STEPS", 2000))
EVERY = 20


def held(output_dir: Path) -> dict[str, float]:
    """What this process and its run hold now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident_mib": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "file_handles": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "shared_memory_entries": len(list(Path("/dev/shm").glob(f"{ADAPTERS}*/{LOCK}"))),
        "disk_files": sum(path.is_file() for path in output_dir.rglob("*")),
    }


class Watch(TrainerCallback):
    """What this process and its run hold, every `EVERY` steps."""

    def __init__(self, output_dir: Path):
        self.output_dir, self.rows = output_dir, []

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % EVERY == 0:
            self.rows.append({"step": state.global_step, **held(self.output_dir)})


@pytest.mark.slow
def test_nothing_grows(tmp_path):
    folder = save_model(tmp_path / "model")
    options = dict(
        max_steps=STEPS, save_strategy="steps", save_steps=EVERY // 2, save_total_limit=2, learning_rate=1e-3
    )
    trainer = make_trainer(folder, AutoTokenizer.from_pretrained(folder), tmp_path, engine="live", **options)
    watch = Watch(tmp_path / "run")
    trainer.add_callback(watch)
    trainer.train()
    trainer.close()
    if "TRUST_SOAK" in os.environ:
        write_json(Path(os.environ["TRUST_SOAK"]), {"steps": STEPS, "rows": watch.rows})
    first, last = watch.rows[len(watch.rows) // 5], watch.rows[-1]  # the beginning fills caches
    assert last["resident_mib"] < first["resident_mib"] * 1.05 + 8
    for name in ("file_handles", "threads", "disk_files"):
        assert last[name] <= first[name], (name, first, last)
