r"""Reads the text of one answer: integers, units, words, choice letters. No comparison happens here.

Used by grading.py only, on what answer_spelling.normalise has cleaned; linear in its length like that.
"""

import re

from opsd.answer_spelling import WRAPPER, closing

_INTEGER = re.compile(r"([+-]?)\s*([0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.(0*))?")
_SCIENTIFIC = re.compile(
    r"([+-]?[0-9]+)(?:\.([0-9]+))?\s?\\(?:times|cdot)\s?10\s?\^\s?(?:\{\s?\+?([0-9]{1,3})\s?\}|([0-9]))"
)
_NUMBER_WITH_UNIT = re.compile(r"([+-]?\s*[0-9][0-9,]*(?:\.[0-9]+)?)\s*(\S.*)", re.DOTALL)
_UNIT = r"\\(?:text|textbf|textit|textrm|textsf|textnormal|mathrm|mbox|operatorname)\s*\{([^{}]*)\}\s*(?:\^\s*\{?-?[0-9]\}?)?"
_TEXT_UNIT = re.compile(rf"\s*(?:{_UNIT}\s*(?:[/.]|\\cdot)?\s*)+")
_FRACTION_OF_UNITS = re.compile(rf"\s*\\frac\{{\s*{_UNIT}\s*\}}\{{\s*{_UNIT}\s*\}}$")
_SHORT_WORDS = frozenset(("yes", "no", "odd", "one", "two", "six", "ten", "red", "tie", "all", "any"))
_BASES = {
    "two": "2",
    "three": "3",
    "four": "4",
    "five": "5",
    "six": "6",
    "seven": "7",
    "eight": "8",
    "nine": "9",
    "ten": "10",
}
_UNIT_LETTERS = frozenset("mgshdLlNJWVAKCF")  # of units that are one letter; any other letter is a name
_MEASURES = frozenset(
    "mm cm dm m km in ft yd mi mg g kg t ms s min h ml cl l".split()
)  # symbols that say how large a unit is
_PLAIN_UNIT = re.compile(r"[^\W\d_]{2,}(?:[. /-]+[^\W\d_]{2,})*\.?(?:\s?\^\s?\{?[23]\}?)?|m/s")
_SCALES = "dozens?|hundreds?|thousands?|millions?|billions?|trillions?|quadrillions?|lakhs?|crores?|tenths?|hundredths?|thousandths?"
_NOT_A_UNIT = re.compile(
    r"\b(?:or|and|to|of|over|divided|times|plus|minus|half|halves|thirds?|" + _SCALES + "|not|pi"
    r"|factorial|squared|cubed|choose|mod|sqrt|sin|cos|tan|log|ln|exp|more|less|least|most|about|approximately|tens|bn|below|incorrect|wrong)\b|[十百千万亿兆分或和与至半π]",
    re.IGNORECASE,
)


