r"""Writes an answer in one way: characters, spacing, fonts, fractions, digit groups and what introduces it.

Used by grading.py and its helpers only. Answers are at most a few thousand characters long when they arrive; everything is linear in
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
        "⩽": r"\le ",
        "⩾": r"\ge ",
        "﹣": "-",
        "．": ".",
        "⁄": "/",
        "½": r"\frac{1}{2}",
        "⅓": r"\frac{1}{3}",
        "¼": r"\frac{1}{4}",
        "²": "^2",
        "³": "^3",
        "\u200b": "",
        "\ufeff": "",
        "\u2009": r"\,",
        "\u202f": r"\,",
    }
    | dict.fromkeys("€£¥¢₹", " ")
    | {chr(0x1D7CE + index): str(index % 10) for index in range(50)}  # the mathematical alphabets' digits
)
_SIZE = r"\\(?:displaystyle|textstyle|scriptstyle|tiny|small|normalsize|large|Large|LARGE|huge|Huge|bf|rm|it|left|right|[bB]igg?[lr]?)"
WRAPPER = r"\\(?:text|textbf|textit|textrm|texttt|textsf|textnormal|emph|mathrm|mathbf|mathit|mathsf|mathtt|mbox|hbox|boxed|fbox|bm"
WRAPPER += r"|boldsymbol|underline|ensuremath|operatorname|pmb)\s*"
_DIGIT_GROUP = re.compile(
    r"(?<=[0-9])(?:\\[,;:! ]|\{(?:,|\\[,;:])\}|~|\\thinspace\s?|\\(?:text|mathord)\{,\})(?=[0-9]{3}(?![0-9]))"
)
_REPEATING = re.compile(
    r"(?<![0-9.,}])([0-9]{0,9})\.([0-9]{0,9})\\(?:overline|bar|dot)\s*(?:\{([0-9]{1,9})\}|([0-9]{1,9}))(?![0-9])(?!\s?\\dot)"
)
_ANSWER_IS = r"(?:the\s+)?(?:final\s+)?(?:answer|ans\.?|total|result)\s*"
_LEAD = re.compile(  # what introduces an answer
    rf"^(?:{WRAPPER}\{{\s*(?:USD|EUR|GBP|Rs\.?)\s*\}}|{WRAPPER}\{{\s*{_ANSWER_IS}(?:is\b\s*[:=]?|[:=])\s*\}}|{WRAPPER}\{{\s*{_ANSWER_IS}\}}\s*[:=]|{_ANSWER_IS}(?:is\b\s*[:=]?|[:=])"
    r"|\(?答案[是为]?[:：]?|[=:]|\\(?:therefore|implies|[rR]ightarrow|Longrightarrow)(?![a-zA-Z]))\s*",
    re.IGNORECASE,
)
_SPELLINGS = tuple(  # one way to write what has several
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"(?<![a-zA-Z\]}^_])\{([-:+]?)\}|\\text\s?\{(-)\}", r"\1\2"),
        (r"(?<![0-9])([0-9]+)\.0+(?![0-9])(?=[^ ])", r"\1"),
        (r"\^\s?\{0\.5\}", r"^{\\frac{1}{2}}"),
        (r"\^\s?\{\s?\\circ\s?\}", r"^\\circ"),
        (r"\^\s?\{?\s?\\prime\s?\}?", "'"),
        (r"\\(?:mathrm|text)\s?\{([iex])\}", r"\1"),
        (r"\\ast(?![a-zA-Z])", r"\\cdot"),
        (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset"),
        (r"\\lbrace(?![a-zA-Z])\s?", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])\s?", r"\\}"),
        (r"\\langle(?![a-zA-Z])\s?", "("),
        (r"\\rangle(?![a-zA-Z])\s?", ")"),
        (r"\\mathbb\s?([NZQRC])(?![a-zA-Z])|\\mathbf\s?\{([NZQR])\}", r"\\mathbb{\1\2}"),
        (r"\{([^{}]*)\\choose(?![a-zA-Z])([^{}]*)\}", r"\\binom{\1}{\2}"),
        (r"\\sqrt\s?(\[[^\[\]]*\])\s?([0-9a-zA-Z])", r"\\sqrt\1{\2}"),
        (r"√\s?[({]?([0-9]+|[a-z])[)}]?", r"\\sqrt{\1}"),
        (r"(?<![0-9.}])([0-9]+) ([0-9]+)/([0-9]+)(?![0-9.])", r"\1\\frac{\2}{\3}"),
        (r"(?<![0-9.}])([0-9]+)\s?(\\frac\{[0-9]+\}\{[0-9]+\})\s?(?=\\(?:pi|sqrt)(?![a-zA-Z]))", r"(\1+\2)"),
        (r"\\(sin|cos|tan|cot|sec|csc)\s?[({]?\s?([0-9.]+)\s?\^\s?\{?\\circ\s?\}?[)}]?", r"\\\1(\\frac{\2\\pi}{180})"),
    )
)


def normalise(answer: str) -> str:
    """Drops what does not change the value: delimiters, sizes, spacing, fonts and braces around the whole, final dots."""
    text = answer.translate(_CHARACTERS)
    text = re.sub(
        r"\\!|\\hspace\*?\{[^{}]*\}|\\h?phantom\{[^{}]*\}|\\pounds(?![a-zA-Z])", "", re.sub(r"\s+", " ", text)
    )
    text = re.sub(r"\\(?:left|right)\s*\.", "", text.replace(r"\bmod", r"\mod"))
    text = re.sub(
        rf"(?:{WRAPPER})?\{{\s*\^\s*\\circ\s*\}}|\^\s?\{{?\s?(?:\\text\s?\{{)?o\}}{{0,2}}(?![a-zA-Z])", r"^\\circ", text
    )
    text = _REPEATING.sub(_fraction, text)
    text = _DIGIT_GROUP.sub("", text).replace("{,}", ",")
    text = re.sub(r"(?<!\\)\\(?:[\[\]()$,;: ]|(?:qquad|quad|thinspace)(?![a-zA-Z]))|[$~]", " ", text)
    text = re.sub(r"(?<!\\)((?:\\\\)*)\\?$", "", re.sub(r"\s+", " ", text))  # a line break or half a space at the end
    text = re.sub(WRAPPER + r"\{\s*\}", "", text)
    text = re.sub(_SIZE + r"(?![a-zA-Z])\s*|\\(?:text)?color\s*\{[^{}]*\}", "", text)
    text = re.sub(r"(?<=[0-9)}])\*\*(-?[0-9]+)(?![0-9]|\*\*)", r"^{\1}", re.sub(r"\\[dtc]frac", r"\\frac", text))
    text = re.sub(r"\\frac\s*(?:([0-9])|(\\[a-zA-Z]+))\s*(?:([0-9a-zA-Z])|(\\[a-zA-Z]+))", r"\\frac{\1\2}{\3\4}", text)
    text = re.sub(r"\\frac\s*(\{[^{}]*\})\s*([0-9a-zA-Z])", r"\\frac\1{\2}", text)
    text = re.sub(r"\\frac\s*([0-9a-zA-Z])\s*(?=\{)", r"\\frac{\1}", text)
    for pattern, plain in _SPELLINGS:
        text = pattern.sub(plain, text)
    previous = None
    while text != previous:
        previous = text
        text = re.sub(r"(?<!\.)\.$", "", text.strip(" \t\r\n`*").rstrip(",;:。、；"))
        text = re.sub(r"^([\"'])(.*)\1$", r"\2", text, flags=re.DOTALL)
        wrapper = re.match(rf"(?:{WRAPPER})?\{{", text)
        if wrapper and text.endswith("}") and closing(text, wrapper.end() - 1) == len(text) - 1:
            text = text[wrapper.end() : -1]
        text = _LEAD.sub("", text)
    if re.fullmatch(r"[+-]?[0-9]+(?:\.[0-9]+)?[eE][+-]?[0-9]+", text):
        text = re.sub(r"[eE]\+?(-?[0-9]+)", r" \\times 10^{\1}", text)
    return text


def _fraction(repeating: re.Match) -> str:
    r"""The exact value of a repeating decimal: 0.1\overline{6} is (16 - 1) / 90."""
    whole, fixed, braced, bare = repeating.groups()
    period = braced or bare
    numerator = int(whole + fixed + period) - int(whole + fixed or "0")
    return rf"\frac{{{numerator}}}{{{10 ** len(fixed) * (10 ** len(period) - 1)}}}"


def closing(text: str, opening: int) -> int:
    """Index of the bracket that closes the one at `opening` ("{" or "("), -1 when there is none."""
    depth, pair = 0, "{}" if text[opening] == "{" else "()"
    for index in range(opening, len(text)):
        if text[index] in pair and text[index - 1 : index] != "\\":
            depth += 1 if text[index] == pair[0] else -1
            if depth == 0:
                return index
    return -1
