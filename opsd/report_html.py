"""Pieces of a report page. Every string that enters HTML passes `escape`; the page holds no script and may load nothing.

`escape` also makes control and direction-changing characters visible, so text shows what it is. Used by report.py.
"""

import html
import unicodedata
from collections.abc import Sequence

HEAD_CHARS, TAIL_CHARS = 1500, 2500  # of a completion; the whole text is in samples.jsonl

# No script may run and nothing may be fetched, even if an escape were forgotten somewhere.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

STYLE = """
:root { --ink: #222; --soft: #666; --line: #ddd; --right: #2f5d8a; --wrong: #b4501f; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 62rem; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.soft { color: var(--soft); }
.verdict { font-size: 1.05rem; border-left: 4px solid var(--right); padding: .5rem .9rem; background: #f4f7fa; }
.warning { border-left: 4px solid var(--wrong); padding: .3rem .9rem; margin: .4rem 0; background: #fdf5f0; }
table { border-collapse: collapse; font-size: .88rem; margin: .6rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .22rem .7rem; border-bottom: 1px solid var(--line); text-align: right; } th { font-weight: 600; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; } .scroll { overflow-x: auto; }
figure { margin: 1rem 0; } svg { width: 100%; height: auto; stroke-linejoin: round; }
details { border-top: 1px solid var(--line); padding: .25rem 0; } details details { margin-left: 1.2rem; }
summary { cursor: pointer; } .right { color: var(--right); } .wrong { color: var(--wrong); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f7f7f7; padding: .7rem; font-size: .8rem;
  max-height: 40rem; overflow-y: auto; }
"""


def escape(text: object) -> str:
    """HTML text with control, format and surrogate characters (line breaks and tabs apart) shown as code points."""
    visible = (
        c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co", "Cn") else f"⟨U+{ord(c):04X}⟩"
        for c in str(text).replace("\r\n", "\n")
    )
    return html.escape("".join(visible), quote=True)


def page(title: str, sections: Sequence[str]) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def section(heading: str, *content: str) -> str:
    return f"<section><h2>{escape(heading)}</h2>{''.join(content)}</section>"


def paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{escape(kind)}">{escape(text)}</p>'


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table of plain cells, all escaped."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def figure(name: str, svg: str, caption: str) -> str:
    """`svg` comes from report_figures.to_svg, never from a model."""
    return f'<figure id="{escape(name)}">{svg}<figcaption class="soft">{escape(caption)}</figcaption></figure>'


def shorten(text: str) -> str:
    """Start and end of a long completion, saying how much lies between."""
    if len(text) <= HEAD_CHARS + TAIL_CHARS:
        return text
    left_out = len(text) - HEAD_CHARS - TAIL_CHARS
    return (
        f"{text[:HEAD_CHARS]}\n\n[… {left_out} characters left out; samples.jsonl has them …]\n\n{text[-TAIL_CHARS:]}"
    )


def completion(sample: dict, name: str) -> str:
    """One expandable sample: verdict, reason, length and the escaped text."""
    verdict = "correct" if sample["correct"] else "wrong"
    answer = "no answer" if sample["extracted"] is None else shorten(sample["extracted"])[:80]
    parts = [f"sample {sample['sample_index']}", verdict, sample["reason"], f"{sample['token_count']} tokens"]
    parts += ["truncated"] * sample["truncated"]
    kind = "right" if sample["correct"] else "wrong"
    label = f'{escape(name)} · <span class="{kind}">{escape(" · ".join(parts))}</span> · {escape(answer)}'
    return f"<details><summary>{label}</summary><pre>{escape(shorten(sample['text']))}</pre></details>"


def expandable(label: str, *content: str) -> str:
    return f"<details><summary>{escape(label)}</summary>{''.join(content)}</details>"
