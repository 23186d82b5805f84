"""`data_filter.py` from the command line, and the filter rules it shares with training."""

import hashlib
import json
import pathlib
import subprocess
import sys
from collections import Counter

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import data_filter
from opsd import rows as rows_module
from opsd.filters import FilterRules, answer_text, compile_answer_pattern, problem_id, read_pass_rates, trace_tokens
from opsd.overlap import BenchmarkIndex, leaks_solution, normalised_words
from opsd.reweight import answer_kind, draw, kind_weights
from opsd.row_filter import RowFilter, kept_rows
from opsd.rows import SourceRow, encode_line, iter_rows, open_atomic

ROOT = pathlib.Path(data_filter.__file__).parent
SAMPLES = ROOT.parent / "shared" / "data"
needs_samples = pytest.mark.skipif(not SAMPLES.is_dir(), reason=f"no sample rows in {SAMPLES}")
ALL = ("--answer_pattern", "", "--min_trace_tokens", "0")


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


def write_lines(path: pathlib.Path, rows: list[dict]) -> pathlib.Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def run_filter(tmp_path: pathlib.Path, source: pathlib.Path, *flags: str) -> tuple[list[dict], dict]:
    output, report = tmp_path / "kept.jsonl", tmp_path / "counts.json"
    data_filter.main(["--input", str(source), "--output", str(output), "--report", str(report), *flags])
    return [json.loads(line) for line in output.read_bytes().splitlines()], json.loads(report.read_text())


def dropped(report: dict) -> dict[str, int]:
    return {rule["rule"]: rule["dropped"] for rule in report["rules"]}


def fates(rules: FilterRules, rows: list[dict], **options) -> RowFilter:
    row_filter = RowFilter(rules, **options)
    list(kept_rows([SourceRow(n, row) for n, row in enumerate(rows, 1)], row_filter, on_bad_row="drop", origin="rows"))
    return row_filter


@pytest.mark.parametrize("answer", ["0", "-7", "999999", " 42 ", "$42$", "$ 42 $\n", "007", "\t$-1$"])
def test_short_integers_match(answer):
    assert fates(FilterRules(answer_pattern=r"-?\d{1,6}"), [make_row(Answer=answer)]).kept == 1


@pytest.mark.parametrize(
    "answer", ["1000000", "1.5", "- 7", "1,000", "4 2", "٤٢", "４２", "\\frac{1}{2}", "x=3", "3\n4", "+5", "−7", "12$3"]
)
def test_other_answers_do_not_match(answer):
    counts = fates(FilterRules(answer_pattern=r"-?\d{1,6}"), [make_row(Answer=answer), make_row()]).dropped
    assert counts == {"bad_row": 0, "answer_missing": 0, "answer_pattern": 1}


@pytest.mark.parametrize("answer", [None, "", "  ", "$", True, 1.0, ["3"]])
def test_missing_answers_are_counted_apart(answer):
    counts = fates(FilterRules(answer_pattern=r"-?\d{1,6}"), [make_row(Answer=answer), make_row()]).dropped
    assert counts == {"bad_row": 0, "answer_missing": 1, "answer_pattern": 0}


def test_integer_answer_column_is_read_as_text():
    assert answer_text(-42) == "-42"


@pytest.mark.parametrize(
    ("value", "tokens"),
    [(2000, 2000), (2000.0, 2000), ("2000", 2000), (0, 0), (None, None), (True, None), (float("nan"), None)]
    + [(float("inf"), None), (12.5, None), ("many", None), ("-3", None), ([], None)],
)
def test_trace_tokens_reads_whole_numbers_only(value, tokens):
    assert trace_tokens(value) == tokens


