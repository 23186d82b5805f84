"""Evaluates a model, or a base model with LoRA adapters, on a benchmark: avg@k with its standard errors, one result JSON per adapter.

    python eval_aime.py --model Qwen/Qwen3-1.7B --adapter runs/opsd/adapter --benchmark aime24 --output_dir results/opsd
    python eval_aime.py --model Qwen/Qwen3-1.7B --adapter 'runs/opsd/checkpoint-*' --output_dir results/curve
    python eval_aime.py --compare results/base/result.json -- results/opsd/result.json
    python eval_aime.py --regrade results/opsd/samples.jsonl
    python eval_aime.py --table results/*/result.json

Killed or interrupted, the same command goes on where it stopped.
"""

import os
import socket
import sys
from pathlib import Path
from urllib.parse import urlparse

from opsd.entry import exit_on_bad_input, library_environment, log_to_stderr
from opsd.runinfo import hardware

for key, value in library_environment(os.cpu_count()).items():
    os.environ.setdefault(key, value)

INTERRUPTED = 130  # what a shell reports after an interrupt


def main(argv: list[str]) -> None:
    stay_offline_without_a_network()
    from opsd.eval_args import parse_eval_args

    args, regime, sides = parse_eval_args(argv)
    log_to_stderr(["opsd"])
    if args.compare or args.table or args.export:
        print(read_out(args, sides))
    elif args.dry_run:
        from opsd.eval_estimate import estimate_plan
        from opsd.eval_setup import make_plan

        print(estimate_plan(make_plan(args, regime), engine_groups(args), hardware()["gpus"]))
    elif args.regrade:
        from opsd.eval_result import regrade

        given = any(word.partition("=")[0] in ("--box_policy", "--box-policy") for word in argv)
        folder = regrade(Path(args.regrade), regime.box_policy if given else None)
        finish([folder], folder, args.report)
    else:
        finish(evaluate(args, regime), Path(args.output_dir), args.report)


def stay_offline_without_a_network() -> None:
    """Uses the hub's cache alone when its host has no address, so that a missing file is an error at once, not after retries."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or any(name.lower() in ("https_proxy", "all_proxy") for name in os.environ):
        return
    try:
        socket.getaddrinfo(urlparse(constants.ENDPOINT).hostname, 443)
    except OSError:
        constants.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"  # for the engine processes


def read_out(args, sides: tuple[list[str], list[str]]) -> object:
    """What --compare, --table or --export prints about finished evaluations."""
    from opsd import eval_output

    if args.table:
        return eval_output.table(args.table)
    output_dir = Path(args.output_dir) if args.output_dir else None
    if args.export:
        return eval_output.export(output_dir, args.export)
    return eval_output.compare_sides(sides, allow_different_regime=args.allow_different_regime, output_dir=output_dir)


def engine_groups(args) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of every engine."""
    from opsd.eval_args import device_groups

    return device_groups(dict(os.environ), hardware()["gpus"], args.tensor_parallel_size)


def evaluate(args, regime) -> list[Path]:
    """Samples and grades every target of the command line; returns their folders."""
    from opsd.eval_pool import EngineDied
    from opsd.eval_runner import run_plan
    from opsd.eval_setup import make_plan

    groups = engine_groups(args)
    plan = make_plan(args, regime)
    try:
        return run_plan(plan, resume=args.resume, groups=groups, environment=dict(os.environ))
    except EngineDied as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.stderr.write(f"interrupted: finished samples are kept in {args.output_dir}; the same command goes on\n")
        sys.exit(INTERRUPTED)


def finish(folders: list[Path], output_dir: Path, with_report: bool) -> None:
    """Writes the report pages and prints the final line of every result."""
    from opsd.eval_result import headline
    from opsd.eval_store import RESULT, read_record

    if with_report:
        from opsd.eval_output import report

        report(folders, output_dir)
    for folder in folders:
        print(headline(read_record(folder / RESULT)))


if __name__ == "__main__":
    exit_on_bad_input(main)
