"""Writes `report.html`, one self-contained page over one or more results, and the same figures as PNG files.

Takes result JSONs, their samples where they are at hand, and a comparison if there is one; reads nothing itself. The page
opens from a disk without a network: figures are inline SVG, there is no script, and all model text is escaped.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from opsd import report_html as h
from opsd.comparison import Comparison
from opsd.evaluation import describe
from opsd.report_figures import draw_figures, save_png, to_svg, training_step
from opsd.runinfo import write_text

CAPTIONS = {
    "score": "Thick: where repeating the evaluation on these problems would land. Thin: other problems of the same kind.",
    "problems": "Share of correct samples per problem.",
    "lengths": "Truncated completions ended at the length limit and mostly hold no answer.",
    "learning_curve": "Checkpoints of one run. Choosing the best one on this benchmark flatters it.",
}
BOUNDS = {
    "all_truncated_correct": "avg@k if every truncated sample were right",
    "truncated_left_out": "avg@k without truncated samples",
}
HEADLINES = 2  # more results than this are read from the table
HEADINGS = {"score": "Score", "problems": "Problems", "lengths": "Lengths", "learning_curve": "Learning curve"}


def write_report(
    folder: Path,
    results: Sequence[dict],
    samples: Sequence[Sequence[dict]],
    *,
    comparison: Comparison | None = None,
    problem_texts: dict[str, str] | None = None,
) -> list[Path]:
    """Writes folder/report.html and folder/figures/*.png; returns what was written, the page first.

    `samples`: one list per result, empty where they are not at hand. `problem_texts`: statements by problem id.
    """
    if not results or len(samples) != len(results):
        raise ValueError(f"report needs one list of samples per result, got {len(samples)} for {len(results)} results")
    if any([p["id"] for p in r["problems"]] != [p["id"] for p in results[0]["problems"]] for r in results):
        raise ValueError("results in one report must share their problems; write one report per benchmark")
    results, samples = _in_training_order(results, samples)
    figures = draw_figures(results, samples)
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    written = [folder / "report.html"]
    for name, drawing in figures.items():
        written.append(folder / "figures" / f"{name}.png")
        save_png(drawing, written[-1])
    svgs = {
        name: h.figure(f"figure-{name}", to_svg(drawing, name), CAPTIONS[name]) for name, drawing in figures.items()
    }
    write_text(written[0], build_page(results, samples, svgs, comparison, problem_texts or {}))
    return written


def build_page(
    results: Sequence[dict],
    samples: Sequence[Sequence[dict]],
    svgs: dict[str, str],
    comparison: Comparison | None,
    problem_texts: dict[str, str],
) -> str:
    """The whole page as text."""
    first = results[0]
    title = f"{first['benchmark']['name']}: " + ", ".join(result["name"] for result in results)
    sections = [
        f"<h1>{h.escape(title)}</h1>",
        h.paragraph(f"{first['model']} · {len(first['problems'])} problems · {_regime_line(first['regime'])}", "soft"),
        *[h.paragraph(f"{result['name']}: {describe(result['statistics'])}") for result in results[:HEADLINES]],
    ]
    if comparison is not None:
        sections.append(_comparison_section(comparison))
    sections.append(h.section(HEADINGS["score"], svgs["score"], _score_table(results)))
    sections += [
        h.section(HEADINGS[name], svgs[name]) for name in ("learning_curve", "problems", "lengths") if name in svgs
    ]
    sections.append(h.section("How answers were graded", _reasons_table(results)))
    if any(samples):
        sections.append(h.section("Completions", *_completions(results, samples, problem_texts)))
    sections.append(
        h.section("Provenance", *[h.expandable(r["name"], f"<pre>{h.escape(_provenance(r))}</pre>") for r in results])
    )
    return h.page(title, sections)


def _in_training_order(results, samples):
    """Checkpoints by step; results without a known step keep their place at the end."""
    order = sorted(
        range(len(results)), key=lambda i: (training_step(results[i]) is None, training_step(results[i]) or 0)
    )
    return [results[i] for i in order], [samples[i] for i in order]


def _regime_line(regime: dict) -> str:
    return ", ".join(f"{name}={value}" for name, value in regime.items())


def _percent(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f}"


def _score_table(results: Sequence[dict]) -> str:
    header = ["result", "avg@k", "± same", "± new", "pass@k", "maj@k", "k", "samples", "no box", "tokens"]
    rows, bounds = [], []
    for result in results:
        s, k = result["statistics"], result["statistics"]["k"]
        scores = [s["avg_at_k"], s["standard_error_same_problems"], s["standard_error_new_problems"]]
        scores += [s["pass_at_k"][str(k)], s["majority_at_k"][str(k)]]
        coverage = f"{s['samples']}/{s['expected_samples']}"
        rows.append(
            [result["name"], *map(_percent, scores), k, coverage, _percent(s["no_box_rate"]), f"{s['mean_tokens']:.0f}"]
        )
        edges = [s["truncation_rate"], *(s["truncated_bounds"][name] for name in BOUNDS)]
        bounds.append([result["name"], *map(_percent, edges)])
    note = "Percent; ± is one standard error. Same: sampling noise on these problems. New: problems of this kind, clustered by problem."
    truncated = ["result", "truncated", *BOUNDS.values()]
    return h.table(header, rows) + h.paragraph(note, "soft") + h.table(truncated, bounds)


def _reasons_table(results: Sequence[dict]) -> str:
    reasons = sorted({reason for result in results for reason in result["statistics"]["reasons"]})
    rows = [[r["name"], *[r["statistics"]["reasons"].get(reason, 0) for reason in reasons]] for r in results]
    grader = ", ".join(sorted({result["grader_version"] for result in results}))
    return h.table(["result", *reasons], rows) + h.paragraph(
        f"Samples by the rule that decided. Grader: {grader}", "soft"
    )


def _comparison_section(c: Comparison) -> str:
    def interval(values) -> str:
        return "–" if values is None else f"{100 * values[0]:+.1f} … {100 * values[1]:+.1f}"

    same, new = c.same_problems, c.new_problems
    rows = [
        [
            "these problems",
            f"{100 * c.difference:+.2f}",
            _percent(same["standard_error"], 2),
            interval(same["interval"]),
        ]
        + [interval(same["bootstrap_interval"]), f"{same['cmh_p']:.3g} (stratified by problem)"],
        ["new problems", f"{100 * c.difference:+.2f}", _percent(new["standard_error"], 2), interval(new["interval"])]
        + [
            interval(new["bootstrap_interval"]),
            "–" if new["sign_flip_p"] is None else f"{new['sign_flip_p']:.3g} (sign flip)",
        ],
    ]
    per_problem = [
        [r["id"], r["answer"], f"{r['correct_a']}/{r['n_a']}", f"{r['correct_b']}/{r['n_b']}", f"{r['z']:+.2f}"]
        for r in c.per_problem
    ]
    candidates = [
        [r["name"], f"{100 * r['difference']:+.2f}", f"{r['p']:.3g}", f"{r['holm_p']:.3g}"] for r in c.candidates
    ]
    return h.section(
        "Comparison",
        h.paragraph(c.verdict, "verdict"),
        *[h.paragraph(warning, "warning") for warning in c.warnings],
        h.paragraph(f"A: {', '.join(c.a.names)} · B: {', '.join(c.b.names)} · B − A in points"),
        h.table(["question", "B − A", "SE", "95 % interval", "bootstrap", "p"], rows),
        h.table(["checkpoint", "difference", "p", "Holm p"], candidates) if candidates else "",
        h.expandable(
            "Every problem, the most different first", h.table(["problem", "answer", "A", "B", "z"], per_problem)
        ),
    )


def _completions(
    results: Sequence[dict], samples: Sequence[Sequence[dict]], problem_texts: dict[str, str]
) -> list[str]:
    """One expandable block per problem with every result's samples."""
    by_problem: dict[str, list[str]] = {p["id"]: [] for p in results[0]["problems"]}
    for result, group in zip(results, samples, strict=True):
        for sample in sorted(group, key=lambda s: s["sample_index"]):
            by_problem[str(sample["problem_id"])].append(h.completion(sample, result["name"]))
    blocks = []
    for i, problem in enumerate(results[0]["problems"]):
        counts = " vs ".join(f"{r['problems'][i]['correct']}/{r['problems'][i]['n']}" for r in results)
        statement = problem_texts.get(problem["id"])
        shown = "" if statement is None else f"<pre>{h.escape(statement)}</pre>"
        blocks.append(
            h.expandable(f"{problem['id']} · answer {problem['answer']} · {counts}", shown, *by_problem[problem["id"]])
        )
    return blocks


def _provenance(result: dict) -> str:
    left_out = ("problems", "statistics")
    return json.dumps(
        {name: value for name, value in result.items() if name not in left_out}, indent=2, ensure_ascii=False
    )