def test_trace_limits_include_their_ends_and_missing_is_not_zero():
    rows = [make_row(n, generated_token_count=n) for n in (1999, 2000, 3000, 3001)]
    rows += [make_row(generated_token_count=None), {"problem": "P", "Answer": "1"}]
    row_filter = fates(FilterRules(min_trace_tokens=2000, max_trace_tokens=3000), rows)
    assert row_filter.dropped == {
        "bad_row": 0,
        "trace_tokens_missing": 2,
        "min_trace_tokens": 1,
        "max_trace_tokens": 1,
    }
    assert row_filter.first_rows["trace_tokens_missing"] == [5, 6]
    only_upper = fates(FilterRules(max_trace_tokens=3000), rows)
    assert only_upper.kept == 3 and only_upper.dropped["trace_tokens_missing"] == 2


def test_missing_counts_are_recomputed_when_asked():
    rows = [
        make_row(generated_token_count=None, COT_Reason="a b c"),
        make_row(generated_token_count=None, COT_Reason=None),
    ]
    rows += [make_row(generated_token_count=1, COT_Reason="a b c d")]
    row_filter = fates(FilterRules(min_trace_tokens=3), rows, count_tokens=lambda text: len(text.split()))
    assert (row_filter.kept, row_filter.recomputed) == (1, 1)
    assert row_filter.dropped == {"bad_row": 0, "trace_tokens_missing": 1, "min_trace_tokens": 1}


@given(st.text(), st.text(alphabet="0123456789-$ \n", max_size=9))
@settings(max_examples=100, deadline=None)
def test_pattern_needs_the_whole_answer(free, digits):
    pattern = compile_answer_pattern(r"-?\d{1,6}")
    for answer in (free, digits):
        text = answer_text(answer)
        if text is not None and pattern.fullmatch(text):
            assert (
                text.isascii() and len(text) <= 7 and text == str(answer).strip("$ \t\r\n\v\f") and -999999 <= int(text)
            )


LEAK_SOLUTION = (
    "Let us restate: find the sum of all divisors of six. They are 1, 2, 3 and 6, which add up to \\boxed{12}."
)


@pytest.mark.parametrize(
    "problem",
    [
        "Find the sum of all divisors of six. $\\boxed{12}$",
        "Find the sum. They are 1, 2, 3 and 6, which add up to $\\boxed{12}$ in all.",
        "Find the sum. They are $1,2,3$ and $6$, which add up to 12.",
        "Find the sum of all divisors of six.\n\n**Solution.** The divisors of six are one, two, three, six: so 12.",
        "Find it.\nSolution:\nBy listing the divisors of six and adding them we see that it is 12",
    ],
)
def test_leaked_solutions_are_found(problem):
    assert leaks_solution(problem, LEAK_SOLUTION, "12")


@pytest.mark.parametrize(
    "problem",
    [
        "Let us restate: find the sum of all divisors of six.",
        "Find the sum of all divisors of six. Put the answer in \\boxed{}.",
        "Fill in the blank: $6 + \\boxed{a} = 12$.",
        "Find the solution: all pairs with sum 12.",
        "Solution A has 12 grams of salt. Which solution of the two has more salt in one litre of water?",
        "They are 1, 2, 3 and 6, which add up to what?",
    ],
)
def test_clean_problems_do_not_leak(problem):
    assert not leaks_solution(problem, LEAK_SOLUTION, "12")


def test_restating_the_question_around_the_answer_is_no_leak():
    solution = "Counting shows that exactly 202 of the integers f of 1 up to f of 2014 have a units digit of one here."
    problem = "Determine how many of the integers f of 1 up to f of 2014 have a units digit of one here."
    assert not leaks_solution(problem, solution, "202")


@needs_samples
@pytest.mark.parametrize("name", ["olympiad_rows_300.jsonl", "gsm8k_train_1000.jsonl"])
def test_real_rows_without_leaks_are_all_kept(name):
    row_filter = RowFilter(FilterRules(drop_leaked=True))
    list(kept_rows(iter_rows(SAMPLES / name), row_filter, on_bad_row="error", origin=name))
    assert row_filter.dropped["leaked_solution"] == 0 and row_filter.kept == row_filter.rows


