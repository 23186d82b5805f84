"""The killable process in which math-verify runs, and the client that talks to it.

sympy can take unbounded time and memory on text a model wrote, and math-verify's own timeouts are signals, which work
on the main thread only. So every comparison that is not decided by reading digits happens in one child process with
hard limits set by the kernel: processor seconds per comparison (RLIMIT_CPU) and address space (RLIMIT_AS). A child that
exceeds a limit dies and the next comparison starts a new one. This works from any thread. The limit counts processor
time, not wall time, so a verdict does not depend on how busy the machine is.

The same file is the child's program (`python grading_worker.py`): JSON lines in, JSON lines out.
"""

import atexit
import json
import os
import select
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

CPU_SECONDS = 2  # per comparison; ordinary ones take a few milliseconds
WALL_SECONDS = 30.0  # outer bound, for a child that waits instead of computing
START_SECONDS = 120.0  # importing sympy and math-verify on a busy machine
MEMORY_BYTES = 1 << 30  # sympy and math-verify need about 150 MiB of address space


@dataclass(frozen=True)
class Verdict:
    """`reason` is `math-verify`, `unparsable`, `timeout` or `memory`; only the first can be correct."""

    correct: bool
    reason: str


class GradingWorker:
    """One child process, started when first needed and restarted after a kill.

    Comparisons queue on a lock, so the last of n threads that ask for expensive ones waits for n of them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._unread = b""

    def compare(self, gold: str, answer: str, *, integer: bool) -> Verdict:
        """Compares two LaTeX strings; `integer` asks for the exact integer `gold` and nothing else."""
        request = json.dumps({"gold": gold, "answer": answer, "integer": integer}).encode() + b"\n"
        with self._lock:
            try:
                if self._process is None or self._process.poll() is not None:
                    self._start()
                reply = self._exchange(request, WALL_SECONDS)
            except BaseException:  # the reply that still comes would be taken for the next comparison's
                self._stop()
                raise
            if reply is None:
                self._stop()
                return Verdict(False, "timeout")
            if reply["reason"] == "memory":
                self._stop()
            return Verdict(bool(reply["correct"]), reply["reason"])

    def close(self) -> None:
        with self._lock:
            self._stop()

    def forget(self) -> None:
        """In a forked child: the process and the lock belong to the parent."""
        self._lock = threading.Lock()
        self._process, self._unread = None, b""

    def _start(self) -> None:
        # -P keeps this file's folder, whose names could shadow other modules, out of the child's import path.
        self._unread = b""
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        if self._exchange(b"", START_SECONDS) is None:
            code = self._process.poll()
            self._stop()
            raise RuntimeError(
                f"grading worker did not start: executable={sys.executable}, exit code={code}; "
                f"run `{sys.executable} {__file__}` to see why (is math-verify installed?)"
            )

    def _stop(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._process = None

    def _exchange(self, request: bytes, seconds: float) -> dict | None:
        """Sends one line, returns the reply, or None when the child died or ran out of time."""
        deadline = time.monotonic() + seconds
        try:
            self._process.stdin.write(request)
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            readable, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(pipe, 65536) if readable else b""
            if not chunk:
                return None
            self._unread += chunk
        line, self._unread = self._unread.split(b"\n", 1)
        return json.loads(line)


WORKER = GradingWorker()
atexit.register(WORKER.close)
os.register_at_fork(after_in_child=WORKER.forget)


def serve() -> None:
    """The child's loop. Nothing the model wrote is ever passed to `eval`: only math-verify's LaTeX grammar is used."""
    import logging
    import resource

    import math_verify
    import sympy

    logging.disable(logging.WARNING)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard_cpu_limit = resource.getrlimit(resource.RLIMIT_CPU)[1]
    extraction = [math_verify.LatexExtractionConfig()]

    def parse(text: str):
        found = math_verify.parse(
            f"${text}$", extraction_config=extraction, fallback_mode="no_fallback", parsing_timeout=None
        )
        return found[0] if found else None

    def one_name_each(*values) -> list:
        """The values with one symbol a name, whatever the parser assumed about it; a lone "i" is the imaginary unit."""
        symbols = {symbol for value in values if isinstance(value, sympy.Basic) for symbol in value.free_symbols}
        meaning = {symbol: sympy.Symbol(symbol.name, real=True) for symbol in symbols}
        if {symbol.name for symbol in symbols} == {"i"}:
            meaning = dict.fromkeys(symbols, sympy.I)
        return [value.xreplace(meaning) if isinstance(value, sympy.Basic) else value for value in values]

    def is_number(value) -> bool:
        return isinstance(value, sympy.Expr) and not value.free_symbols

    def relative_gap(a, b) -> float:
        return float(abs(sympy.N((a - b) / b, 20)))

    def same_integer(gold: str, answer) -> bool:
        (answer,) = one_name_each(answer)
        if not is_number(answer):
            return False
        value, target = sympy.sympify(answer.doit()), sympy.Integer(gold)
        if value.has(sympy.Float):
            return bool(sympy.Abs(sympy.N(value - target, 20)) <= sympy.Float("1e-12") * max(1, abs(target)))
        return (value - target).equals(0) is True

    def verify(gold, answer) -> bool:
        return math_verify.verify(
            [gold], [answer], float_rounding=6, allow_set_relation_comp=True, timeout_seconds=None
        )

    def same_expression(gold, answer) -> bool:
        if isinstance(gold, sympy.Eq) and isinstance(answer, sympy.Eq) and not gold.rhs.has(sympy.Set):
            if not gold.free_symbols or gold.free_symbols != answer.free_symbols:
                return False
            ratio = sympy.simplify((gold.lhs - gold.rhs) / (answer.lhs - answer.rhs))
            return bool(ratio.is_number and ratio.is_finite and ratio.is_nonzero)
        if not verify(gold, answer):
            if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)):
                return False
            gold, answer = one_name_each(gold, answer)
            if not verify(gold, answer):
                return False
        # math-verify rounds to six decimals, so all tiny numbers look alike: ask for the same relative accuracy too.
        if is_number(gold) and is_number(answer) and not gold.has(sympy.UnevaluatedExpr, sympy.oo, -sympy.oo):
            exact = not (gold.has(sympy.Float) or answer.has(sympy.Float) or answer.has(sympy.UnevaluatedExpr))
            gold, answer = gold.doit(), answer.doit()
            return gold == answer or (gold != 0 and relative_gap(answer, gold) < (1e-15 if exact else 2e-6))
        return True

    def decide(request: dict) -> Verdict:
        # math-verify logs and swallows its own errors; the ones listed are what sympy raises on text without meaning.
        try:
            answer = parse(request["answer"])
            gold = request["gold"] if request["integer"] else parse(request["gold"])
            if answer is None or gold is None:
                return Verdict(False, "unparsable")
            return Verdict((same_integer if request["integer"] else same_expression)(gold, answer), "math-verify")
        except MemoryError:
            return Verdict(False, "memory")
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            NotImplementedError,
            RecursionError,
            TypeError,
            ValueError,
        ):
            return Verdict(False, "unparsable")

    def reply(message: dict) -> None:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()

    parse(r"\frac{1}{2}")  # builds the grammar's tables, so that the first comparison is not charged for it
    reply({"ready": True})
    for line in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime) + 1 + CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (limit, hard_cpu_limit))
        verdict = decide(json.loads(line))
        reply({"correct": verdict.correct, "reason": verdict.reason})


if __name__ == "__main__":
    serve()
