"""What a run leaves behind: files that are complete or absent, logs that survive a kill, and errors of one line."""

import hashlib
import json
import math
import os
from pathlib import Path

import pytest
import torch

from opsd.runinfo import (
    append_jsonl,
    git_state,
    hardware,
    open_append_jsonl,
    package_versions,
    read_jsonl,
    sha256_file,
    sha256_tensors,
    write_json,
    write_jsonl,
    write_text,
)

ROOT = Path(__file__).resolve().parent.parent


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "a.json"
    write_json(path, {"a": [1, "ü"]})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": [1, "ü"]}
    for value in (math.nan, math.inf, object()):
        with pytest.raises((ValueError, TypeError)):
            write_json(path, {"a": value})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": [1, "ü"]}
    assert os.listdir(path.parent) == ["a.json"]  # no temporary is left
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def full(_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_text(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.txt"]


def test_lines_are_appended_and_read_back(tmp_path):
    path = tmp_path / "a.jsonl"
    with open_append_jsonl(path) as handle:
        append_jsonl(handle, {"n": 1})
        append_jsonl(handle, {"n": 2}, durable=False)
        assert read_jsonl(path) == [{"n": 1}, {"n": 2}]  # readable while the writer is open
    with open_append_jsonl(path) as handle:
        append_jsonl(handle, {"n": 3})
    assert read_jsonl(path) == [{"n": 1}, {"n": 2}, {"n": 3}]
    write_jsonl(path, [{"n": 4}])
    assert read_jsonl(path) == [{"n": 4}]


@pytest.mark.parametrize("torn", ['{"n": 2', '{"n": 2}'])  # even a complete object without its newline was not finished
def test_a_torn_last_line_is_dropped_with_a_warning(tmp_path, caplog, torn):
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n' + torn)
    assert read_jsonl(path) == [{"n": 1}]
    assert f"torn last line of {len(torn)} bytes" in caplog.text
    with open_append_jsonl(path) as handle:
        append_jsonl(handle, {"n": 3})
    assert read_jsonl(path) == [{"n": 1}, {"n": 3}]


@pytest.mark.parametrize("line", ["{", "[1]", "3", "", "\udcff"])
def test_any_other_bad_line_is_named(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n' + line.encode(errors="surrogateescape") + b'\n{"n": 2}\n')
    with pytest.raises(ValueError, match=rf"{path}:2 is"):
        read_jsonl(path)


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist; give an existing .jsonl"):
        read_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(FileNotFoundError, match="is not a file; give an existing .jsonl"):
        read_jsonl(tmp_path)


def test_digests(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"abc" * 100000)
    assert sha256_file(path) == hashlib.sha256(b"abc" * 100000).hexdigest()
    tensor = torch.arange(6.0).reshape(2, 3)
    digest = sha256_tensors([("a", tensor)])
    assert digest == sha256_tensors([("a", tensor.clone())])
    assert digest == sha256_tensors([("a", tensor.T.contiguous().T)])  # values count, not the layout in memory
    different = [("b", tensor), ("a", tensor.reshape(3, 2)), ("a", tensor.double()), ("a", tensor + 1e-6)]
    assert len({digest, *(sha256_tensors([item]) for item in different)}) == 5
    assert sha256_tensors([("a", tensor.bfloat16())]) != digest


def test_provenance():
    state = git_state()
    assert set(state) == {"commit", "dirty"}
    assert state["commit"] is None or len(state["commit"]) == 40
    versions = package_versions()
    assert versions["torch"] == torch.__version__ and "python" in versions
    assert hardware()["cpus"] == os.cpu_count()
