"""`data_filter.py` from the command line: verbatim rows, counts, formats, and every way to call it wrongly."""

import hashlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from made_up_rows import SAMPLES, dropped, make_row, needs_samples, write_lines
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import data_filter
from opsd.benchmarks import load_benchmark
from opsd.filters import problem_id, read_pass_rates

ROOT = Path(data_filter.__file__).parent
ALL = ("--answer_pattern", "", "--min_trace_tokens", "0")


def run_filter(tmp_path: Path, source: Path, *flags: str) -> tuple[list[dict], dict]:
    output, report = tmp_path / "kept.jsonl", tmp_path / "counts.json"
    data_filter.main(["--input", str(source), "--output", str(output), "--report", str(report), *flags])
    return [json.loads(line) for line in output.read_bytes().splitlines()], json.loads(report.read_text())


@needs_samples
def test_the_benchmark_itself_is_dropped_whole(tmp_path):
    problems = [json.loads(line) for line in (SAMPLES / "aime24.jsonl").read_text().splitlines()]
    source = write_lines(tmp_path / "rows.jsonl", [make_row(), *problems])
    rows, report = run_filter(tmp_path, source, *ALL, "--benchmark", str(SAMPLES / "aime24.jsonl"))
    assert rows == [make_row()] and dropped(report)["benchmark_overlap"] == 30
    assert [found["benchmark_id"] for found in report["benchmark_overlaps"]] == [row["id"] for row in problems]
    assert all(found["identical"] and found["share"] == 1.0 for found in report["benchmark_overlaps"])


def test_pass_rates_of_an_evaluation_select_by_difficulty(tmp_path):
    rows = [make_row(n) for n in range(4)] + [make_row(9, id="own")]
    samples = []
    for correct, row in zip((0, 1, 4, 2), (rows[0], rows[1], rows[2], rows[4]), strict=True):
        samples += [{"problem_id": problem_id(row), "correct": k < correct} for k in range(4)]
    path = write_lines(tmp_path / "samples.jsonl", samples)
    assert read_pass_rates(path)["own"] == 0.5
    source = write_lines(tmp_path / "rows.jsonl", rows)
    flags = ("--pass_rates", str(path), "--min_pass_rate", "0.25", "--max_pass_rate", "0.75")
    kept, report = run_filter(tmp_path, source, *ALL, *flags)
    assert kept == [rows[1], rows[4]]
    assert dropped(report) == {"bad_row": 0, "pass_rate_missing": 1, "pass_rate": 2}


@needs_samples
def test_olympiad_rows_with_short_integers(tmp_path):
    source = SAMPLES / "olympiad_rows_300.jsonl"
    rows, report = run_filter(tmp_path, source, "--answer_pattern", r"-?\d{1,6}", "--min_trace_tokens", "0")
    assert (report["rows"], report["kept"], len(rows), dropped(report)["answer_pattern"]) == (300, 154, 154, 146)
    kept_lines = (tmp_path / "kept.jsonl").read_bytes().splitlines(keepends=True)
    wanted = iter(source.read_bytes().splitlines(keepends=True))
    assert all(line in wanted for line in kept_lines)  # `in` consumes the iterator: same bytes, same order
    assert report["output_sha256"] == hashlib.sha256((tmp_path / "kept.jsonl").read_bytes()).hexdigest()


@needs_samples
def test_rows_without_token_counts_are_counted_and_named(tmp_path):
    rows, report = run_filter(tmp_path, SAMPLES / "gsm8k_train_1000.jsonl")
    assert rows == [] and report["kept"] == 0
    assert dropped(report) == {
        **{"bad_row": 0, "answer_missing": 0, "answer_pattern": 2, "trace_tokens_missing": 998, "min_trace_tokens": 0}
    }
    assert report["rules"][3]["first_rows"] == [1, 2, 3, 4, 5]


def test_lines_stay_verbatim_whatever_their_spelling(tmp_path):
    lines = [
        b'{"Answer":"1" ,  "problem": "caf\\u00e9", "z": 1e3}\n',
        b'{"problem": "caf\xc3\xa9", "Answer": "22"}\r\n',
        b"\n",
        b'{"Answer": "x", "problem": "dropped"}\n',
        b'{"Answer": "3", "Answer": "4", "problem": "twice"}',
    ]
    source = tmp_path / "rows.jsonl"
    source.write_bytes(b"".join(lines))
    run_filter(tmp_path, source, "--min_trace_tokens", "0")
    assert (tmp_path / "kept.jsonl").read_bytes() == lines[0] + lines[1] + lines[4] + b"\n"


