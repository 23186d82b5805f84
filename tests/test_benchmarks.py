"""Benchmarks: every bad file is one clear error, the hash sees every change that matters and none that does not."""

import json
import logging
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from opsd import benchmarks
from opsd.benchmarks import BENCHMARKS, KNOWN_CONTENT, Problem, content_sha256, load_benchmark

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
ROWS = [{"id": "a", "problem": "1 + 1?", "answer": "2"}, {"id": "b", "problem": "Half of\n 1?", "answer": "\\frac12"}]


def write(path: Path, rows: list[dict], end: str = "\n") -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows) + end, encoding="utf-8")
    return str(path)


def problems(*rows) -> tuple[Problem, ...]:
    return tuple(Problem(*row) for row in rows)


def test_jsonl_parquet_and_saved_folder_give_the_same_benchmark(tmp_path):
    import datasets

    jsonl = load_benchmark(write(tmp_path / "x.jsonl", ROWS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "y.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "z")
    for other in (load_benchmark(str(tmp_path / "y.parquet")), load_benchmark(str(tmp_path / "z"))):
        assert other.problems == jsonl.problems and other.content_sha256 == jsonl.content_sha256
    assert jsonl.name == "x" and jsonl.rows == 2 and len(jsonl.file_sha256) == 64
    assert jsonl.record()["sha256"] == jsonl.content_sha256


def test_a_last_line_without_a_line_end_is_a_row(tmp_path):
    assert len(load_benchmark(write(tmp_path / "x.jsonl", ROWS, end="")).problems) == 2


def test_ids_default_to_row_numbers_and_answers_may_be_numbers(tmp_path):
    path = write(tmp_path / "x.jsonl", [{"problem": "p", "answer": 7}, {"problem": "q", "answer": 2.0}])
    assert load_benchmark(path).problems == problems(("1", "p", "7"), ("2", "q", "2"))


def test_content_hash():
    base = content_sha256(problems(("1", "a  b", "025"), ("2", "c", "x + 1")))
    assert base == content_sha256(problems(("1", "a\nb", "25"), ("2", " c", "x  + 1")))
    for changed in (
        problems(("1", "a b", "26"), ("2", "c", "x + 1")),
        problems(("1", "ab", "25"), ("2", "c", "x + 1")),
        problems(("9", "a b", "25"), ("2", "c", "x + 1")),
        problems(("2", "c", "x + 1"), ("1", "a b", "25")),
        problems(("1", "a b", "25")),
    ):
        assert content_sha256(changed) != base


def test_head_has_a_hash_of_its_own(tmp_path):
    path = write(tmp_path / "x.jsonl", ROWS)
    one, two = load_benchmark(path, max_problems=1), load_benchmark(path, max_problems=2)
    assert len(one.problems) == 1 and one.rows == 2 and one.content_sha256 != two.content_sha256


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "has no rows"),
        ([{"problem": "p"}], "row 1 has answer=None"),
        ([{"problem": "p", "answer": ""}], "row 1 has answer=''"),
        ([{"problem": "p", "answer": True}], "row 1 has answer=True"),
        ([{"answer": "1"}], "row 1 has no problem (columns: answer)"),
        ([{"problem": " ", "answer": "1"}], "row 1 has no problem"),
        ([ROWS[0], ROWS[1], {**ROWS[0], "problem": "other"}], "rows 1 and 3 share id=a"),
    ],
)
def test_bad_rows_are_named(tmp_path, rows, message):
    with pytest.raises(ValueError) as error:
        load_benchmark(write(tmp_path / "x.jsonl", rows))
    assert message in str(error.value)


def test_unreadable_lines_are_named(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"problem": "p", "answer": "1"}\n{"problem": \n')
    with pytest.raises(ValueError, match="row 2: .*not JSON"):
        load_benchmark(str(tmp_path / "x.jsonl"))


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(FileNotFoundError, match="neither a file nor one of aime24, aime25"):
        load_benchmark("aime2024")


def test_without_hub_and_cache_the_remedy_is_named():
    with pytest.raises(FileNotFoundError, match="benchmark=aime24.*give a local .jsonl or .parquet file"):
        load_benchmark("aime24")


def hub(monkeypatch, rows: list[dict]) -> None:
    monkeypatch.setattr(benchmarks, "_hub_rows", lambda name, source: (rows, "test"))


def test_named_benchmarks_are_checked(monkeypatch, caplog):
    good = [{"id": n, "problem": f"p{n}", "answer": f"{n:03d}"} for n in range(30)]
    hub(monkeypatch, good[:29])
    with pytest.raises(ValueError, match="aime25.*has 29 rows, expected 30.*--allow_changed_benchmark true"):
        load_benchmark("aime25")
    with caplog.at_level(logging.WARNING):
        assert len(load_benchmark("aime25", allow_changed=True).problems) == 29
    assert "expected 30" in caplog.text
    hub(monkeypatch, good)
    assert load_benchmark("aime25").name == "aime25"
    with pytest.raises(ValueError, match="aime24.*has content hash"):
        load_benchmark("aime24")
    hub(monkeypatch, [*good[:29], {**good[29], "answer": "1/2"}])
    with pytest.raises(ValueError, match="row 30 has answer='1/2', not an integer"):
        load_benchmark("aime25")


def test_gsm8k_and_olympiadbench_answers(monkeypatch):
    hub(monkeypatch, [{"question": f"q{n}", "answer": "She has 1,000 + 300 = <<..>>\n#### 1,300"} for n in range(1319)])
    assert load_benchmark("gsm8k").problems[0].answer == "1300"
    hub(monkeypatch, [{"id": n, "question": "q", "final_answer": ["1", "2"]} for n in range(674)])
    assert load_benchmark("olympiadbench").problems[5] == Problem("5", "q", "1, 2")


def test_the_table():
    names = ["aime24", "aime25", "hmmt25", "amc23", "math500", "minerva", "olympiadbench", "gsm8k"]
    assert list(BENCHMARKS) == names
    assert {source.answer_type for source in BENCHMARKS.values()} == {"integer", "expression", "after_hashes"}
    assert set(KNOWN_CONTENT.values()) <= set(BENCHMARKS)


@pytest.mark.parametrize("name", ["aime24", "aime25"])
def test_local_copies_are_recognised_by_content(name, tmp_path, caplog):
    if not (DATA / f"{name}.jsonl").exists():
        pytest.skip(f"{DATA} is not here")
    copy = tmp_path / "copy.jsonl"
    rows = [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    write(copy, [row | {"answer": int(row["answer"])} for row in rows])
    assert load_benchmark(str(copy)).name == name
    changed = write(tmp_path / f"{name}.jsonl", [*rows[:-1], rows[-1] | {"problem": rows[-1]["problem"] + "!"}])
    assert load_benchmark(changed).name == f"{name} (file)" and "not a recorded one" in caplog.text
