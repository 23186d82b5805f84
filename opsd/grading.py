"""The one definition of answer equality: find the boxed answer in a response, compare it with the reference.

Used by evaluation, by rejection filters and by reward baselines. Imports neither torch, vLLM nor transformers, may be
called from any thread, and returns in bounded time on any text (see grading_worker.py). Rules, in order:

1. The final box decides (`BOX_POLICIES` says where it may stand). When it is empty or never closed, the response is
   wrong; an earlier box does not rescue it. A response without a box is wrong. Missing answers equal nothing.
2. Two integers are compared as integers ("025" = 25, "1,315" = 1315, "60^\\circ" = 60), two equal strings are equal.
3. An integer reference accepts only a single exact number ("\\frac{630}{2}", "m+n = 315"), never a list, an interval or
   an equation; words are compared as words; everything else is math-verify's to decide, in a killable process.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version

from opsd import answer_shape, answer_spelling, answer_text
from opsd.grading_worker import WORKER

BOX_POLICIES = {
    "outside_unfinished_think": "boxes count everywhere except in a thinking block that was never closed",
    "after_think": "boxes count only outside thinking blocks, finished or not",
    "anywhere": "every box counts, also in a thinking block that was cut off",
}
DEFAULT_BOX_POLICY = "outside_unfinished_think"
MAX_ANSWER_CHARS = 2000  # a longer boxed answer is compared as a string only
RULES_VERSION = 3  # raise when a rule changes: results with different rules are not comparable

_THINK_TAG = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)
_BOX_TOKEN = re.compile(r"(\\{1,4}(?:boxed|fbox)(?![a-zA-Z])\s*)(\{)?|\\[\\{}]|[{}]")
_BARE_BOX = re.compile(
    r"[+-]?[0-9][0-9,]*(?:\.[0-9]+)?"
    r"|\\(?:[dt]?frac|sqrt|text|textbf|mathbf|mathrm)(?![a-zA-Z])[^$\n]{1,80}?(?=\$|\n|\\\)|\\\]|$)"
)


@dataclass(frozen=True)
class Grade:
    """`extracted` is the text in the final box. `reason` says which rule decided: `int`, `string`, `math-verify`, or, for
    wrong answers only: `no_box`, `unterminated`, `empty`, `not_a_number`, `unparsable`, `too_large`, `timeout`,
    `memory`, `no_reference`. `truncated` repeats the caller's flag: it never changes the verdict."""

    correct: bool
    extracted: str | None
    reason: str
    truncated: bool = False


def grader_version() -> str:
    """Names the rules and the libraries behind them; stored with every result."""
    names = ("math-verify", "latex2sympy2_extended", "sympy")
    return f"opsd-grader/{RULES_VERSION} " + " ".join(f"{name}/{version(name)}" for name in names)


def extract_answer(response: str | None, *, box_policy: str = DEFAULT_BOX_POLICY) -> str | None:
    """The text in the final box; None when there is no box, or the final one is empty or not closed."""
    return _final_box(response, box_policy)[0]


def is_correct(response: str | None, answer: str | int | None, *, box_policy: str = DEFAULT_BOX_POLICY) -> bool:
    """Whether the final boxed answer of `response` equals the reference `answer`."""
    return grade(response, answer, box_policy=box_policy).correct


def grade(
    response: str | None,
    answer: str | int | None,
    *,
    truncated: bool = False,
    box_policy: str = DEFAULT_BOX_POLICY,
) -> Grade:
    """Grades one response against one reference and says why. `truncated`: sampling ended at the length limit."""
    extracted, problem = _final_box(response, box_policy)
    reference = "" if answer is None else str(answer).strip()
    if problem:
        return Grade(False, None, problem, truncated)
    if not reference:
        return Grade(False, extracted, "no_reference", truncated)
    correct, reason = compare_answers(extracted, reference)
    return Grade(correct, extracted, reason, truncated)


def compare_answers(extracted: str, reference: str) -> tuple[bool, str]:
    """(equal, reason) for two answers without their boxes. Order matters: the model's answer, then the reference."""
    if len(extracted) > MAX_ANSWER_CHARS or len(reference) > MAX_ANSWER_CHARS:
        return (True, "string") if extracted == reference else (False, "too_large")
    return _compare(extracted, reference)


@lru_cache(maxsize=8192)
def _compare(extracted: str, reference: str) -> tuple[bool, str]:
    written = extract_answer(reference) if "box" in reference else None
    written = written or reference
    answer, gold = answer_spelling.normalise(extracted), answer_spelling.normalise(written)
    if not answer:
        return False, "empty"
    label = answer_text.choice_label(gold)
    if label is None:
        answer, gold = answer_text.without_label(answer), answer_text.without_label(gold)
    measures = {answer_text.measure_of(answer), answer_text.measure_of(gold)}
    if len(measures) == 2 and None not in measures:  # 5 cm are not 5 m
        return False, "string"
    integer = answer_text.as_integer(gold)
    if integer is not None:
        verdict = _compare_with_integer(answer, integer)
        # "70,110" may be one number or two, "10%" may be 10 or 0.1, until another integer settles it; "1,024" is one number
        ambiguous = "%" in gold or ("," in gold and ",0" not in gold)
        if verdict[0] or not ambiguous or answer_text.as_integer(answer) is not None:
            return verdict
        gold = gold.replace(",", ", ")
    if answer_text.canonical(answer) == answer_text.canonical(gold):
        return True, "string"
    if answer_text.clock_time(gold):  # which the LaTeX grammar reads as a ratio
        return answer_text.clock_time(answer) == answer_text.clock_time(gold), "string"
    if "'" in gold or (len(gold) == 1 and gold.isalpha() and answer.isalpha()):
        return False, "string"  # minutes of arc, which it multiplies with the degrees; one name, whose case matters
    if answer_text.is_words(gold, written):
        return answer_text.as_words(answer) == answer_text.as_words(gold), "string"
    if label is not None:
        given = answer_text.choice_label(answer)
        if given is not None or re.search(r"\([A-J]\)", answer):
            return given == label, "string"
    verdict = _compare_expressions(answer, gold)
    if not verdict[0] and "%" in answer + gold:  # 62.5 is what a question for a percentage wants to hear
        answer, gold = (re.sub(r"\s*\\?%|\s*\\text\s*\{\s*percent\s*\}", "", text) for text in (answer, gold))
        return _compare_expressions(answer, gold)
    return verdict


