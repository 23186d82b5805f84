"""One engine in a process of its own: receives requests over a pipe, answers each as soon as it finishes. Started by eval_pool.py.

    python -m opsd.eval_worker <file descriptor of the pipe>

Messages to the worker: EngineSettings first, then ("serve", adapter or None), ("request", key, prompt_ids, seed), ("close",).
Messages from it: ("ready",), ("serving", changed), ("done", key, completion_ids, finish_reason), and ("beat", decoding steps so far).
"""

import ctypes
import logging
import queue
import signal
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from opsd.rollout import SamplingSettings, VLLMEngine

PR_SET_PDEATHSIG = 1  # linux/prctl.h
BEAT_SECONDS = 2.0
GONE = object()  # in a queue: the other end of the pipe is closed, or nothing more will be sent


@dataclass(frozen=True)
class EngineSettings:
    """Everything one engine is built from. `max_lora_rank` None = no adapter will be served."""

    kind: str
    model: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    sampling: SamplingSettings
    canary_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    pad_id: int
    max_lora_rank: int | None
    lora_targets: tuple[str, ...] | None = None
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    load_format: str = "auto"
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1


@dataclass(frozen=True)
class Request:
    """One completion to sample."""

    key: tuple[str, int]  # (problem id, sample index)
    prompt_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Finished:
    """One sampled completion and the engine that sampled it."""

    request: Request
    engine: str
    completion_ids: tuple[int, ...]
    finish_reason: str  # "stop" or "length"


def build_engine(settings: EngineSettings):
    """The engine named by `settings.kind`, with the base model loaded."""
    if settings.kind == "transformers":
        import torch

        from opsd.rollout_transformers import TransformersEngine

        return TransformersEngine.from_pretrained(
            settings.model,
            dtype=settings.dtype,
            device="cuda" if torch.cuda.is_available() else "cpu",
            eos_ids=set(settings.eos_ids),
            pad_id=settings.pad_id,
            batch_size=settings.max_num_seqs,
        )
    return VLLMEngine(
        settings.model,
        canary_ids=list(settings.canary_ids),
        eos_ids=set(settings.eos_ids),
        max_model_len=settings.max_model_len,
        dtype=settings.dtype,
        max_num_seqs=settings.max_num_seqs,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        max_lora_rank=settings.max_lora_rank,
        lora_targets=settings.lora_targets and list(settings.lora_targets),
        enforce_eager=settings.enforce_eager,
        load_format=settings.load_format,
        kv_cache_dtype=settings.kv_cache_dtype,
        tensor_parallel_size=settings.tensor_parallel_size,
        with_logps=False,
    )


def serve(connection: Connection, build=build_engine) -> None:
    """Works through the messages until ("close",) or until the other end is gone.

    Two threads move messages, so that neither a slow parent nor a full pipe ever holds up the engine.
    """
    inbox: queue.Queue = queue.Queue()
    outbox: queue.Queue = queue.Queue()
    threading.Thread(target=_read, args=(connection, inbox), daemon=True).start()
    writer = threading.Thread(target=_write, args=(connection, outbox), daemon=True)
    writer.start()
    try:
        settings = inbox.get()
        if settings is GONE:
            return
        engine = build(settings)
        outbox.put(("ready",))
        _work(engine, settings.sampling, inbox, outbox)
        engine.close()
    finally:
        outbox.put(GONE)
        writer.join()


def _work(engine, sampling: SamplingSettings, inbox: queue.Queue, outbox: queue.Queue) -> None:
    steps, last_beat = 0, time.monotonic()
    while True:
        while not engine.pending or not inbox.empty():
            message = inbox.get()
            if message is GONE or message[0] == "close":
                return
            if message[0] == "serve":
                outbox.put(("serving", _sync(engine, message[1])))
            else:
                _, key, prompt_ids, seed = message
                engine.submit(key, prompt_ids, sampling, seed)
        for key, rollout in engine.poll():
            outbox.put(("done", key, list(rollout.completion_ids), rollout.finish_reason))
        steps += 1
        if time.monotonic() - last_beat >= BEAT_SECONDS:
            last_beat = time.monotonic()
            outbox.put(("beat", steps))


def _sync(engine, adapter_dir: Path | None) -> bool:
    """Serves the adapter; whether that changed what vLLM says about the canary prompt (True where it cannot be told)."""
    if adapter_dir is None or not isinstance(engine, VLLMEngine):
        engine.sync(adapter_dir, step=0)
        return True
    engine.sync(None, step=0)
    base = engine.canary_logps
    engine.sync(adapter_dir, step=0)
    return engine.canary_logps != base


def _read(connection: Connection, inbox: queue.Queue) -> None:
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, OSError):
        inbox.put(GONE)


def _write(connection: Connection, outbox: queue.Queue) -> None:
    while (message := outbox.get()) is not GONE:
        try:
            connection.send(message)
        except OSError:
            return


def die_with_parent() -> None:
    """Asks Linux to kill this process when the one that started it dies, so that no engine keeps a GPU after a kill."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    serve(Connection(int(sys.argv[1])))
