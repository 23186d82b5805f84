"""Clamped objective beside the true divergence over training: from run folders to one JSON and one figure. docs/clamp.md reads them.

    python bench/clamp_runs.py --run none=runs/tiny --run "entry 0.05=runs/entry_clip" --output results/clamp_runs.json \\
        --study results/clamp_tiny.json --study results/clamp_smollm2.json --figure results/clamp.png

A run folder is what `train_capped.sh` leaves: metrics.jsonl, run.json and, where it was evaluated, eval/before and eval/after.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from opsd.entry import exit_on_bad_input
from opsd.runinfo import read_jsonl, write_json

SERIES = {
    "objective": "loss/objective",
    "divergence": "loss/divergence",
    "clipped_tokens": "loss/clipped_token_fraction",
    "student_entropy": "policy/student_entropy",
}
ARGUMENTS = ("world", "world_seed", "seed", "beta", "entry_clip", "clip_mode", "max_steps", "learning_rate")
SCORES = ("avg_at_k", "standard_error_same_problems", "standard_error_new_problems")
WINDOW = 10  # steps averaged at each end of a run


def read_run(folder: Path) -> dict:
    """One run's settings, series and scores."""
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    arguments = {name: value for group in record["arguments"].values() for name, value in group.items()}
    rows = read_jsonl(folder / "metrics.jsonl")
    series = {name: [round(row[key], 6) for row in rows] for name, key in SERIES.items()}
    ends = {
        name: {"first": sum(v[:WINDOW]) / len(v[:WINDOW]), "last": sum(v[-WINDOW:]) / len(v[-WINDOW:])}
        for name, v in series.items()
    }
    scores = {}
    for when in ("before", "after"):
        path = folder / "eval" / when / "result.json"
        if path.is_file():
            statistics = json.loads(path.read_text(encoding="utf-8"))["statistics"]
            scores[when] = {name: statistics[name] for name in SCORES}
    return {
        "commit": record["commit"],
        "dirty": record["dirty"],
        "arguments": {name: arguments[name] for name in ARGUMENTS},
        "steps": [row["step"] for row in rows],
        "series": series,
        f"mean_of_{WINDOW}_steps": ends,
        "scores": scores,
    }


def draw(runs: dict[str, dict], studies: list[dict], path: Path) -> None:
    """Divergence and objective of every run; on the right, where the clamped gradient points, over the cap."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(11, 3))
    for panel, name in zip(panels, ("divergence", "objective"), strict=False):
        for label, run in runs.items():
            panel.plot(run["steps"], run["series"][name], label=label, linewidth=1)
        panel.set_title({"divergence": "true divergence", "objective": "training objective"}[name], fontsize=10)
        panel.set_xlabel("step")
        panel.set_ylim(bottom=min(0.0, *(min(run["series"][name]) for run in runs.values())))
    panels[0].set_ylabel("nats per token")
    panels[0].legend(fontsize=8, frameon=False)
    for study in studies:
        caps, cosines = zip(*((row["entry_clip"], row["cosine"]) for row in study["by_clip"]), strict=True)
        panels[2].plot(caps, cosines, marker="o", markersize=3, linewidth=1, label=study["world"])
    panels[2].axhline(0, color="black", linewidth=0.5)
    panels[2].axvline(0.05, color="grey", linewidth=0.5, linestyle=":")
    panels[2].set_xscale("log")
    panels[2].set_title("cosine of clamped and true gradient", fontsize=10)
    panels[2].set_xlabel("entry clip, nats")
    panels[2].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=100, metadata={"Software": None})


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--run", action="append", required=True, help="LABEL=FOLDER of a finished run; repeat it.")
    parser.add_argument("--output", type=Path, required=True, help="JSON to write.")
    parser.add_argument("--study", action="append", type=Path, required=True, help="JSON of clamp_study.py; repeat it.")
    parser.add_argument("--figure", type=Path, required=True, help="PNG to write.")
    arguments = parser.parse_args(argv)
    runs = {}
    for given in arguments.run:
        label, equals, folder = given.partition("=")
        if not equals or not (Path(folder) / "metrics.jsonl").is_file():
            raise FileNotFoundError(f"run={given} must be LABEL=FOLDER with a metrics.jsonl in the folder")
        runs[label] = read_run(Path(folder))
    write_json(arguments.output, {"schema": "opsd-clamp-runs/1", "runs": runs})
    studies = [json.loads(path.read_text(encoding="utf-8")) for path in arguments.study]
    draw(runs, studies, arguments.figure)


if __name__ == "__main__":
    exit_on_bad_input(main)