def test_normalised_words_ignore_layout_only():
    words = ["find", "frac", "1", "2", "cdot", "x", "if", "x", ">", "2"]
    assert normalised_words("Find $\\left( \\dfrac{1}{2} \\right) \\cdot x$,  if X>2.") == words
    assert normalised_words("find (\\frac{1}2)\\cdot\\, x if x > \\boxed{2}") == words
    assert normalised_words("x+y") != normalised_words("x-y")


BENCHMARK = (
    "Aya walks nine kilometers every morning and stops at a coffee shop for t minutes before she goes home again."
)


@pytest.mark.parametrize(
    ("text", "identical"),
    [
        (BENCHMARK.upper().replace(" ", "\n "), True),
        ("A question from a contest. " + BENCHMARK + " How long?", False),
        (BENCHMARK.replace("t minutes", "five minutes"), False),
    ],
)
def test_copies_of_the_benchmark_are_found(text, identical):
    overlap = BenchmarkIndex({"7": BENCHMARK, "8": "Another problem of at least eight words stands here."}, 0.3).lookup(
        text
    )
    assert (overlap.benchmark_id, overlap.identical) == ("7", identical) and overlap.share >= 0.3


def test_benchmark_threshold_is_a_share_of_the_benchmark_problem():
    words = [f"w{'x' * n}" for n in range(27)]  # 20 runs of 8 words
    index = BenchmarkIndex({"b": " ".join(words)}, 0.5)
    assert index.lookup(" ".join(words[:17])).share == 0.5
    assert index.lookup(" ".join(words[:16])) is None
    assert index.lookup("short text") is None
    with pytest.raises(ValueError, match="benchmark_overlap=0"):
        BenchmarkIndex({}, 0)


@needs_samples
def test_the_benchmark_itself_is_dropped_whole(tmp_path):
    problems = [json.loads(line) for line in (SAMPLES / "aime24.jsonl").read_text().splitlines()]
    source = write_lines(tmp_path / "rows.jsonl", [make_row(), *problems])
    rows, report = run_filter(tmp_path, source, *ALL, "--benchmark", str(SAMPLES / "aime24.jsonl"))
    assert rows == [make_row()] and dropped(report)["benchmark_overlap"] == 30
    assert [found["benchmark_id"] for found in report["benchmark_overlaps"]] == [row["id"] for row in problems]
    assert all(found["identical"] and found["share"] == 1.0 for found in report["benchmark_overlaps"])


def test_duplicates_keep_the_first_row_that_passes_the_other_rules():
    rows = [
        make_row(generated_token_count=5),
        make_row(),
        make_row(problem="find the VALUE number 0  of the sum"),
        make_row(1),
    ]
    row_filter = fates(FilterRules(min_trace_tokens=10, drop_duplicates=True), rows)
    assert row_filter.first_rows == {"min_trace_tokens": [1], "duplicate": [3]} and row_filter.kept == 2


def test_sources_are_a_whitelist():
    rows = [make_row(source="amc_aime"), make_row(source="math"), make_row(source=None), make_row(source=["amc_aime"])]
    assert fates(FilterRules(sources=("amc_aime",)), rows).dropped == {"bad_row": 0, "source": 3}


def test_pass_rates_of_an_evaluation_select_by_difficulty(tmp_path):
    rows = [make_row(n) for n in range(4)] + [make_row(9, id="own")]
    samples = []
    for correct, row in zip((0, 1, 4, 2), (rows[0], rows[1], rows[2], rows[4]), strict=True):
        samples += [{"problem_id": problem_id(row), "correct": k < correct} for k in range(4)]
    path = write_lines(tmp_path / "samples.jsonl", samples)
    assert read_pass_rates(path)["own"] == 0.5
    source = write_lines(tmp_path / "rows.jsonl", rows)
    flags = ("--pass_rates", str(path), "--min_pass_rate", "0.25", "--max_pass_rate", "0.75")
    kept, report = run_filter(tmp_path, source, *ALL, *flags)
    assert kept == [rows[1], rows[4]]
    assert dropped(report) == {"bad_row": 0, "pass_rate_missing": 1, "pass_rate": 2}


