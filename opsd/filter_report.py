"""What `data_filter.py` shows of its work: the table of counts per rule and the histogram of trace lengths with the cut."""

import io
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from opsd.filters import trace_tokens
from opsd.rows import SourceRow, open_atomic

BIN_TOKENS = 500


class LengthHistogram:
    """Trace lengths of all rows and of the kept ones in bins of BIN_TOKENS tokens; memory does not grow with the rows."""

    def __init__(self):
        self.read: Counter[int] = Counter()  # bin -> rows
        self.kept: Counter[int] = Counter()
        self.missing = 0

    def watch_read(self, rows: Iterable[SourceRow]) -> Iterator[SourceRow]:
        """Passes rows through on their way to the filter and counts their lengths."""
        for row in rows:
            self._count(row, self.read)
            yield row

    def watch_kept(self, rows: Iterable[SourceRow]) -> Iterator[SourceRow]:
        """Passes rows through on their way from the filter and counts their lengths."""
        for row in rows:
            self._count(row, self.kept)
            yield row

    def plot(self, path: Path, min_trace_tokens: int, max_trace_tokens: int | None) -> None:
        """Writes the histogram as a .png, with a line at every length limit; without any count its axes are empty."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for counts, label in ((self.read, "all rows"), (self.kept, "kept rows")):
            starts = [index * BIN_TOKENS for index in sorted(counts)]
            heights = [counts[index] for index in sorted(counts)]
            axes.bar(starts, heights, width=BIN_TOKENS, align="edge", label=f"{label}: {counts.total():,}", alpha=0.7)
        for name, limit in (("min_trace_tokens", min_trace_tokens), ("max_trace_tokens", max_trace_tokens)):
            if limit:
                axes.axvline(limit, color="black", linestyle="--", label=f"{name} = {limit:,}")
        axes.set_xlabel("generated_token_count (tokens)")
        axes.set_ylabel(f"rows per {BIN_TOKENS} tokens")
        axes.set_title(f"{self.missing:,} rows without a count are not shown")
        axes.legend()
        image = io.BytesIO()
        figure.savefig(image, format="png")
        with open_atomic(path) as handle:
            handle.write(image.getvalue())

    def _count(self, row: SourceRow, counts: Counter[int]) -> None:
        if row.values is None:
            return
        tokens = trace_tokens(row.values.get("generated_token_count"))
        if tokens is not None:
            counts[tokens // BIN_TOKENS] += 1
        elif counts is self.read:
            self.missing += 1


def table(report: dict) -> str:
    """The counts of `RowFilter.report` as aligned text, one rule a line, in the order of application."""
    header = ("rule", "dropped", "remaining", "first rows")
    lines = [header, ("(rows read)", "", f"{report['rows']:,}", "")]
    for rule in report["rules"]:
        named = ", ".join(map(str, rule["first_rows"]))
        lines.append((rule["rule"], f"{rule['dropped']:,}", f"{rule['remaining']:,}", named))
    lines.append(("(rows kept)", "", f"{report['kept']:,}", ""))
    name, dropped, remaining = (max(len(line[column]) for line in lines) for column in range(3))
    return "\n".join(f"{a:<{name}}  {b:>{dropped}}  {c:>{remaining}}  {d}".rstrip() for a, b, c, d in lines)