@pytest.mark.parametrize("kind", ["json", "json_lines", "parquet", "dataset"])
def test_other_formats_give_the_same_rows(tmp_path, kind):
    rows = [make_row(n) for n in range(600)]
    source = tmp_path / f"rows.{'json' if kind == 'json_lines' else kind}"
    if kind == "json":
        source.write_text(json.dumps(rows))
    elif kind == "json_lines":
        write_lines(source, rows)
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(str(source))
    kept, report = run_filter(tmp_path, source, "--answer_pattern", r"\d{1,2}")
    assert kept == rows[:100] and report["rules"][2]["first_rows"] == [101, 102, 103, 104, 105]


def test_two_runs_write_the_same_bytes(tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", [make_row(n) for n in range(50)])
    target = write_lines(tmp_path / "target.jsonl", [{"problem": "P", "answer": a} for a in ("7", "12")])
    flags = ("--target_answers", str(target), "--sample", "9", "--seed", "3", "--plot", str(tmp_path / "lengths.png"))
    first = run_filter(tmp_path, source, *flags)
    files = [path.read_bytes() for path in sorted(tmp_path.iterdir())]
    assert run_filter(tmp_path, source, *flags) == first
    assert [path.read_bytes() for path in sorted(tmp_path.iterdir())] == files
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_plot_works_without_any_token_count(tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", [make_row(generated_token_count=None)])
    run_filter(tmp_path, source, *ALL, "--plot", str(tmp_path / "lengths.png"))
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_weights_give_the_target_distribution(tmp_path):
    rows = [make_row(n) for n in range(200)]  # 10 one-digit, 90 two-digit, 100 three-digit answers
    source = write_lines(tmp_path / "rows.jsonl", rows)
    target = write_lines(tmp_path / "target.jsonl", [{"problem": "P", "answer": a} for a in ("5", "025", "104", "204")])
    weights = tmp_path / "weights.jsonl"
    kept, report = run_filter(tmp_path, source, "--target_answers", str(target), "--weights", str(weights))
    assert kept == rows
    records = [json.loads(line) for line in weights.read_text().splitlines()]
    assert [record["row"] for record in records] == list(range(1, 201))
    share = Counter()
    for record in records:
        share[record["kind"]] += record["weight"] / len(records)
    assert share == pytest.approx({"d": 0.25, "dd": 0.25, "ddd": 0.5})
    assert report["weights"]["target"] == {"d": 1, "dd": 1, "ddd": 2}


def test_output_rows_become_a_benchmark_once_per_problem(tmp_path):
    """The problems on which eval_aime.py measures the pass rates that --pass_rates reads."""
    rows = [make_row(n) for n in range(30)] + [make_row(3, Answer="$3$")]
    source = write_lines(tmp_path / "rows.jsonl", rows)
    path = tmp_path / "bench.jsonl"
    kept, report = run_filter(tmp_path, source, "--sample", "4", "--benchmark_output", str(path))
    problems = [json.loads(line) for line in path.read_text().splitlines()]
    assert problems == [{"id": problem_id(r), "problem": r["problem"], "answer": r["Answer"]} for r in kept]
    assert len(kept) == report["written"] == 4 and [r for r in rows if r in kept] == kept
    run_filter(tmp_path, source, "--benchmark_output", str(path))
    assert [problem.answer for problem in load_benchmark(str(path)).problems] == [str(n) for n in range(30)]


BAD_LINES = [
    (b'{"Answer": "1", "problem": "a\0b"}\n', "row 2: a NUL byte in the line"),
    (b'\0\0\0\0{"Answer": "1"}\n', "row 2: a NUL byte in the line"),
    (b'{"Answer": "\xff"}\n', r"row 2: not UTF-8 \(byte 12\)"),
    (b'["Answer"]\n', "row 2: a JSON list, not an object"),
    (b'{"Answer": "1", "problem', "row 2: not JSON .* the file ends inside this line"),
    (b'{"Answer": 1' + b"0" * 5000 + b"}\n", "row 2: not usable JSON"),
    (b'{"Answer": ' + b"[" * 100_000 + b"}\n", "row 2: not usable JSON"),
    (b'{"problem": "P"}\n', r"row 2: no column 'Answer' \(its columns: problem\)"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_bad_lines_stop_the_filter_or_are_counted(tmp_path, line, message):
    source = tmp_path / "rows.jsonl"
    source.write_bytes(json.dumps(make_row(1)).encode() + b"\n" + line)
    with pytest.raises(ValueError, match=message) as caught:
        run_filter(tmp_path, source)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]  # no output, no temporary file
    rows, report = run_filter(tmp_path, source, "--on_bad_row", "drop")
    assert rows == [make_row(1)] and dropped(report)["bad_row"] == 1 and report["bad_rows"][0]["row"] == 2


BAD_COMMANDS = [
    (["--input", "absent.jsonl"], "input=absent.jsonl does not exist"),
    (["--input", "folder"], "input=folder is a folder but no saved dataset"),
    (["--input", "rows.csv"], "input=rows.csv must end in .jsonl, .json or .parquet"),
    (["--input", "broken.parquet"], "input=broken.parquet is not readable as parquet"),
    (["--input", "broken.json"], "input=broken.json is not a JSON array"),
    (["--input", "empty.jsonl"], "input=empty.jsonl holds no rows"),
    (["--output", "rows.jsonl"], "output=rows.jsonl must be another file than the input"),
    (["--output", "kept.parquet"], "output=kept.parquet must be another file than the input and end in .jsonl"),
    (["--answer_pattern", "("], "answer_pattern='\\(' is not a regular expression"),
    (["--min_trace_tokens", "-1"], "min_trace_tokens=-1 must be >= 0 tokens"),
    (["--max_trace_tokens", "100"], "max_trace_tokens=100 must be > 0 and >= min_trace_tokens=2000"),
    (["--min_pass_rate", "0.5"], "min_pass_rate=0.5 needs --pass_rates"),
    (["--benchmark_overlap", "0.5"], "benchmark_overlap=0.5 needs --benchmark"),
    (["--seed", "1"], "seed=1 needs --sample"),
    (["--target_answers", "rows.jsonl"], "target_answers needs --weights"),
    (["--recompute_tokens", "here", "--min_trace_tokens", "0"], "recompute_tokens=here needs"),
    (["--recompute_tokens", "folder"], "recompute_tokens=folder is no tokenizer"),
    (["--sample", "0"], "sample=0 must be from 1 to 1"),
    (["--sample", "2"], "sample=2 must be from 1 to 1"),
    (["--plot", "lengths.txt"], "plot=lengths.txt must end in .png"),
    (["--benchmark", "rows.jsonl"], "benchmark=rows.jsonl: row 1 has answer=None"),
    (["--benchmark", "aime42"], "benchmark=aime42 is neither a file nor one of aime24"),
    (["--pass_rates", "absent.jsonl"], "pass_rates=absent.jsonl does not exist"),
    (["--sauces", "math"], "unrecognized arguments: --sauces math"),
    (["--min_trace", "5"], "unrecognized arguments: --min_trace 5"),
]


@pytest.mark.parametrize(("flags", "message"), BAD_COMMANDS)
def test_bad_input_is_named(tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "rows.jsonl", [make_row(1)])
    (tmp_path / "folder").mkdir()
    for name in ("rows.csv", "broken.parquet", "broken.json"):
        (tmp_path / name).write_text("[broken")
    (tmp_path / "empty.jsonl").write_text("\n")
    before = sorted(tmp_path.iterdir())
    defaults = {"--input": "rows.jsonl", "--output": "kept.jsonl", "--report": "counts.json"}
    given = [part for name, value in defaults.items() if name not in flags for part in (name, value)]
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        data_filter.main([*given, *flags])
    assert sorted(tmp_path.iterdir()) == before


def test_command_line_prints_the_table_or_one_line(tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", [make_row(1), make_row(2, Answer="x")])
    command = [sys.executable, str(ROOT / "data_filter.py"), "--report", str(tmp_path / "counts.json")]
    command += ["--output", str(tmp_path / "kept.jsonl"), "--input"]
    good = subprocess.run([*command, str(source)], capture_output=True, text=True, cwd=tmp_path)
    assert (good.returncode, good.stderr) == (0, "")
    assert good.stdout.splitlines() == [
        "rule                  dropped  remaining  first rows",
        "(rows read)                            2",
        "bad_row                     0          2",
        "answer_missing              0          2",
        "answer_pattern              1          1  2",
        "trace_tokens_missing        0          1",
        "min_trace_tokens            0          1",
        "(rows kept)                            1",
    ]
    bad = subprocess.run([*command, "absent.jsonl"], capture_output=True, text=True, cwd=tmp_path)
    assert bad.returncode == 2 and bad.stdout == ""
    assert bad.stderr.startswith("error: input=absent.jsonl does not exist") and bad.stderr.count("\n") == 1


def test_recompute_tokens_uses_the_named_tokenizer(tmp_path):
    core = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]").save_pretrained(tmp_path / "tokenizer")
    rows = [make_row(n, generated_token_count=None, COT_Reason=" ".join(["word"] * n)) for n in (2, 3, 4)]
    source = write_lines(tmp_path / "rows.jsonl", rows)
    kept, report = run_filter(
        tmp_path, source, "--min_trace_tokens", "3", "--recompute_tokens", str(tmp_path / "tokenizer")
    )
    assert kept == rows[1:] and report["recomputed_token_counts"] == 3
