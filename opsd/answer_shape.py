"""Says what kind of thing an answer is: one number, an assignment, an equation, or something too large to evaluate.

Used by grading.py only, on text that answer_text.normalise has cleaned.
"""

import re

from opsd.answer_text import WRAPPER, as_integer

_RELATIONS = re.compile(
    r"[<>;:?&']|[0-9)}]\s?_|\\(?:pm|mp|leq?|geq?|lt|gt|neq?|approx|sim|simeq|equiv|in|notin|cup|cap|to|or|and|lor|land|vee|wedge|implies|iff|ldots|dots"
    r"|cdots|infty|rightarrow|Rightarrow|begin|text|mathrm|mbox)(?![a-zA-Z])|[^\x00-\x7f]"
)
_POWER = re.compile(r"([0-9]+(?:\.[0-9]+)?)\^(?:\{([0-9]+)\}|\(([0-9]+)\)|([0-9]+))(?![\^0-9])")
MAX_DIGITS = 4000  # below the 4300 digits at which Python refuses to print an integer
MAX_NESTING = 40


def value_of_assignment(text: str) -> str | None:
    """Right side of "m+n = 20+25 = 45" (left side of "45 = m+n"); None when the relation is an equation in its own right.

    "3x-y+13 = 0" states a line, not the number 0. A left side names a quantity unless it has a constant term besides
    letters, or is made of x, y, z with coefficients or powers, or equals zero and is more than a sum of names.
    """
    if "=" not in text:
        return text
    same_name = re.fullmatch(r"\s*(\S[^=,]*?)\s*=([^=,]+)(?:,\s*\1\s*=[^=,]+)+", text)
    if same_name:  # "x=1, x=3"
        return re.sub(rf"{re.escape(same_name[1])}\s*=", "", text).strip()
    pieces = [piece.strip() for piece in text.split("=")]
    if not all(pieces) or "," in re.sub(r"\([^()]*\)", "", "".join(pieces[:-1])):
        return None
    names, value = pieces[0], pieces[-1]
    if _has_letters(value) and not _has_letters(names):
        names, value = value, names
    return value if _names_a_quantity(names, value) else None


def _has_letters(text: str) -> bool:
    return bool(re.search(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", text)))


def _names_a_quantity(names: str, value: str) -> bool:
    names = re.sub(rf"{WRAPPER}\{{[^{{}}]*\}}", "W", names)
    if re.search(r"[<>]|\\(?:leq?|geq?|neq?|approx|equiv|implies|iff|text)(?![a-zA-Z])", names):
        return False
    if not _has_letters(names):
        return True
    depth_free = re.sub(r"[\s{}]", "", re.sub(r"\\[a-zA-Z]+", r"\\", names))
    terms = [term for term in re.split(r"[+-](?![^(]*\))", depth_free) if term]
    if any(not _has_letters(term) and "\\" not in term for term in terms):
        return False
    letters = set(re.findall(r"[a-zA-Z]", depth_free))
    zero = as_integer(value) == "0"
    if letters <= set("xyz"):
        plain = all(re.fullmatch(r"(?:[xyz](?:_[0-9a-z])?)+", term) for term in terms)
        return plain and (len(terms) == 1 and len(letters) == 1 or not zero)
    if zero and len(terms) > 1 and letters & set("xyz"):
        return False
    return not zero or not any(re.match(r"[0-9]", term) for term in terms)


def is_single_number(text: str) -> bool:
    """Whether text can denote one number at all: no letters, lists, relations, or digits parted by spaces."""
    if _RELATIONS.search(text) or "," in text or "=" in text or "!=" in text:
        return False
    return (
        not _has_letters(text) and not re.search(r"(?<!_)[0-9]\s+[0-9]", text) and bool(re.search(r"[0-9]|\\pi", text))
    )


def is_too_large(text: str) -> bool:
    """Whether evaluating `text` would build an astronomically large number or recurse deeply (power towers, factorials)."""
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING or text.count("^") + text.count("**") > 200:
        return True
    text = re.sub(r"\s+|\\left|\\right", "", text.replace("**", "^"))
    for factorial in re.findall(r"([0-9]+)\)?!", text):
        if len(factorial) > 3:
            return True
    if re.search(r"binom|!|\\(?:sum|prod|int)", text) and re.search(r"[0-9]{6}|!\)+!", text):
        return True
    while powers := list(_POWER.finditer(text)):  # from the innermost exponent outwards
        match = powers[-1]
        base, exponent = match[1], match[2] or match[3] or match[4]
        if len(exponent) > 5 or len(base) * int(exponent) > MAX_DIGITS:
            return True
        value = "1" if "." in base else str(int(base) ** int(exponent))
        text = text[: match.start()] + value + text[match.end() :]
    return False
