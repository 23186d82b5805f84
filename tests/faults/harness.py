"""Runs that are killed, and what has to hold on disk afterwards: everything is complete or absent, and a resume ends as if nothing was.

Used by test_kills.py. A run is a training of a random model of a few thousand parameters with the transformers engine: seconds.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from random_qwen3 import save_model

from opsd.adapter import check_adapter
from opsd.checkpoint import check_checkpoint, checkpoints
from opsd.runinfo import read_jsonl, sha256_file

STEPS = 6
VISIBLE = {"adapter", "metrics.jsonl", "preview.txt", "rollouts.jsonl", "run.json"}


class Nursery:
    """The client of nursery.py."""

    def __init__(self):
        program = str(Path(__file__).parent / "nursery.py")
        self._process = subprocess.Popen(
            [sys.executable, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def _ask(self, request: dict) -> dict:
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, entry: str, arguments: list, log: Path, *, folder="", fatal=None, signal=9, limits=None) -> int:
        """Starts an entry point; its process id. `fatal`: the file operation under `folder` before which it gets `signal`."""
        request = {"entry": entry, "arguments": [str(a) for a in arguments], "log": str(log), "folder": str(folder)}
        request |= {"fatal": fatal, "signal": int(signal), "limits": limits or {}, "environment": {}}
        return self._ask(request)["pid"]

    def wait(self, pid: int) -> int:
        """The exit code; minus the signal for a run that one ended."""
        return self._ask({"wait": pid})["code"]

    def run(self, *arguments, **options) -> int:
        return self.wait(self.start(*arguments, **options))

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


@dataclass
class World:
    """A model folder and rows, with the command line of a training on them."""

    folder: Path

    @classmethod
    def build(cls, folder: Path) -> "World":
        save_model(folder / "model")
        rows = [{"problem": f"{n} + 1", "solution": f"It is {n + 1}.", "Answer": str(n + 1)} for n in range(10)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return cls(folder)

    def training(self, output_dir: Path, *more: str) -> list[str]:
        flags = {
            "model_name_or_path": self.folder / "model", "train_file": self.folder / "rows.jsonl", "output_dir": output_dir,
            "max_steps": STEPS, "rollouts_per_step": 4, "per_device_train_batch_size": 4, "max_completion_length": 8,
            "rollout_engine": "transformers", "use_cpu": "true", "dtype": "float32", "learning_rate": "1e-2", "save_steps": 2,
            "save_total_limit": 2, "use_peft": "true", "lora_r": 4, "lora_dropout": 0, "disable_tqdm": "true",
        }  # fmt: skip
        words = [f"--{name}={value}" for name, value in flags.items()]
        return [*words, "--lora_target_modules", "q_proj", "v_proj", *more]


def check_disk(output_dir: Path) -> None:
    """Everything that has a name of its own is whole; only hidden names may hold an unfinished write."""
    for path in output_dir.iterdir() if output_dir.is_dir() else ():
        assert path.name.startswith((".", "checkpoint-")) or path.name in VISIBLE, path
    for checkpoint in checkpoints(output_dir):
        check_checkpoint(checkpoint)
    if (output_dir / "adapter").exists():
        check_checkpoint(output_dir / "adapter")
    if (output_dir / "run.json").exists():
        json.loads((output_dir / "run.json").read_text())
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        if (output_dir / name).exists():
            read_jsonl(output_dir / name)


def outcome(output_dir: Path) -> dict:
    """What a finished run has computed: every scalar but times, every rollout, and the adapter's digest."""
    metrics = [
        {name: value for name, value in row.items() if name.split("/")[0] not in ("time", "throughput")}
        for row in read_jsonl(output_dir / "metrics.jsonl")
    ]
    adapter, _ = check_adapter(output_dir / "adapter")
    return {
        "metrics": metrics,
        "rollouts": read_jsonl(output_dir / "rollouts.jsonl"),
        "adapter": adapter,
        "optimizer": sha256_file(output_dir / f"checkpoint-{STEPS}" / "optimizer.pt"),
        "status": json.loads((output_dir / "run.json").read_text())["status"],
    }
