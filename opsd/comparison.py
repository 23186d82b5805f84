"""Compares two sides of evaluation results, paired by problem, and says in words what the numbers support.

Each side is one or more result JSONs (`opsd-eval/1`): repeated evaluations, trained replicas, or checkpoints. Counts are
pooled per problem within a side. Scores and differences (B minus A) are fractions in 0-1. The tests are in
paired_tests.py, one side in comparison_side.py, refusals and warnings in comparison_checks.py, the terminal text in
comparison_text.py.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from opsd import paired_tests as tests
from opsd.comparison_checks import (
    check_comparable,
    checkpoint_families,
    provenance_warnings,
    repeated_sample_warnings,
    selection_warnings,
)
from opsd.comparison_side import SUSPICIOUS, Side, describe_side, pool_counts, spread_warnings

DIFFERENCES_OF_INTEREST = (0.01, 0.02, 0.03, 0.04, 0.05)


@dataclass(frozen=True)
class Comparison:
    """Everything `--compare` prints. `p` is the headline: CMH, or the t test over runs when the runs differ beyond sampling."""

    a: Side
    b: Side
    benchmark: str
    problems: int
    difference: float
    same_problems: dict  # standard_error, interval, bootstrap_interval, cmh_z, cmh_p
    new_problems: dict  # standard_error, interval, bootstrap_interval, t_p, sign_flip_p, problems_needed
    runs_test: dict | None
    basis: str  # "samples" or "runs"
    p: float
    distinguishable: bool
    power: dict
    candidates: list[dict]
    per_problem: list[dict]
    warnings: list[str]
    verdict: str

    def to_dict(self) -> dict:
        return asdict(self)


def compare(
    side_a: Sequence[dict],
    side_b: Sequence[dict],
    *,
    samples_a: Sequence[Sequence[dict]] = (),
    samples_b: Sequence[Sequence[dict]] = (),
    allow_different_regime: bool = False,
    seed: int = 0,
) -> Comparison:
    """B against A. `samples_*`: the results' samples.jsonl contents, if at hand, to find completions shared between runs."""
    warnings = check_comparable(side_a, side_b, allow_different_regime)
    ids = [p["id"] for p in side_a[0]["problems"]]
    pooled = [pool_counts(side, ids) for side in (side_a, side_b)]
    kept = [i for i in range(len(ids)) if pooled[0][i][0] > 0 and pooled[1][i][0] > 0]
    if not kept:
        raise ValueError("no problem has samples on both sides; finish the evaluations first (--resume)")
    if len(kept) < len(ids):
        warnings.append(f"only {len(kept)} of {len(ids)} problems have samples on both sides; the others are left out")
    counts_a, counts_b = ([counts[i] for i in kept] for counts in pooled)
    a, b = describe_side(side_a, counts_a), describe_side(side_b, counts_b)
    warnings += provenance_warnings(side_a, side_b) + repeated_sample_warnings(side_a, side_b, samples_a, samples_b)
    warnings += spread_warnings("A", a) + spread_warnings("B", b)
    candidates = _candidates(side_a, side_b, ids)
    warnings += selection_warnings(side_a, side_b, a.run_sampling_sd, b.run_sampling_sd)

    z, cmh_p = tests.stratified_test(counts_a, counts_b)
    same = {**tests.difference_same_problems(counts_a, counts_b, seed), "cmh_z": z, "cmh_p": cmh_p}
    new = tests.difference_new_problems(counts_a, counts_b, seed)
    difference = b.score - a.score
    sd_d = None if new["standard_error"] is None else new["standard_error"] * math.sqrt(len(kept))
    new["problems_needed"] = None if not sd_d else tests.problems_needed(difference, sd_d)
    runs_test = tests.run_level_test(
        fmean(a.run_scores), a.sd_between_runs, a.runs, fmean(b.run_scores), b.sd_between_runs, b.runs
    )
    overdispersed = any(s.spread_p_larger is not None and s.spread_p_larger < SUSPICIOUS for s in (a, b))
    basis = "runs" if overdispersed and runs_test else "samples"
    p = runs_test["pooled"]["p"] if basis == "runs" else cmh_p
    power = _power(difference, a, b, basis) | {"samples_per_problem_and_run": a.samples / a.runs / len(kept)}
    return Comparison(
        a=a,
        b=b,
        benchmark=side_a[0]["benchmark"]["name"],
        problems=len(kept),
        difference=difference,
        same_problems=same,
        new_problems=new,
        runs_test=runs_test,
        basis=basis,
        p=p,
        distinguishable=p < tests.LEVEL,
        power=power,
        candidates=candidates,
        per_problem=_per_problem(side_a[0], kept, counts_a, counts_b),
        warnings=warnings,
        verdict=verdict(difference, p, basis, len(kept), new, power["runs_needed_for_observed"]),
    )


