"""Checkpoints that are complete or absent: written under a hidden name, listed in a manifest, fsynced and renamed in one step.

Between trainer.py, which fills the folder, and resume.py, which picks the one to go on from. A kill at any moment leaves the older
checkpoints as they were and at most a hidden folder that nobody reads and the next save removes. The manifest also names a checkpoint that
was damaged later (a torn copy, a full disk). Nothing here, and nothing that transformers 5.17 does with these files, unpickles objects:
the weights are safetensors, and optimizer, schedule and random states are read with `weights_only=True`.
"""

import fcntl
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from opsd.full_weights import check_saved
from opsd.runinfo import sha256_file, write_json

logger = logging.getLogger(__name__)

MANIFEST = "complete.json"
SCHEMA = "opsd-checkpoint/1"
STAGING = ".incomplete"
REPLACED = ".replaced"
ADAPTERS, LOCK = ".opsd-adapter-", ".lock"
PICKLED_ARGUMENTS = "training_args.bin"  # transformers writes it, nobody reads it; run.json has the arguments as text
STATE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")
LATEST, AUTO = "latest", "auto"


def staging_dir(output_dir: Path) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return Path(output_dir) / STAGING


def clear_staging(output_dir: Path) -> None:
    """Removes what a killed save left."""
    for name in (STAGING, REPLACED):
        if (Path(output_dir) / name).exists():
            shutil.rmtree(Path(output_dir) / name)


def publish(output_dir: Path, name: str, step: int) -> Path:
    """Proves the staged folder `name`, writes its manifest, and renames it into `output_dir`. Returns the checkpoint."""
    staged, final = staging_dir(output_dir) / name, Path(output_dir) / name
    (staged / PICKLED_ARGUMENTS).unlink(missing_ok=True)
    check_saved(staged)
    paths = sorted(path for path in staged.rglob("*") if path.is_file())
    files = {}
    for path in paths:
        _fsync(path)
        files[str(path.relative_to(staged))] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    write_json(staged / MANIFEST, {"schema": SCHEMA, "step": step, "files": files})
    for folder in {path.parent for path in paths} | {staged}:
        _fsync(folder)
    if final.exists():  # a step that is trained again after a resume from an earlier one
        final.rename(Path(output_dir) / REPLACED)
    staged.rename(final)
    _fsync(Path(output_dir))
    clear_staging(output_dir)
    return final


def save_complete(trainer, name: str, write: Callable[[], None]) -> Path:
    """Has `write` fill `staging_dir(output_dir) / name` on every process, then publishes it once it is whole. Returns the folder."""
    output_dir, step = Path(trainer.args.output_dir), trainer.state.global_step
    if trainer.args.should_save:
        clear_staging(output_dir)
    trainer.accelerator.wait_for_everyone()
    write()
    trainer.accelerator.wait_for_everyone()
    if trainer.args.should_save:
        publish(output_dir, name, step)
        remove_old(output_dir, trainer.args.save_total_limit)
    trainer.accelerator.wait_for_everyone()
    return output_dir / name


def check_checkpoint(path: Path) -> int:
    """Proves that every file of the checkpoint is there and unchanged; returns its optimizer step.

    Raises FileNotFoundError without the folder and ValueError, naming the first damaged file, for one that is not complete.
    """
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(
            f"resume_from_checkpoint={path} does not exist; give a checkpoint-N folder, {LATEST} or {AUTO}"
        )
    remedy = "give an earlier checkpoint"
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"checkpoint={path} has no {MANIFEST}, so it was not written to its end; {remedy}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"checkpoint={path}: {MANIFEST} is not JSON ({error}); {remedy}") from None
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        raise ValueError(f"checkpoint={path}: {MANIFEST} is not of schema {SCHEMA}; {remedy}")
    if not isinstance(manifest.get("files"), dict):
        raise ValueError(f"checkpoint={path}: {MANIFEST} lists no files; {remedy}")
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise ValueError(f"checkpoint={path}: {name} is missing; {remedy}")
        if file.stat().st_size != expected["bytes"]:
            raise ValueError(
                f"checkpoint={path}: {name} has {file.stat().st_size} bytes, {expected['bytes']} were written; {remedy}"
            )
        if sha256_file(file) != expected["sha256"]:
            raise ValueError(f"checkpoint={path}: {name} has changed since it was written; {remedy}")
    check_saved(path)
    return manifest["step"]


def checkpoints(output_dir: Path) -> list[Path]:
    """The checkpoint-N folders of a run, newest step first; complete or not."""
    if not Path(output_dir).is_dir():
        return []
    found = [path for path in Path(output_dir).iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """The optimizer step in the name of a checkpoint-N folder."""
    return int(_NAME.fullmatch(checkpoint.name)[1])


def newest_complete(output_dir: Path, *, after: int = -1) -> Path | None:
    """The complete checkpoint of the largest step beyond `after`; damaged ones are passed over with a warning."""
    for path in checkpoints(output_dir):
        if step_of(path) <= after:
            return None
        try:
            check_checkpoint(path)
        except (ValueError, FileNotFoundError) as error:
            logger.warning("passed over: %s", error)
            continue
        return path
    return None


def remove_old(output_dir: Path, limit: int | None) -> None:
    """Deletes the checkpoints of the smallest steps beyond `limit` (transformers' save_total_limit; None = keep all)."""
    for path in checkpoints(output_dir)[limit:] if limit else []:
        # renamed first, so that a kill leaves no half-deleted checkpoint under a checkpoint's name
        hidden = Path(output_dir) / REPLACED
        path.rename(hidden)
        shutil.rmtree(hidden)


def claim_folder(parent: Path | None) -> tuple[Path, IO[bytes]]:
    """A new folder in `parent` (None: the system's temporary one) for adapters on their way to the engine, and the lock that says that its
    process lives. Folders of processes that were killed are removed: memory-backed disk is memory."""
    folder = Path(tempfile.mkdtemp(prefix=ADAPTERS, dir=parent))
    lock = open(folder / ".locking", "wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    (folder / ".locking").rename(folder / LOCK)  # named only once it is held
    for other in folder.parent.glob(ADAPTERS + "*"):
        try:
            with open(other / LOCK, "rb") as theirs:
                fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(other, ignore_errors=True)
        except (FileNotFoundError, BlockingIOError, PermissionError):  # being made, in use, or another user's
            continue
    return folder, lock


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
