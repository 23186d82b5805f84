"""How entry points start and end: the libraries' environment, errors of one line, exit codes, also of one of several processes."""

import subprocess
import sys
from pathlib import Path

from opsd.entry import library_environment
from opsd.runinfo import hardware

ROOT = Path(__file__).resolve().parent.parent


def test_libraries_send_nothing_and_the_engine_stays_in_the_process():
    environment = library_environment(3)
    assert (
        environment["DO_NOT_TRACK"]
        == environment["VLLM_NO_USAGE_STATS"]
        == environment["HF_HUB_DISABLE_TELEMETRY"]
        == "1"
    )
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    if not hardware()["gpus"]:
        assert environment["OMP_NUM_THREADS"] == "3"


SCRIPT = """
from opsd.entry import exit_on_bad_input
def main(argv):
    {body}
exit_on_bad_input(main)
"""


def run(body: str, *argv: str) -> subprocess.CompletedProcess:
    code = SCRIPT.format(body=body)
    return subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, cwd=ROOT)


def test_bad_input_is_one_line_and_exit_code_2():
    for kind in ("ValueError", "FileNotFoundError"):
        failed = run(f"raise {kind}('top_p=2 must be\\n  in (0, 1]')")
        assert (failed.returncode, failed.stderr) == (2, "error: top_p=2 must be in (0, 1]\n")
    assert "Traceback" in run("raise ValueError('x')", "--debug").stderr
    assert run("assert argv == ['a', 'b'], argv", "a", "--debug", "b").returncode == 0


def test_one_of_several_processes_ends_before_the_interpreter_is_taken_down(monkeypatch):
    body = """import atexit
    class Last:
        def __del__(self): print('taken down')
    main.last = Last()
    atexit.register(print, 'at exit')
    """
    assert run(body).stdout == "at exit\ntaken down\n"
    monkeypatch.setenv("WORLD_SIZE", "2")  # else gloo's threads may abort the process there
    assert run(body).stdout == "at exit\n"
    assert run("raise ValueError('x')").returncode == 2
    stopped = run("raise SystemExit('error: the loss is nan')")
    assert (stopped.returncode, stopped.stderr) == (1, "error: the loss is nan\n")
    assert run("import sys; sys.exit(3)").returncode == 3


def test_broken_invariants_keep_their_traceback():
    failed = run("raise RuntimeError('the base weights changed')")
    assert failed.returncode == 1 and "Traceback" in failed.stderr
