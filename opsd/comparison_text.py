"""Terminal text of a comparison: one table per question, warnings first to be read, the verdict last.

Everything that may come from a model, a file or a name passes `printable`, so no terminal control sequence gets through.
"""

import unicodedata

from opsd.comparison import Comparison
from opsd.comparison_side import Side
from opsd.published import PublishedComparison

PROBLEMS_SHOWN = 10


def printable(text: str, limit: int | None = None) -> str:
    """`text` on one line without control, format or unassigned characters; cut to `limit` characters."""
    clean = "".join(" " if c in "\n\r\t" else "" if unicodedata.category(c)[0] == "C" else c for c in text)
    return clean if limit is None or len(clean) <= limit else clean[: limit - 1] + "…"


def table(rows: list[list[str]], header: list[str]) -> str:
    """Aligned columns, the first left and the others right; cells are made printable."""
    lines = [[printable(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in lines) for i in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in lines
    )


def format_comparison(comparison: Comparison, problems_shown: int = PROBLEMS_SHOWN) -> str:
    """The whole comparison as text."""
    c = comparison
    lines = [f"{c.benchmark}, {c.problems} problems, B minus A, in points (percent correct)", ""]
    lines += [table([_side_row("A", c.a), _side_row("B", c.b)], _SIDE_HEADER), ""]
    same, new = c.same_problems, c.new_problems
    rows = [
        [
            "these problems, analytic",
            _signed(c.difference),
            _points(same["standard_error"]),
            _range(same["interval"]),
            _p(same["cmh_p"]),
        ],
        ["these problems, bootstrap", "", "", _range(same["bootstrap_interval"]), ""],
        [
            "new problems, t",
            _signed(c.difference),
            _points(new["standard_error"]),
            _range(new["interval"]),
            _p(new["t_p"]),
        ],
        ["new problems, bootstrap", "", "", _range(new["bootstrap_interval"]), _p(new["sign_flip_p"])],
    ]
    rows += _runs_rows(c.runs_test)
    lines += [table(rows, ["question", "B-A", "SE", "95 % interval", "p"])]
    lines += [
        f"p: Cochran-Mantel-Haenszel (z = {same['cmh_z']:.2f}); paired t; sign-flip permutation"
        + ("; t over whole runs" if c.runs_test else ""),
        "",
    ]
    lines += _noise_lines(c)
    lines += _power_lines(c.power, new["problems_needed"])
    if c.candidates:
        rows = [[r["name"], r["side"], _signed(r["difference"]), _p(r["p"]), _p(r["holm_p"])] for r in c.candidates]
        lines += ["", table(rows, ["checkpoint", "side", "difference", "CMH p", "Holm p"])]
    rows = [
        [r["id"], r["answer"], f"{r['correct_a']}/{r['n_a']}", f"{r['correct_b']}/{r['n_b']}", f"{r['z']:+.2f}"]
        for r in c.per_problem[:problems_shown]
    ]
    lines += ["", table(rows, ["problem", "answer", "A", "B", "z"])]
    if len(c.per_problem) > problems_shown:
        lines.append(f"… {len(c.per_problem) - problems_shown} more problems with smaller |z|")
    lines += [""] + [f"warning: {printable(w)}" for w in c.warnings] + [printable(c.verdict)]
    return "\n".join(lines)


def format_published(comparison: PublishedComparison) -> str:
    """The comparison of published summaries as text."""
    c = comparison
    rows = [[s.name, str(s.runs), f"{100 * s.mean:.2f}", _points(s.sd)] for s in (c.a, c.b)]
    lines = [table(rows, ["score", "runs", "mean %", "sd"]), ""]
    lines.append(
        f"difference {_signed(c.difference)} points = {c.z:.2f} SE with sd {_points(c.one_run_sd)} on both sides "
        f"({c.z_exact_anchor:.2f} SE if {printable(c.a.name)} is taken as exact)"
    )
    lines += [table(_runs_rows(c.runs_test), ["question", "B-A", "SE", "95 % interval", "p"]), ""]
    low, high = (100 * value for value in c.sd_interval)
    lines.append(f"an sd from so few runs is itself uncertain: 95 % interval {low:.2f} to {high:.2f}")
    lines.append(
        f"pooled binomial error {_points(c.pooled_binomial_bound)}: an upper bound of the sampling error on these problems"
    )
    if c.implied["explained_by_sampling"]:
        lines.append(
            f"if sampling is the only noise: sd between problems {c.implied['sd_between_problems']:.2f}, standard error for new "
            f"problems {_points(c.implied['standard_error_new_problems'])} points; no training noise is needed to explain the sd"
        )
    else:
        lines.append("the sd exceeds that bound: something besides sampling differs between the runs")
    lines += _power_lines({**vars(c), "one_run_sd": [c.one_run_sd, c.one_run_sd]}, None)
    return "\n".join([*lines, printable(c.verdict)])


_SIDE_HEADER = ["side", "runs", "samples", "score %", "SE same", "SE new", "sd between runs", "sampling sd"]


def _side_row(label: str, side: Side) -> list[str]:
    name = side.names[0] if side.runs == 1 else f"{side.names[0]} … {side.names[-1]}"
    return [
        f"{label} {printable(name, 48)}",
        str(side.runs),
        str(side.samples),
        f"{100 * side.score:.2f}",
        _points(side.standard_error_same_problems),
        _points(side.standard_error_new_problems),
        _points(side.sd_between_runs),
        _points(side.run_sampling_sd),
    ]


def _runs_rows(runs_test: dict | None) -> list[list[str]]:
    if runs_test is None:
        return []
    return [
        [f"whole runs, {name} t", "", _points(t["standard_error"]), _range(t["interval"]), _p(t["p"])]
        for name, t in runs_test.items()
        if t is not None
    ]


def _noise_lines(c: Comparison) -> list[str]:
    lines = []
    for label, side in (("A", c.a), ("B", c.b)):
        if side.sd_between_runs is None:
            continue
        extra = "" if side.sd_beyond_sampling is None else f", beyond sampling {_points(side.sd_beyond_sampling)}"
        chi = "" if side.spread_chi_square is None else f" (chi-square {side.spread_chi_square:.2f} on {side.runs - 1})"
        lines.append(f"noise of side {label}: sd between {side.runs} runs {_points(side.sd_between_runs)}{extra}{chi}")
    if c.a.sd_between_problems is not None:
        lines.append(
            f"problems differ by sd {_points(c.a.sd_between_problems)} (A); pairing by problem narrows only the interval for new problems"
        )
    return lines


def _power_lines(power: dict, problems_needed: int | None) -> list[str]:
    if not power["runs_needed"]:
        return []
    needed = ", ".join(f"{d} points: {runs}" for d, runs in power["runs_needed"].items())
    found = ", ".join(f"{runs}: {_points(value)}" for runs, value in power["detectable"].items())
    observed = power["runs_needed_for_observed"]
    size = power.get("samples_per_problem_and_run")
    run = "runs" if size is None else f"runs of {size:.3g} samples per problem"
    lines = [
        f"{run} a side for 80 % power at 5 %: {needed}"
        + ("" if observed is None else f", the observed difference: {observed}")
    ]
    lines.append(f"smallest difference found with 80 % power, by runs a side: {found}")
    if problems_needed is not None:
        lines.append(f"new problems needed to find the observed difference in the paired test: {problems_needed}")
    return lines


def _points(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def _signed(value: float) -> str:
    return f"{100 * value:+.2f}"


def _range(interval: list[float] | None) -> str:
    return "-" if interval is None else f"{100 * interval[0]:+.1f} … {100 * interval[1]:+.1f}"


def _p(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if value >= 0.001 else f"{value:.1e}"
