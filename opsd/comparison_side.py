"""One side of a comparison: its pooled counts, its errors, and whether its runs differ as much as sampling says they should.

Used by comparison.py. Scores are fractions in 0-1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from opsd.distributions import chi_square_cdf
from opsd.evaluation import score_with_errors, variance_same_problems
from opsd.paired_tests import standard_deviation

SUSPICIOUS = 0.025  # tail probability at which the spread between runs is called too large or too small


@dataclass(frozen=True)
class Side:
    """One side. `sd_between_runs` and what follows it are None for a single run."""

    names: list[str]
    runs: int
    samples: int
    score: float
    standard_error_same_problems: float | None
    standard_error_new_problems: float | None
    run_scores: list[float]
    run_sampling_sd: float | None  # what sampling alone predicts for the sd of one run's score on these problems
    sd_between_runs: float | None
    spread_chi_square: float | None
    spread_p_larger: float | None  # small: the runs differ by more than sampling
    spread_p_smaller: float | None  # small: the runs are more alike than independent samples can be
    sd_beyond_sampling: (
        float | None
    )  # training, versions, hardware: sqrt(sd_between_runs^2 - run_sampling_sd^2), at least 0
    sd_between_problems: float | None


def pool_counts(side: Sequence[dict], ids: list[str]) -> list[tuple[int, int]]:
    """(samples, correct) per problem over all runs of a side."""
    runs = [{p["id"]: p for p in result["problems"]} for result in side]
    return [(sum(run[i]["n"] for run in runs), sum(run[i]["correct"] for run in runs)) for i in ids]


def _run_counts(result: dict) -> list[tuple[int, int]]:
    return [(p["n"], p["correct"]) for p in result["problems"] if p["n"] > 0]


def describe_side(side: Sequence[dict], counts: list[tuple[int, int]]) -> Side:
    errors = score_with_errors(counts)
    run_scores = [fmean(c / n for n, c in _run_counts(result)) for result in side]
    # The pooled counts predict one run best: rescale their variance from R*n samples to the n samples of one run.
    variance = variance_same_problems(counts)
    sampling_sd = None if variance is None else math.sqrt(variance * len(side))
    sd = standard_deviation(run_scores)
    chi_square = p_larger = p_smaller = beyond = None
    if sd is not None and sampling_sd:
        own = [variance_same_problems(_run_counts(result)) for result in side]
        within = math.sqrt(fmean(own)) if None not in own else sampling_sd
        chi_square = (len(side) - 1) * sd**2 / within**2 if within > 0 else None
        beyond = math.sqrt(max(0.0, sd**2 - within**2))
    if chi_square is not None:
        p_smaller = chi_square_cdf(chi_square, len(side) - 1)
        p_larger = 1 - p_smaller
    return Side(
        names=[result["name"] for result in side],
        runs=len(side),
        samples=sum(n for n, _ in counts),
        score=errors["avg_at_k"],
        standard_error_same_problems=errors["standard_error_same_problems"],
        standard_error_new_problems=errors["standard_error_new_problems"],
        run_scores=run_scores,
        run_sampling_sd=sampling_sd,
        sd_between_runs=sd,
        spread_chi_square=chi_square,
        spread_p_larger=p_larger,
        spread_p_smaller=p_smaller,
        sd_beyond_sampling=beyond,
        sd_between_problems=errors["sd_between_problems"],
    )


def spread_warnings(label: str, side: Side) -> list[str]:
    if side.spread_p_smaller is None:
        return []
    spread = f"side {label}: sd between runs {100 * side.sd_between_runs:.2f}, sampling alone predicts {100 * side.run_sampling_sd:.2f}"
    if side.spread_p_smaller < SUSPICIOUS:
        return [
            f"{spread}: too alike to be independent (p = {side.spread_p_smaller:.2g}); look for a shared seed or copies"
        ]
    if side.spread_p_larger < SUSPICIOUS:
        return [
            f"{spread} (p = {side.spread_p_larger:.2g}): the runs differ by more than sampling (training seed, version, adapter); "
            "the verdict is taken from whole runs, if either side has several"
        ]
    return []
