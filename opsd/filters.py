"""Which training rows are kept: the rules as data, and how the columns they read are understood.

One definition for `data_filter.py` and `data.py`; `row_filter.py` applies it. The seed recipe keeps rows with a short
integer `Answer` whose trace has at least 2,000 tokens (29,434 -> 9,775 rows); every other rule is off unless asked for.
"""

import hashlib
import re
import string
from dataclasses import dataclass
from pathlib import Path

from opsd.overlap import BenchmarkIndex
from opsd.rows import iter_rows

_AROUND_ANSWER = string.whitespace + "$"


@dataclass(frozen=True)
class FilterRules:
    """What a row must fulfil; every default keeps all rows. Lengths: tokens of the trace (`generated_token_count`)."""

    answer_pattern: str = ""  # regular expression for the whole Answer; empty = off
    min_trace_tokens: int = 0  # 0 = off
    max_trace_tokens: int | None = None  # None = off
    sources: tuple[str, ...] = ()  # allowed values of `source`; empty = all
    drop_leaked: bool = False
    drop_duplicates: bool = False
    privileged_column: str = "solution"  # read by drop_leaked
    benchmark: BenchmarkIndex | None = None  # None = off
    pass_rates: dict[str, float] | None = None  # problem id -> share of correct samples of the base model; None = off
    pass_rate_range: tuple[float, float] = (0.0, 1.0)  # both ends included

    def __post_init__(self):
        compile_answer_pattern(self.answer_pattern)
        if self.min_trace_tokens < 0:
            raise ValueError(f"min_trace_tokens={self.min_trace_tokens} must be >= 0 tokens; use 0 to disable")
        if self.max_trace_tokens is not None and self.max_trace_tokens < max(self.min_trace_tokens, 1):
            raise ValueError(
                f"max_trace_tokens={self.max_trace_tokens} must be > 0 and >= min_trace_tokens="
                f"{self.min_trace_tokens}; leave it out to disable"
            )
        low, high = self.pass_rate_range
        if not 0 <= low <= high <= 1:
            raise ValueError(f"pass rates from {low} to {high}: both must be in [0, 1], in this order")

    def columns(self) -> tuple[list[str], list[str]]:
        """Columns the rules need: those that must exist, and those that must hold text.

        `generated_token_count` is in neither: where it is missing, the row is counted as such.
        """
        must_exist = ["Answer"] * bool(self.answer_pattern or self.drop_leaked) + ["source"] * bool(self.sources)
        reads_problem = self.drop_leaked or self.drop_duplicates or self.benchmark or self.pass_rates is not None
        must_hold_text = ["problem"] * bool(reads_problem) + [self.privileged_column] * self.drop_leaked
        return must_exist, must_hold_text


def compile_answer_pattern(pattern: str) -> re.Pattern:
    """`\\d` means the ASCII digits 0-9."""
    try:
        return re.compile(pattern, re.ASCII)
    except re.error as error:
        raise ValueError(f"answer_pattern={pattern!r} is not a regular expression: {error}; empty = keep all") from None


def answer_text(value: object) -> str | None:
    """`Answer` without surrounding spaces and `$`; None when it is missing, empty or neither text nor an integer."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        return None
    return value.strip(_AROUND_ANSWER) or None


def trace_tokens(value: object) -> int | None:
    """`generated_token_count` as a number; None when it is missing, null or no whole number: missing is not zero."""
    if isinstance(value, str) and re.fullmatch(r"\d{1,12}", value, re.ASCII):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def problem_id(row: dict) -> str:
    """The row's `id` if it has one, else 16 hex digits of its problem's hash: the key of its pass rate."""
    if row.get("id") is not None:
        return str(row["id"])
    return hashlib.sha256(row["problem"].encode("utf-8", "surrogatepass")).hexdigest()[:16]


def read_pass_rates(path: Path) -> dict[str, float]:
    """Problem id -> share of correct samples, 0-1, from the per-sample records of `eval_aime.py`."""
    samples: dict[str, list[int]] = {}
    for row in iter_rows(path, field="pass_rates"):
        if row.defect:
            raise ValueError(f"pass_rates={path}: row {row.number}: {row.defect}; repair it")
        problem, correct = row.values.get("problem_id"), row.values.get("correct")
        if problem is None or not isinstance(correct, bool):
            raise ValueError(
                f"pass_rates={path}: row {row.number} has problem_id={problem!r}, correct={correct!r}; "
                "give the per-sample records of eval_aime.py"
            )
        counts = samples.setdefault(str(problem), [0, 0])
        counts[0] += correct
        counts[1] += 1
    return {problem: correct / total for problem, (correct, total) in samples.items()}