def verdict(difference: float, p: float, basis: str, problems: int, new: dict | None, runs_needed: int | None) -> str:
    """One paragraph in plain words. `new`: the test for other problems, None when only summaries are known."""
    points = f"{100 * difference:+.2f} points"
    test = {"samples": "stratified by problem", "runs": "t test over runs"}[basis]
    if p >= tests.LEVEL:
        need = (
            ""
            if runs_needed is None
            else f"; about {runs_needed} runs a side would give 80 % power for this difference"
        )
        return f"Not distinguishable: {points}, p = {p:.2f} ({test}){need}."
    higher = "B is higher" if difference > 0 else "A is higher"
    text = f"{higher} on these {problems} problems: {points}, p = {p:.2g} ({test})."
    if new is not None and new["sign_flip_p"] is not None:
        generalises = new["sign_flip_p"] < tests.LEVEL
        claim = "the same holds for" if generalises else "this does not establish a difference for"
        text += f" By the paired test, {claim} new problems of this kind (sign-flip p = {new['sign_flip_p']:.2g})."
    return text


def _power(difference: float, a: Side, b: Side, basis: str) -> dict:
    """Runs a side for 80 % power; `one_run_sd` is what one run's score varies by on each side."""
    sds = [s.sd_between_runs if basis == "runs" and s.sd_between_runs else s.run_sampling_sd for s in (a, b)]
    if None in sds:
        return {"one_run_sd": sds, "runs_needed_for_observed": None, "runs_needed": {}, "detectable": {}}
    return {
        "one_run_sd": sds,
        "runs_needed_for_observed": tests.runs_needed(difference, *sds),
        "runs_needed": {f"{100 * d:g}": tests.runs_needed(d, *sds) for d in DIFFERENCES_OF_INTEREST},
        "detectable": {str(runs): tests.detectable_difference(runs, *sds) for runs in (1, 3, 5, 10)},
    }


def _candidates(side_a: Sequence[dict], side_b: Sequence[dict], ids: list[str]) -> list[dict]:
    """Every checkpoint of a side that holds several of one run, each against the whole other side, Holm-corrected."""
    rows = []
    for label, side, other in (("A", side_a, side_b), ("B", side_b, side_a)):
        reference = pool_counts(other, ids)
        for result in (result for family in checkpoint_families(side) for result in family):
            own = pool_counts([result], ids)
            pairs = [(r, o) for r, o in zip(reference, own, strict=True) if r[0] and o[0]]
            z, p = tests.stratified_test([r for r, _ in pairs], [o for _, o in pairs])
            gain = fmean(tests.rates([o for _, o in pairs])) - fmean(tests.rates([r for r, _ in pairs]))
            rows.append({"side": label, "name": result["name"], "difference": gain, "cmh_z": z, "p": p})
    for row, adjusted in zip(rows, tests.holm([row["p"] for row in rows]), strict=True):
        row["holm_p"] = adjusted
    return rows


def _per_problem(result: dict, kept: list[int], counts_a, counts_b) -> list[dict]:
    """Both sides' counts of every problem, the most different first."""
    rows = [
        {
            "id": result["problems"][i]["id"],
            "answer": result["problems"][i]["answer"],
            "n_a": a[0],
            "correct_a": a[1],
            "n_b": b[0],
            "correct_b": b[1],
            "z": tests.problem_z(a, b),
        }
        for i, a, b in zip(kept, counts_a, counts_b, strict=True)
    ]
    return sorted(rows, key=lambda row: -abs(row["z"]))
