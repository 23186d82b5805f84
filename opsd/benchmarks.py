"""The benchmarks by name, and how a benchmark is read, checked and hashed. First file of the evaluator's data flow, before eval_runner.py.

A benchmark is a hub data set of the table below or a local .jsonl, .json, .parquet or saved `datasets` folder with `problem` and `answer`
(`id` optional). Its content hash goes into every result, since public copies of one contest differ in wording and in answers.
"""

import hashlib
import json
import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path

from opsd.rows import iter_rows
from opsd.runinfo import sha256_file

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BenchmarkSource:
    """Where a named benchmark lies on the hub, which columns are read, and what it has to look like."""

    hub_id: str
    split: str
    problem_column: str
    answer_column: str
    rows: int
    answer_type: str  # integer: every answer is one; expression: LaTeX; after_hashes: the integer behind `####`
    id_column: str | None = None
    config: str | None = None
    content_sha256: tuple[
        str, ...
    ] = ()  # accepted content hashes; empty = none recorded, the row count alone is checked


AIME24_SHA256 = "5c959d2270f526eae4d7a48556ad08deac4a8afadb059bd29a2a79e0d48ba652"
AIME25_SHA256 = "08cef82d0d09c626899ad1b630a23984a2c6c8faa30d7369f0181228c93674a0"

BENCHMARKS = {
    "aime24": BenchmarkSource(
        "HuggingFaceH4/aime_2024", "train", "problem", "answer", 30, "integer", "id", content_sha256=(AIME24_SHA256,)
    ),
    "aime25": BenchmarkSource("yentinglin/aime_2025", "train", "problem", "answer", 30, "integer", "id"),
    "hmmt25": BenchmarkSource("MathArena/hmmt_feb_2025", "train", "problem", "answer", 30, "expression", "problem_idx"),
    "amc23": BenchmarkSource("math-ai/amc23", "test", "question", "answer", 40, "integer", "id"),
    "math500": BenchmarkSource("HuggingFaceH4/MATH-500", "test", "problem", "answer", 500, "expression", "unique_id"),
    "minerva": BenchmarkSource("math-ai/minervamath", "test", "question", "answer", 272, "expression"),
    "olympiadbench": BenchmarkSource(
        "math-ai/olympiadbench", "test", "question", "final_answer", 674, "expression", "id"
    ),
    "gsm8k": BenchmarkSource("openai/gsm8k", "test", "question", "answer", 1319, "after_hashes", config="main"),
}
# Local files that are recognised by content: hash -> name. The aime25 copy has other ids than the hub's.
KNOWN_CONTENT = {AIME24_SHA256: "aime24", AIME25_SHA256: "aime25"}

_INTEGER = re.compile(r"[+-]?\d+")


@dataclass(frozen=True)
class Problem:
    """One problem of a benchmark. `answer` is the reference as it was read, without a data set's own wrapping."""

    id: str
    problem: str
    answer: str


@dataclass(frozen=True)
class Benchmark:
    """Problems with the hashes that name them. `rows` counts what the source holds, `problems` may be its beginning."""

    name: str
    source: str
    problems: tuple[Problem, ...]
    rows: int
    content_sha256: str
    file_sha256: str | None

    def head(self, count: int | None) -> "Benchmark":
        """The first `count` problems, under the hash of what is left; None keeps all."""
        if count is None or count >= len(self.problems):
            return self
        kept = self.problems[:count]
        return replace(self, problems=kept, content_sha256=content_sha256(kept))

    def record(self) -> dict:
        """What a result says about its benchmark."""
        return {
            "name": self.name,
            "sha256": self.content_sha256,
            "problems": len(self.problems),
            "rows": self.rows,
            "source": self.source,
            "file_sha256": self.file_sha256,
        }


def content_sha256(problems: tuple[Problem, ...] | list[Problem]) -> str:
    """Hash over id, problem and answer in order. Runs of white space count as one space and integers by value ("025" = "25"),

    so that copies of one text agree; any other change of a character changes the hash.
    """
    rows = [[p.id, " ".join(p.problem.split()), _canonical_answer(p.answer)] for p in problems]
    return hashlib.sha256(json.dumps(rows, ensure_ascii=False).encode()).hexdigest()


def load_benchmark(name_or_path: str, *, allow_changed: bool = False, max_problems: int | None = None) -> Benchmark:
    """Reads a benchmark of the table by name, or a local file. Raises FileNotFoundError and ValueError with one line.

    `allow_changed` turns the errors for an unexpected row count or content hash into warnings.
    """
    if name_or_path in BENCHMARKS:
        benchmark = _load_named(name_or_path, allow_changed)
    else:
        benchmark = _load_local(name_or_path)
    return benchmark.head(max_problems)


