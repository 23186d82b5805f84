"""Compares texts by normalised words: does a problem repeat a benchmark problem, or give its own solution away?

Used by `filters.py`. Wording is compared, meaning is not: a translated or rewritten copy is not found.
"""

import re
import unicodedata
from dataclasses import dataclass

NGRAM_WORDS = 8
TAIL_WORDS = 12  # the end of a solution that no clean statement repeats, if the answer is part of it
SHORT_SOLUTION_WORDS = 6  # a whole solution with fewer words than this may occur in a statement by chance
HEADED_WORDS = 8

_LAYOUT = re.compile(r"\\(?:left|right|big|Big|displaystyle|textstyle|limits|quad|qquad|boxed|[,;:! ])(?![a-zA-Z])")
_FRACTION = re.compile(r"\\[dt]frac(?![a-zA-Z])")
_WORD = re.compile(r"[^\W\d_]+|\d+|[-+*/=<>^]")
_SOLUTION_HEADING = re.compile(r"^[\W_]*(?:solution|proof|answer)\b[^\w\n]*(?:[:.]|$)", re.IGNORECASE | re.MULTILINE)


def normalised_words(text: str) -> list[str]:
    """Lower-case words, numbers and operators; layout commands, punctuation, spacing and brackets do not count."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return _WORD.findall(_FRACTION.sub(r"\\frac", _LAYOUT.sub(" ", text)).lower())


def leaks_solution(problem: str, solution: str, answer: str | None) -> bool:
    """True where the statement contains what it asks for. Three signs, each of which a clean statement does not show:

    - the answer in a box;
    - the end of the solution, answer included, word for word (without the answer, or at its beginning, a solution
      often restates the problem, which proves nothing);
    - a heading such as "Solution:" and below it several words that include the answer.
    """
    if answer and f"\\boxed{{{_squeeze(answer)}}}" in _squeeze(problem):
        return True
    asked = normalised_words(answer or "")
    tail = _tail_with_answer(normalised_words(solution), asked)
    if len(tail) >= SHORT_SOLUTION_WORDS and _contains(normalised_words(problem), tail):
        return True
    heading = _SOLUTION_HEADING.search(problem)
    if heading is None or not asked:
        return False
    below = normalised_words(problem[heading.end() :])
    return len(below) >= HEADED_WORDS and _contains(below, asked)


@dataclass(frozen=True)
class Overlap:
    """How much of a benchmark problem a text repeats."""

    benchmark_id: str
    share: float  # of the benchmark problem's n-grams, 0-1; 1.0 when the normalised texts are equal
    identical: bool


class BenchmarkIndex:
    """The n-grams of a benchmark's problems, for looking up one text after another."""

    def __init__(self, problems: dict[str, str], threshold: float):
        """`problems`: id -> statement; `threshold`: smallest share (0-1] of its n-grams that makes a copy."""
        if not 0 < threshold <= 1:
            raise ValueError(f"benchmark_overlap={threshold} must be in (0, 1]; use 1 for whole copies only")
        self.threshold = threshold
        self._by_text: dict[tuple[str, ...], str] = {}
        self._by_ngram: dict[tuple[str, ...], list[str]] = {}
        self._sizes: dict[str, int] = {}
        for benchmark_id, problem in problems.items():
            words = normalised_words(problem)
            self._by_text.setdefault(tuple(words), benchmark_id)
            grams = _ngrams(words)
            self._sizes[benchmark_id] = len(grams)
            for gram in grams:
                self._by_ngram.setdefault(gram, []).append(benchmark_id)

    def lookup(self, text: str) -> Overlap | None:
        """The benchmark problem that `text` repeats most, if at least the threshold."""
        words = normalised_words(text)
        if (same := self._by_text.get(tuple(words))) is not None:
            return Overlap(same, 1.0, identical=True)
        shared: dict[str, int] = {}
        for gram in _ngrams(words) & self._by_ngram.keys():
            for benchmark_id in self._by_ngram[gram]:
                shared[benchmark_id] = shared.get(benchmark_id, 0) + 1
        if not shared:
            return None
        best = max(self._sizes, key=lambda name: shared.get(name, 0) / max(self._sizes[name], 1))
        share = shared[best] / self._sizes[best]
        return Overlap(best, share, identical=False) if share >= self.threshold else None


def _tail_with_answer(words: list[str], answer: list[str]) -> list[str]:
    """The last TAIL_WORDS words, reaching back to the last place that gives the answer; all words if none does."""
    for start in range(len(words) - len(answer), -1, -1):
        if answer and words[start : start + len(answer)] == answer:
            return words[max(0, min(start, len(words) - TAIL_WORDS)) :]
    return words


def _contains(words: list[str], part: list[str]) -> bool:
    return f" {' '.join(part)} " in f" {' '.join(words)} "


def _ngrams(words: list[str]) -> set[tuple[str, ...]]:
    return set(zip(*(words[start:] for start in range(NGRAM_WORDS)), strict=False))


def _squeeze(text: str) -> str:
    return "".join(text.split()).replace("$", "")
