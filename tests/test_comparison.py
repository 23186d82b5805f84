"""Comparison against closed forms, exact enumerations, simulated false-alarm rates and the reported numbers of the seed project."""

import itertools
import math
import random
from statistics import fmean, stdev

import numpy as np
import pytest
from evaluation_samples import REGIME, make_result, make_samples, u_shaped_rates

from opsd import paired_tests as tests
from opsd.comparison import compare
from opsd.comparison_text import format_comparison, format_published, printable
from opsd.published import PublishedScore, compare_published, parse_published, published_from_runs


def one_result(name, rates, seed, n=12, **changes):
    return make_result(name, make_samples(rates, n, seed), len(rates), n, run_seed=seed, **changes)


@pytest.fixture(scope="module")
def rates():
    return u_shaped_rates(30, 7)


def test_stratified_test_is_the_textbook_formula():
    a, b = [(12, 3), (12, 12), (10, 5)], [(12, 6), (12, 12), (14, 10)]
    surplus = (6 - 12 * 9 / 24) + (10 - 14 * 15 / 24)
    variance = 12 * 12 * 9 * 15 / (24**2 * 23) + 10 * 14 * 15 * 9 / (24**2 * 23)
    z, p = tests.stratified_test(a, b)
    assert z == pytest.approx(surplus / math.sqrt(variance))
    assert p == pytest.approx(math.erfc(abs(z) / math.sqrt(2)))
    assert tests.stratified_test(b, a)[0] == pytest.approx(-z)
    assert tests.stratified_test([(12, 12), (12, 0)], [(12, 12), (12, 0)]) == (0.0, 1.0)


def test_false_alarm_rates(rates):
    """Stratified about 5 %, naive two-proportion test near 0: between-problem variance is not noise on fixed problems."""
    generator = np.random.default_rng(0)
    pairs = generator.binomial(12, np.array(rates), (4000, 2, 30))
    stratified = naive = 0
    for a, b in pairs.tolist():
        z, p = tests.stratified_test([(12, c) for c in a], [(12, c) for c in b])
        stratified += p < 0.05
        pooled = (sum(a) + sum(b)) / 720
        naive += abs(sum(b) - sum(a)) / 360 / math.sqrt(pooled * (1 - pooled) * 2 / 360) > 1.96
    assert 0.038 < stratified / 4000 < 0.062
    assert naive / 4000 < 0.005


def test_power_and_paired_t_false_alarms(rates):
    generator = np.random.default_rng(1)
    better = np.clip(np.array(rates) + 0.06, 0, 1)
    found = false = 0
    for a, b, c in zip(*(generator.binomial(12, r, (1000, 30)).tolist() for r in (rates, rates, better)), strict=True):
        a, b, c = ([(12, x) for x in counts] for counts in (a, b, c))
        found += tests.stratified_test(a, c)[1] < 0.05
        d = np.array(tests.rates(b)) - np.array(tests.rates(a))
        t = d.mean() / (d.std(ddof=1) / math.sqrt(30))
        false += abs(t) > 2.0452
    assert found / 1000 > 0.5
    assert 0.03 < false / 1000 < 0.07


def test_same_problem_difference_is_unpaired_and_bootstrap_agrees(rates):
    a, b = ([(12, int(c)) for c in np.random.default_rng(s).binomial(12, rates)] for s in (0, 1))
    result = tests.difference_same_problems(a, b, seed=0)
    expected = math.sqrt(sum(c / n * (1 - c / n) / (n - 1) for n, c in [*a, *b])) / 30
    assert result["standard_error"] == pytest.approx(expected)
    assert np.diff(result["bootstrap_interval"]) == pytest.approx(np.diff(result["interval"]), rel=0.02)
    assert np.mean(result["bootstrap_interval"]) == pytest.approx(np.mean(result["interval"]), abs=0.001)


def test_new_problem_difference_is_paired(rates):
    a, b = ([(12, int(c)) for c in np.random.default_rng(s).binomial(12, rates)] for s in (2, 3))
    d = [cb / 12 - ca / 12 for (_, ca), (_, cb) in zip(a, b, strict=True)]
    result = tests.difference_new_problems(a, b, seed=0)
    assert result["standard_error"] == pytest.approx(stdev(d) / math.sqrt(30))
    assert result["interval"][1] == pytest.approx(fmean(d) + 2.0452296 * stdev(d) / math.sqrt(30), rel=1e-6)
    assert result["bootstrap_interval"][0] == pytest.approx(result["interval"][0], abs=0.006)
    few = tests.difference_new_problems([(100, 50)] * 10, [(100, 50 + 3 * i) for i in range(-5, 5)], seed=0)
    assert np.diff(few["bootstrap_interval"]) == pytest.approx(2 * 1.96 * few["standard_error"], rel=0.03)
    unpaired = math.sqrt(stdev(tests.rates(a)) ** 2 + stdev(tests.rates(b)) ** 2) / math.sqrt(30)
    assert result["standard_error"] < unpaired / 3


