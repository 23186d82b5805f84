"""Writes the rows that passed the filter: verbatim, in order, atomically; weighted towards a benchmark or drawn from.

Last step of `data_filter.py`. Per kept row only its number and the kind of its answer stay in memory.
"""

import contextlib
import json
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from opsd.benchmarks import load_benchmark
from opsd.filters import answer_text, problem_id
from opsd.reweight import answer_kind, draw, kind_weights
from opsd.rows import SourceRow, encode_line, open_atomic


@dataclass(frozen=True)
class AfterFilter:
    """What happens to the kept rows besides being written; every default does nothing."""

    target_answers: str | None = None  # name or file of the benchmark whose distribution of answers the weights aim at
    weights: Path | None = None  # where each output row's weight is written
    sample: int | None = None  # rows drawn; None = all
    seed: int = 0
    benchmark_output: Path | None = None  # the output rows as a benchmark


def write_rows(rows: Iterable[SourceRow], output: Path, after: AfterFilter) -> dict:
    """Writes all files or, after an error, none; returns what the report says about them."""
    target = None
    if after.target_answers:
        problems = load_benchmark(after.target_answers).problems
        target = Counter(answer_kind(answer_text(problem.answer)) for problem in problems)
    numbers, kinds = array("Q"), []
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(open_atomic(output))
        kept = out if after.sample is None else stack.enter_context(tempfile.TemporaryFile(dir=output.parent))
        for row in rows:
            kept.write(encode_line(row))
            numbers.append(row.number)
            if target is not None:
                kinds.append(answer_kind(answer_text(row.values.get("Answer"))))
        info = {"written": len(numbers)}
        weights = [1.0] * len(numbers)
        if target is not None:
            by_kind = kind_weights(Counter(kinds), target)
            weights = [by_kind[kind] for kind in kinds]
            info["weights"] = {"target": dict(target), "kept": dict(Counter(kinds)), "weight": by_kind}
        if after.sample is not None:
            chosen = draw(weights, after.sample, after.seed)
            _copy_lines(kept, chosen, out)
            info["written"] = len(chosen)
        if after.weights:
            lines = stack.enter_context(open_atomic(after.weights))
            for number, kind, weight in zip(numbers, kinds, weights, strict=True):
                lines.write(json.dumps({"row": number, "kind": kind, "weight": weight}).encode() + b"\n")
        if after.benchmark_output:
            _write_benchmark(out, stack.enter_context(open_atomic(after.benchmark_output)))
    return info


def _copy_lines(source: BinaryIO, chosen: list[int], target: BinaryIO) -> None:
    """Copies the lines with these indices, which must be in order."""
    source.seek(0)
    wanted = iter(chosen)
    index = next(wanted, None)
    for position, line in enumerate(source):
        if position == index:
            target.write(line)
            index = next(wanted, None)


def _write_benchmark(rows: BinaryIO, benchmark: BinaryIO) -> None:
    """The rows as `id, problem, answer`; of rows with one id (a repeated problem) the first."""
    rows.seek(0)
    seen: set[str] = set()
    for line in rows:
        values = json.loads(line.decode("utf-8-sig"))
        identifier = problem_id(values)
        if identifier not in seen:
            seen.add(identifier)
            problem = {"id": identifier, "problem": values["problem"], "answer": answer_text(values["Answer"])}
            benchmark.write(json.dumps(problem, ensure_ascii=False).encode() + b"\n")
