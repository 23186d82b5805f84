"""From rows to training examples: reads, filters, builds both roles' prompts and tokenises them.

Second step of the data flow, between `row_filter.py` and `trainer.py`. A prompt that is too long stops the run or drops
the row and counts it; it is never cut. The counts go to `run.json`.
"""

import hashlib
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np
from datasets.table import InMemoryTable

from opsd import prompts
from opsd.args import DataArgs
from opsd.filters import FilterRules
from opsd.row_filter import NAMED_ROWS, RowFilter, kept_rows
from opsd.rows import SourceRow, iter_hub_rows, iter_rows

FILTER_COLUMNS = ["problem", "Answer", "generated_token_count"]
TOKENISE_ROWS = 128  # prompts encoded in one call, which the tokenizer spreads over the cores


def load_training_examples(
    args: DataArgs,
    tokenizer,
    *,
    student_thinking: bool,
    teacher_thinking: bool,
    train_file: Path | None = None,
    teacher_prefix: str = "none",
    teacher_sees_problem: bool = True,
    wrong_reference_seed: int | None = None,
    reason_first: bool = False,
) -> tuple[datasets.Dataset, dict]:
    """The examples in file order, and the counts of everything that happened to the rows.

    Columns: `example_id` (the row's number in its source, as text), `prompt_ids` and `teacher_prompt_ids` (int32, both
    ending where the completion starts), and with `wrong_reference_seed` also `negative_teacher_prompt_ids`, the teacher
    prompt with another row's privileged context. With `reason_first` also `analysis_prompt_ids`, `problem` and
    `privileged_context`, from which opsd/reason_first.py makes the scoring prompt. `train_file` replaces
    `args.train_file` (a built-in world's rows).
    """
    prompts.check_thinking_switch(tokenizer, student_thinking, teacher_thinking)
    prefix = prompts.teacher_prefix_text(tokenizer, teacher_prefix, teacher_thinking=teacher_thinking)
    rows, counts = load_rows(args, train_file)
    problems = [row.values["problem"] for row in rows]
    contexts = [row.values[args.privileged_column] for row in rows]

    def teacher_ids(references: list[str]) -> list[np.ndarray]:
        messages = (
            prompts.teacher_messages(problem, reference, include_problem=teacher_sees_problem)
            for problem, reference in zip(problems, references, strict=True)
        )
        return _token_arrays(tokenizer, messages, enable_thinking=teacher_thinking, prefix=prefix)

    student = (prompts.student_messages(problem) for problem in problems)
    columns = {
        "prompt_ids": _token_arrays(tokenizer, student, enable_thinking=student_thinking),
        "teacher_prompt_ids": teacher_ids(contexts),
    }
    if wrong_reference_seed is not None:
        wrong = wrong_references(contexts, wrong_reference_seed)
        columns["negative_teacher_prompt_ids"] = teacher_ids([contexts[index] for index in wrong])
    if reason_first:
        analysis = (
            prompts.analysis_messages(problem, context, include_problem=teacher_sees_problem)
            for problem, context in zip(problems, contexts, strict=True)
        )
        columns["analysis_prompt_ids"] = _token_arrays(tokenizer, analysis, enable_thinking=False)
    limits = {
        "prompt_ids": ("max_prompt_length", args.max_prompt_length),
        "teacher_prompt_ids": ("max_teacher_prompt_length", args.max_teacher_prompt_length),
        "negative_teacher_prompt_ids": ("max_teacher_prompt_length", args.max_teacher_prompt_length),
        "analysis_prompt_ids": ("max_teacher_prompt_length", args.max_teacher_prompt_length),
    }
    fits, counts["overlong"] = _fitting(rows, columns, limits, args.overlong)
    if not fits:
        raise ValueError(
            f"no row is left: all {len(rows)} prompts are too long ({counts['overlong']}); raise the limits"
        )
    counts["examples"] = len(fits)
    counts["examples_sha256"] = _hash(columns, fits)
    for name, arrays in columns.items():
        counts[f"longest_{name}"] = max(len(arrays[index]) for index in fits)
    examples = {"example_id": [str(rows[index].number) for index in fits]}
    examples |= {name: [arrays[index] for index in fits] for name, arrays in columns.items()}
    features = {name: datasets.List(datasets.Value("int32")) for name in columns}
    texts = {"problem": problems, "privileged_context": contexts} if reason_first else {}
    examples |= {name: [values[index] for index in fits] for name, values in texts.items()}
    features |= {name: datasets.Value("string") for name in texts}
    features = datasets.Features({"example_id": datasets.Value("string"), **features})
    table = InMemoryTable.from_pydict(examples, schema=features.arrow_schema)
    # an explicit fingerprint: hashing the table pickles pyarrow types, which fails with some dill versions, for a cache nobody reads
    return datasets.Dataset(table, datasets.DatasetInfo(features=features), fingerprint="opsd"), counts


