"""Figures of an evaluation report, drawn once each and saved both as SVG (for the page) and as PNG.

Uses matplotlib's object interface, so any thread may draw; nothing in a name is read as mathematics. Scores in percent.
"""

import io
import os
import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

COLOURS = ("#2f5d8a", "#c8642d", "#4b8b5a", "#8a5a9e", "#a08a2a", "#5a7f8a", "#b04a5a", "#6a6a6a")
STYLE = {
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333",
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "grid.color": "#e4e4e4",
    "text.parse_math": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "opsd",
}
HEAT_MAP_COLUMNS = 60  # problems per block of rows; longer benchmarks continue below
NAME_CHARS = 28


def draw_figures(results: Sequence[dict], samples: Sequence[Sequence[dict]]) -> dict[str, Figure]:
    """The figures that the results allow, by name. `samples`: one list per result, empty where they are not at hand."""
    with matplotlib.rc_context(STYLE):
        figures = {"score": draw_scores(results), "problems": draw_heat_map(results)}
        if any(samples):
            figures["lengths"] = draw_lengths(results, samples)
        if len({step for step in map(training_step, results) if step}) > 1:  # two checkpoints; step 0 is no checkpoint
            figures["learning_curve"] = draw_learning_curve(results)
    return figures


def save_png(figure: Figure, path: Path) -> None:
    with matplotlib.rc_context(STYLE):
        FigureCanvasAgg(figure)
        figure.savefig(path, dpi=160, format="png", metadata={"Software": None})


def to_svg(figure: Figure, name: str) -> str:
    """An <svg> element for a page: no XML prologue, no metadata, no page-wide style; ids get the prefix `name`."""
    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    return re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", text).strip()


def training_step(result: dict) -> int | None:
    """The optimizer step a result belongs to; 0 for a model without an adapter; None when it is not known."""
    if result["adapter"] is None:
        return 0
    return None if result["training"] is None else result["training"]["step"]


def draw_scores(results: Sequence[dict]) -> Figure:
    """avg@k of every result with the interval for the same problems (thick) and for new problems (thin)."""
    figure = Figure(figsize=(7.6, 0.9 + 0.42 * len(results)), layout="constrained")
    axes = figure.subplots()
    for row, result in enumerate(results):
        s, colour = result["statistics"], COLOURS[row % len(COLOURS)]
        for key, width in (("interval_new_problems", 1.4), ("interval_same_problems", 4.5)):
            if s[key] is not None:
                low, high = (100 * min(1.0, max(0.0, edge)) for edge in s[key])
                axes.plot([low, high], [row, row], color=colour, linewidth=width, solid_capstyle="butt")
        axes.plot(
            100 * s["avg_at_k"], row, "o", color="white", markeredgecolor=colour, markeredgewidth=1.6, markersize=7
        )
        axes.annotate(
            f"{100 * s['avg_at_k']:.1f}", (100 * s["avg_at_k"], row), (0, 7), textcoords="offset points", ha="center"
        )
    axes.set_yticks(range(len(results)), [short_name(result) for result in results])
    axes.set_ylim(len(results) - 0.5, -0.65)
    axes.set_xlim(0, 100)
    axes.set_xlabel("avg@k in percent; 95 % intervals, thick: same problems, thin: new problems")
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    return figure


