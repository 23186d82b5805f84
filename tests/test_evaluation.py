"""Statistics of one evaluation against closed forms, published numbers and simulated truths."""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest
from evaluation_samples import make_problems, make_sample, make_samples, u_shaped_rates

from opsd import distributions
from opsd.evaluation import build_statistics, count_by_problem, describe, pass_at, score_with_errors
from opsd.majority import majority_at

REPO = Path(__file__).resolve().parents[1]


def samples_from_counts(counts, n):
    return [make_sample(str(i), j, j < c) for i, c in enumerate(counts) for j in range(n)]


def test_errors_are_the_closed_forms():
    counts, n = [12, 0, 6, 3], 12
    s = build_statistics(samples_from_counts(counts, n), make_problems(4), n)
    p = [c / n for c in counts]
    assert s["avg_at_k"] == pytest.approx(fmean(p))
    assert s["standard_error_same_problems"] == pytest.approx(math.sqrt(sum(q * (1 - q) / (n - 1) for q in p)) / 4)
    assert s["standard_error_new_problems"] == pytest.approx(stdev(p) / 2)
    assert s["interval_new_problems"][1] - s["avg_at_k"] == pytest.approx(3.182446 * stdev(p) / 2, rel=1e-6)
    assert s["interval_same_problems"][1] - s["avg_at_k"] == pytest.approx(
        1.959964 * s["standard_error_same_problems"], rel=1e-6
    )
    assert s["pooled_binomial_bound"] == pytest.approx(math.sqrt(fmean(p) * (1 - fmean(p)) / 48))
    assert s["sd_between_problems"] ** 2 == pytest.approx(stdev(p) ** 2 - fmean(q * (1 - q) / (n - 1) for q in p))


def test_pooled_bound_of_360_samples_at_54_percent_is_2_63_points():
    s = score_with_errors([(12, 7)] * 10 + [(12, 12)] * 10 + [(12, 0)] * 9 + [(12, 5)])
    assert s["pooled_binomial_bound"] > s["standard_error_same_problems"]
    assert 100 * math.sqrt(0.5422 * 0.4578 / 360) == pytest.approx(2.63, abs=0.005)


def test_equal_rates_reach_the_binomial_bound():
    s = score_with_errors([(1000, 500)] * 30)
    assert s["standard_error_same_problems"] == pytest.approx(s["pooled_binomial_bound"], rel=1e-3)
    assert s["standard_error_new_problems"] == 0 and s["sd_between_problems"] == 0


def test_same_problem_interval_covers_the_truth_and_errors_match_simulation():
    rates, n, runs = np.array(u_shaped_rates(30, 3)), 12, 3000
    drawn = np.random.default_rng(0).binomial(n, rates, (runs, 30))
    results = [score_with_errors([(n, int(c)) for c in row]) for row in drawn]
    covered = fmean(low <= rates.mean() <= high for low, high in (r["interval_same_problems"] for r in results))
    truth = math.sqrt((rates * (1 - rates)).sum() / n) / 30
    assert 0.93 < covered < 0.965
    assert math.sqrt(fmean(r["standard_error_same_problems"] ** 2 for r in results)) == pytest.approx(truth, rel=0.02)
    assert stdev([r["avg_at_k"] for r in results]) == pytest.approx(truth, rel=0.05)


def test_new_problem_error_matches_simulated_new_problems():
    generator = np.random.default_rng(1)
    rates = generator.beta(0.25, 0.22, (3000, 30))
    drawn = generator.binomial(12, rates)
    results = [score_with_errors([(12, int(c)) for c in row]) for row in drawn]
    covered = fmean(low <= 0.25 / 0.47 <= high for low, high in (r["interval_new_problems"] for r in results))
    assert math.sqrt(fmean(r["standard_error_new_problems"] ** 2 for r in results)) == pytest.approx(
        stdev([r["avg_at_k"] for r in results]), rel=0.05
    )
    assert 0.93 < covered < 0.97


def test_pass_at_is_the_average_over_subsets():
    for n, c, j in [(6, 2, 3), (5, 0, 2), (5, 5, 5), (7, 1, 7)]:
        outcomes = [True] * c + [False] * (n - c)
        subsets = list(itertools.combinations(outcomes, j))
        assert pass_at([(n, c)], j)[0] == pytest.approx(fmean(any(s) for s in subsets))
    assert pass_at([(4, 4), (12, 0)], 5) == (0, 1)
    assert pass_at([(4, 4)], 5) == (None, 0)


def test_majority_counts_unanswered_and_shares_ties():
    def group(*answers):
        return [
            make_sample(
                "0", i, a == "right", extracted=None if a is None else a, reason="no_box" if a is None else "int"
            )
            for i, a in enumerate(answers)
        ]

    assert majority_at([group("right", "right", "7")], 3) == 1
    assert majority_at([group("right", "7", "07")], 3) == 0  # "7" and "07" are one answer
    assert majority_at([group("right", None, None)], 3) == 0
    assert majority_at([group("right", "7")], 2) == 0.5
    assert majority_at([group("right", "7", "8")], 3) == pytest.approx(1 / 3)
    assert majority_at([group("right", "right", "7")], 2) == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert majority_at([group("right", "right", "7"), group("1")], 2) == pytest.approx(2 / 3)
    assert majority_at([group("1")], 2) is None


