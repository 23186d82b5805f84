"""What a run goes on from, and what may differ from its first part. Between opsd_train.py and checkpoint.py."""

import fcntl
import json
import logging
import os
from pathlib import Path

from opsd.checkpoint import AUTO, LATEST, check_checkpoint, checkpoints, newest_complete, step_of
from opsd.method_args import check

logger = logging.getLogger(__name__)

MAY_CHANGE = (
    "resume_from_checkpoint",
    "output_dir",
    "disable_tqdm",
    "local_rank",
)  # arguments that say nothing about the result
TRAINED = {True: "adapter", False: "model"}  # use_peft -> the folder that a finished run leaves
WRITABLE = "give a folder that you may write to"
_claims: dict[Path, int] = {}  # descriptors, held until the process ends


def claim_output_dir(output_dir: Path, *, lock: bool) -> None:
    """Makes the folder and, with `lock` (the run's first process), keeps other runs out of it until this process ends.

    The folder itself is locked, so that a refused run leaves no file. Raises ValueError for a folder that cannot be written to or that a
    live process has claimed.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        check(os.access(output_dir, os.W_OK | os.X_OK), f"output_dir={output_dir} is read-only; {WRITABLE}")
        if not lock or output_dir.resolve() in _claims:
            return
        claim = os.open(output_dir, os.O_RDONLY)
    except OSError as error:
        raise ValueError(f"output_dir={output_dir} cannot be made ({error.strerror}); {WRITABLE}") from None
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(claim)
        raise ValueError(
            f"output_dir={output_dir} is in use by another run; wait for its end, or give another output_dir"
        ) from None
    except OSError as error:  # a file system without locks
        logger.warning("output_dir=%s cannot be locked (%s): start no second run in it", output_dir, error.strerror)
    _claims[output_dir.resolve()] = claim


def find_resume(output_dir: Path, wanted: str | None, max_steps: int) -> Path | None:
    """The checkpoint to go on from, or None to start anew.

    `wanted`: None starts a run and refuses a folder that has checkpoints or a finished run already; `latest` is the newest complete one and
    an error without one; `auto` is the same but starts anew when there is none, for schedulers that repeat a command; anything else is a
    folder. One of more than `max_steps` steps is refused, and one that `output_dir` has a later one of: `latest` would go on from that one
    next time. Raises ValueError, and FileNotFoundError for a folder that is none.
    """
    if wanted is None:
        present = checkpoints(output_dir)
        if present:
            raise ValueError(
                f"output_dir={output_dir} holds {present[0].name} of an earlier run; go on with --resume_from_checkpoint {LATEST}, "
                "or give another output_dir"
            )
        _refuse_trained(output_dir)
        return None
    if wanted not in (LATEST, AUTO):
        step = check_checkpoint(Path(wanted))
        latest = newest_complete(output_dir, after=step)
        if latest is not None:
            raise ValueError(
                f"resume_from_checkpoint={wanted} is followed by {latest.name} in output_dir={output_dir}, which a later resume "
                "would take; move the later checkpoints away, or give another output_dir"
            )
        return _within(Path(wanted), step, max_steps)
    found = newest_complete(output_dir)
    if found is None and wanted == LATEST:
        raise ValueError(
            f"resume_from_checkpoint={LATEST}: output_dir={output_dir} holds no complete checkpoint; remove the flag to start anew"
        )
    logger.info("resume_from_checkpoint=%s: %s", wanted, found or "no checkpoint yet, starting")
    if found is None:
        _refuse_trained(output_dir)
        return None
    return _within(found, step_of(found), max_steps)


def _refuse_trained(output_dir: Path) -> None:
    for name in TRAINED.values():
        check(
            not (output_dir / name).exists(),
            f"output_dir={output_dir} holds the {name} of a finished run without checkpoints; give another output_dir",
        )


def _within(checkpoint: Path, step: int, max_steps: int) -> Path:
    if step > max_steps:
        raise ValueError(
            f"max_steps={max_steps} is less than the {step} steps of checkpoint={checkpoint}; give {step} or more"
        )
    return checkpoint


def compare_runs(run_json: Path, record: dict) -> dict[str, list]:
    """What differs in a resumed run from its first part, each with a warning: argument -> [then, now], and the hash of its examples.

    `record` is what the resumed run writes into run.json. Raises FileNotFoundError without the first part's file, and ValueError when the
    base weights are others: the checkpoint would not belong to them.
    """
    if not run_json.is_file():
        raise FileNotFoundError(f"file={run_json} does not exist; keep run.json beside the checkpoints of its run")
    try:
        previous = json.loads(run_json.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"file={run_json} is not JSON ({error}); put the first part's file back") from None
    then, now = previous["base_sha256_before"], record["base_sha256_before"]
    if then != now:
        raise ValueError(
            f"base_sha256={now[:12]} is not the {then[:12]} that the checkpoint was trained on; give the same "
            "model_name_or_path, dtype, bf16 and use_peft"
        )
    changed = {}
    then, now = previous["data"].get("examples_sha256"), record["data"]["examples_sha256"]
    if then != now:
        logger.warning("examples_sha256=%s was %s in the first part of this run: it goes on with other rows", now, then)
        changed["examples_sha256"] = [then, now]
    for owner, arguments in record["arguments"].items():
        for name, value in arguments.items():
            old = previous["arguments"].get(owner, {}).get(name)
            if old != value and name not in MAY_CHANGE:
                logger.warning("%s=%s was %s in the first part of this run", name, value, old)
                changed[name] = [old, value]
    return changed
