"""Statistics of one evaluation: samples in, score with both of its errors out.

Per-problem counts come first and every average is over problems (a partial run weighs problems equally and says what is
missing). Two errors, never mixed up: `standard_error_same_problems` is what repeating the evaluation on these problems
would show (sampling noise only); `standard_error_new_problems` is for other problems of the same kind, with the problem as
the cluster, and already contains the sampling noise. Formulas: Miller 2024 (arXiv 2411.00640); pass@k: Chen et al. 2021
(arXiv 2107.03374, equation 1). Scores are fractions in 0-1. Standard library only.
"""

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, median

from opsd.distributions import normal_quantile, t_quantile
from opsd.majority import majority_at, majority_sizes

NO_BOX_REASONS = ("no_box", "unterminated", "empty")


def count_by_problem(samples: Sequence[dict], problems: Sequence[dict]) -> list[dict]:
    """Per-problem counts in benchmark order: id, answer, n, correct, truncated, no_box, mean_tokens (None without samples)."""
    grouped = _group(samples, problems)
    return [
        {
            "id": str(problem["id"]),
            "answer": str(problem["answer"]),
            "n": len(group),
            "correct": sum(sample["correct"] for sample in group),
            "truncated": sum(sample["truncated"] for sample in group),
            "no_box": sum(sample["reason"] in NO_BOX_REASONS for sample in group),
            "mean_tokens": fmean(sample["token_count"] for sample in group) if group else None,
        }
        for problem, group in zip(problems, grouped, strict=True)
    ]


def build_statistics(samples: Sequence[dict], problems: Sequence[dict], k: int) -> dict:
    """Everything the result JSON stores under `statistics`. `k`: samples asked for per problem; fewer is reported, not hidden."""
    if k < 1:
        raise ValueError(f"k={k} must be at least 1 sample per problem")
    groups = [group for group in _group(samples, problems) if group]
    if not groups:
        raise ValueError("samples=[] has no finished sample; run the evaluation before asking for its statistics")
    counts = [(len(group), sum(sample["correct"] for sample in group)) for group in groups]
    lengths = [sample["token_count"] for group in groups for sample in group]
    pass_at_k = {j: pass_at(counts, j) for j in range(1, k + 1)}
    return {
        "k": k,
        "problems": len(problems),
        "problems_with_samples": len(groups),
        "samples": len(lengths),
        "expected_samples": k * len(problems),
        "complete": all(n >= k for n, _ in counts) and len(groups) == len(problems),
        "n_min": min(n for n, _ in counts) if len(groups) == len(problems) else 0,
        "n_max": max(n for n, _ in counts),
        **score_with_errors(counts),
        "pass_at_k": {str(j): value for j, (value, _) in pass_at_k.items()},
        "pass_at_k_problems": {str(j): covered for j, (_, covered) in pass_at_k.items()},
        "majority_at_k": {str(j): majority_at(groups, j) for j in majority_sizes(k)},
        "truncation_rate": _mean_rate(groups, lambda sample: sample["truncated"]),
        "no_box_rate": _mean_rate(groups, lambda sample: sample["reason"] in NO_BOX_REASONS),
        "mean_tokens": fmean(fmean(sample["token_count"] for sample in group) for group in groups),
        "median_tokens": median(lengths),
        "max_tokens": max(lengths),
        "total_tokens": sum(lengths),
        "truncated_bounds": _truncated_bounds(groups),
        "reasons": dict(sorted(Counter(sample["reason"] for group in groups for sample in group).items())),
        "repeated_completions": sum(len(group) - len({sample["text"] for sample in group}) for group in groups),
    }


def score_with_errors(counts: Sequence[tuple[int, int]]) -> dict:
    """avg@k and its errors from (samples, correct) per problem. None where an error cannot be estimated.

    When no sample or every sample is correct, the estimated errors are 0 and say nothing; the intervals are then the exact
    one-sided 95 % bounds: from the number of samples (same problems), from the number of problems (new problems).
    """
    rates = [correct / n for n, correct in counts]
    score, size = fmean(rates), len(counts)
    same = variance_same_problems(counts)
    same = None if same is None else math.sqrt(same)
    new = math.sqrt(sum((rate - score) ** 2 for rate in rates) / (size * (size - 1))) if size > 1 else None
    within = (
        None if same is None else fmean(rate * (1 - rate) / (n - 1) for rate, (n, _) in zip(rates, counts, strict=True))
    )
    samples = sum(n for n, _ in counts)
    return {
        "avg_at_k": score,
        "standard_error_same_problems": same,
        "interval_same_problems": _interval(score, same, samples, normal_quantile(0.975)),
        "standard_error_new_problems": new,
        "interval_new_problems": _interval(score, new, size, t_quantile(0.975, max(1, size - 1))),
        "pooled_binomial_bound": math.sqrt(score * (1 - score) / samples),
        "sd_between_problems": None if new is None or within is None else math.sqrt(max(0.0, new**2 * size - within)),
    }