def test_majority_of_large_groups_is_sampled_reproducibly():
    group = [make_sample("0", i, i % 3 == 0, extracted=str(i % 3)) for i in range(24)]
    assert majority_at([group], 8) == majority_at([group], 8)
    assert 0.2 < majority_at([group], 8) < 0.5


def test_truncation_unanswered_and_bounds():
    cut = {"truncated": True, "extracted": None, "reason": "no_box"}
    samples = [
        make_sample("0", 0, True),
        make_sample("0", 1, False, **cut),
        make_sample("1", 0, False, **cut),
        make_sample("1", 1, False, **cut),
    ]
    s = build_statistics(samples, make_problems(2), 2)
    assert (s["avg_at_k"], s["truncation_rate"], s["no_box_rate"]) == (0.25, 0.75, 0.75)
    assert s["truncated_bounds"] == {
        "all_truncated_correct": 1.0,
        "truncated_left_out": 1.0,
        "truncated_left_out_problems": 1,
    }
    assert s["reasons"] == {"int": 1, "no_box": 3}
    assert count_by_problem(samples, make_problems(2))[1] == {
        "id": "1", "answer": "1", "n": 2, "correct": 0, "truncated": 2, "no_box": 2, "mean_tokens": 100,
    }  # fmt: skip


def test_partial_runs_average_problems_first_and_say_so():
    samples = [make_sample("0", j, True) for j in range(10)] + [make_sample("1", j, False) for j in range(2)]
    s = build_statistics(samples, make_problems(3), 10)
    assert s["avg_at_k"] == 0.5
    assert (s["samples"], s["expected_samples"], s["complete"], s["n_min"], s["problems_with_samples"]) == (
        12,
        30,
        False,
        0,
        2,
    )
    assert s["pass_at_k_problems"] == {"1": 2, "2": 2} | {str(j): 1 for j in range(3, 11)}
    assert "12/30 samples (partial: n=0..10)" in describe(s)


def test_single_samples_have_no_same_problem_error():
    s = build_statistics([make_sample("0", 0, True), make_sample("1", 0, False)], make_problems(2), 1)
    assert s["standard_error_same_problems"] is None and s["interval_same_problems"] is None
    assert s["standard_error_new_problems"] == pytest.approx(0.5)


def test_uniform_outcomes_get_exact_bounds_instead_of_zero_width():
    s = build_statistics(samples_from_counts([0] * 10, 4), make_problems(10), 4)
    assert (1 - s["interval_same_problems"][1]) ** 40 == pytest.approx(0.05) and s["interval_same_problems"][0] == 0
    assert (1 - s["interval_new_problems"][1]) ** 10 == pytest.approx(0.05)
    assert "0.0 % (95 %: 0 to 7 on the same 10 problems, 0 to 26 on new problems)" in describe(s)
    s = build_statistics(samples_from_counts([4] * 10, 4), make_problems(10), 4)
    assert s["interval_same_problems"] == pytest.approx([0.05 ** (1 / 40), 1.0])


def test_bad_samples_are_refused():
    one = make_sample("0", 0, True)
    for samples, problems, k, message in [
        ([one, one], make_problems(1), 1, "occurs twice"),
        ([make_sample("9", 0, True)], make_problems(1), 1, "not in the benchmark"),
        ([], make_problems(1), 1, "no finished sample"),
        ([one], make_problems(1) * 2, 1, "unique"),
        ([one], make_problems(1), 0, "k=0"),
    ]:
        with pytest.raises(ValueError, match=message):
            build_statistics(samples, problems, k)


def test_repeated_completions_are_counted():
    samples = [make_sample("0", j, True, text="same") for j in range(4)]
    assert build_statistics(samples, make_problems(1), 4)["repeated_completions"] == 3


def test_headline_names_both_errors():
    text = describe(build_statistics(make_samples(u_shaped_rates(30, 0), 12, 0), make_problems(30), 12), "AIME24")
    for part in (
        "AIME24 avg@12 = ",
        "(SE, same 30 problems)",
        "(SE, new problems)",
        "pass@6",
        "maj@12",
        "360/360 samples",
        "truncated",
        "no box",
    ):
        assert part in text


def test_distributions_agree_with_tables():
    assert distributions.t_quantile(0.975, 29) == pytest.approx(2.0452296, abs=1e-6)
    assert distributions.t_quantile(0.975, 4) == pytest.approx(2.7764451, abs=1e-6)
    assert distributions.t_quantile(0.025, 1) == pytest.approx(-12.7062047, abs=1e-5)
    assert distributions.chi_square_quantile(0.975, 4) == pytest.approx(11.1432868, abs=1e-6)
    assert distributions.chi_square_quantile(0.025, 4) == pytest.approx(0.4844186, abs=1e-6)
    assert distributions.chi_square_cdf(124.342, 100) == pytest.approx(0.95, abs=1e-5)
    assert distributions.t_two_sided(0.0, 5) == pytest.approx(1)
    assert distributions.normal_two_sided(1.959963985) == pytest.approx(0.05)
    with pytest.raises(ValueError, match="between 0 and 1"):
        distributions.t_quantile(1.0, 5)


def test_imports_without_torch():
    code = "import sys, opsd.evaluation, opsd.comparison; print(*[m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
