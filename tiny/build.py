"""Builds the tiny world into a cache folder: model, rows, benchmark, held-out problems and the measurements that have to hold.

    python -m tiny.build --seed 0 --cache_dir ~/.cache/opsd

Last file of the tiny world's flow. The folder's name carries a digest of the code, the prompts' passages, the settings, the
versions and the seed, so a change of any of them builds a new world. A world that misses a gate is not kept.
"""

import argparse
import dataclasses
import hashlib
import json
import logging
import math
import os
import shutil
import tempfile
import time
from pathlib import Path

from opsd.entry import exit_on_bad_input
from opsd.runinfo import git_state, hardware, package_versions, write_json, write_text
from tiny import measure, muon, pretrain, tokenizer, world

logger = logging.getLogger(__name__)

SOURCES = (world, tokenizer, muon, pretrain, measure)
VERSIONS = ("torch", "transformers")
# name of the measurement -> (lowest, highest), fractions; `swapped_gain` is swapped minus unaided in the same thinking mode
GATES = {
    "student_thinking_off_sampled": (0.4, 0.6),
    "student_thinking_off_greedy": (0.4, 0.6),
    "evaluation_thinking_off_sampled": (0.4, 0.6),
    "evaluation_thinking_off_greedy": (0.4, 0.6),
    "evaluation_thinking_on_sampled": (0.4, 0.6),
    "evaluation_thinking_on_greedy": (0.4, 0.6),
    "privileged_sampled": (0.9, 1.0),
    "privileged_greedy": (0.9, 1.0),
    "swapped_gain": (-1.0, 0.05),
    "teacher_p_value": (0.9, 1.0),
    "teacher_p_mark": (0.9, 1.0),
    "teacher_p_mark_after_wrong": (0.9, 1.0),
}


def world_digest(seed: int, settings: pretrain.PretrainSettings) -> str:
    """16 hex digits over everything the folder's content depends on."""
    installed = package_versions()
    parts = {
        "code": [hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest() for module in SOURCES],
        "passages": tokenizer.fixed_passages(),
        "settings": dataclasses.asdict(settings),
        "versions": {name: installed[name] for name in VERSIONS},
        "seed": seed,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def build_tiny_world(cache_dir: Path, seed: int, settings: pretrain.PretrainSettings | None = None) -> Path:
    """The world's folder, built if it is not there yet.

    It holds model/, train.jsonl, train_swapped.jsonl, benchmark.jsonl, heldout.jsonl and world.json (table, settings, measurements).
    """
    settings = settings or pretrain.PretrainSettings()
    folder = Path(cache_dir) / f"tiny-{seed}-{world_digest(seed, settings)}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _build(building, seed, settings)
        os.chmod(building, 0o755)
        try:
            os.rename(building, folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process built the same world in the meantime
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def check_gates(measured: dict[str, float]) -> None:
    """RuntimeError naming every measurement outside its gate."""
    missed = [
        f"{name}={measured[name]:.3f} must be in [{low}, {high}]"
        for name, (low, high) in GATES.items()
        if not low <= measured[name] <= high
    ]
    if missed:
        raise RuntimeError(
            "the tiny world misses its gates: " + "; ".join(missed) + "; change tiny/pretrain.py's settings or the seed"
        )


def _build(folder: Path, seed: int, settings: pretrain.PretrainSettings) -> None:
    started = time.monotonic()
    rows, swapped, benchmark, heldout = world.make_rows(seed)
    for name, records in (("train", rows), ("train_swapped", swapped), ("benchmark", benchmark), ("heldout", heldout)):
        write_text(folder / f"{name}.jsonl", "".join(json.dumps(record) + "\n" for record in records))
    words = tokenizer.build_tokenizer()
    logger.info("tiny world, seed %d: pretraining for %d steps", seed, settings.steps)
    model = pretrain.pretrain(words, seed, settings)
    pretraining_seconds = time.monotonic() - started
    model.save_pretrained(folder / "model")
    words.save_pretrained(folder / "model")
    measured = measure.measure(model, words, heldout, seed)
    measured["swapped_gain"] = measured["swapped_sampled"] - measured["evaluation_thinking_on_sampled"]
    for name, value in measured.items():
        logger.info("tiny world, seed %d: %s = %.3f", seed, name, value)
    check_gates(measured)
    table, unknown = world.make_table(seed)
    write_json(
        folder / "world.json",
        {
            "seed": seed,
            "parameters": model.num_parameters(),
            "table": table,
            "unknown": sorted(unknown),
            "settings": dataclasses.asdict(settings),
            "versions": package_versions(),
            "heldout_problems": len(heldout),
            "measured": measured,
            "pretraining_seconds": round(pretraining_seconds, 1),
            "total_seconds": round(time.monotonic() - started, 1),
        },
    )


def summary(folders: list[Path]) -> dict:
    """What `results/tiny_world.json` holds: provenance and, per seed, every measurement; accuracies with n and standard error."""
    worlds = [json.loads((folder / "world.json").read_text(encoding="utf-8")) for folder in folders]
    return {
        "question": "is the tiny world's model half right unaided, nearly always right with the reference, no better with a swapped one?",
        **git_state(),
        "hardware": hardware(),
        "gates": {name: list(limits) for name, limits in GATES.items()},
        "worlds": [_with_errors(world_record) for world_record in worlds],
    }


def _with_errors(record: dict) -> dict:
    n = record["heldout_problems"]
    errors = {
        name: round(math.sqrt(value * (1 - value) / n), 4)
        for name, value in record["measured"].items()
        if name.endswith(("_sampled", "_greedy"))
    }
    kept = ("seed", "parameters", "unknown", "settings", "versions", "measured", "pretraining_seconds", "total_seconds")
    return {name: record[name] for name in kept} | {"n": n, "standard_error": errors}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--seed", type=int, nargs="+", default=[0], help="Seeds of the table, the problems and the pretraining."
    )
    parser.add_argument("--cache_dir", type=Path, required=True, help="Folder under which worlds are kept.")
    parser.add_argument("--result", type=Path, help="JSON file to write all measurements to; unset = none.")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    folders = [build_tiny_world(arguments.cache_dir.expanduser(), seed) for seed in arguments.seed]
    for folder in folders:
        logger.info("tiny world: %s", folder)
    if arguments.result is not None:
        write_json(arguments.result, summary(folders))


if __name__ == "__main__":
    exit_on_bad_input(main)
