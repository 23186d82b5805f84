r"""Reads the text of one answer: integers, units, words, choice letters. No comparison happens here.

Used by grading.py only. Answers are at most a few thousand characters long when they arrive; everything is linear in
that: no pattern may repeat a group whose parts can match the same text in two ways.
"""

import re

_CHARACTERS = str.maketrans(
    {chr(0xFF10 + digit): str(digit) for digit in range(10)}
    | {"−": "-", "–": "-", "－": "-", "＋": "+", "，": ",", "（": "(", "）": ")", "＝": "=", "％": "%", "\u00a0": " "}
    | {"×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "°": r"^\circ", "π": r"\pi ", "∞": r"\infty ", "∪": r"\cup "}
    | {
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "≈": r"\approx ",
        "±": r"\pm ",
        "\u200b": "",
        "\u2009": " ",
        "\u202f": " ",
    }
)
_SIZE = r"\\(?:displaystyle|textstyle|scriptstyle|tiny|small|normalsize|large|Large|LARGE|huge|Huge|bf|rm|it|left|right|[bB]igg?[lr]?)"
WRAPPER = r"\\(?:text|textbf|textit|textrm|texttt|textsf|textnormal|emph|mathrm|mathbf|mathit|mathsf|mathtt|mbox|hbox|boxed|fbox|bm"
WRAPPER += r"|boldsymbol|underline|ensuremath|operatorname|pmb)\s*"
_DIGIT_GROUP = re.compile(r"(?<=[0-9])(?:\\[,;:! ]|\{,\}|\{\\,\}|\\thinspace)(?=[0-9]{3}(?![0-9]))")
_REPEATING = re.compile(r"(?<![0-9.,}])([0-9]{0,9})\.([0-9]{0,9})\\(?:overline|bar)\s*\{?([0-9]{1,9})(?![0-9])\}?")
_INTEGER = re.compile(r"([+-]?)\s*([0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.(0*))?")
_NUMBER_WITH_UNIT = re.compile(r"([+-]?\s*[0-9][0-9,]*(?:\.[0-9]+)?)\s*(\S.*)", re.DOTALL)
_TEXT_UNIT = re.compile(
    r"\s*(?:\\(?:text|textbf|textit|textrm|mathrm|mbox|operatorname)\s*\{([^{}]*)\}\s*(?:\^\s*\{?[0-9]\}?)?\s*[/.]?\s*)+"
)
_PLAIN_UNIT = re.compile(r"[^\W\d_]{2,}(?:[. /-]+[^\W\d_]{2,})*\.?(?:\^\s?\{?[23]\}?)?|m/s")
_NOT_A_UNIT = re.compile(
    r"\b(?:or|and|to|of|over|divided|times|plus|minus|half|halves|thirds?|dozens?|hundreds?|thousands?|millions?|billions?|trillions?|not|pi"
    r"|factorial|squared|cubed|choose|mod|sqrt|sin|cos|tan|log|ln|exp|more|less|least|most|about|approximately)\b|[十百千万亿兆分或和与至半π]",
    re.IGNORECASE,
)


def normalise(answer: str) -> str:
    """Drops what does not change the value: delimiters, sizes, spacing, fonts and braces around the whole, final dots."""
    text = answer.translate(_CHARACTERS)
    text = re.sub(r"\\!|\\hspace\*?\{[^{}]*\}|\\phantom\{[^{}]*\}", "", re.sub(r"\s+", " ", text))
    text = re.sub(r"\\(?:left|right)\s*\.", "", text.replace(r"\bmod", r"\mod"))
    text = re.sub(r"\{\s*\^\s*\\circ\s*\}", r"^\\circ", text)
    text = _REPEATING.sub(_fraction, text.replace(r"\varnothing", r"\emptyset"))
    text = _DIGIT_GROUP.sub("", text.replace("{,}", ",") if "{,}" in text else text)
    text = re.sub(r"(?<!\\)\\(?:[\[\]()$,;: ]|(?:qquad|quad|thinspace)(?![a-zA-Z]))|[$~]", " ", text)
    text = re.sub(WRAPPER + r"\{\s*\}", "", text)
    text = re.sub(_SIZE + r"(?![a-zA-Z])\s*|\\(?:text)?color\s*\{[^{}]*\}", "", text)
    text = re.sub(r"(?<=[0-9)}])\*\*(-?[0-9]+)(?![0-9]|\*\*)", r"^{\1}", re.sub(r"\\[dtc]frac", r"\\frac", text))
    text = re.sub(r"\\frac\s*(?:([0-9])|(\\[a-zA-Z]+))\s*(?:([0-9a-zA-Z])|(\\[a-zA-Z]+))", r"\\frac{\1\2}{\3\4}", text)
    text = re.sub(r"\\frac\s*(\{[^{}]*\})\s*([0-9a-zA-Z])", r"\\frac\1{\2}", text)
    text = re.sub(r"\\frac\s*([0-9a-zA-Z])\s*(?=\{)", r"\\frac{\1}", text)
    previous = None
    while text != previous:
        previous = text
        text = text.strip(" \t\r\n\"'`*").rstrip(".,;:。、；")
        wrapper = re.match(rf"(?:{WRAPPER})?\{{", text)
        if wrapper and text.endswith("}") and _closing(text, wrapper.end() - 1) == len(text) - 1:
            text = text[wrapper.end() : -1]
        text = re.sub(
            r"^(?:the\s+)?(?:final\s+)?answer\s*(?:is\b|:|=)\s*|^\(?答案[是为]?[:：]?\s*", "", text, flags=re.IGNORECASE
        )
    if re.fullmatch(r"[+-]?[0-9]+(?:\.[0-9]+)?[eE][+-]?[0-9]+", text):
        text = re.sub(r"[eE]\+?(-?[0-9]+)", r" \\times 10^{\1}", text)
    return text


def _fraction(repeating: re.Match) -> str:
    r"""The exact value of a repeating decimal: 0.1\overline{6} is (16 - 1) / 90."""
    whole, fixed, period = repeating.groups()
    numerator = int(whole + fixed + period) - int(whole + fixed or "0")
    return rf"\frac{{{numerator}}}{{{10 ** len(fixed) * (10 ** len(period) - 1)}}}"


def _closing(text: str, opening: int) -> int:
    """Index of the bracket that closes the one at `opening` ("{" or "("), -1 when there is none."""
    depth, pair = 0, "{}" if text[opening] == "{" else "()"
    for index in range(opening, len(text)):
        if text[index] in pair and text[index - 1 : index] != "\\":
            depth += 1 if text[index] == pair[0] else -1
            if depth == 0:
                return index
    return -1


def as_integer(text: str) -> str | None:
    """The integer that `text` (normalised) denotes, as a decimal string without leading zeros; None when it is not one."""
    text = re.sub(r"^(?:\\(?:text|textbf|mathrm)\s*\{)?\s*\([A-J]\)\s*\}?\s*(?=[+-]?[0-9])", "", text)  # "(C) 25"
    text = re.sub(
        r"^\\text\s*\{[^{}0-9]*\b(?:answer|is|equals|total)\b\s*[:=]?\s*\}\s*(?=[+-]?[0-9])", "", text, flags=re.I
    )
    text = re.sub(r"\s*\\pmod\s*\{?\s*[0-9]+\s*\}?$|\s*\(mod\s*[0-9]+\)$", "", text)
    text = re.sub(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degrees?|\\%|%)(?:\s*[CF])?$", "", strip_unit(text)).strip()
    while text.startswith("(") and _closing(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    previous = None
    while text != previous and len(text) > 2:  # "\text{025}^\circ", "{025}"
        previous = text
        wrapper = re.match(rf"(?:{WRAPPER})?\{{", text)
        if wrapper and _closing(text, wrapper.end() - 1) == len(text) - 1:
            text = text[wrapper.end() : -1].strip()
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
    for start in (match.start() for match in re.finditer(r"\s*\\(?:text|mathrm|mbox|operatorname)", text)):
        unit = _TEXT_UNIT.fullmatch(text, start)
        if unit and text[:start].strip() and not text[:start].rstrip().endswith(tuple("=+-*/^_(,")):
            words = re.sub(r"\\[a-z]+|[{}^0-9]", " ", unit[0])
            inside = re.findall(r"\{([^{}]*)\}", unit[0])
            if not _NOT_A_UNIT.search(words) and not any(
                re.search(r"[0-9]", part) and len(part) > 1 for part in inside
            ):
                return text[:start].rstrip()
    return text


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


def is_words(text: str) -> bool:
    r"""Whether a reference is prose ("Evelyn", "\text{even}") and not a product of variables."""
    plain = re.sub(rf"{WRAPPER}\{{([^{{}}]*)\}}", r" \1 ", text).strip()
    words = re.findall(r"[^\W\d_]+", plain)
    return bool(re.fullmatch(r"[^\W\d_][^\d_\\^=+*/{}()\[\]]*", plain)) and any(len(word) >= 4 for word in words)


def as_words(text: str) -> str:
    """Letters and digits of a phrase in lower case, single spaces between words."""
    text = re.sub(rf"{WRAPPER}\{{([^{{}}]*)\}}", r" \1 ", text)
    return " ".join(re.findall(r"[\w\\^+*/=<>-]+", text.casefold()))


def choice_label(text: str) -> str | None:
    r"""The letter of a multiple-choice answer: "C", "(C)", "\textbf{(C)}\ 45", "C. 45"."""
    plain = re.sub(rf"{WRAPPER}\{{([^{{}}]*)\}}", r"\1", text).strip()
    match = re.fullmatch(r"\(([A-J])\)(?:.*)|([A-J])(?:[.):]\s*.*)?", plain, re.DOTALL)
    return (match[1] or match[2]) if match else None


def number_base(text: str) -> tuple[str, str | None] | None:
    """(digits, base) for "4210_5" or "4210_{5}", (digits, None) for plain digits after comparison with a base; else None."""
    match = re.fullmatch(
        r"\(?([0-9A-F]+)\)?\s*_\s*(?:\{\s*([0-9]+)\s*\}|([0-9]+))", canonical(text).replace("_", "_", 1)
    )
    if match:
        return match[1].lstrip("0") or "0", match[2] or match[3]
    return (text.lstrip("0") or "0", None) if re.fullmatch(r"[0-9A-F]+", text) else None