def test_bad_samples_are_named(tmp_path):
    path = write_lines(tmp_path / "samples.jsonl", [{"problem_id": "1", "correct": "yes"}])
    with pytest.raises(ValueError, match="correct='yes'"):
        read_pass_rates(path)
    path = write_lines(tmp_path / "samples.jsonl", [{"correct": True}])
    with pytest.raises(ValueError, match="row 1 has no problem_id"):
        read_pass_rates(path)


@needs_samples
def test_olympiad_rows_with_short_integers(tmp_path):
    source = SAMPLES / "olympiad_rows_300.jsonl"
    rows, report = run_filter(tmp_path, source, "--min_trace_tokens", "0")
    assert (report["rows"], report["kept"], len(rows), dropped(report)["answer_pattern"]) == (300, 154, 154, 146)
    kept_lines = (tmp_path / "kept.jsonl").read_bytes().splitlines(keepends=True)
    wanted = iter(source.read_bytes().splitlines(keepends=True))
    assert all(line in wanted for line in kept_lines)  # `in` consumes the iterator: same bytes, same order
    assert report["output_sha256"] == hashlib.sha256((tmp_path / "kept.jsonl").read_bytes()).hexdigest()


@needs_samples
def test_rows_without_token_counts_are_counted_and_named(tmp_path):
    rows, report = run_filter(tmp_path, SAMPLES / "gsm8k_train_1000.jsonl")
    assert rows == [] and report["kept"] == 0
    assert dropped(report) == {
        **{"bad_row": 0, "answer_missing": 0, "answer_pattern": 2, "trace_tokens_missing": 998, "min_trace_tokens": 0}
    }
    assert report["rules"][3]["first_rows"] == [1, 2, 3, 4, 5]


def test_lines_stay_verbatim_whatever_their_spelling(tmp_path):
    lines = [
        b'{"Answer":"1" ,  "problem": "caf\\u00e9", "z": 1e3}\n',
        b'{"problem": "caf\xc3\xa9", "Answer": "22"}\r\n',
        b"\n",
        b'{"Answer": "x", "problem": "dropped"}\n',
        b'{"Answer": "3", "Answer": "4", "problem": "twice"}',
    ]
    source = tmp_path / "rows.jsonl"
    source.write_bytes(b"".join(lines))
    run_filter(tmp_path, source, "--min_trace_tokens", "0")
    assert (tmp_path / "kept.jsonl").read_bytes() == lines[0] + lines[1] + lines[4] + b"\n"


@given(
    st.lists(st.tuples(st.sampled_from(["7", "x", "", None]), st.sampled_from([None, 1, 5])), min_size=1, max_size=12)
)
@settings(max_examples=40, deadline=None)
def test_counts_add_up_and_order_is_kept(cases):
    rows = [make_row(n, Answer=answer, generated_token_count=tokens) for n, (answer, tokens) in enumerate(cases)]
    row_filter = RowFilter(FilterRules(answer_pattern=r"\d", min_trace_tokens=3))
    source = [SourceRow(n, row) for n, row in enumerate(rows, 1)]
    kept = [row.number for row in kept_rows(source, row_filter, on_bad_row="error", origin="rows")]
    assert kept == [n for n, (answer, tokens) in enumerate(cases, 1) if answer == "7" and tokens == 5]
    report = row_filter.report()
    assert report["rows"] == len(rows) == report["kept"] + sum(dropped(report).values())
    assert report["rules"][-1]["remaining"] == report["kept"] == len(kept)


@pytest.mark.parametrize("kind", ["json", "json_lines", "parquet", "dataset"])
def test_other_formats_give_the_same_rows(tmp_path, kind):
    rows = [make_row(n) for n in range(600)]
    source = tmp_path / f"rows.{'json' if kind == 'json_lines' else kind}"
    if kind == "json":
        source.write_text(json.dumps(rows))
    elif kind == "json_lines":
        write_lines(source, rows)
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(str(source))
    kept, report = run_filter(tmp_path, source, "--answer_pattern", r"\d{1,2}")
    assert kept == rows[:100] and report["rules"][2]["first_rows"] == [101, 102, 103, 104, 105]


