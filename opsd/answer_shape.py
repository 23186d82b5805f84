"""Says what kind of thing an answer is: one number, an assignment, an equation, or something too large to evaluate.

Used by grading.py only, on text that answer_spelling.normalise has cleaned.
"""

import re

from opsd.answer_spelling import WRAPPER
from opsd.answer_text import as_integer

_RELATIONS = re.compile(
    r"[<>;:?&']|\.\.|[0-9)}]\s?_|\\(?:pm|mp|leq?|geq?|lt|gt|neq?|approx|sim|simeq|equiv|in|notin|cup|cap|to|or|and|lor|land|vee|wedge|implies|iff|ldots|dots"
    r"|cdots|infty|rightarrow|Rightarrow|begin|text|mathrm|mbox)(?![a-zA-Z])|[^\x00-\x7f]"
)
_SEVERAL_STATEMENTS = re.compile(r"\b(?:or|and|if|when|where|not)\b|\\\\", re.IGNORECASE)
_TUPLE_OF_NAMES = re.compile(r"\(\s*[a-zA-Z](?:_\{?\w+\}?)?(?:\s*,\s*[a-zA-Z](?:_\{?\w+\}?)?)+\s*\)")
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
    value = r"\s*=\s*(?:\([^()]*\)|[^=,]+)"
    same_name = re.fullmatch(rf"\s*(\([^()=]*\)|\S[^=,(]*?){value}(?:,\s*\1{value})+", text)
    if same_name:  # "x=1, x=3"
        return re.sub(rf"{re.escape(same_name[1])}\s*=", "", text).strip()
    coordinates = re.fullmatch(r"\s*([a-zA-Z])\s*=([^=,]+)(?:,\s*([a-zA-Z])\s*=([^=,]+)){1,3}", text)
    if coordinates:  # "x=3, y=2" is the point (3, 2)
        named = [part.split("=") for part in text.split(",")]
        in_order = all(a[0].strip() < b[0].strip() for a, b in zip(named, named[1:], strict=False))
        return f"({', '.join(value.strip() for _, value in named)})" if in_order else None
    pieces = [piece.strip() for piece in text.split("=")]
    if not all(pieces) or "," in re.sub(r"\([^()]*\)", "", "".join(pieces[:-1])):
        return None
    if _SEVERAL_STATEMENTS.search(pieces[0]) or any(_says_more(piece) for piece in pieces[1:-1]):
        return None
    names, value = pieces[0], pieces[-1]
    if has_letters(value) and not has_letters(names):
        names, value = value, names
    return value if _names_a_quantity(names, value) else None


def _says_more(middle: str) -> bool:
    """Whether the middle of a chain "a = b = c" ends one statement and begins another, as in "x=25, y=26"."""
    middle = re.sub(r"[_^]\s*\{[^{}]*\}", "", middle)
    return bool(
        _RELATIONS.search(middle) or _SEVERAL_STATEMENTS.search(middle) or re.search(r"[0-9)}]\s+[a-zA-Z]", middle)
    )


def has_letters(text: str) -> bool:
    return bool(re.search(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", text)))


def _names_a_quantity(names: str, value: str) -> bool:
    if _TUPLE_OF_NAMES.fullmatch(names.strip()):
        return True
    names = re.sub(r"\|[a-zA-Z_0-9]+\|(?:\^\{?[0-9]\}?)?", "W", names)
    names = re.sub(rf"{WRAPPER}\{{[^{{}}]*\}}", "W", names)
    if re.search(r"[<>]|\\(?:leq?|geq?|neq?|approx|equiv|implies|iff|text)(?![a-zA-Z])", names):
        return False
    if not has_letters(names):
        return True
    if names.strip().startswith("-"):
        return False
    depth_free = re.sub(r"[\s{}]", "", re.sub(r"\\[a-zA-Z]+", r"\\", names))
    terms = [term for term in re.split(r"[+-](?![^(]*\))", depth_free) if term]
    if any(not has_letters(term) and "\\" not in term for term in terms):
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
        not has_letters(text) and not re.search(r"(?<!_)[0-9]\s+[0-9]", text) and bool(re.search(r"[0-9]|\\pi", text))
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
