"""The hand-off to the evaluator: what it is called with, and a signal that reaches it."""

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from opsd.args import EvalRegime
from opsd.handoff import Handoff

SCRIPT = """
import json, os, sys, time
open(os.environ["HANDOFF_CALLS"], "a").write(json.dumps(sys.argv[1:]) + "\\n")
time.sleep(float(os.environ.get("HANDOFF_SECONDS", 0)))
"""


@pytest.fixture
def called(tmp_path, monkeypatch):
    """A script that writes down its arguments, and what it was called with so far."""
    (tmp_path / "evaluator.py").write_text(SCRIPT)
    monkeypatch.setenv("HANDOFF_CALLS", str(tmp_path / "calls"))

    def make(*, use_peft=True, dtype="bfloat16", bf16=True) -> Handoff:
        model = SimpleNamespace(model_name_or_path="base", use_peft=use_peft, dtype=dtype)
        handoff = SimpleNamespace(eval_benchmark="rows.jsonl", eval_max_problems=None)
        return Handoff(tmp_path / "evaluator.py", model, handoff, EvalRegime(), tmp_path / "eval", bf16)

    def calls() -> list[str]:
        return (tmp_path / "calls").read_text().splitlines()

    return make, calls


def test_an_adapter_goes_beside_its_base_and_a_model_in_its_place(called):
    make, calls = called
    make().run("before")
    make().run("after", Path("run/adapter"))
    make(use_peft=False, dtype="float32").run("after", Path("run/model"))
    make(use_peft=False, dtype="float32", bf16=False).check()
    before, adapter, model, dry = calls()
    assert '"--model", "base"' in before and "--adapter" not in before
    assert '"--model", "base", "--adapter", "run/adapter"' in adapter and '"--dtype", "bfloat16"' in adapter
    assert '"--model", "run/model"' in model and "--adapter" not in model and '"--dtype", "bfloat16"' in model
    assert '"--dtype", "float32"' in dry and '"--dry_run", "true"' in dry


def test_a_signal_ends_the_evaluator_and_says_how_to_go_on(called, monkeypatch, caplog):
    make, calls = called
    monkeypatch.setenv("HANDOFF_SECONDS", "60")
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]

    def send():
        while not Path(os.environ["HANDOFF_CALLS"]).exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send, daemon=True).start()
    started = time.monotonic()
    with pytest.raises(SystemExit) as stopped:
        make().run("before")
    assert stopped.value.code == 128 + signal.SIGTERM and time.monotonic() - started < 30
    assert "SIGTERM during the evaluation: finished completions are kept; to go on: the same command" in caplog.text
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == handlers