def test_two_runs_write_the_same_bytes(tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", [make_row(n) for n in range(50)])
    target = write_lines(tmp_path / "target.jsonl", [{"id": "1", "problem": "P", "answer": "7"}, {"answer": "12"}])
    flags = ("--target_answers", str(target), "--sample", "9", "--seed", "3", "--plot", str(tmp_path / "lengths.png"))
    first = run_filter(tmp_path, source, *flags)
    files = [path.read_bytes() for path in sorted(tmp_path.iterdir())]
    assert run_filter(tmp_path, source, *flags) == first
    assert [path.read_bytes() for path in sorted(tmp_path.iterdir())] == files
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_plot_works_without_any_token_count(tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", [make_row(generated_token_count=None)])
    run_filter(tmp_path, source, *ALL, "--plot", str(tmp_path / "lengths.png"))
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_weights_give_the_target_distribution(tmp_path):
    rows = [make_row(n) for n in range(200)]  # 10 one-digit, 90 two-digit, 100 three-digit answers
    source = write_lines(tmp_path / "rows.jsonl", rows)
    target = write_lines(tmp_path / "target.jsonl", [{"answer": a} for a in ("5", "025", "104", "204")])
    weights = tmp_path / "weights.jsonl"
    kept, report = run_filter(tmp_path, source, "--target_answers", str(target), "--weights", str(weights))
    assert kept == rows
    records = [json.loads(line) for line in weights.read_text().splitlines()]
    assert [record["row"] for record in records] == list(range(1, 201))
    share = Counter()
    for record in records:
        share[record["kind"]] += record["weight"] / len(records)
    assert share == pytest.approx({"d": 0.25, "dd": 0.25, "ddd": 0.5})
    assert report["weights"]["target"] == {"d": 1, "dd": 1, "ddd": 2}


def test_kinds_without_rows_leave_the_mean_weight_at_one():
    weights = kind_weights(Counter(d=3, other=1), Counter(d=1, ddd=1))
    assert weights == {"d": pytest.approx(4 / 3), "other": 0.0}
    with pytest.raises(ValueError, match="target_answers: none of its kinds"):
        kind_weights(Counter(other=1), Counter(d=1))


@pytest.mark.parametrize(
    ("answer", "kind"), [("025", "dd"), ("0", "d"), ("-12", "-dd"), ("x", "other"), (None, "other"), ("1.0", "other")]
)
def test_answer_kinds(answer, kind):
    assert answer_kind(answer) == kind


def test_draw_is_seeded_ordered_and_follows_the_weights():
    weights = [0.0, 1.0, 1.0, 8.0]
    counts = Counter(index for seed in range(2000) for index in draw(weights, 1, seed))
    assert counts[0] == 0 and counts[3] == pytest.approx(1600, abs=60)  # sd 18
    assert draw(weights, 3, 0) == [1, 2, 3] and draw([1.0] * 50, 9, 5) == draw([1.0] * 50, 9, 5)
    assert draw([1.0] * 50, 9, 5) != draw([1.0] * 50, 9, 6)
    with pytest.raises(ValueError, match="sample=4 must be from 1 to 3"):
        draw(weights, 4, 0)


def test_sample_also_draws_the_benchmark_rows(tmp_path):
    rows = [make_row(n) for n in range(30)]
    source = write_lines(tmp_path / "rows.jsonl", rows)
    path = tmp_path / "bench.jsonl"
    kept, report = run_filter(tmp_path, source, "--sample", "4", "--benchmark_output", str(path))
    problems = [json.loads(line) for line in path.read_text().splitlines()]
    assert problems == [{"id": problem_id(r), "problem": r["problem"], "answer": r["Answer"]} for r in kept]
    assert len(kept) == report["written"] == 4 and [r for r in rows if r in kept] == kept


BAD_LINES = [
    (b'{"Answer": "1", "problem": "a\0b"}\n', "row 2: a NUL byte in the line"),
    (b'\0\0\0\0{"Answer": "1"}\n', "row 2: a NUL byte in the line"),
    (b'{"Answer": "\xff"}\n', r"row 2: not UTF-8 \(byte 12\)"),
    (b'["Answer"]\n', "row 2: a JSON list, not an object"),
    (b'{"Answer": "1", "problem', "row 2: not JSON .* the file ends inside this line"),
    (b'{"Answer": 1' + b"0" * 5000 + b"}\n", "row 2: not usable JSON"),
    (b'{"Answer": ' + b"[" * 100_000 + b"}\n", "row 2: not usable JSON"),
    (b'{"problem": "P"}\n', r"row 2: no column 'Answer' \(its columns: problem\)"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_bad_lines_stop_the_filter_or_are_counted(tmp_path, line, message):
    source = tmp_path / "rows.jsonl"
    source.write_bytes(json.dumps(make_row(1)).encode() + b"\n" + line)
    with pytest.raises(ValueError, match=message) as caught:
        run_filter(tmp_path, source)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]  # no output, no temporary file
    rows, report = run_filter(tmp_path, source, "--on_bad_row", "drop")
    assert rows == [make_row(1)] and dropped(report)["bad_row"] == 1 and report["bad_rows"][0]["row"] == 2


def test_a_huge_line_is_skipped_without_being_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "MAX_LINE_BYTES", 100)
    source = tmp_path / "rows.jsonl"
    source.write_bytes(b'{"a": 1}\n{"a": "' + b"x" * 1000 + b'"}\n{"a": 3}\n' + b"y" * 250)
    read = list(iter_rows(source))
    assert [(row.number, row.values, row.defect) for row in read] == [
        (1, {"a": 1}, None),
        (2, None, "longer than 100 bytes"),
        (3, {"a": 3}, None),
        (4, None, "longer than 100 bytes"),
    ]


def test_a_byte_order_mark_is_not_part_of_the_first_row(tmp_path):
    source = tmp_path / "rows.jsonl"
    source.write_bytes(b'\xef\xbb\xbf{"a": 1}\n')
    (row,) = iter_rows(source)
    assert row.values == {"a": 1} and encode_line(row) == source.read_bytes()


def test_many_bad_rows_are_summed_up_in_one_message():
    rows = [SourceRow(n, {"problem": "P"}) for n in range(1, 10)]
    with pytest.raises(ValueError, match=r"among the first 5: row 1, 2, 3, 4, 5: no column 'Answer'"):
        list(kept_rows(rows, RowFilter(FilterRules(answer_pattern="1")), on_bad_row="error", origin="rows"))
    with pytest.raises(ValueError, match="every row is bad"):
        list(kept_rows(rows, RowFilter(FilterRules(answer_pattern="1")), on_bad_row="drop", origin="rows"))


BAD_COMMANDS = [
    (["--input", "absent.jsonl"], "input=absent.jsonl does not exist"),
    (["--input", "folder"], "input=folder is a folder but no saved dataset"),
    (["--input", "rows.csv"], "input=rows.csv must end in .jsonl, .json or .parquet"),
    (["--input", "broken.parquet"], "input=broken.parquet is not readable as parquet"),
    (["--input", "broken.json"], "input=broken.json is not a JSON array"),
    (["--input", "empty.jsonl"], "input=empty.jsonl holds no rows"),
    (["--output", "rows.jsonl"], "output=rows.jsonl must be another file than the input"),
    (["--output", "kept.parquet"], "output=kept.parquet must be another file than the input and end in .jsonl"),
    (["--answer_pattern", "("], "answer_pattern='\\(' is not a regular expression"),
    (["--min_trace_tokens", "-1"], "min_trace_tokens=-1 must be >= 0 tokens"),
    (["--max_trace_tokens", "100"], "max_trace_tokens=100 must be > 0 and >= min_trace_tokens=2000"),
    (["--min_pass_rate", "0.5"], "min_pass_rate=0.5 needs --pass_rates"),
    (["--benchmark_overlap", "0.5"], "benchmark_overlap=0.5 needs --benchmark"),
    (["--seed", "1"], "seed=1 needs --sample"),
    (["--target_answers", "rows.jsonl"], "target_answers needs --weights"),
    (["--recompute_tokens", "here", "--min_trace_tokens", "0"], "recompute_tokens=here needs"),
    (["--recompute_tokens", "folder"], "recompute_tokens=folder is no tokenizer"),
    (["--sample", "0"], "sample=0 must be from 1 to 1"),
    (["--sample", "2"], "sample=2 must be from 1 to 1"),
    (["--plot", "lengths.txt"], "plot=lengths.txt must end in .png"),
    (["--benchmark", "rows.jsonl"], "rows.jsonl: row 1 has no id"),
    (["--sauces", "math"], "unrecognized arguments: --sauces math"),
    (["--min_trace", "5"], "unrecognized arguments: --min_trace 5"),
]


@pytest.mark.parametrize(("flags", "message"), BAD_COMMANDS)
def test_bad_input_is_named(tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "rows.jsonl", [make_row(1)])
    (tmp_path / "folder").mkdir()
    for name in ("rows.csv", "broken.parquet", "broken.json"):
        (tmp_path / name).write_text("[broken")
    (tmp_path / "empty.jsonl").write_text("\n")
    before = sorted(tmp_path.iterdir())
    defaults = {"--input": "rows.jsonl", "--output": "kept.jsonl", "--report": "counts.json"}
    given = [part for name, value in defaults.items() if name not in flags for part in (name, value)]
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        data_filter.main([*given, *flags])
    assert sorted(tmp_path.iterdir()) == before


def test_command_line_prints_the_table_or_one_line(tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", [make_row(1), make_row(2, Answer="x")])
    command = [sys.executable, str(ROOT / "data_filter.py"), "--report", str(tmp_path / "counts.json")]
    command += ["--output", str(tmp_path / "kept.jsonl"), "--input"]
    good = subprocess.run([*command, str(source)], capture_output=True, text=True, cwd=tmp_path)
    assert (good.returncode, good.stderr) == (0, "")
    assert good.stdout.splitlines() == [
        "rule                  dropped  remaining  first rows",
        "(rows read)                            2",
        "bad_row                     0          2",
        "answer_missing              0          2",
        "answer_pattern              1          1  2",
        "trace_tokens_missing        0          1",
        "min_trace_tokens            0          1",
        "(rows kept)                            1",
    ]
    bad = subprocess.run([*command, "absent.jsonl"], capture_output=True, text=True, cwd=tmp_path)
    assert bad.returncode == 2 and bad.stdout == ""
    assert bad.stderr.startswith("error: input=absent.jsonl does not exist") and bad.stderr.count("\n") == 1


def test_recompute_tokens_uses_the_named_tokenizer(tmp_path):
    core = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]").save_pretrained(tmp_path / "tokenizer")
    rows = [make_row(n, generated_token_count=None, COT_Reason=" ".join(["word"] * n)) for n in (2, 3, 4)]
    source = write_lines(tmp_path / "rows.jsonl", rows)
    kept, report = run_filter(
        tmp_path, source, "--min_trace_tokens", "3", "--recompute_tokens", str(tmp_path / "tokenizer")
    )
    assert kept == rows[1:] and report["recomputed_token_counts"] == 3


def test_atomic_file_appears_only_when_complete(tmp_path):
    path = tmp_path / "new" / "out.bin"
    with pytest.raises(RuntimeError), open_atomic(path) as handle:
        handle.write(b"half")
        raise RuntimeError
    assert list(path.parent.iterdir()) == []
    with open_atomic(path) as handle:
        handle.write(b"whole")
        assert not path.exists()
    assert path.read_bytes() == b"whole"