def _load_named(name: str, allow_changed: bool) -> Benchmark:
    source = BENCHMARKS[name]
    rows, fingerprint = _hub_rows(name, source)
    columns = (source.id_column, source.problem_column, source.answer_column)
    problems = _problems(rows, columns, f"benchmark={name} ({source.hub_id})", source.answer_type)
    found = content_sha256(problems)
    complaints = []
    if len(problems) != source.rows:
        complaints.append(f"has {len(problems)} rows, expected {source.rows}")
    if source.content_sha256 and found not in source.content_sha256:
        complaints.append(f"has content hash {found[:12]}, recorded is {source.content_sha256[0][:12]}")
    if complaints:
        text = f"benchmark={name}: {source.hub_id} {' and '.join(complaints)}"
        if not allow_changed:
            raise ValueError(f"{text}; it is another set of problems: use --allow_changed_benchmark true to accept it")
        logger.warning("%s; accepted", text)
    return Benchmark(name, f"{source.hub_id}@{source.split} ({fingerprint})", problems, len(problems), found, None)


def _hub_rows(name: str, source: BenchmarkSource) -> tuple[list[dict], str]:
    import datasets

    arguments = {} if source.config is None else {"name": source.config}
    try:
        dataset = datasets.load_dataset(source.hub_id, split=source.split, **arguments)
    except (
        OSError,
        ValueError,
    ) as error:  # offline, unknown or missing: OSError; unknown split or configuration: ValueError
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise FileNotFoundError(
            f"benchmark={name}: {source.hub_id} is neither in the cache nor reachable ({first}); "
            "give a local .jsonl or .parquet file with problem and answer, or connect to the hub once"
        ) from None
    return list(dataset), str(dataset.info.version or dataset._fingerprint)


def _load_local(path_text: str) -> Benchmark:
    path = Path(path_text).expanduser()
    if not path.exists():
        raise FileNotFoundError(
            f"benchmark={path_text} is neither a file nor one of {', '.join(BENCHMARKS)}; "
            "give a name or a local .jsonl or .parquet file with problem and answer"
        )
    rows = []
    for row in iter_rows(path):
        if row.defect is not None:
            raise ValueError(f"benchmark={path}: row {row.number}: {row.defect}; repair the file")
        rows.append(row.values)
    problems = _problems(rows, ("id", "problem", "answer"), f"benchmark={path}", "expression")
    found = content_sha256(problems)
    name = KNOWN_CONTENT.get(found, path.stem)
    if name in BENCHMARKS and found not in KNOWN_CONTENT:
        logger.warning(
            "benchmark=%s is named like %s, but its content hash %s is not a recorded one", path, name, found[:12]
        )
        name = f"{name} (file)"
    return Benchmark(name, str(path), problems, len(problems), found, sha256_file(path) if path.is_file() else None)


def _problems(rows: list[dict], columns: tuple, where: str, answer_type: str) -> tuple[Problem, ...]:
    """Checked problems out of raw rows; `columns` are those of id (or None), problem and answer."""
    id_column, problem_column, answer_column = columns
    problems, seen = [], {}
    for number, row in enumerate(rows, start=1):
        problem = row.get(problem_column)
        if not isinstance(problem, str) or not problem.strip():
            raise ValueError(
                f"{where}: row {number} has no {problem_column} (columns: {', '.join(row)}); every row needs "
                f"{problem_column} and {answer_column}"
            )
        answer = _answer(row.get(answer_column), answer_type)
        if answer is None:
            raise ValueError(
                f"{where}: row {number} has {answer_column}={row.get(answer_column)!r}, not "
                f"{'an integer' if answer_type != 'expression' else 'an answer'}; repair or remove the row"
            )
        own_id = row.get(id_column) if id_column else None
        identifier = str(number if own_id is None else own_id)
        if identifier in seen:
            raise ValueError(f"{where}: rows {seen[identifier]} and {number} share id={identifier}; ids must be unique")
        seen[identifier] = number
        problems.append(Problem(identifier, problem, answer))
    if not problems:
        raise ValueError(f"{where} has no rows; give a benchmark with at least one problem")
    return tuple(problems)


def _answer(value, answer_type: str) -> str | None:
    """The reference answer as text; None when there is none, or it is not of the declared type."""
    if isinstance(value, list):  # olympiadbench: a list of the parts of one answer
        value = ", ".join(map(str, value))
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None or isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    text = str(value).strip()
    if answer_type == "after_hashes":
        text = text.rpartition("####")[2].strip().replace(",", "")
    if answer_type != "expression" and not _INTEGER.fullmatch(text):
        return None
    return text or None


def _canonical_answer(answer: str) -> str:
    text = answer.strip()
    return str(int(text)) if _INTEGER.fullmatch(text) and len(text) <= 4000 else " ".join(text.split())
