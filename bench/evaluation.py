r"""Time of `eval_aime.py` over the KV-bandwidth floor at the Qwen3-1.7B shape: CUDA graphs, eager as published, and an fp8 KV cache.

    python -m bench.shape --output_dir /tmp/shape
    python -m bench.evaluation --shape /tmp/shape --new_tokens 4096 --output results/bench_evaluation_4096.json
    python -m bench.evaluation --shape /tmp/shape --new_tokens 16384 --problems 5 --output results/bench_evaluation_16384.json \
        --variants "CUDA graphs" "CUDA graphs, fp8 KV cache"

At 16,384 tokens 60 sequences are what one GPU holds at once; more would wait for them. Floor: every token reads the KV cache of its
sequence and every decoding step the weights, at the measured copy bandwidth. Every variant is a complete call of `eval_aime.py`, with its
results written as they finish; loading is not counted.
"""

import argparse
import json
import logging
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.reference import COPY_BYTES_PER_S, WEIGHT_BYTES
from opsd.entry import exit_on_bad_input
from opsd.runinfo import git_state, hardware, package_versions, read_jsonl, write_json

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parent.parent
KV_BYTES = 114_688  # of one token in bf16
PROMPT_TOKENS = 200
VARIANTS = {
    "CUDA graphs": ([], KV_BYTES),
    "eager": (["--enforce_eager", "true"], KV_BYTES),
    "CUDA graphs, fp8 KV cache": (["--kv_cache_dtype", "fp8"], KV_BYTES / 2),
}


def floor_seconds(sequences: int, new_tokens: int, kv_bytes: float) -> float:
    """Seconds that the memory bus alone needs when all sequences run at once on one GPU."""
    cache = sequences * kv_bytes * (PROMPT_TOKENS * new_tokens + new_tokens**2 / 2)
    return (cache + new_tokens * WEIGHT_BYTES) / COPY_BYTES_PER_S


def measure(shape: Path, folder: Path, flags: list[str], args) -> dict:
    """One call of the evaluator; returns its line of runs.jsonl."""
    command = [sys.executable, str(ROOT / "eval_aime.py"), "--model", str(shape / "model"), "--output_dir", str(folder)]
    command += ["--benchmark", str(folder.parent / "problems.jsonl"), "--samples_per_problem", str(args.samples)]
    command += ["--max_new_tokens", str(args.new_tokens), "--ignore_eos", "true", "--report", "false"]
    subprocess.run([*command, *flags], check=True)
    (run,) = read_jsonl(folder / "runs.jsonl")
    return run


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--shape", type=Path, required=True, help="Folder written by bench.shape.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--problems", type=int, default=30)
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--new_tokens", type=int, default=4096)
    parser.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS))
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        problems = [
            {"problem": " ".join(f"w{7 + i * 1000 + j}" for j in range(PROMPT_TOKENS - 20)), "answer": i}
            for i in range(args.problems)
        ]
        (Path(scratch) / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
        for name in args.variants:
            flags, kv_bytes = VARIANTS[name]
            run = measure(args.shape, Path(scratch) / name.replace(" ", "_"), flags, args)
            floor = floor_seconds(args.problems * args.samples, args.new_tokens, kv_bytes)
            rows.append({"variant": name, **run, "floor_seconds": floor, "over_floor": run["sampling_seconds"] / floor})
            logger.info("%s", rows[-1])
            record = {
                "command": argv,
                "sequences": args.problems * args.samples,
                "new_tokens": args.new_tokens,
                "rows": rows,
            }
            write_json(args.output, record | git_state() | {"versions": package_versions(), "hardware": hardware()})


if __name__ == "__main__":
    exit_on_bad_input(main)
