"""A process that has imported everything once and forks one run per request, so that a killed run costs seconds less.

    python tests/faults/nursery.py

Reads one JSON request a line, answers with one JSON line. {"run": …} forks an entry point and answers its process id, {"wait": pid}
answers how it ended. A run can be told to kill itself right before its n-th file operation under a folder: before each file that it
opens for writing, creates, renames or removes. That reaches every gap between two steps of a save, which a timer rarely hits.
"""

import importlib
import json
import os
import resource
import signal
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.link")


class FileOperations:
    """Counts what a run changes under `folder` and sends itself `number` right before the operation `fatal`."""

    def __init__(self, folder: str, fatal: int | None, number: int):
        self.folder, self.fatal, self.number, self.count = folder, fatal, number, 0

    def __call__(self, event: str, arguments: tuple) -> None:
        if event == "open":
            path, _, flags = arguments
            if not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
        elif event in CHANGES:
            path = arguments[0]
        else:
            return
        if not isinstance(path, str | os.PathLike) or not os.fspath(path).startswith(self.folder):
            return
        self.count += 1
        if self.count == self.fatal:
            os.kill(os.getpid(), self.number)


def child(request: dict) -> int:
    """Runs one entry point in this forked process; its exit code."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    for name, limit in request["limits"].items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    os.environ.update(request["environment"])
    operations = FileOperations(request["folder"], request["fatal"], request["signal"])
    sys.addaudithook(operations)
    sys.argv = [request["entry"] + ".py", *request["arguments"]]
    from opsd.entry import exit_on_bad_input

    try:
        exit_on_bad_input(importlib.import_module(request["entry"]).main)
        return 0
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:  # noqa: BLE001  what the interpreter does at the end of a program
        traceback.print_exc()
        return 1
    finally:
        operations.fatal = None
        Path(request["log"]).with_suffix(".count").write_text(str(operations.count))
        sys.stderr.flush()
        sys.stdout.flush()


def serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = {"code": os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])}
        else:
            pid = os.fork()
            if pid == 0:
                os._exit(child(request))
            answer = {"pid": pid}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    from opsd.entry import library_environment

    for key, value in library_environment(1).items():
        os.environ.setdefault(key, value)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in (
        "opsd_train",
        "data_filter",
        "eval_aime",
        "opsd.setup_run",
        "opsd.handoff",
        "opsd.data",
        "opsd.teacher_load",
    ):
        importlib.import_module(name)
    for name in ("preemption", "metrics_jsonl", "progress_bar", "rollout_log"):
        importlib.import_module(f"callbacks.{name}")
    import torch

    torch.set_num_threads(1)
    serve()
