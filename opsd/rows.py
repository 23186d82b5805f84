"""Reads rows from .jsonl, .json, .parquet, a saved `datasets` folder or the hub, one by one, with row numbers.

First step of the data flow: `data_filter.py` and `data.py` read through `iter_rows`. A line that is no JSON object is
not skipped here but handed on with its defect, so that the caller can stop or count it. pyarrow and datasets are
imported on demand.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MAX_LINE_BYTES = 64 * 2**20  # a row of the real set has at most a few hundred kB; a longer line means a broken file
BATCH_ROWS = 256  # rows decoded at once from columnar files


@dataclass(frozen=True)
class SourceRow:
    """One row as it was read."""

    number: int  # from 1: the line of a .jsonl file, the position elsewhere
    values: dict | None  # None when the row is unreadable
    defect: str | None = None  # why it is unreadable
    line: bytes | None = None  # the bytes of a .jsonl line, line end included


def iter_rows(path: Path, columns: list[str] | None = None, *, field: str = "rows") -> Iterator[SourceRow]:
    """Streams the rows of a local file or saved dataset in order and in bounded memory (.json arrays excepted).

    `columns` limits what is decoded from columnar files; columns that the file lacks are then absent from the rows.
    `field` is the name of the argument that gave the path, for messages.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"{field}={path} does not exist; give a .jsonl, .json or .parquet file or a saved dataset"
        )
    if path.is_dir():
        return _saved_dataset_rows(path, columns, field)
    if path.suffix == ".jsonl":
        return _line_rows(path)
    if path.suffix == ".json":
        return _json_rows(path, field)
    if path.suffix == ".parquet":
        return _parquet_rows(path, columns, field)
    raise ValueError(f"{field}={path} must end in .jsonl, .json or .parquet, or be a folder of datasets.save_to_disk")


def iter_hub_rows(dataset_name: str, split: str, columns: list[str]) -> Iterator[SourceRow]:
    """Streams a hub dataset from the local cache, downloading it first where needed."""
    import datasets

    try:
        dataset = datasets.load_dataset(dataset_name, split=split)
    except (
        OSError,
        ValueError,
    ) as error:  # offline, unknown name and missing file are OSError; unknown split is ValueError
        raise FileNotFoundError(
            f"dataset_name={dataset_name}, dataset_split={split} cannot be loaded from the hub or its cache "
            f"({_first_line(error)}); check the name and the connection, or give train_file"
        ) from error
    return _dataset_rows(dataset, columns)


@contextlib.contextmanager
def open_atomic(path: Path) -> Iterator[BinaryIO]:
    """A binary file that appears under `path` when the block ends without an error: temporary name, fsync, rename."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w+b") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def encode_line(row: SourceRow) -> bytes:
    """The row as one JSONL line: its own bytes where it came from a .jsonl file, else its values in column order."""
    if row.line is not None:
        return row.line if row.line.endswith(b"\n") else row.line + b"\n"
    try:
        return json.dumps(row.values, ensure_ascii=False).encode() + b"\n"
    except (TypeError, UnicodeEncodeError) as error:
        raise ValueError(f"row {row.number} cannot be written as JSON: {error}; convert the column to text") from None


def _line_rows(path: Path) -> Iterator[SourceRow]:
    with open(path, "rb") as handle:
        number = 0
        while line := handle.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                yield SourceRow(number, None, f"longer than {MAX_LINE_BYTES} bytes")
                while not line.endswith(b"\n") and (line := handle.readline(MAX_LINE_BYTES)):
                    pass
            elif not line.isspace():
                yield _parse_line(number, line)


def _parse_line(number: int, line: bytes) -> SourceRow:
    torn = "" if line.endswith(b"\n") else ", the file ends inside this line"
    try:
        values = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        return SourceRow(number, None, f"not UTF-8 (byte {error.start}){torn}", line)
    except json.JSONDecodeError as error:
        reason = "a NUL byte in the line" if b"\0" in line else f"not JSON ({error.msg} at character {error.pos}){torn}"
        return SourceRow(number, None, reason, line)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of nested brackets
        return SourceRow(number, None, f"not usable JSON ({_first_line(error)})", line)
    if not isinstance(values, dict):
        return SourceRow(number, None, f"a JSON {type(values).__name__}, not an object", line)
    return SourceRow(number, values, None, line)


def _json_rows(path: Path, field: str) -> Iterator[SourceRow]:
    """A .json file is an array of objects, or JSON lines under the other name."""
    with open(path, "rb") as handle:
        while (byte := handle.read(1)).isspace():
            pass
    if byte != b"[":
        yield from _line_rows(path)
        return
    try:
        array = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{field}={path} is not a JSON array ({_first_line(error)}); repair the file") from None
    for number, values in enumerate(array, start=1):
        if isinstance(values, dict):
            yield SourceRow(number, values)
        else:
            yield SourceRow(number, None, f"a JSON {type(values).__name__}, not an object")


def _parquet_rows(path: Path, columns: list[str] | None, field: str) -> Iterator[SourceRow]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            wanted = [name for name in columns if name in names] if columns else names
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=wanted):
                for values in batch.to_pylist():
                    number += 1
                    yield SourceRow(number, values)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(
            f"{field}={path} is not readable as parquet after row {number} ({_first_line(error)}); repair the file"
        ) from error


def _saved_dataset_rows(path: Path, columns: list[str] | None, field: str) -> Iterator[SourceRow]:
    import datasets

    try:
        dataset = datasets.load_from_disk(str(path))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{field}={path} is a folder but no saved dataset; give one of datasets.save_to_disk"
        ) from None
    if isinstance(dataset, datasets.DatasetDict):
        raise ValueError(f"{field}={path} holds the splits {', '.join(dataset)}; give the folder of one split")
    return _dataset_rows(dataset, columns)


def _dataset_rows(dataset, columns: list[str] | None) -> Iterator[SourceRow]:
    if columns:
        dataset = dataset.select_columns([name for name in columns if name in dataset.column_names])
    number = 0
    for table in dataset.with_format("arrow").iter(batch_size=BATCH_ROWS):
        for values in table.to_pylist():
            number += 1
            yield SourceRow(number, values)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
