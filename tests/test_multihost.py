"""Two hosts, played by two launchers on this machine: one is killed, the other soon ends and says so, and the run resumes."""

import time
from pathlib import Path

import psutil
import pytest
from test_processes import free_port, launch, steps, write_recipe

from opsd.checkpoint import check_checkpoint, newest_complete

MAX_STEPS = 12


def start_hosts(recipe: Path, output_dir: Path, *flags: str) -> list:
    port = str(free_port())
    hosts = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OPSD_NUM_PROCESSES": "1"}
    return [launch(recipe, output_dir, *flags, NODE_RANK=rank, **hosts) for rank in ("0", "1")]


def kill_host(launcher) -> None:
    """SIGKILL to everything that runs on it, as a power cut would."""
    processes = [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(recursive=True)]
    for process in processes:
        process.kill()
    launcher.wait()


@pytest.mark.slow
def test_a_lost_host_ends_the_other_within_a_minute_and_the_run_resumes(tmp_path):
    recipe, output_dir = write_recipe(tmp_path, MAX_STEPS), tmp_path / "run"
    survivor, lost = start_hosts(recipe, output_dir, "--save_steps", "1")
    while not (output_dir / "checkpoint-2").is_dir():
        assert survivor.poll() is None and lost.poll() is None, (tmp_path / "run0.stderr").read_text()[-3000:]
        time.sleep(0.1)
    kill_host(lost)
    killed_at = time.monotonic()
    assert survivor.wait(timeout=60) not in (0, None)
    assert time.monotonic() - killed_at < 60
    assert "--resume_from_checkpoint latest" in (tmp_path / "run0.stderr").read_text()
    reached = check_checkpoint(newest_complete(output_dir))
    assert 2 <= reached < MAX_STEPS
    for host in start_hosts(recipe, output_dir, "--save_steps", "1", "--resume_from_checkpoint", "latest"):
        assert host.wait() == 0, (tmp_path / "run0.stderr").read_text()[-3000:]
    assert steps(output_dir)[-1]["step"] == MAX_STEPS
    assert (output_dir / "adapter").is_dir()