def test_sign_flip_is_exact_for_few_problems_and_simulated_for_many():
    d = np.array([0.2, 0.1, -0.05, 0.3, 0.0, 0.15])
    exact = fmean(
        abs(sum(s * x for s, x in zip(signs, d, strict=True))) >= 0.7 - 1e-9
        for signs in itertools.product((-1, 1), repeat=6)
    )
    assert tests.sign_flip_p(d, 0) == pytest.approx(exact)
    assert tests.sign_flip_p(np.zeros(5), 0) == 1.0
    many = np.random.default_rng(0).normal(0.0, 0.1, 30)
    t = many.mean() / (many.std(ddof=1) / math.sqrt(30))
    assert tests.sign_flip_p(many, 0) == pytest.approx(math.erfc(abs(t) / math.sqrt(2)), abs=0.04)


def test_runs_needed_and_detectable_difference():
    needed = [tests.runs_needed(d, 0.0148, 0.0148) for d in (0.0115, 0.02, 0.03, 0.04)]
    assert needed == [26, 9, 4, 3]
    found = [round(100 * tests.detectable_difference(r, 0.0148, 0.0148), 1) for r in (1, 3, 5, 10)]
    assert found == [5.9, 3.4, 2.6, 1.9]
    assert tests.runs_needed(0.0, 0.01, 0.01) is None
    generator = np.random.default_rng(0)
    draws = generator.normal(0, 0.0148 / math.sqrt(26), (2, 20_000))
    z = (0.0115 + draws[1] - draws[0]) / (0.0148 * math.sqrt(2 / 26))
    assert (z > 1.96).mean() == pytest.approx(0.80, abs=0.02)


def test_best_of_m_and_holm():
    assert [round(tests.expected_maximum(m), 2) for m in (1, 2, 3, 5, 10)] == [0.0, 0.56, 0.85, 1.16, 1.54]
    assert 100 * tests.expected_maximum(5) * 0.0148 == pytest.approx(1.7, abs=0.05)
    assert tests.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert tests.holm([0.6, 0.9]) == pytest.approx([1.0, 1.0])


def test_the_reported_numbers_are_not_separable():
    c = compare_published(
        PublishedScore("anchor", 0.5422, 0.0148, 5), published_from_runs("ours", [0.5694, 0.5306, 0.5611])
    )
    assert round(100 * c.difference, 2) == 1.15
    assert (round(c.z, 2), round(c.z_exact_anchor, 2)) == (1.06, 1.35)
    pooled, welch = c.runs_test["pooled"], c.runs_test["welch"]
    assert (round(100 * pooled["standard_error"], 2), round(pooled["t"], 2), round(pooled["p"], 2)) == (
        1.23,
        0.93,
        0.39,
    )
    assert [round(100 * x, 1) for x in pooled["interval"]] == [-1.9, 4.2]
    assert [round(100 * x, 1) for x in welch["interval"]] == [-2.9, 5.2]
    assert round(100 * c.pooled_binomial_bound, 2) == 2.63
    assert [round(100 * x, 2) for x in c.sd_interval] == [0.89, 4.25]
    assert round(c.implied["sd_between_problems"], 2) == 0.41 and round(c.implied["share_between_problems"], 2) == 0.96
    assert round(100 * c.implied["standard_error_new_problems"], 1) == 7.7
    assert c.runs_needed_for_observed == 26 and not c.distinguishable
    text = format_published(c)
    assert "Not distinguishable: +1.15 points, p = 0.39" in text and "about 26 runs a side" in text


