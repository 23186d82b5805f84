"""Runs recipes on several seeds, evaluates each run, and appends one table with paired differences to the ledger.

    python sweep.py recipes/tiny.env recipes/ablations/beta_1.env --base_recipe recipes/tiny.env --seeds 3 --name ablations
    python sweep.py recipes/tiny.env recipes/baselines/sft_tiny.yaml --name baselines …

A YAML file is a baseline's: `sft_….yaml` is trained by baselines/sft_train.py, `grpo_….yaml` by grpo_train.py. A finished run (same
hash of the resolved recipe, same seed) is never trained again, so a killed sweep goes on where it stopped.
"""

import argparse
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from opsd.entry import exit_on_bad_input
from opsd.ledger import Run, append_to_ledger, mean_costs, paired, score, summarise, sweep_table, write_sweep
from opsd.runinfo import read_json
from opsd.sweep_plan import command_of, plan

ROOT = Path(__file__).resolve().parent
logger = logging.getLogger("sweep")


def execute(runs: list[Run], arguments, extra: list[str]) -> None:
    """Trains what is not finished, `--parallel` runs at a time; the first run of a seed also evaluates its base model."""
    running: dict[subprocess.Popen, Run] = {}
    gpus = [g for g in (arguments.gpus or "").split(",") if g]
    gpu_of: dict[subprocess.Popen, str] = {}
    waiting = [run for run in runs if not run.finished]
    logger.info("%d of %d runs are finished already", len(runs) - len(waiting), len(runs))
    try:
        while waiting or running:
            while waiting and len(running) < arguments.parallel:
                run = waiting.pop(0)
                before = not base_path(arguments.output_dir, run.seed).is_file() and not any(
                    r.seed == run.seed for r in running.values()
                )
                run.folder.mkdir(parents=True, exist_ok=True)
                environment = dict(os.environ)
                gpu = next((g for g in gpus if g not in [gpu_of[p] for p in running]), None)
                if gpus:
                    environment["CUDA_VISIBLE_DEVICES"] = gpu
                with open(run.folder / "log.txt", "ab") as log:
                    process = subprocess.Popen(
                        command_of(run, arguments, extra, before=before), stdout=log, stderr=log, env=environment
                    )
                logger.info("started %s, seed %d, log %s", run.recipe, run.seed, run.folder / "log.txt")
                running[process], gpu_of[process] = run, gpu
            for process in [p for p in running if p.poll() is not None]:
                run = running.pop(process)
                if process.returncode:
                    raise RuntimeError(
                        f"{run.recipe}, seed {run.seed} ended with exit code {process.returncode}; see {run.folder / 'log.txt'}"
                    )
                keep_base(run, arguments.output_dir)
                logger.info(
                    "finished %s, seed %d: %.1f %%", run.recipe, run.seed, 100 * score(read_json(run.result_path))
                )
            time.sleep(1)
    finally:  # a failed run or a signal: the others save a checkpoint and end
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


def base_path(output_dir: Path, seed: int) -> Path:
    return output_dir / f"base-seed{seed}" / "result.json"


def keep_base(run: Run, output_dir: Path) -> None:
    """Keeps the base model's result of a seed beside the runs, for the runs that do not measure it again."""
    own = run.folder / "eval" / "before" / "result.json"
    target = base_path(output_dir, run.seed)
    if own.is_file() and not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(own, target)


def report(runs: list[Run], arguments, command: list[str]) -> None:
    bases = {seed: read_json(base_path(arguments.output_dir, seed)) for seed in arguments.seeds}
    against = {s: read_json(r.result_path) for r in runs for s in [r.seed] if r.recipe == arguments.against} or bases
    rows = [summarise("base model", [paired(against[s], bases[s]) for s in bases], [score(b) for b in bases.values()])]
    for name in dict.fromkeys(run.recipe for run in runs):
        results = {run.seed: read_json(run.result_path) for run in runs if run.recipe == name}
        costs = mean_costs(read_json(run.folder / "run.json") for run in runs if run.recipe == name)
        differences = [paired(against[s], r) for s, r in results.items()]
        rows.append(summarise(name, differences, [score(r) for r in results.values()], costs))
    records = [{"recipe": r.recipe, "hash": r.digest, "seed": r.seed, "result": read_json(r.result_path)} for r in runs]
    records += [{"recipe": "base model", "hash": None, "seed": s, "result": b} for s, b in bases.items()]
    path = arguments.results_dir / f"sweep_{arguments.name}.json"
    record = write_sweep(
        path,
        question=arguments.question,
        command=command,
        against=arguments.against or "base model",
        rows=rows,
        runs=records,
    )
    append_to_ledger(arguments.results_dir / "LEDGER.md", record, path.name)
    sys.stdout.write(sweep_table(rows, record["against"]) + "\n")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "recipes", nargs="+", help="Recipe files, or baselines' YAML files; their order is the table's."
    )
    parser.add_argument(
        "--base_recipe", default=None, help="Base for the recipes that extend one, e.g. recipes/tiny.env."
    )
    parser.add_argument("--seeds", type=int, default=3, help="Number of seeds: 0, 1, …; also the tiny world's seeds.")
    parser.add_argument(
        "--against", default=None, help="Recipe name that differences are taken to; unset = the base model."
    )
    parser.add_argument("--parallel", type=int, default=1, help="Runs at a time.")
    parser.add_argument("--gpus", default=None, help="Comma-separated GPU ids given out to parallel runs.")
    parser.add_argument("--name", required=True, help="Name of the sweep's JSON in the results folder.")
    parser.add_argument("--question", required=True, help="What the sweep asks, one line for the ledger.")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "runs" / "sweep", help="Folder of the runs.")
    parser.add_argument(
        "--results_dir", type=Path, default=ROOT / "results", help="Folder of LEDGER.md and the sweep's JSON."
    )
    arguments, extra = parser.parse_known_args(argv)
    if arguments.seeds < 1 or arguments.parallel < 1:
        raise ValueError(f"seeds={arguments.seeds} and parallel={arguments.parallel} must be >= 1")
    if arguments.gpus and len(arguments.gpus.split(",")) < arguments.parallel:
        raise ValueError(
            f"parallel={arguments.parallel} needs as many gpus, got gpus={arguments.gpus}; name one GPU for each"
        )
    arguments.seeds = list(range(arguments.seeds))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # through the `finally` that ends the runs
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    runs = plan(arguments, extra)
    if arguments.against and arguments.against not in {run.recipe for run in runs}:
        raise ValueError(f"against={arguments.against!r} is none of {sorted({run.recipe for run in runs})}")
    execute(runs, arguments, extra)
    report(runs, arguments, ["python", "sweep.py", *argv])


if __name__ == "__main__":
    exit_on_bad_input(main)
