"""Tests and intervals for two sets of per-problem counts, each answering a named question. Pure functions of counts.

`Counts` is one (samples, correct) pair per problem, in the same problem order on both sides. "Same problems": would these
two models differ if sampled for ever on exactly these problems? "New problems": would they differ on others of this kind?
Sources: Cochran 1954, Mantel and Haenszel 1959 (stratified test); Miller 2024 (arXiv 2411.00640; paired
differences, power). Differences are B minus A, fractions in 0-1.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev

import numpy as np

from opsd.distributions import normal_quantile, normal_two_sided, t_quantile, t_two_sided
from opsd.evaluation import variance_same_problems

Counts = Sequence[tuple[int, int]]

BOOTSTRAP_RESAMPLES = 20_000
EXACT_SIGN_FLIPS = 14  # problems that differ, up to which all 2^m sign patterns are enumerated
POWER = 0.80
LEVEL = 0.05


def rates(counts: Counts) -> list[float]:
    return [correct / n for n, correct in counts]


def difference_same_problems(a: Counts, b: Counts, seed: int) -> dict:
    """Difference with the sampling error given the problems. The samples are independent: pairing narrows nothing here."""
    difference = fmean(rates(b)) - fmean(rates(a))
    variances = variance_same_problems(a), variance_same_problems(b)
    if None in variances:
        return {"standard_error": None, "interval": None, "bootstrap_interval": None}
    error = math.sqrt(sum(variances))
    half = normal_quantile(1 - LEVEL / 2) * error
    generator = np.random.default_rng(seed)
    draws = _resampled_scores(b, generator) - _resampled_scores(a, generator)
    return {
        "standard_error": error,
        "interval": [difference - half, difference + half],
        "bootstrap_interval": _percentiles(draws),
    }


def difference_new_problems(a: Counts, b: Counts, seed: int) -> dict:
    """Paired by problem: t interval with P-1 degrees of freedom, bootstrap over problems, sign-flip permutation test."""
    d = np.array(rates(b)) - np.array(rates(a))
    size = len(d)
    if size < 2:
        return {"standard_error": None, "interval": None, "bootstrap_interval": None, "t_p": None, "sign_flip_p": None}
    error = float(d.std(ddof=1)) / math.sqrt(size)
    half = t_quantile(1 - LEVEL / 2, size - 1) * error
    generator = np.random.default_rng(seed)
    # Resampling P values has variance (P-1)/P of the unbiased estimate: stretch it back.
    picks = d[generator.integers(0, size, (BOOTSTRAP_RESAMPLES, size))].mean(axis=1)
    stretched = d.mean() + (picks - d.mean()) * math.sqrt(size / (size - 1))
    return {
        "standard_error": error,
        "interval": [float(d.mean()) - half, float(d.mean()) + half],
        "bootstrap_interval": _percentiles(stretched),
        "t_p": t_two_sided(float(d.mean()) / error, size - 1) if error > 0 else float(not d.any()),
        "sign_flip_p": sign_flip_p(d, seed),
    }


def stratified_test(a: Counts, b: Counts) -> tuple[float, float]:
    """(z, two-sided p) of Cochran-Mantel-Haenszel without continuity correction; (0, 1) when no problem is informative."""
    surplus, variance = zip(*[_problem_surplus(*one) for one in zip(a, b, strict=True)], strict=True)
    if sum(variance) == 0:
        return 0.0, 1.0
    z = sum(surplus) / math.sqrt(sum(variance))
    return z, normal_two_sided(z)


def problem_z(a: tuple[int, int], b: tuple[int, int]) -> float:
    """z of one problem, on the scale of `stratified_test`; 0 when all or none of its samples are correct."""
    surplus, variance = _problem_surplus(a, b)
    return surplus / math.sqrt(variance) if variance > 0 else 0.0


def _problem_surplus(a: tuple[int, int], b: tuple[int, int]) -> tuple[float, float]:
    """Correct samples of B beyond its share, and the hypergeometric variance."""
    (n_a, c_a), (n_b, c_b) = a, b
    total, correct = n_a + n_b, c_a + c_b
    variance = n_a * n_b * correct * (total - correct) / (total**2 * (total - 1)) if total > 1 else 0.0
    return c_b - n_b * correct / total, variance


def sign_flip_p(d: np.ndarray, seed: int, flips: int = BOOTSTRAP_RESAMPLES) -> float:
    """Two-sided p of the mean of `d` when every problem's sign is arbitrary: exact for few problems, else by simulation."""
    d = d[np.abs(d) > 1e-12]
    observed = abs(d.sum()) - 1e-9
    if len(d) <= EXACT_SIGN_FLIPS:
        patterns = (np.arange(2 ** len(d))[:, None] >> np.arange(len(d))) & 1
        return float((np.abs((2 * patterns - 1) @ d) >= observed).mean())
    signs = np.random.default_rng(seed).integers(0, 2, (flips, len(d))) * 2 - 1
    return float((np.sum(np.abs(signs @ d) >= observed) + 1) / (flips + 1))