def as_integer(text: str) -> str | None:
    """The integer that `text` (normalised) denotes, as a decimal string without leading zeros; None when it is not one."""
    text = re.sub(
        r"^\\text\s*\{[^{}0-9]*\b(?:answer|is|are|equals|exactly|total)\b\s*[:=]?\s*\}\s*(?=[+-]?[0-9])",
        "",
        text,
        flags=re.I,
    )
    text = re.sub(r"\s*\\pmod\s*\{?\s*[0-9]+\s*\}?$|\s*\(mod\s*[0-9]+\)$", "", text)
    text = re.sub(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degrees?|\\%|%)(?:\s*[CF])?$", "", strip_unit(text)).strip()
    while text.startswith("(") and closing(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    previous = None
    while text != previous and len(text) > 2:  # "\text{025}^\circ", "{025}"
        previous = text
        wrapper = re.match(rf"(?:{WRAPPER})?\{{", text)
        if wrapper and closing(text, wrapper.end() - 1) == len(text) - 1:
            text = text[wrapper.end() : -1].strip()
    text = re.sub(r"(?<=[0-9])_\s?\{?10\}?$", "", text)
    scientific = _SCIENTIFIC.fullmatch(text)
    if scientific:
        whole, decimals, exponent = scientific[1], scientific[2] or "", int(scientific[3] or scientific[4])
        text = whole + decimals.ljust(exponent, "0") if len(decimals) <= exponent else text
    match = _INTEGER.fullmatch(text)
    if match is None:
        return None
    digits = match[2].replace(",", "").lstrip("0") or "0"
    return f"-{digits}" if match[1] == "-" and digits != "0" else digits


def strip_unit(text: str) -> str:
    r"""Drops a trailing unit: "\text{ paths}", "cm^2", "degrees". Words that change the value are not units."""
    number = _NUMBER_WITH_UNIT.fullmatch(text)
    if number and _PLAIN_UNIT.fullmatch(number[2]) and not _NOT_A_UNIT.search(number[2]):
        return number[1]
    if number and re.fullmatch(r"[\u3400-\u9fff]{1,4}", number[2]) and not _NOT_A_UNIT.search(number[2]):
        return number[1]
    text = _FRACTION_OF_UNITS.sub("", text)
    for start in (match.start() for match in re.finditer(r"\s*\\(?:text|mathrm|mbox|operatorname)", text)):
        unit = _TEXT_UNIT.fullmatch(text, start)
        if unit and text[:start].strip() and not text[:start].rstrip().endswith(tuple("=+-*/^_(,")):
            words = re.sub(r"\\[a-z]+|[{}^0-9]", " ", unit[0])
            inside = [
                re.sub(r"\^\s*\{?-?[0-9]\}?", "", part) for part in re.findall(r"\{([^{}]*[^\W\d][^{}]*)\}", unit[0])
            ]
            letters = set(re.findall(r"(?<![^\W\d_])[a-zA-Z](?![^\W\d_])", words))
            numbers = any(re.search(r"[0-9]", part) and len(part) > 1 for part in inside)
            if (
                inside
                and letters <= _UNIT_LETTERS
                and "\\pi" not in unit[0]
                and not numbers
                and not _NOT_A_UNIT.search(words)
            ):
                return text[:start].rstrip()
    return text


def measure_of(text: str) -> str | None:
    r"""The unit of "5\text{ cm}^2" as "cm2", when it is a common symbol of measure; None for anything else."""
    unit = re.sub(r"\\[a-z]+|[^a-zA-Z0-9]", "", text[len(strip_unit(text)) :])
    return unit if unit.rstrip("23") in _MEASURES else None


def canonical(text: str) -> str:
    r"""For string equality: no spaces, no braces around a single character ("x^{2}" is "x^2"), \text{} without meaning."""
    text = re.sub(rf"{WRAPPER}\{{([^{{}}]*)\}}", r"\1", text)
    text = re.sub(r"(?<=[\^_])\{([0-9a-zA-Z])\}", r"\1", text)
    return re.sub(r"\s+", "", re.sub(r"(\\[a-zA-Z]+)\s+(?=[a-zA-Z])", r"\1{}", text))


def is_decimal(text: str) -> bool:
    """Whether `text` is a plain decimal number such as "2.94" or "24.9999"."""
    return bool(re.fullmatch(r"[+-]?[0-9]*\.[0-9]+", strip_unit(text).strip()))


def as_list(text: str) -> str:
    """Writes "70 or 110" and "-2 and 1" with commas."""
    return re.sub(
        rf"\s*,?\s*(?:{WRAPPER}\{{\s*,?\s*(?:or|and)\s*\}}|(?<![a-zA-Z])(?:or|and)(?![a-zA-Z]))\s*", ", ", text
    )


def is_words(text: str, written: str = "") -> bool:
    r"""Whether a reference is prose ("Evelyn", "\text{even}") and not a product of variables. `written`: it before `normalise`."""
    if re.fullmatch(r"\s*\$?\s*\\text(?:bf|it|rm)?\s*\{\s*[^\W\d_]{2,}[^{}\\^=+*/<>]*\}\s*\$?\s*", written):
        return True
    plain = re.sub(rf"{WRAPPER}\{{([^{{}}]*)\}}", r" \1 ", text).strip()
    words = re.findall(r"[^\W\d_]+", plain)
    prose = any(len(word) >= 4 or word.lower() in _SHORT_WORDS or re.fullmatch("[A-Z][a-z]{2}", word) for word in words)
    return bool(re.fullmatch(r"[^\W\d_][^\d_\\^=+*/{}()\[\]]*", plain)) and prose


def as_words(text: str) -> str:
    """Letters and digits of a phrase in lower case, single spaces between words; no articles, no plural, "and" is a comma."""
    text = re.sub(rf"{WRAPPER}\{{([^{{}}]*)\}}", r" \1 ", text)
    words = re.findall(r"[\w\\^+*/=<>-]+", text.casefold())
    return " ".join(
        word[:-1] if len(word) > 4 and word.endswith("s") else word
        for word in words
        if word not in ("and", "a", "an", "the")
    )


def choice_label(text: str) -> str | None:
    r"""The letter of a multiple-choice answer: "C", "(C)", "Option C", "\textbf{(C)}\ 45", "C. 45"; None when there are several."""
    plain = re.sub(rf"{WRAPPER}\{{([^{{}}]*)\}}", r"\1", text).strip()
    match = re.fullmatch(
        r"(?:(?:option|choice|answer)\s+)?(?:\(([A-J])\)(.*)|([A-J])(?:[.):]\s*(.*))?)",
        plain,
        re.DOTALL | re.IGNORECASE,
    )
    if match is None or not (match[1] or match[3]).isupper():
        return None
    rest = match[2] or match[4] or ""
    return None if re.search(r"\([A-J]\)|\b(?:or|and)\s+[A-J]\b|^\s*,?\s*[A-J]\b", rest) else match[1] or match[3]


def without_label(text: str) -> str:
    r"""The value behind a choice's letter: 25 of "(C) 25" and of "\textbf{(C)}\ 25"."""
    return re.sub(
        rf"^(?:{WRAPPER}\{{)?\s*(?:\([A-J]\)|[A-J][.):])\s*\}}?\s*(?=[+-]?(?:[0-9]|\\(?:frac|sqrt|pi|binom)))", "", text
    )


def number_base(text: str) -> tuple[str, str | None] | None:
    """(digits, base) for "4210_5", "4210_{five}" or "4210 (base 5)", (digits, None) for plain digits; else None."""
    compact = re.sub(r"\(?base_?\(?([0-9]+|[a-z]+)\)?$", r"_\1", canonical(text))
    match = re.fullmatch(r"\(?([0-9A-F]+)\)?_[{(]?([0-9]+|[a-z]+)[})]?", compact)
    if match and (match[2] in _BASES or match[2].isdigit()):
        return match[1].lstrip("0") or "0", _BASES.get(match[2], match[2])
    return (text.lstrip("0") or "0", None) if re.fullmatch(r"[0-9A-F]+", text) else None


def scale_words(text: str) -> list[str]:
    """Words that multiply a number ("1.5 million"), which math-verify drops."""
    found = re.findall(rf"\b({_SCALES})\b", text, re.IGNORECASE)
    return [word.lower().rstrip("s") for word in found]


def outer_bracket(text: str) -> str | None:
    r"""The bracket around a whole list: "{" for "\{1, 2\}", "(" for "(1, 2)", None for anything else."""
    text = text.strip()
    if text.startswith(r"\{") and text.endswith(r"\}") and text.count(r"\{") == 1:
        return "{"
    return "(" if text.startswith("(") and "," in text and closing(text, 0) == len(text) - 1 else None


def clock_time(text: str) -> str | None:
    r"""A time of day as "6:00" or "6:00pm"; None for anything else."""
    compact = canonical(text).lower().replace(".", "")
    return compact if re.fullmatch(r"[0-9]{1,2}:[0-9]{2}(?:[ap]m)?", compact) else None