def draw_heat_map(results: Sequence[dict]) -> Figure:
    """Share of correct samples per problem (columns) and result (rows), problems in benchmark order."""
    problems = results[0]["problems"]
    shared = os.path.commonprefix([p["id"] for p in problems]).rfind("-") + 1 if len(problems) > 1 else 0
    blocks = [problems[i : i + HEAT_MAP_COLUMNS] for i in range(0, len(problems), HEAT_MAP_COLUMNS)]
    columns = max(len(block) for block in blocks)
    rates = [{p["id"]: p["correct"] / p["n"] if p["n"] else None for p in result["problems"]} for result in results]
    height = len(blocks) * (0.62 + 0.3 * len(results)) + 0.55
    figure = Figure(figsize=(max(7.6, 1.9 + 0.25 * columns), height), layout="constrained")
    grid = figure.subplots(len(blocks), 1, squeeze=False)[:, 0]
    colours = matplotlib.colormaps["RdYlBu"].with_extremes(bad="#dddddd")
    for axes, block in zip(grid, blocks, strict=True):
        cells = [[float("nan") if rate[p["id"]] is None else rate[p["id"]] for p in block] for rate in rates]
        cells = [row + [float("nan")] * (columns - len(block)) for row in cells]
        mesh = axes.pcolormesh(cells, cmap=colours, vmin=0, vmax=1, edgecolors="white", linewidth=1.2)
        axes.invert_yaxis()
        axes.set_yticks([row + 0.5 for row in range(len(results))], [short_name(result) for result in results])
        axes.set_xticks(
            [i + 0.5 for i in range(len(block))], [p["id"][shared:][-8:] for p in block], rotation=90, fontsize=7
        )
        axes.tick_params(length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
    bar = figure.colorbar(mesh, ax=list(grid), fraction=0.03, pad=0.01, aspect=8)
    bar.set_ticks([0, 0.5, 1], labels=["0", "½", "1"])
    bar.outline.set_visible(False)
    grid[-1].set_xlabel("problem; colour: share of correct samples")
    return figure


def draw_lengths(results: Sequence[dict], samples: Sequence[Sequence[dict]]) -> Figure:
    """Completion lengths, one panel per result on a common axis: correct, wrong and truncated stacked."""
    shown = [(result, group) for result, group in zip(results, samples, strict=True) if group]
    longest = max(sample["token_count"] for _, group in shown for sample in group)
    edges = [longest * i / 40 for i in range(41)]
    figure = Figure(figsize=(7.6, 0.95 + 1.25 * len(shown)), layout="constrained")
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    kinds = [("correct", COLOURS[0]), ("wrong", COLOURS[1]), ("truncated", "#555555")]
    for axes, (result, group) in zip(panels, shown, strict=True):
        kind_of = ["truncated" if s["truncated"] else "correct" if s["correct"] else "wrong" for s in group]
        stacks = [[s["token_count"] for s, k in zip(group, kind_of, strict=True) if k == kind] for kind, _ in kinds]
        axes.hist(
            stacks, bins=edges, stacked=True, color=[colour for _, colour in kinds], edgecolor="white", linewidth=0.4
        )
        rate = 100 * result["statistics"]["truncation_rate"]
        axes.set_title(
            f"{short_name(result)}: mean {result['statistics']['mean_tokens']:.0f} tokens, {rate:.1f} % truncated",
            loc="left",
            fontsize=9,
        )
        axes.set_ylabel("samples")
        axes.grid(axis="y")
        axes.set_axisbelow(True)
    handles = [Patch(color=colour, label=kind) for kind, colour in kinds]
    figure.legend(handles=handles, frameon=False, ncols=3, loc="outside upper right", fontsize=8)
    panels[-1].set_xlabel("tokens per completion")
    return figure


def draw_learning_curve(results: Sequence[dict]) -> Figure:
    """avg@k over optimizer steps with both intervals as bands; step 0 is the model without an adapter."""
    points = sorted(
        ((training_step(r), r["statistics"]) for r in results if training_step(r) is not None),
        key=lambda point: point[0],
    )
    steps = [step for step, _ in points]
    figure = Figure(figsize=(7.6, 3.2), layout="constrained")
    axes = figure.subplots()
    for key, alpha, label in (
        ("interval_new_problems", 0.13, "95 %, new problems"),
        ("interval_same_problems", 0.32, "95 %, same problems"),
    ):
        edges = [s[key] or [s["avg_at_k"]] * 2 for _, s in points]
        low, high = ([100 * min(1.0, max(0.0, edge[i])) for edge in edges] for i in (0, 1))
        axes.fill_between(steps, low, high, color=COLOURS[0], alpha=alpha, linewidth=0, label=label)
    axes.plot(steps, [100 * s["avg_at_k"] for _, s in points], "o-", color=COLOURS[0], markersize=5, label="avg@k")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("percent")
    axes.grid()
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=8)
    return figure


def short_name(result: dict) -> str:
    """A name for an axis: printable characters only, the end of it when it is long."""
    name = "".join(character for character in result["name"] if character.isprintable())
    return name if len(name) <= NAME_CHARS else "…" + name[-(NAME_CHARS - 1) :]
