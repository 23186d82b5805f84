"""Applies the rules of `filters.py` row by row and counts each row's fate; shared by `data_filter.py` and `data.py`."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from opsd.filters import FilterRules, answer_text, compile_answer_pattern, problem_id, trace_tokens
from opsd.overlap import leaks_solution, normalised_words
from opsd.rows import SourceRow

NAMED_ROWS = 5  # row numbers given per rule in reports and messages
LISTED_OVERLAPS = 200


@dataclass
class RowFilter:
    """Applies the rules in a fixed order; a row is charged to the first rule it fails.

    Duplicates come last, so that a row dropped for another reason never shadows a good copy of itself.
    `text_columns` must hold text in every kept row; `count_tokens` recomputes a missing token count from `COT_Reason`.
    """

    rules: FilterRules
    text_columns: tuple[str, ...] = ()
    count_tokens: Callable[[str], int] | None = None
    rows: int = 0
    kept: int = 0
    recomputed: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # in the order of application, zeros included
    first_rows: dict[str, list[int]] = field(default_factory=dict)
    overlaps: list[dict] = field(default_factory=list)
    defects: list[dict] = field(default_factory=list)  # of the first NAMED_ROWS bad rows

    def __post_init__(self):
        rules = self.rules
        self._pattern = compile_answer_pattern(rules.answer_pattern)
        self._sources = frozenset(rules.sources)
        self._reads_length = rules.min_trace_tokens > 0 or rules.max_trace_tokens is not None
        self._seen: set[bytes] = set()
        self._must_exist, self._must_hold_text = rules.columns()
        active = {
            "bad_row": True,
            "source": rules.sources,
            "answer_missing": rules.answer_pattern,
            "answer_pattern": rules.answer_pattern,
            "trace_tokens_missing": self._reads_length,
            "min_trace_tokens": rules.min_trace_tokens,
            "max_trace_tokens": rules.max_trace_tokens is not None,
            "leaked_solution": rules.drop_leaked,
            "pass_rate_missing": rules.pass_rates is not None,
            "pass_rate": rules.pass_rates is not None,
            "benchmark_overlap": rules.benchmark,
            "duplicate": rules.drop_duplicates,
        }
        self.dropped = {name: 0 for name, asked in active.items() if asked}

    def keeps(self, row: SourceRow) -> bool:
        """Decides about one row and counts it under its fate."""
        self.rows += 1
        failed = None
        defect = row.defect or _column_defect(row.values, self._must_exist, self._must_hold_text)
        if defect is None:
            failed = self._failed_rule(row.number, row.values)
            if failed is None:
                defect = _column_defect(row.values, (), self.text_columns)
        if defect is None and failed is None:
            self.kept += 1
            return True
        rule = failed or "bad_row"
        self.dropped[rule] += 1
        named = self.first_rows.setdefault(rule, [])
        if len(named) < NAMED_ROWS:
            named.append(row.number)
            if defect is not None:
                self.defects.append({"row": row.number, "defect": defect})
        return False

    def tokens_of(self, row: dict) -> int | None:
        """Length of the row's trace in tokens, recomputed if it is missing and `count_tokens` was given."""
        tokens = trace_tokens(row.get("generated_token_count"))
        if tokens is None and self.count_tokens is not None and isinstance(row.get("COT_Reason"), str):
            self.recomputed += 1
            return self.count_tokens(row["COT_Reason"])
        return tokens

    def report(self) -> dict:
        """Counts in the order of application, as they go to JSON and `run.json`."""
        remaining, table = self.rows, []
        for rule, count in self.dropped.items():
            remaining -= count
            table.append(
                {"rule": rule, "dropped": count, "remaining": remaining, "first_rows": self.first_rows.get(rule, [])}
            )
        counts = {"rows": self.rows, "kept": self.kept, "recomputed_token_counts": self.recomputed, "rules": table}
        return {**counts, "bad_rows": self.defects, "benchmark_overlaps": self.overlaps}

    def _failed_rule(self, number: int, row: dict) -> str | None:
        rules = self.rules
        if self._sources and not (isinstance(row["source"], str) and row["source"] in self._sources):
            return "source"
        answer = answer_text(row.get("Answer"))
        if rules.answer_pattern:
            if answer is None:
                return "answer_missing"
            if not self._pattern.fullmatch(answer):
                return "answer_pattern"
        if self._reads_length:
            tokens = self.tokens_of(row)
            if tokens is None:
                return "trace_tokens_missing"
            if tokens < rules.min_trace_tokens:
                return "min_trace_tokens"
            if rules.max_trace_tokens is not None and tokens > rules.max_trace_tokens:
                return "max_trace_tokens"
        if rules.drop_leaked and leaks_solution(row["problem"], row[rules.privileged_column], answer):
            return "leaked_solution"
        if rules.pass_rates is not None:
            rate = rules.pass_rates.get(problem_id(row))
            if rate is None:
                return "pass_rate_missing"
            if not rules.pass_rate_range[0] <= rate <= rules.pass_rate_range[1]:
                return "pass_rate"
        return self._failed_copy_rule(number, row)

    def _failed_copy_rule(self, number: int, row: dict) -> str | None:
        if self.rules.benchmark and (overlap := self.rules.benchmark.lookup(row["problem"])):
            if len(self.overlaps) < LISTED_OVERLAPS:
                found = {"row": number, "benchmark_id": overlap.benchmark_id, "share": round(overlap.share, 4)}
                self.overlaps.append({**found, "identical": overlap.identical})
            return "benchmark_overlap"
        if self.rules.drop_duplicates:
            text = " ".join(normalised_words(row["problem"]))
            digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).digest()
            if digest in self._seen:
                return "duplicate"
            self._seen.add(digest)
        return None


def kept_rows(
    rows: Iterable[SourceRow], row_filter: RowFilter, *, on_bad_row: str, origin: str, limit: int | None = None
) -> Iterator[SourceRow]:
    """The rows that pass, in order. Bad rows (unreadable, or without a needed column) stop everything or are counted.

    `on_bad_row`: `error` or `drop`; `origin` names the rows in messages; `limit`: stop after that many kept rows.
    """
    for row in rows:
        if row_filter.keeps(row):
            yield row
        if (on_bad_row == "error" and len(row_filter.defects) == NAMED_ROWS) or row_filter.kept == limit:
            break
    bad = row_filter.dropped["bad_row"]
    if bad and (on_bad_row == "error" or bad == row_filter.rows):
        numbers: dict[str, list[str]] = {}
        for found in row_filter.defects:
            numbers.setdefault(found["defect"], []).append(str(found["row"]))
        listed = "; ".join(f"row {', '.join(rows)}: {defect}" for defect, rows in numbers.items())
        remedy = (
            "repair them, or use on_bad_row=drop to drop and count them"
            if on_bad_row == "error"
            else "every row is bad"
        )
        raise ValueError(f"{origin} has bad rows among the first {row_filter.rows}: {listed}; {remedy}")
    if row_filter.rows == 0:
        raise ValueError(f"{origin} holds no rows; give a file with one row per line")


def _column_defect(values: dict, must_exist: Iterable[str], must_hold_text: Iterable[str]) -> str | None:
    for column in (*must_exist, *must_hold_text):
        if column not in values:
            return f"no column {column!r} (its columns: {', '.join(values)})"
    for column in must_hold_text:
        if not isinstance(values[column], str) or not values[column].strip():
            return f"no text in column {column!r}"
        if not values[column].isascii() and any("\ud800" <= character <= "\udfff" for character in values[column]):
            return f"half of a surrogate pair in column {column!r}, which no tokenizer accepts"
    return None
