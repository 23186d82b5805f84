"""Sampling weights that give the kept rows a benchmark's distribution of answers, and a seeded draw by such weights.

Used by `data_filter.py`. Answers are compared by kind: sign and number of digits of an integer, or no integer at all.
"""

import heapq
import math
import random
import re
from collections import Counter
from collections.abc import Sequence

_INTEGER = re.compile(r"(-?)0*(\d+)", re.ASCII)


def answer_kind(answer: str | None) -> str:
    """An integer's sign and digits, such as `-d` or `ddd`, else `other`; leading zeros do not count (AIME's `025`)."""
    integer = _INTEGER.fullmatch(answer) if answer else None
    return integer[1] + "d" * len(integer[2]) if integer else "other"


def kind_weights(kept: Counter[str], target: Counter[str]) -> dict[str, float]:
    """Weight of one row of each kind: target share / kept share, scaled to mean 1 over the kept rows.

    Kinds of the target without kept rows cannot be reached and are left out of its shares.
    `kept`, `target`: number of rows and of benchmark answers of each kind.
    """
    covered = {kind: target[kind] for kind in kept if target[kind]}
    if not covered:
        raise ValueError(
            f"target_answers: none of its kinds ({', '.join(sorted(target)) or 'it is empty'}) is among the kept rows "
            f"({', '.join(sorted(kept)) or 'none'}); use another benchmark or other rules"
        )
    scale = kept.total() / sum(covered.values())
    return {kind: scale * covered.get(kind, 0) / kept[kind] for kind in sorted(kept)}


def draw(weights: Sequence[float], count: int, seed: int) -> list[int]:
    """Indices, in order, of `count` rows drawn without replacement, the next one always with probability ~ its weight.

    Keys log(u) / w, the largest win (Efraimidis and Spirakis 2006). One u per row: seed and order decide the draw.
    """
    generator = random.Random(seed)
    keys = []
    for index, weight in enumerate(weights):
        uniform = 1.0 - generator.random()  # (0, 1]
        if weight > 0:
            keys.append((math.log(uniform) / weight, index))
    if not 1 <= count <= len(keys):
        raise ValueError(f"sample={count} must be from 1 to {len(keys)}, the kept rows with a weight above zero")
    return sorted(index for _, index in heapq.nlargest(count, keys))
