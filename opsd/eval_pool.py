"""The parent's side of the engine processes: one per GPU (or per group of GPUs), a shared queue, and a clear error when one dies.

Between eval_runner.py (what is asked) and eval_worker.py (one engine). A worker holds only as many requests as keep its engine
busy, so that a queue of any length costs nothing and a dead engine takes only what it had in flight.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

from opsd.eval_worker import EngineSettings, Finished, Request
from opsd.rollout import EngineDied

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parent.parent
WORKER = (sys.executable, "-m", "opsd.eval_worker")
LOG_TAIL_LINES = 15
QUEUED_AHEAD = (
    16  # requests beyond max_num_seqs that a worker holds, so that a free slot is filled without a round trip
)


@dataclass
class Worker:
    """One engine process. `name` says where it runs, e.g. `engine 1 (GPU 3)`."""

    name: str
    process: subprocess.Popen
    connection: Connection
    log: Path
    held: dict[tuple[str, int], Request] = field(default_factory=dict)
    steps: int = 0  # decoding steps, as of the last beat
    steps_per_second: float = 0.0
    beat_at: float = field(default_factory=time.monotonic)

    def beat(self, steps: int) -> None:
        now = time.monotonic()
        self.steps_per_second = (steps - self.steps) / max(now - self.beat_at, 1e-9)
        self.steps, self.beat_at = steps, now


class EnginePool:
    """Engine processes that share one queue. Use as a context manager; leaving it ends every process it started."""

    def __init__(
        self,
        settings: EngineSettings,
        groups: list[str | None],
        log_dir: Path,
        environment: dict[str, str],
        command: tuple[str, ...] = WORKER,
    ):
        log_dir.mkdir(parents=True, exist_ok=True)
        self._max_num_seqs = settings.max_num_seqs
        self._window = settings.max_num_seqs + QUEUED_AHEAD
        self._workers: list[Worker] = []
        started = time.monotonic()
        try:
            for number, group in enumerate(groups):
                self._workers.append(_start(number, group, log_dir, environment, command))
            for worker in self._workers:
                self._send(worker, settings)
            for worker in self._workers:
                self._receive(worker, "ready")
            self.load_seconds = time.monotonic() - started
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __len__(self) -> int:
        return len(self._workers)

    def serve(self, adapter_dir: Path | None, *, must_differ: bool = False) -> None:
        """Every engine serves this adapter (None = the base model) from now on.

        Raises RuntimeError when `must_differ` and an engine's output is bit for bit the base model's.
        """
        for worker in self._workers:
            self._send(worker, ("serve", adapter_dir))
        for worker in self._workers:
            changed = self._receive(worker, "serving")[1]
            if must_differ and not changed:
                raise RuntimeError(
                    f"{worker.name} answers as the base model does although adapter={adapter_dir} is not zero; it does not serve "
                    "the adapter, or the adapter's effect is below the precision: check it and the vLLM version"
                )

    def run(self, requests: list[Request]) -> Iterator[Finished | None]:
        """Yields completions as they finish, and None when a while passed without one.

        Raises EngineDied, after everything that had arrived was yielded.
        """
        queue = deque(requests)
        share = -(-len(queue) // len(self._workers)) if queue else 0
        for worker in self._workers:
            self._feed(worker, queue, min(self._window, share))
        while any(worker.held for worker in self._workers):
            ready = wait([worker.connection for worker in self._workers], timeout=1.0)
            if not ready:
                yield None
            for worker in [w for w in self._workers if w.connection in ready]:
                try:
                    yield self._finished(worker)
                    self._feed(worker, queue, self._window)
                except EngineDied:
                    yield from self._arrived()
                    raise

    def tokens_per_second(self) -> float:
        """Of all engines now: every sequence that is decoded gains one token a step. An upper bound when the KV cache is full."""
        return sum(w.steps_per_second * min(len(w.held), self._max_num_seqs) for w in self._workers)

    def _finished(self, worker: Worker) -> Finished | None:
        message = self._receive(worker, "done", "beat")
        if message[0] == "beat":
            worker.beat(message[1])
            return None
        _, key, completion_ids, finish_reason = message
        return Finished(worker.held.pop(key), worker.name, tuple(completion_ids), finish_reason)

    def _arrived(self) -> Iterator[Finished | None]:
        """What the engines that still run have sent already."""
        for worker in self._workers:
            while worker.process.poll() is None and worker.connection.poll():
                yield self._finished(worker)

    def _feed(self, worker: Worker, queue: deque[Request], window: int) -> None:
        while queue and len(worker.held) < window:
            request = queue.popleft()
            worker.held[request.key] = request
            self._send(worker, ("request", request.key, list(request.prompt_ids), request.seed))

    def _send(self, worker: Worker, message) -> None:
        try:
            worker.connection.send(message)
        except OSError:
            raise self._death(worker) from None

    def _receive(self, worker: Worker, *kinds: str):
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            raise self._death(worker) from None
        if message[0] not in kinds:
            raise RuntimeError(f"{worker.name} answered {message[0]!r} where {kinds[0]!r} was expected")
        return message

    def _death(self, worker: Worker) -> EngineDied:
        try:
            code = worker.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            code = None
        if code is None:
            how = "closed its pipe"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}" + (
                " (out of memory?)" if code == -signal.SIGKILL else ""
            )
        else:
            how = f"ended with exit code {code}"
        lines = worker.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
        tail = "\n".join(f"  | {line}" for line in lines)
        return EngineDied(f"{worker.name} {how}; end of its log {worker.log}:\n{tail}")

    def close(self) -> None:
        """Ends every worker: asks, waits a moment, then kills."""
        for worker in self._workers:
            if worker.held or worker.process.poll() is not None:
                continue
            try:
                worker.connection.send(("close",))
            except OSError:
                logger.debug("%s is gone already", worker.name)
        for worker in self._workers:
            if worker.held:
                worker.process.kill()
            try:
                worker.process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            worker.connection.close()
        self._workers = []


def _start(
    number: int, group: str | None, log_dir: Path, environment: dict[str, str], command: tuple[str, ...]
) -> Worker:
    mine, theirs = Pipe(duplex=True)
    log = log_dir / f"engine-{number}.log"
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    variables = environment | {"PYTHONPATH": os.pathsep.join(paths)}
    if group is not None:
        variables["CUDA_VISIBLE_DEVICES"] = group
    with open(log, "ab") as output:
        process = subprocess.Popen(
            [*command, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=variables,
            start_new_session=True,  # an interrupt from the terminal reaches the parent alone, which ends the engines in order
        )
    theirs.close()
    where = "CPU" if group is None else f"GPU {group}"
    logger.info("engine %d (%s) starts, process %d, log %s", number, where, process.pid, log)
    return Worker(f"engine {number} ({where})", process, mine, log)
