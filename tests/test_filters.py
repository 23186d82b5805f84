"""The filter rules as functions and `RowFilter`, leaks and copies, weights and draws."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_rows import SAMPLES, dropped, make_row, needs_samples, write_lines

from opsd.filters import FilterRules, answer_text, compile_answer_pattern, read_pass_rates, trace_tokens
from opsd.overlap import BenchmarkIndex, leaks_solution, normalised_words
from opsd.reweight import answer_kind, draw, kind_weights
from opsd.row_filter import RowFilter, kept_rows
from opsd.rows import SourceRow, iter_rows


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


def test_bad_samples_are_named(tmp_path):
    path = write_lines(tmp_path / "samples.jsonl", [{"problem_id": "1", "correct": "yes"}])
    with pytest.raises(ValueError, match="correct='yes'"):
        read_pass_rates(path)
    path = write_lines(tmp_path / "samples.jsonl", [{"correct": True}])
    with pytest.raises(ValueError, match="row 1 has problem_id=None"):
        read_pass_rates(path)


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


def test_many_bad_rows_are_summed_up_in_one_message():
    rows = [SourceRow(n, {"problem": "P"}) for n in range(1, 10)]
    with pytest.raises(ValueError, match=r"among the first 5: row 1, 2, 3, 4, 5: no column 'Answer'"):
        list(kept_rows(rows, RowFilter(FilterRules(answer_pattern="1")), on_bad_row="error", origin="rows"))
    with pytest.raises(ValueError, match="every row is bad"):
        list(kept_rows(rows, RowFilter(FilterRules(answer_pattern="1")), on_bad_row="drop", origin="rows"))
