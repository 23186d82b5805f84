"""One optimizer step under ddp, zero2 and fsdp2 at the Qwen3-1.7B shape on one GPU: training, adapter export, peak memory.

    python -m bench.shape --output_dir /tmp/shape && python -m bench.sharding --shape /tmp/shape --output results/bench_sharding.json

One process has nothing to shard away, so this is what the machinery itself costs beside plain data parallelism. Everything is
`opsd_train.py` under `accelerate launch`, with rollouts that are made up (32 of 1,024 tokens a step) in place of an engine.
"""

import argparse
import json
import logging
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.reference import TARGETS
from opsd.entry import exit_on_bad_input
from opsd.runinfo import git_state, hardware, package_versions, read_jsonl, write_json

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parent.parent
# mode -> file in accelerate_configs/; ddp of one process is single
CONFIGS = {"ddp": "single", "zero2": "zero2", "fsdp2": "fsdp2"}
COLUMNS = ("time/train_s", "time/adapter_save_s", "memory/peak_gib", "loss/objective")


class MadeUpEngine:
    """Full-length completions of tokens drawn from the request's seed."""

    def __init__(self, *_, **__): ...

    def sync(self, adapter_dir: Path, step: int) -> None:
        """Nothing to serve."""

    def generate(self, prompt_ids, sampling, seeds):
        from opsd.rollout import Rollout

        count = sampling.max_new_tokens
        completions = [random.Random(seed).choices(range(7, 150_000), k=count) for seed in seeds]
        return [
            Rollout(tuple(ids), tuple(completion), (-3.0,) * count, "length")
            for ids, completion in zip(prompt_ids, completions, strict=True)
        ]

    def rest(self) -> None:
        """Nothing to free."""

    def close(self) -> None:
        """Nothing to stop."""


def work(argv: list[str]) -> None:
    """`opsd_train.py` without an engine, in the process that `accelerate launch` has started."""
    import opsd_train
    from opsd import setup_run

    setup_run.build_engine = MadeUpEngine
    opsd_train.main(argv)


def measure(mode: str, shape: Path, folder: Path, steps: int) -> dict:
    """Best of the steps after the first of one run under `mode`."""
    arguments = {
        "model_name_or_path": shape / "model", "train_file": shape / "train.jsonl", "output_dir": folder, "dtype": "bfloat16",
        "max_steps": steps, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "use_peft": "true", "lora_r": 64,
        "lora_alpha": 128, "lora_dropout": 0, "learning_rate": 1e-5, "entry_clip": 0.05, "distill_temperature": 1.1, "logging_steps": 1,
        "use_liger_kernel": "true", "recompute": "false", "save_strategy": "no", "log_rollouts": "false",
    }  # fmt: skip
    flags = [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
    config = ROOT / "accelerate_configs" / f"{CONFIGS[mode]}.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), "--num_processes", "1"]
    command += ["-m", "bench.sharding", "--worker", *flags, "--lora_target_modules", *TARGETS]
    subprocess.run(command, check=True, cwd=ROOT)
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if "time/train_s" in row]
    best = min(rows[1:], key=lambda row: row["time/train_s"])
    return {"mode": mode, "steps": len(rows), **{name: best[name] for name in COLUMNS}}


def main(argv: list[str]) -> None:
    if argv[:1] == ["--worker"]:
        work(argv[1:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--shape", type=Path, required=True, help="Folder written by bench.shape.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--modes", nargs="+", choices=tuple(CONFIGS), default=list(CONFIGS))
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO)
    rows = []
    for mode in args.modes:
        with tempfile.TemporaryDirectory() as scratch:
            rows.append(measure(mode, args.shape, Path(scratch) / "run", args.steps))
        logger.info("%s", json.dumps(rows[-1]))
        record = {"command": argv, "rows": rows, **git_state(), "versions": package_versions(), "hardware": hardware()}
        write_json(args.output, record)


if __name__ == "__main__":
    exit_on_bad_input(main)