def test_published_scores_are_read_from_text():
    anchor = parse_published("anchor=54.22,sd=1.48,runs=5")
    assert (anchor.name, anchor.mean, anchor.sd, anchor.runs) == (
        "anchor",
        pytest.approx(0.5422),
        pytest.approx(0.0148),
        5,
    )
    ours = parse_published("ours=56.94,53.06,56.11")
    assert ours.runs == 3 and ours.sd == pytest.approx(0.0204311, abs=1e-6)
    assert parse_published("one=50").sd is None
    for text in ("54.22", "a=x", "a=54,sd=1", "a=154.2"):
        with pytest.raises(ValueError, match="must"):
            parse_published(text)
    with pytest.raises(ValueError, match="one run each"):
        compare_published(parse_published("a=50"), parse_published("b=51"))
    beyond = compare_published(parse_published("a=50,sd=5,runs=4"), parse_published("b=51"))
    assert not beyond.implied["explained_by_sampling"] and "something besides sampling" in format_published(beyond)


def test_two_runs_of_one_model_are_not_distinguishable(rates):
    c = compare([one_result("a", rates, 1)], [one_result("b", rates, 2)])
    assert not c.distinguishable and c.basis == "samples" and "Not distinguishable" in c.verdict
    assert c.difference == pytest.approx(c.b.score - c.a.score)
    assert c.p == c.same_problems["cmh_p"]
    zs = [abs(row["z"]) for row in c.per_problem]
    assert zs == sorted(zs, reverse=True) and len(zs) == 30


def test_a_clear_gain_is_called_higher(rates):
    better = [min(1.0, r + 0.25) for r in rates]
    c = compare([one_result("a", rates, 1)], [one_result("b", better, 2)])
    assert c.distinguishable and c.verdict.startswith("B is higher on these 30 problems")
    assert "the same holds for new problems" in c.verdict
    back = compare([one_result("b", better, 2)], [one_result("a", rates, 1)])
    assert back.verdict.startswith("A is higher") and back.difference == pytest.approx(-c.difference)


def test_gain_on_one_problem_is_not_claimed_for_new_problems():
    known = [1.0] * 15 + [0.0] * 14
    c = compare([one_result("a", [0.0, *known], 1)], [one_result("b", [1.0, *known], 2)])
    assert c.distinguishable and "does not establish a difference for new problems" in c.verdict


def test_runs_are_pooled_and_noise_is_split(rates):
    side_a, side_b = (
        [one_result(f"{name}{i}", rates, 10 * k + i) for i in range(4)] for k, name in ((1, "a"), (2, "b"))
    )
    c = compare(side_a, side_b)
    assert c.a.runs == 4 and c.a.samples == 1440
    assert c.a.score == pytest.approx(fmean(c.a.run_scores))
    assert c.a.sd_between_runs == pytest.approx(stdev(c.a.run_scores))
    truth = math.sqrt(sum(r * (1 - r) / 12 for r in rates)) / 30
    assert c.a.run_sampling_sd == pytest.approx(truth, rel=0.2)
    assert c.runs_test["pooled"]["df"] == 6
    assert c.a.spread_p_larger > 0.025 and c.a.sd_beyond_sampling < 0.02


def test_runs_that_differ_beyond_sampling_are_judged_by_runs(rates):
    shifts = (-0.3, 0.0, 0.3)
    side_b = [one_result(f"b{i}", [min(1, max(0, r + s)) for r in rates], 30 + i) for i, s in enumerate(shifts)]
    c = compare([one_result("a", rates, 1)], side_b)
    assert c.basis == "runs" and c.p == c.runs_test["pooled"]["p"] and not c.distinguishable
    assert any("differ by more than sampling" in w for w in c.warnings)
    assert c.b.sd_beyond_sampling > 0.1


def test_copies_are_noticed(rates):
    original = one_result("a0", rates, 1)
    copies = [original | {"name": f"a{i}", "run_seed": 1} for i in range(3)]
    c = compare(copies, [one_result("b", rates, 2)])
    assert any("same weights with the same run_seed=1" in w for w in c.warnings)
    others = [copy | {"model_sha256": f"model {i}", "adapter_sha256": None} for i, copy in enumerate(copies)]
    assert not any("same weights" in w for w in compare(others, [one_result("b", rates, 2)]).warnings)
    assert any("too alike to be independent" in w for w in c.warnings)
    renamed = [original, original | {"name": "a1", "run_seed": 5}]
    assert any("identical counts and lengths" in w for w in compare(renamed, [one_result("b", rates, 2)]).warnings)
    samples = [make_samples(rates, 12, 1), make_samples(rates, 12, 1)]
    c = compare(renamed, [one_result("b", rates, 2)], samples_a=samples, samples_b=[make_samples(rates, 12, 2)])
    assert any("share 360 of 360 completions" in w for w in c.warnings)


