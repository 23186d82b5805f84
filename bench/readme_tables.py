"""Writes the README's tables from the JSON files under results/; no number in them is typed.

python -m bench.readme_tables            rewrites the blocks between `<!-- name -->` and `<!-- end name -->`
"""

import argparse
import re
import shlex
from pathlib import Path

import numpy as np

from bench.reference import STUDENT_PROMPT, TEACHER_PROMPT
from opsd.entry import exit_on_bad_input
from opsd.eval_output import table
from opsd.ledger import sweep_table
from opsd.runinfo import read_json, read_jsonl, write_text

ROOT = Path(__file__).resolve().parent.parent


def sweep_block(results: Path, name: str) -> str:
    record = read_json(results / f"sweep_{name}.json")
    command = shlex.join(record["command"])
    return f"{sweep_table(record['rows'], record['against'])}\n\n`{command}`, data in `results/sweep_{name}.json`."


LOSS_TOKENS = 16_384  # the length at which every variant is shown; ours is shown at all of them


def loss_block(results: Path) -> str:
    records = [read_json(results / name) for name in ("bench_loss.json", "bench_loss_131072.json")]
    lines = [
        "| tokens | beta | variant | ms | x floor | peak GiB | gradient error |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in (row for record in records for row in record["rows"]):
        if row["tokens"] != LOSS_TOKENS and not row["row"].startswith("triton"):
            continue
        name = row["row"] + ("" if row["clamped"] else " (cannot clamp)")
        if "ms" not in row:
            lines.append(f"| {row['tokens']:,} | {row['beta']:g} | {name} | {row['error']} | | | |")
            continue
        lines.append(
            f"| {row['tokens']:,} | {row['beta']:g} | {name} | {row['ms']:.1f} | {row['x_floor']:.2f} | {row['peak_gib']:.2f} | "
            f"{row['gradient_relative_error']:.4f} |"
        )
    commands = ", ".join(f"`{' '.join(record['command'])}`" for record in records)
    return "\n".join(lines) + f"\n\n{commands}, data in the files they name."


def shape_run_block(results: Path) -> str:
    folder = results / "seed_at_shape"
    lines = [
        "| step | rollouts s | training s | sync s | step s | peak GiB | of it the engine |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in read_jsonl(folder / "metrics.jsonl"):
        if "time/step_s" in row:
            lines.append(
                f"| {row['step']} | {row['time/rollout_s']:.2f} | {row['time/train_s']:.2f} | {row['time/sync_s']:.2f} | "
                f"{row['time/step_s']:.2f} | {row['memory/peak_gib']:.1f} | {row['memory/engine_gib']:.1f} |"
            )
    commands = (folder / "command.txt").read_text(encoding="utf-8").splitlines()
    return "\n".join(lines) + f"\n\n{', then '.join(f'`{c}`' for c in commands)}, data in `results/seed_at_shape/`."


STEP_PARTS = {
    "step": "32 rollouts, one step",
    "micro": "4 sequences, teacher prompts of 3,000 to 8,000",
    "growth": "one micro-batch, teacher prompts of 600",
}


def step_block(results: Path) -> str:
    record, micro = (read_json(results / name) for name in ("bench_step.json", "bench_step_micro.json"))
    lines = [
        "| what | variant | completion | micro-batch | recomputation | s | floor s | peak GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in [row for row in record["rows"] if row["part"] != "micro"] + micro["rows"]:
        what = STEP_PARTS[row["part"]]
        floor = "" if "floor_s" not in row else f"{row['floor_s']:.2f}"
        lines.append(
            f"| {what} | {row['variant']} | {row.get('completion', 1024):,} | {row.get('micro_batch', 4)} | "
            f"{'on' if row['recompute'] else 'off'} | {row['seconds']:.2f} | {floor} | {row['peak_gib']:.1f} |"
        )
    return (
        "\n".join(lines)
        + f"\n\n{growth_sentence([row for row in record['rows'] if row['part'] == 'growth'])} "
        + ", ".join(f"`python -m bench.step {' '.join(r['command'])}`" for r in (record, micro))
        + ", data in the files they name."
    )


def growth_sentence(rows: list[dict]) -> str:
    """How time grows with completion length: a time per token and one per pair of tokens that attend, fitted to relative errors."""
    tokens, pairs, seconds = [], [], np.array([row["seconds"] for row in rows])
    for row in rows:
        lengths = [row["completion"] + prompt for prompt in (STUDENT_PROMPT, TEACHER_PROMPT)]
        tokens.append(row["micro_batch"] * sum(lengths))
        pairs.append(row["micro_batch"] * sum(length**2 / 2 for length in lengths))
    columns = np.stack([tokens, pairs], axis=1) / seconds[:, None]
    (per_token, per_pair), *_ = np.linalg.lstsq(columns, np.ones(len(rows)), rcond=None)
    worst = np.abs(columns @ (per_token, per_pair) - 1).max()
    return (
        f"With completion length, time grows by {1e6 * per_token:.1f} us a token and {1e12 * per_pair:,.0f} us for a million pairs of "
        f"tokens that attend to each other, within {100 * worst:.0f} % from {rows[0]['completion']} to {rows[-1]['completion']:,} tokens."
    )


def rollout_block(results: Path) -> str:
    record = read_json(results / "bench_rollout.json")
    lines = [
        "| engine | sampled from | s for 32 x 1,024 tokens | ms a step | tokens/s | sync s |",
        "|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        lines.append(
            f"| {row['engine']} | {row['case']} | {min(row['seconds']):.2f} | {row['ms_per_step']:.2f} | {row['tokens_per_s']:,.0f} | "
            f"{row['sync_s']:.2f} |"
        )
    floor = f"Floor of a decode step: {record['floor_ms_per_step']:.2f} ms."
    return (
        "\n".join(lines)
        + f"\n\n{floor} `python -m bench.rollout {' '.join(record['command'])}`, data in `results/bench_rollout.json`."
    )


def speed_block(results: Path) -> str:
    paths = sorted(results.glob("bench_evaluation_*.json"))
    lines = [
        "| variant | sequences | new tokens | s | KV-bandwidth floor s | x floor | load s |",
        "|---|---|---|---|---|---|---|",
    ]
    records = [read_json(path) for path in paths]
    for record in records:
        for row in record["rows"]:
            lines.append(
                f"| {row['variant']} | {record['sequences']} | {record['new_tokens']:,} | {row['sampling_seconds']:.1f} | "
                f"{row['floor_seconds']:.1f} | {row['over_floor']:.2f} | {row['load_seconds']:.0f} |"
            )
    commands = ", ".join(f"`python -m bench.evaluation {shlex.join(record['command'])}`" for record in records)
    return "\n".join(lines) + f"\n\n{commands}, data in the files they name."


EVALUATIONS = ("smollm2/before.json", "smollm2/after.json")


def evaluation_block(results: Path) -> str:
    paths = [f"results/{name}" for name in EVALUATIONS]
    text = table([str(results / name) for name in EVALUATIONS])
    return f"{text}\n\n`python eval_aime.py --table {' '.join(paths)}`"


def trust_block(results: Path) -> str:
    record = read_json(results / "trust.json")
    kills, inputs, fuzz, soak, tiny = (record[name] for name in ("kills", "bad_input", "fuzz", "soak", "soak_tiny"))
    guided = ", ".join(f"{name} {count:,}" for name, count in fuzz["atheris"]["runs"].items())
    cases = ", ".join(f"{name} {count:,}" for name, count in fuzz["cases"].items())
    return (
        "| what | figure | command |\n|---|---|---|\n"
        f"| runs killed, survived | {kills['total']}, {kills['survived']} | `{kills['command']}` |\n"
        f"| tests of bad and hostile input passed | {inputs['tests_passed']} | `{inputs['command']}` |\n"
        f"| fuzz cases; findings in opsd | {cases}; {fuzz['findings_in_opsd']} | `{fuzz['command']}` |\n"
        f"| soak: steps, checkpoints, evaluations | {soak['steps']:,}, {soak['checkpoints_written']}, {soak['evaluations']} | "
        f"`{soak['command']}` |\n"
        f"| coverage-guided fuzz cases; findings | {guided}; {fuzz['atheris']['findings']} | `{fuzz['atheris']['command']}` |\n"
        f"| soak of the tiny world: steps, evaluations | {tiny['steps']:,}, {len(tiny['evaluations'])} | `{tiny['command']}` |\n\n"
        f"At commit {record['commit'][:12]}, data in `results/trust.json`."
    )


MAKERS = {
    "loss": loss_block,
    "step": step_block,
    "rollout": rollout_block,
    "shape_run": shape_run_block,
    "trust": trust_block,
    "evaluation_speed": speed_block,
    "evaluations": evaluation_block,
}


def blocks(results: Path) -> dict[str, str]:
    """Every generated block of the README whose data exists."""
    found = {name: make(results) for name, make in MAKERS.items()}
    for name in ("tiny", "ablations"):
        if (results / f"sweep_{name}.json").is_file():
            found[name] = sweep_block(results, name)
    return found


def fill(readme: str, generated: dict[str, str]) -> str:
    """`readme` with each block replaced. Raises ValueError for a block that the text has no place for."""
    for name, text in generated.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        if not pattern.search(readme):
            raise ValueError(f"README.md has no block {name!r}; add <!-- {name} --> and <!-- end {name} -->")
        readme = pattern.sub(lambda match, text=text: match[1] + text + "\n" + match[2], readme)
    return readme


def main(argv: list[str]) -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False).parse_args(argv)
    path = ROOT / "README.md"
    write_text(path, fill(path.read_text(encoding="utf-8"), blocks(ROOT / "results")))


if __name__ == "__main__":
    exit_on_bad_input(main)