def runs_needed(difference: float, sd_a: float, sd_b: float) -> int | None:
    """Runs per side to detect `difference` with 80 % power at 5 % two-sided; `sd`: of one run's score. None for no difference."""
    if difference == 0:
        return None
    return max(1, math.ceil(_power_factor() ** 2 * (sd_a**2 + sd_b**2) / difference**2 - 1e-9))


def detectable_difference(runs: int, sd_a: float, sd_b: float) -> float:
    """Smallest difference found with 80 % power when each side has `runs` runs."""
    return _power_factor() * math.sqrt((sd_a**2 + sd_b**2) / runs)


def problems_needed(difference: float, sd_of_differences: float) -> int | None:
    """Problems to detect `difference` on new problems with 80 % power, given the sd of per-problem differences."""
    return None if difference == 0 else math.ceil((_power_factor() * sd_of_differences / difference) ** 2 - 1e-9)


def _power_factor() -> float:
    return normal_quantile(1 - LEVEL / 2) + normal_quantile(POWER)


def expected_maximum(m: int) -> float:
    """Expected largest of `m` independent standard normal values: by how many sd picking the best of `m` flatters."""
    normal = NormalDist()
    grid = np.linspace(-8, 8, 4001)
    density = np.array([normal.pdf(x) * m * normal.cdf(x) ** (m - 1) for x in grid])
    return float(np.sum(grid * density) * (grid[1] - grid[0]))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm-adjusted p-values, in the order given."""
    adjusted, running = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted


def run_level_test(
    mean_a: float, sd_a: float | None, runs_a: int, mean_b: float, sd_b: float | None, runs_b: int
) -> dict | None:
    """t tests on whole-run scores: pooled (one common sd) and, with an sd on both sides, Welch. None below two runs anywhere."""
    df_a, df_b = (runs_a - 1 if sd_a is not None else 0), (runs_b - 1 if sd_b is not None else 0)
    if df_a + df_b == 0:
        return None
    difference = mean_b - mean_a
    pooled_sd = math.sqrt((df_a * (sd_a or 0) ** 2 + df_b * (sd_b or 0) ** 2) / (df_a + df_b))
    result = {
        "pooled": _t_result(difference, pooled_sd * math.sqrt(1 / runs_a + 1 / runs_b), df_a + df_b),
        "welch": None,
    }
    if df_a and df_b and sd_a + sd_b > 0:
        share_a, share_b = sd_a**2 / runs_a, sd_b**2 / runs_b
        df = (share_a + share_b) ** 2 / (share_a**2 / df_a + share_b**2 / df_b)
        result["welch"] = _t_result(difference, math.sqrt(share_a + share_b), df)
    return result


def _t_result(difference: float, error: float, df: float) -> dict:
    half = t_quantile(1 - LEVEL / 2, df) * error
    t = difference / error if error > 0 else None
    return {
        "standard_error": error,
        "t": t,
        "df": df,
        "p": float(difference == 0) if t is None else t_two_sided(t, df),
        "interval": [difference - half, difference + half],
    }


def standard_deviation(values: Sequence[float]) -> float | None:
    """Sample standard deviation (ddof 1); None for fewer than two values."""
    return stdev(values) if len(values) > 1 else None


def _resampled_scores(counts: Counts, generator: np.random.Generator) -> np.ndarray:
    """Scores with every problem's samples drawn again, deviations stretched by sqrt(n/(n-1)) to be unbiased."""
    n, p = np.array([n for n, _ in counts]), np.array(rates(counts))
    drawn = generator.binomial(n, p, (BOOTSTRAP_RESAMPLES, len(n))) / n
    return (p + (drawn - p) * np.sqrt(n / (n - 1))).mean(axis=1)


def _percentiles(draws: np.ndarray) -> list[float]:
    return [float(value) for value in np.quantile(draws, [LEVEL / 2, 1 - LEVEL / 2])]