def _compare_with_integer(answer: str, integer: str) -> tuple[bool, str]:
    if "mod" in answer:
        answer = answer.replace(r"\equiv", "=")
    value = answer_text.as_integer(answer)
    if value is None and "=" in answer:
        answer = answer_shape.value_of_assignment(answer)
        value = None if answer is None else answer_text.as_integer(answer)
    if value is not None:
        return value == integer, "int"
    if answer is not None and answer_text.is_decimal(answer):
        return False, "int"
    answer = None if answer is None else answer_text.strip_unit(answer)
    if answer is None or not answer_shape.is_single_number(answer):
        return False, "not_a_number"
    if answer_shape.is_too_large(answer):
        return False, "too_large"
    # "5(5)" is a product, which the LaTeX grammar reads as a function call.
    product = re.sub(r"(?<=[0-9)])(?<!_[0-9])\s?\((?=[0-9-])", r"\\cdot (", answer)
    verdict = WORKER.compare(integer, product, integer=True)
    return verdict.correct, verdict.reason


def _compare_expressions(answer: str, gold: str) -> tuple[bool, str]:
    answer, gold = answer_text.as_list(answer), answer_text.as_list(gold)
    if ("=" in answer) != ("=" in gold):
        answer, gold = answer_shape.value_of_assignment(answer), answer_shape.value_of_assignment(gold)
        if answer is None or gold is None:
            return False, "not_a_number"
        if answer_text.canonical(answer) == answer_text.canonical(gold):
            return True, "string"
    if answer_shape.is_too_large(answer) or answer_shape.is_too_large(gold):
        return False, "too_large"
    gold_base, answer_base = answer_text.number_base(gold), answer_text.number_base(answer)
    based = any(number and number[1] for number in (gold_base, answer_base))
    if based or ((gold_base or answer_base) and answer_shape.has_letters(gold + answer)):
        # "4210" answers a question asked in base 5; another base, or a base nobody asked for, does not.
        return gold_base is not None and answer_base in (gold_base, (gold_base[0], None)), "string"
    if answer_text.scale_words(answer) != answer_text.scale_words(gold):
        return False, "string"
    brackets = {answer_text.outer_bracket(text) for text in (answer, gold)}
    if brackets == {"{", "("}:  # math-verify takes a set for a tuple
        return False, "string"
    verdict = WORKER.compare(answer_text.strip_unit(gold), answer_text.strip_unit(answer), integer=False)
    return verdict.correct, verdict.reason


def _final_box(response: str | None, box_policy: str) -> tuple[str | None, str]:
    """(content, "") or (None, why there is none: `no_box`, `unterminated`, `empty`)."""
    if box_policy not in BOX_POLICIES:
        raise ValueError(f"box_policy={box_policy!r} must be one of {', '.join(BOX_POLICIES)}")
    content, problem = None, "no_box"
    for segment in _segments(response or "", box_policy):
        for found in _last_box(segment):
            content, problem = found
    return content, problem


def _segments(response: str, box_policy: str) -> list[str]:
    """The stretches between think tags in which boxes count, in order. Braces are never matched across a tag."""
    if box_policy == "anywhere":
        return _THINK_TAG.split(response)[::2]
    tags = list(_THINK_TAG.finditer(response))
    closings = [tag.end() for tag in tags if tag[1]]
    last_closing = closings[-1] if closings else 0
    unfinished = [tag.start() for tag in tags if not tag[1] and tag.start() >= last_closing]
    end = unfinished[0] if unfinished else len(response)
    if box_policy == "after_think":
        return [response[last_closing:end]]
    return _THINK_TAG.split(response[:end])[::2]


def _last_box(text: str) -> list[tuple[str | None, str]]:
    """The last outermost box of `text` as [(content, "")] or [(None, problem)]; [] without a box. One pass over the text."""
    open_braces: list[int | None] = []  # content start for a box, None for any other brace
    boxes: list[tuple[int, int]] = []  # (start, end) of the content of every closed box
    for token in _BOX_TOKEN.finditer(text):
        if token[1] and token[2]:
            open_braces.append(token.end())
        elif token[1]:
            bare = _BARE_BOX.match(text, token.end())
            if bare or token.end() == len(text):
                boxes.append((token.end(), bare.end() if bare else -1))
        elif token[0] == "{":
            open_braces.append(None)
        elif token[0] == "}" and open_braces:
            start = open_braces.pop()
            if start is not None:
                boxes.append((start, token.start()))
    boxes += [(start, -1) for start in open_braces if start is not None]
    if not boxes:
        return []
    start, end = max(boxes)
    for outer_start, outer_end in boxes:
        if outer_start < start and outer_end >= end >= 0:
            start, end = outer_start, outer_end
    if end < 0:
        return [(None, "unterminated")]
    content = text[start:end].strip()
    return [(content, "") if answer_spelling.normalise(content[:MAX_ANSWER_CHARS]) else (None, "empty")]