def load_rows(args: DataArgs, train_file: Path | None = None) -> tuple[list[SourceRow], dict]:
    """The rows that pass the filter and have what both prompts need, and the filter's counts."""
    columns = sorted({*FILTER_COLUMNS, args.privileged_column})
    path = train_file or args.train_file
    if path is not None:
        source, origin = iter_rows(Path(path), columns, field="train_file"), f"train_file={path}"
    else:
        source = iter_hub_rows(args.dataset_name, args.dataset_split, columns)
        origin = f"dataset_name={args.dataset_name}"
    rules = FilterRules(answer_pattern=args.answer_pattern, min_trace_tokens=args.min_trace_tokens)
    row_filter = RowFilter(rules, text_columns=("problem", args.privileged_column))
    kept = kept_rows(source, row_filter, on_bad_row=args.on_bad_row, origin=origin, limit=args.max_train_rows)
    rows = [SourceRow(row.number, {name: row.values[name] for name in row_filter.text_columns}) for row in kept]
    counts = row_filter.report()
    if not rows:
        fates = ", ".join(f"{name}={count}" for name, count in row_filter.dropped.items() if count)
        raise ValueError(
            f"{origin} has no row that passes answer_pattern={args.answer_pattern!r} and "
            f"min_trace_tokens={args.min_trace_tokens}: {row_filter.rows} read, dropped {fates}; loosen the rule"
        )
    return rows, counts


def wrong_references(contexts: list[str], seed: int) -> list[int]:
    """For every row the index of another row with another privileged context; deterministic, spread over the rows."""
    count = len(contexts)
    if len(set(contexts)) < 2:
        raise ValueError(
            f"{count} rows share one privileged context; a wrong reference needs at least two different ones"
        )
    shift = random.Random(seed).randrange(1, count)
    return [
        next(other for step in range(count) if contexts[other := (index + shift + step) % count] != contexts[index])
        for index in range(count)
    ]


def _token_arrays(tokenizer, messages: Iterator[list[dict]], **rendering) -> list[np.ndarray]:
    arrays = []
    while batch := list(itertools.islice(messages, TOKENISE_ROWS)):
        arrays += [np.asarray(ids, np.int32) for ids in prompts.render_ids_batch(tokenizer, batch, **rendering)]
    return arrays


def _hash(columns: dict[str, list[np.ndarray]], indices: list[int]) -> str:
    """SHA-256 of the examples' token ids in their order: what a resumed run has to train on."""
    digest = hashlib.sha256()
    for name, arrays in columns.items():
        digest.update(name.encode())
        for index in indices:
            digest.update(len(arrays[index]).to_bytes(8, "little") + arrays[index].astype("<i4").tobytes())
    return digest.hexdigest()


def _fitting(
    rows: list[SourceRow], columns: dict[str, list[np.ndarray]], limits: dict[str, tuple[str, int]], overlong: str
) -> tuple[list[int], dict]:
    """Indices of the rows whose every prompt is within its limit, and per column what exceeded it."""
    too_long: set[int] = set()
    counts = {}
    for name, arrays in columns.items():
        field, limit = limits[name]
        exceeding = [index for index, ids in enumerate(arrays) if len(ids) > limit]
        too_long.update(exceeding)
        first = [rows[index].number for index in exceeding[:NAMED_ROWS]]
        longest = max(map(len, arrays))
        counts[name] = {"limit": limit, "rows": len(exceeding), "first_rows": first, "longest": longest}
        if exceeding and overlong == "error":
            raise ValueError(
                f"{field}={limit} tokens is exceeded by {name} of {len(exceeding)} of {len(rows)} rows (rows "
                f"{', '.join(map(str, first))}; longest {longest}); raise {field}, or use overlong=drop"
            )
    return [index for index in range(len(rows)) if index not in too_long], counts
