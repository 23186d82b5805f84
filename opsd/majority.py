"""Majority vote over samples, maj@j: what a user would get who asks `j` times and takes the most frequent answer.

Used by evaluation.py. Answers are classed by grade and normalised text; nothing is compared symbolically here.
"""

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from opsd import answer_spelling, answer_text
from opsd.grading import MAX_ANSWER_CHARS

MAJORITY_SEED = 0
MAX_SUBSETS = 1000  # per problem; below this, every subset is counted and majority@j is exact


def majority_at(groups: Sequence[Sequence[dict]], j: int) -> float | None:
    """Majority vote of `j` samples, averaged over subsets; an unanswered sample votes for "unanswered"; ties share credit."""
    values = [_majority_credit([_answer_class(sample) for sample in group], j) for group in groups if len(group) >= j]
    return fmean(values) if values else None


def _majority_credit(votes: list[str], j: int) -> float:
    if math.comb(len(votes), j) <= MAX_SUBSETS:
        subsets = itertools.combinations(votes, j)
    else:
        generator = random.Random(MAJORITY_SEED)
        subsets = (generator.sample(votes, j) for _ in range(MAX_SUBSETS))
    credits = []
    for subset in subsets:
        tally = Counter(subset)
        best = max(tally.values())
        winners = [answer for answer, votes_for in tally.items() if votes_for == best]
        credits.append(("correct" in winners) / len(winners))
    return fmean(credits)


def _answer_class(sample: dict) -> str:
    """Every correct sample is one class, whatever its spelling; wrong ones are grouped by integer value or by text."""
    if sample["correct"]:
        return "correct"
    if sample["extracted"] is None:
        return "unanswered"
    text = answer_spelling.normalise(sample["extracted"][:MAX_ANSWER_CHARS])
    return "wrong " + (answer_text.as_integer(text) or answer_text.canonical(text))


def majority_sizes(k: int) -> list[int]:
    return sorted({2**power for power in range(k.bit_length()) if 2**power <= k} | {k})
