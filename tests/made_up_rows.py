"""Made-up rows and the counts of a filter run, for the tests of the data side."""

import json
from pathlib import Path

import pytest

SAMPLES = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
needs_samples = pytest.mark.skipif(not SAMPLES.is_dir(), reason=f"no sample rows in {SAMPLES}")


def make_row(index: int = 0, **changes) -> dict:
    row = {
        "source": "olympiads",
        "problem": f"Find the value number {index} of the sum.",
        "solution": f"It is easy: \\boxed{{{index}}}.",
        "generated_token_count": 2000,
        "COT_Reason": "one two three",
        "Answer": str(index),
    }
    return row | changes


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def dropped(report: dict) -> dict[str, int]:
    return {rule["rule"]: rule["dropped"] for rule in report["rules"]}