def variance_same_problems(counts: Sequence[tuple[int, int]]) -> float | None:
    """(1/P^2) sum p(1-p)/(n-1): unbiased variance of the score on these problems. None when a problem has one sample."""
    if any(n < 2 for n, _ in counts):
        return None
    return sum((c / n) * (1 - c / n) / (n - 1) for n, c in counts) / len(counts) ** 2


def pass_at(counts: Sequence[tuple[int, int]], j: int) -> tuple[float | None, int]:
    """Unbiased pass@j over the problems with at least `j` samples, and how many those are (None when there is none)."""
    values = [1 - math.comb(n - correct, j) / math.comb(n, j) for n, correct in counts if n >= j]
    return (fmean(values) if values else None), len(values)


def _group(samples: Sequence[dict], problems: Sequence[dict]) -> list[list[dict]]:
    grouped: dict[str, dict[int, dict]] = {str(problem["id"]): {} for problem in problems}
    if len(grouped) != len(problems):
        raise ValueError(f"problems: {len(problems) - len(grouped)} ids occur twice; ids must be unique in a benchmark")
    for sample in samples:
        key, index = str(sample["problem_id"]), sample["sample_index"]
        if key not in grouped:
            raise ValueError(
                f"problem_id={key!r} is not in the benchmark; these samples belong to another problem file"
            )
        if index in grouped[key]:
            raise ValueError(
                f"sample_index={index} of problem_id={key!r} occurs twice; each sample may be counted once"
            )
        grouped[key][index] = sample
    return [list(by_index.values()) for by_index in grouped.values()]


def _interval(score: float, error: float | None, trials: int, quantile: float) -> list[float] | None:
    """`score` plus and minus `quantile` errors; after `trials` outcomes that are all alike, the exact one-sided bound."""
    if score in (0.0, 1.0):
        reach = 1 - 0.05 ** (1 / trials)  # at this rate, `trials` equal outcomes happen one time in twenty
        return [0.0, reach] if score == 0 else [1 - reach, 1.0]
    return None if error is None else [score - quantile * error, score + quantile * error]


def _mean_rate(groups: Sequence[Sequence[dict]], predicate) -> float:
    return fmean(fmean(float(predicate(sample)) for sample in group) for group in groups)


def _truncated_bounds(groups: Sequence[Sequence[dict]]) -> dict:
    """The score if every truncated sample were right, and with truncated samples left out (with the problems that remain)."""
    finished = [[sample for sample in group if not sample["truncated"]] for group in groups]
    left = [fmean(float(sample["correct"]) for sample in group) for group in finished if group]
    return {
        "all_truncated_correct": _mean_rate(groups, lambda sample: sample["correct"] or sample["truncated"]),
        "truncated_left_out": fmean(left) if left else None,
        "truncated_left_out_problems": len(left),
    }


def describe(statistics: dict, name: str = "") -> str:
    """The headline: score with both errors, pass@k, majority, coverage, truncation, unanswered, length."""
    s, k = statistics, statistics["k"]
    errors = [
        f"± {100 * s[key]:.1f} (SE, {label})"
        for key, label in (
            ("standard_error_same_problems", f"same {s['problems_with_samples']} problems"),
            ("standard_error_new_problems", "new problems"),
        )
        if s[key] is not None
    ]
    if s["avg_at_k"] in (0.0, 1.0):  # the estimated errors are 0 because nothing varied
        same, new = s["interval_same_problems"], s["interval_new_problems"]
        errors = [
            f"(95 %: {_span(same)} on the same {s['problems_with_samples']} problems, {_span(new)} on new problems)"
        ]
    parts = [f"{name} avg@{k} = {100 * s['avg_at_k']:.1f} % ".lstrip() + " · ".join(errors)]
    for label, values in (("pass", s["pass_at_k"]), ("maj", s["majority_at_k"])):
        size = max(
            (
                int(j)
                for j, value in values.items()
                if value is not None and (label == "maj" or int(j) <= max(1, k // 2))
            ),
            default=None,
        )
        if size is not None:
            parts.append(f"{label}@{size} {100 * values[str(size)]:.1f}")
    coverage = "" if s["complete"] else f" (partial: n={s['n_min']}..{s['n_max']})"
    parts.append(f"{s['samples']}/{s['expected_samples']} samples{coverage}")
    parts.append(f"truncated {100 * s['truncation_rate']:.1f} %")
    parts.append(f"no box {100 * s['no_box_rate']:.1f} %")
    parts.append(f"mean {s['mean_tokens']:.0f} tokens")
    return " · ".join(parts)


def _span(interval: Sequence[float]) -> str:
    return f"{100 * interval[0]:.0f} to {100 * interval[1]:.0f}"
