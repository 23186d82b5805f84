"""Compares scores of which only a summary was published: means, standard deviations and numbers of runs.

Without per-problem counts there is no pairing and no stratified test; what remains is a t test over runs and what the
standard deviation implies about the noise. Scores are fractions in 0-1.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from opsd import paired_tests as tests
from opsd.comparison import DIFFERENCES_OF_INTEREST, verdict
from opsd.distributions import chi_square_quantile


@dataclass(frozen=True)
class PublishedScore:
    """`sd`: standard deviation between runs (ddof 1), None for one run."""

    name: str
    mean: float
    sd: float | None
    runs: int

    def __post_init__(self):
        if not 0 <= self.mean <= 1:
            raise ValueError(f"mean={self.mean} of {self.name!r} must be a fraction in 0-1; divide percent by 100")
        if self.runs < 1 or (self.sd is None) != (self.runs == 1):
            raise ValueError(
                f"runs={self.runs}, sd={self.sd} of {self.name!r}: give an sd exactly when there are several runs"
            )


def published_from_runs(name: str, scores: Sequence[float]) -> PublishedScore:
    """From the scores of single runs."""
    return PublishedScore(name, fmean(scores), tests.standard_deviation(scores), len(scores))


def is_published(text: str) -> bool:
    """Whether the text is a score rather than the path of a result: name=number…"""
    return re.match(r"[^=,/]+=\d", text) is not None


def parse_published(text: str) -> PublishedScore:
    """Reads "name=54.22,sd=1.48,runs=5" or "name=56.94,53.06,56.11", in percent."""
    number = r"\d+(?:\.\d+)?"
    summary = re.fullmatch(rf"([^=,]+)=({number}),sd=({number}),runs=(\d+)", text)
    if summary:
        return PublishedScore(summary[1], float(summary[2]) / 100, float(summary[3]) / 100, int(summary[4]))
    scores = re.fullmatch(rf"([^=,]+)=({number}(?:,{number})*)", text)
    if scores is None:
        raise ValueError(
            f"published={text!r} must read name=54.22,sd=1.48,runs=5 or name=56.94,53.06,56.11, in percent"
        )
    return published_from_runs(scores[1], [float(score) / 100 for score in scores[2].split(",")])


@dataclass(frozen=True)
class PublishedComparison:
    """`z_*` are differences in standard errors: with side A's sd for both sides, and with A's mean taken as exact."""

    a: PublishedScore
    b: PublishedScore
    difference: float
    one_run_sd: float
    standard_error: float
    z: float
    z_exact_anchor: float
    runs_test: dict
    sd_interval: list[float]
    pooled_binomial_bound: float
    implied: dict
    runs_needed_for_observed: int | None
    runs_needed: dict
    detectable: dict
    p: float
    distinguishable: bool
    verdict: str

    def to_dict(self) -> dict:
        return asdict(self)


def compare_published(
    a: PublishedScore, b: PublishedScore, *, problems: int = 30, samples: int = 12
) -> PublishedComparison:
    """B against the published A. `problems`, `samples`: of one run, for the noise that its sd implies."""
    if a.sd is None and b.sd is None:
        raise ValueError(f"{a.name!r} and {b.name!r} have one run each and no sd; one side needs several runs")
    if not a.sd and not b.sd:
        raise ValueError(
            f"the runs of {a.name!r} and of {b.name!r} are all alike (sd 0), so there is no noise to test against; compare result files"
        )
    reference = a if a.sd else b
    sd = reference.sd
    difference = b.mean - a.mean
    error = sd * math.sqrt(1 / a.runs + 1 / b.runs)
    runs_test = tests.run_level_test(a.mean, a.sd, a.runs, b.mean, b.sd, b.runs)
    df = reference.runs - 1
    p = runs_test["pooled"]["p"]
    needed = tests.runs_needed(difference, sd, sd)
    return PublishedComparison(
        a=a,
        b=b,
        difference=difference,
        one_run_sd=sd,
        standard_error=error,
        z=difference / error,
        z_exact_anchor=difference / (sd / math.sqrt(b.runs)),
        runs_test=runs_test,
        sd_interval=[sd * math.sqrt(df / chi_square_quantile(q, df)) for q in (0.975, 0.025)],
        pooled_binomial_bound=math.sqrt(reference.mean * (1 - reference.mean) / (problems * samples)),
        implied=implied_noise(reference.mean, sd, problems, samples),
        runs_needed_for_observed=needed,
        runs_needed={f"{100 * d:g}": tests.runs_needed(d, sd, sd) for d in DIFFERENCES_OF_INTEREST},
        detectable={str(runs): tests.detectable_difference(runs, sd, sd) for runs in (1, 3, 5, 10)},
        p=p,
        distinguishable=p < tests.LEVEL,
        verdict=verdict(difference, p, "runs", problems, None, needed),
    )


def implied_noise(score: float, sd: float, problems: int, samples: int) -> dict:
    """What an sd between runs says if sampling is its only cause: how problems differ, and the error for new problems.

    `explained_by_sampling` is false when the sd exceeds the pooled binomial bound, which sampling cannot do.
    """
    within = sd**2 * problems * samples  # mean of p(1-p) over problems
    between = score * (1 - score) - within  # variance of p over problems
    if between < 0:
        return {
            "explained_by_sampling": False,
            "sd_between_problems": None,
            "share_between_problems": None,
            "standard_error_new_problems": None,
        }
    total = between + within / samples
    return {
        "explained_by_sampling": True,
        "sd_between_problems": math.sqrt(between),
        "share_between_problems": between / total,
        "standard_error_new_problems": math.sqrt(total / problems),
    }
