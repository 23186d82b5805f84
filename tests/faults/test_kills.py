"""Kills at chosen and at random moments of training, filtering and evaluation: nothing half-written, and a resume ends as if none happened.

The unmarked tests kill a few times; `-m slow` kills at least fifty times and writes its figures to the file named by OPSD_TRUST_FIGURES.
"""

import json
import os
import signal
import time

import pytest
from harness import STEPS, Nursery, World, check_disk, outcome


@pytest.fixture(scope="module")
def nursery():
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World.build(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def uninterrupted(nursery, world):
    """(outcome, number of file operations) of a run that nothing disturbs."""
    folder = world.folder / "whole"
    assert nursery.run("opsd_train", world.training(folder), world.folder / "whole.log", folder=folder) == 0
    check_disk(folder)
    return outcome(folder), int((world.folder / "whole.count").read_text())


def resume(nursery, world, folder, log, **options) -> int:
    arguments = world.training(folder, "--resume_from_checkpoint", "auto")
    return nursery.run("opsd_train", arguments, log, folder=folder, **options)


def finish_and_compare(nursery, world, folder, log, expected) -> None:
    check_disk(folder)
    assert resume(nursery, world, folder, log) == 0, log.read_text()[-2000:]
    check_disk(folder)
    assert outcome(folder) == expected


@pytest.mark.parametrize("share", [0.3, 0.55, 0.8, 0.97])
def test_a_killed_training_ends_as_an_uninterrupted_one(nursery, world, uninterrupted, tmp_path, share):
    expected, operations = uninterrupted
    folder, log = tmp_path / "run", tmp_path / "log"
    arguments = world.training(folder)
    code = nursery.run("opsd_train", arguments, log, folder=folder, fatal=int(share * operations))
    assert code == -signal.SIGKILL
    finish_and_compare(nursery, world, folder, log, expected)


def test_a_signal_saves_the_step_and_says_how_to_go_on(nursery, world, uninterrupted, tmp_path):
    expected, _ = uninterrupted
    folder, log = tmp_path / "run", tmp_path / "log"
    never = "--save_steps=500"  # so that the signal alone makes the checkpoint
    pid = nursery.start("opsd_train", world.training(folder, never), log, folder=folder)
    while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").read_text():
        time.sleep(0.005)
    os.kill(pid, signal.SIGTERM)
    assert nursery.wait(pid) == 0, log.read_text()[-2000:]
    assert json.loads((folder / "run.json").read_text())["status"] == "stopped"
    assert "--resume_from_checkpoint latest" in log.read_text()
    saved = [path.name for path in folder.iterdir() if path.name.startswith("checkpoint-")]
    assert saved and f"checkpoint-{STEPS}" not in saved
    finish_and_compare(nursery, world, folder, log, expected)


def test_the_same_seed_gives_the_same_metrics_bit_for_bit(nursery, world, uninterrupted, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    assert nursery.run("opsd_train", world.training(folder), log, folder=folder) == 0
    assert outcome(folder) == uninterrupted[0]
    other = tmp_path / "other"
    assert nursery.run("opsd_train", world.training(other, "--seed=1"), log, folder=other) == 0
    assert outcome(other)["metrics"] != uninterrupted[0]["metrics"]
