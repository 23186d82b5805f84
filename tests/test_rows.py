"""Reading rows line by line, and files that appear only when complete."""

import pytest

from opsd import rows as rows_module
from opsd.rows import encode_line, iter_rows, open_atomic


def test_a_huge_line_is_skipped_without_being_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "MAX_LINE_BYTES", 100)
    source = tmp_path / "rows.jsonl"
    source.write_bytes(b'{"a": 1}\n{"a": "' + b"x" * 1000 + b'"}\n{"a": 3}\n' + b"y" * 250)
    read = list(iter_rows(source))
    assert [(row.number, row.values, row.defect) for row in read] == [
        (1, {"a": 1}, None),
        (2, None, "longer than 100 bytes"),
        (3, {"a": 3}, None),
        (4, None, "longer than 100 bytes"),
    ]


def test_a_byte_order_mark_is_not_part_of_the_first_row(tmp_path):
    source = tmp_path / "rows.jsonl"
    source.write_bytes(b'\xef\xbb\xbf{"a": 1}\n')
    (row,) = iter_rows(source)
    assert row.values == {"a": 1} and encode_line(row) == source.read_bytes()


def test_atomic_file_appears_only_when_complete(tmp_path):
    path = tmp_path / "new" / "out.bin"
    with pytest.raises(RuntimeError), open_atomic(path) as handle:
        handle.write(b"half")
        raise RuntimeError
    assert list(path.parent.iterdir()) == []
    with open_atomic(path) as handle:
        handle.write(b"whole")
        assert not path.exists()
    assert path.read_bytes() == b"whole"
