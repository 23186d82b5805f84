"""Sweeps and their record: which runs a sweep needs, what they scored, and the ledger that every sweep is appended to.

Used by `sweep.py`. A recipe is known by the hash of its resolved values; the same hash and seed is trained once. Every number in a
table comes out of a result JSON.
"""

import hashlib
import json
import math
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, stdev

from opsd.paired_tests import difference_same_problems
from opsd.runinfo import git_state, write_json, write_text

NOT_PART_OF_A_RECIPE = ("--seed", "--world_seed", "--output_dir", "--evaluate_before", "--evaluate_after", "--use_cpu")
LEDGER_TITLE = "# Ledger\n\nNewest first. Every number comes from the JSON named with it; negative results stay.\n"


@dataclass(frozen=True)
class Run:
    """One training run of a sweep: a recipe, its hash, a seed, and the folder it writes."""

    recipe: str  # name of the recipe file without its suffix
    recipe_path: str
    digest: str
    seed: int
    folder: Path

    @property
    def result_path(self) -> Path:
        return self.folder / "eval" / "after" / "result.json"

    @property
    def is_baseline(self) -> bool:
        """Whether `recipe_path` is a YAML file of baselines/ rather than a recipe of OPSD."""
        return self.recipe_path.endswith((".yaml", ".yml"))

    @property
    def finished(self) -> bool:
        return self.result_path.is_file()


def recipe_digest(training_arguments: list[str]) -> str:
    """16 hex digits over the resolved arguments of a run, without what differs between repetitions of it."""
    groups: list[list[str]] = []
    for word in training_arguments:
        if word.startswith("--"):
            groups.append([word])
        else:
            groups[-1].append(word)
    kept = sorted(g for g in groups if g[0].split("=")[0] not in NOT_PART_OF_A_RECIPE)
    return hashlib.sha256(json.dumps(kept).encode()).hexdigest()[:16]


def baseline_digest(settings: dict, extra: list[str]) -> str:
    """The same over a baseline's YAML file and the sweep's own flags."""
    kept = {name: value for name, value in settings.items() if f"--{name}" not in NOT_PART_OF_A_RECIPE}
    return hashlib.sha256(json.dumps([sorted(kept.items()), extra]).encode()).hexdigest()[:16]


def counts_of(result: dict) -> list[tuple[int, int]]:
    """(samples, correct) per problem, in the benchmark's order."""
    return [(p["n"], p["correct"]) for p in result["problems"]]


def paired(a: dict, b: dict) -> tuple[float, float]:
    """Difference B - A of two results on the same problems and its sampling standard error, fractions.

    Raises ValueError when benchmark or regime differ.
    """
    for key in ("regime_hash",):
        if a[key] != b[key]:
            raise ValueError(f"{key} differs between {a['name']} and {b['name']}; evaluate both in one regime")
    if a["benchmark"]["sha256"] != b["benchmark"]["sha256"]:
        raise ValueError(f"benchmark differs between {a['name']} and {b['name']}; compare runs of one seed")
    outcome = difference_same_problems(counts_of(a), counts_of(b), seed=0)
    return score(b) - score(a), outcome["standard_error"]


def score(result: dict) -> float:
    """avg@k of a result, a fraction."""
    return result["statistics"]["avg_at_k"]


COSTS = ("tokens_generated", "tokens_trained", "gpu_seconds", "wall_seconds")


def mean_costs(records: Iterable[dict]) -> dict[str, float | None]:
    """What a run cost, from several runs' run.json: sampled tokens, tokens through the trained model, GPU seconds (None without a
    GPU), and the training's wall clock, which other jobs on the machine lengthen."""
    records = list(records)
    means = dict.fromkeys(COSTS)
    for name in COSTS:
        if all(name in record for record in records):
            means[name] = fmean(record[name] for record in records)
    if means["gpu_seconds"] == 0:
        means["gpu_seconds"] = None
    return means


def summarise(
    name: str, differences: list[tuple[float, float]], scores: list[float], costs: dict[str, float | None] | None = None
) -> dict:
    """Mean over seeds with the sampling error of that mean, and the spread between seeds; fractions. `costs` as from `mean_costs`."""
    values = [d for d, _ in differences]
    error = math.sqrt(sum(e * e for _, e in differences)) / len(differences)
    mean = fmean(values)
    return {
        "recipe": name,
        "seeds": len(scores),
        "avg_at_k": fmean(scores),
        "scores": scores,
        "difference": mean,
        "differences": values,
        "standard_error": error,
        "interval": [mean - 1.96 * error, mean + 1.96 * error],
        "between_seed_sd": stdev(values) if len(values) > 1 else None,
        "costs": costs or dict.fromkeys(COSTS),
    }


def sweep_table(rows: list[dict], against: str) -> str:
    """Markdown table of summaries, percent; bold where the sampling interval of the difference excludes zero."""
    lines = [
        f"| recipe | seeds | avg@k | per seed | difference to {against} | 95 % (sampling) | sd between seeds | tokens sampled | trained | "
        "GPU s | wall s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["interval"]
        difference = f"{100 * row['difference']:+.1f} ± {100 * row['standard_error']:.1f}"
        if low > 0 or high < 0:
            difference = f"**{difference}**"
        spread = "–" if row["between_seed_sd"] is None else f"{100 * row['between_seed_sd']:.1f}"
        per_seed = ", ".join(f"{100 * s:.1f}" for s in row["scores"])
        lines.append(
            f"| {row['recipe']} | {row['seeds']} | {100 * row['avg_at_k']:.1f} | {per_seed} | {difference} | "
            f"{100 * low:+.1f} … {100 * high:+.1f} | {spread} | "
            + " | ".join("–" if row["costs"].get(name) is None else f"{row['costs'][name]:,.0f}" for name in COSTS)
            + " |"
        )
    return "\n".join(lines)


def write_sweep(
    path: Path, *, question: str, command: list[str], against: str, rows: list[dict], runs: list[dict]
) -> dict:
    """Writes the sweep's JSON and returns it."""
    record = {
        "schema": "opsd-sweep/1",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "question": question,
        "command": command,
        "against": against,
        **git_state(),
        "rows": rows,
        "runs": runs,
    }
    write_json(path, record)
    return record


def append_to_ledger(ledger: Path, record: dict, json_name: str) -> None:
    """Puts the sweep's entry on top of the ledger; an entry of the same JSON is replaced."""
    old = ledger.read_text(encoding="utf-8") if ledger.exists() else LEDGER_TITLE
    head, *entries = old.split("\n## ")
    entries = [e for e in entries if f"`{json_name}`" not in e]
    state = " (with uncommitted changes)" if record["dirty"] else ""
    entry = (
        f"{record['date']}: {record['question']}\n\n"
        f"Command: `{shlex.join(record['command'])}` at commit {(record['commit'] or 'unknown')[:12]}{state}. Data: `{json_name}`.\n\n"
        f"{sweep_table(record['rows'], record['against'])}\n"
    )
    write_text(ledger, "\n## ".join([head.rstrip("\n") + "\n", entry, *entries]))