def test_checkpoints_of_one_run_bring_holm_and_the_best_of_m_warning(rates):
    side_b = [one_result(f"step{i}", rates, 50 + i, training={"run_dir": "runs/x", "step": 10 * i}) for i in range(5)]
    c = compare([one_result("base", rates, 1)], side_b)
    (warning,) = [w for w in c.warnings if "checkpoints of one training run" in w]
    assert "The best of 5" in warning and "points at an sd of" in warning
    gain = float(warning.split("about +")[1].split(" ")[0])
    assert gain == pytest.approx(100 * 1.163 * c.b.run_sampling_sd, abs=0.06)
    assert len(c.candidates) == 5
    assert [r["holm_p"] for r in c.candidates] == pytest.approx(tests.holm([r["p"] for r in c.candidates]))
    assert all(r["holm_p"] >= r["p"] for r in c.candidates)


def test_incomparable_results_are_refused(rates):
    a = one_result("a", rates, 1)
    for changes, message in [
        (
            {"benchmark": {"name": "aime25", "sha256": "f" * 64, "problems": 30}},
            "benchmark of 'a' and 'b' differ: aime24",
        ),
        ({"regime": REGIME | {"temperature": 0.6}}, "sampling regimes of 'a' and 'b' differ: temperature=1.0 and 0.6"),
        ({"grader_version": "grader/2"}, "grade both again"),
        ({"problems": a["problems"][::-1]}, "problem ids"),
    ]:
        with pytest.raises(ValueError, match=message):
            compare([a], [one_result("b", rates, 2) | changes])
    with pytest.raises(ValueError, match="at least one result"):
        compare([a], [])
    c = compare([a], [one_result("b", rates, 2) | {"regime": REGIME | {"seed": 7, "samples_per_problem": 12}}])
    assert not any("regime" in w for w in c.warnings)


def test_fp8_cache_is_named_when_allowed(rates):
    b = one_result("b", rates, 2) | {"regime": REGIME | {"kv_cache_dtype": "fp8"}}
    with pytest.raises(ValueError, match="kv_cache_dtype='auto' and 'fp8'"):
        compare([one_result("a", rates, 1)], [b])
    c = compare([one_result("a", rates, 1)], [b], allow_different_regime=True)
    assert any("fp8 KV cache changes the sampled distribution" in w for w in c.warnings)


def test_partial_runs_compare_on_shared_problems(rates):
    samples = [
        s
        for s in make_samples(rates, 12, 2)
        if int(s["problem_id"]) < 20 and s["sample_index"] < 8 + int(s["problem_id"]) % 4
    ]
    c = compare([one_result("a", rates, 1)], [make_result("b", samples, 30, 12)])
    assert c.problems == 20 and any("only 20 of 30 problems" in w for w in c.warnings)
    assert any("incomplete" in w for w in c.warnings)
    assert c.a.score == pytest.approx(c.b.score - c.difference)


def test_text_has_everything_and_no_control_characters(rates):
    a = one_result("bad\x1b[31m\nname", rates, 1)
    text = format_comparison(compare([a], [one_result("b", rates, 2)]))
    assert "\x1b" not in text and "bad[31m name" in text
    for part in (
        "these problems, analytic",
        "new problems, t",
        "bootstrap",
        "sign-flip",
        "runs of 12 samples per problem a side for 80 % power",
        "Not distinguishable",
    ):
        assert part in text
    assert printable("a\x07b\u202ec\u200bd\r\ne") == "abcd  e" and printable("abcdef", 4) == "abc…"


def test_results_are_reproducible(rates):
    side_a, side_b = [one_result("a", rates, 1)], [one_result("b", rates, 2)]
    random.seed(0)
    np.random.seed(0)
    assert compare(side_a, side_b).to_dict() == compare(side_a, side_b).to_dict()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine": {"dtype": "float32"}}, "engine dtype differs"),
        ({"engine": {"kind": "transformers"}}, "engine kind differs"),
        ({"engine": {"load_format": "dummy"}}, "engine load_format differs"),
        ({"prompts_sha256": "other"}, "the rendered prompts differ"),
    ],
)
def test_other_engines_and_prompts_are_told(rates, changes, words):
    a, b = one_result("a", rates, 1), one_result("b", rates, 2)
    assert words not in " ".join(compare([a], [b]).warnings)
    if "engine" in changes:
        changes = {"engine": b["engine"] | changes["engine"]}
    assert words in " ".join(compare([a], [b | changes]).warnings)
