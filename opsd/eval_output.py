"""What `eval_aime.py` makes of finished evaluations: report pages, comparisons, tables and exports, from the files in their folders.

After eval_runner.py; the statistics, texts and pages themselves are those of comparison.py, eval_table.py and report.py.
"""

from pathlib import Path

from opsd.comparison import Comparison, compare
from opsd.comparison_text import format_comparison, format_published
from opsd.eval_result import FROM_MANIFEST, RESULT_SCHEMA
from opsd.eval_store import MANIFEST, RESULT, SAMPLES, read_record
from opsd.eval_table import EXPORT_FORMS, results_table
from opsd.published import compare_published, is_published, parse_published
from opsd.report import write_report
from opsd.runinfo import read_jsonl, write_json


def read_results(paths: list[Path]) -> tuple[list[dict], list[list[dict]]]:
    """Result records, and the samples beside each (none where samples.jsonl is not at hand)."""
    results, samples = [], []
    for path in paths:
        result = read_record(path)
        if result.get("schema") != RESULT_SCHEMA:
            raise ValueError(
                f"{path} has schema={result.get('schema')!r}, expected {RESULT_SCHEMA!r}; give a result.json"
            )
        missing = [name for name in (*FROM_MANIFEST, "problems", "statistics") if name not in result]
        if missing:
            raise ValueError(f"{path} has no {missing[0]}; give a result.json as eval_aime.py wrote it")
        beside = Path(path).parent / SAMPLES
        results.append(result)
        samples.append(read_jsonl(beside) if beside.is_file() else [])
    return results, samples


def result_file(text: str) -> Path:
    """The result that a path on the command line means: a result.json, or the folder of an evaluation."""
    path = Path(text)
    return path / RESULT if path.is_dir() else path


def problem_texts(paths: list[Path]) -> dict[str, str]:
    """Statements by problem id, from the first manifest that lies beside one of the results."""
    for path in paths:
        manifest = Path(path).parent / MANIFEST
        if manifest.is_file():
            return {problem["id"]: problem["problem"] for problem in read_record(manifest)["problems"]}
    return {}


def report(folders: list[Path], output_dir: Path) -> None:
    """report.html and figures in every folder; with several, also one page over all of them in `output_dir`."""
    groups = [([folder], folder) for folder in folders]
    if len(folders) > 1:
        groups.append((folders, output_dir))
    for group, where in groups:
        paths = [folder / RESULT for folder in group]
        results, samples = read_results(paths)
        write_report(where, results, samples, problem_texts=problem_texts(paths))


def compare_sides(sides: tuple[list[str], list[str]], *, allow_different_regime: bool, output_dir: Path | None) -> str:
    """The paired comparison of two sides of results as text; with `output_dir`, also comparison.json and a report of both.

    Sides may be published scores instead (`published.parse_published`): then nothing can be paired, and there is no report.
    """
    given = [text for side in sides for text in side]
    if any(is_published(text) for text in given):
        return _compare_published(sides, output_dir)
    paths = [[result_file(text) for text in side] for side in sides]
    (results_a, samples_a), (results_b, samples_b) = map(read_results, paths)
    comparison: Comparison = compare(
        results_a,
        results_b,
        samples_a=samples_a if all(samples_a) else (),
        samples_b=samples_b if all(samples_b) else (),
        allow_different_regime=allow_different_regime,
    )
    if output_dir is not None:
        write_json(output_dir / "comparison.json", comparison.to_dict())
        write_report(
            output_dir,
            [*results_a, *results_b],
            [*samples_a, *samples_b],
            comparison=comparison,
            problem_texts=problem_texts([*paths[0], *paths[1]]),
        )
    return format_comparison(comparison)


def _compare_published(sides: tuple[list[str], list[str]], output_dir: Path | None) -> str:
    for side in sides:
        if len(side) != 1 or not is_published(side[0]):
            raise ValueError(
                f"compare={' '.join(side)!r}: a published score is compared with one other published score, such as "
                "anchor=54.22,sd=1.48,runs=5 -- seed=56.94,53.06,56.11; give result files on both sides to pair by problem"
            )
    comparison = compare_published(*(parse_published(side[0]) for side in sides))
    if output_dir is not None:
        write_json(output_dir / "comparison.json", comparison.to_dict())
    return format_published(comparison)


def table(paths: list[str]) -> str:
    """One Markdown table per benchmark and regime."""
    return results_table(read_results([result_file(path) for path in paths])[0])


def export(folder: Path, form: str) -> Path:
    """Writes `<folder>/<form>.json` in the layout of another evaluator; returns its path."""
    results, _ = read_results([folder / RESULT])
    path = folder / f"{form}.json"
    write_json(path, EXPORT_FORMS[form](results[0]))
    return path
