"""Checkpoints: published whole, damage is named, the newest complete one is found, and nothing is mixed with an earlier run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from random_qwen3 import save_adapter, save_model

from opsd import checkpoint
from opsd.checkpoint import (
    check_checkpoint,
    checkpoints,
    claim_folder,
    publish,
    remove_old,
    staging_dir,
)
from opsd.resume import claim_output_dir, compare_runs, find_resume

ROOT = Path(checkpoint.__file__).parent.parent


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    save_model(folder / "model")
    return save_adapter(folder / "adapter", folder / "model")


def stage(output_dir, adapter, name="checkpoint-2"):
    folder = staging_dir(output_dir) / name
    folder.mkdir(parents=True)
    for path in adapter.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "optimizer.pt").write_bytes(b"state")
    (folder / "training_args.bin").write_bytes(b"pickle")
    return folder


def save(output_dir, adapter, step):
    stage(output_dir, adapter, f"checkpoint-{step}")
    return publish(output_dir, f"checkpoint-{step}", step)


def test_a_published_checkpoint_is_complete_and_holds_no_pickled_arguments(tmp_path, adapter):
    path = save(tmp_path, adapter, 2)
    assert check_checkpoint(path) == 2
    assert not (path / "training_args.bin").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-2"]


def test_an_adapter_that_is_not_complete_is_never_published(tmp_path, adapter):
    folder = stage(tmp_path, adapter)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ValueError, match="not a complete safetensors"):
        publish(tmp_path, "checkpoint-2", 2)
    assert checkpoints(tmp_path) == []


@pytest.mark.parametrize(
    "damage", ["missing", "cut", "changed", "no manifest", "garbled manifest", "other schema", "no files"]
)
def test_damage_is_named_and_passed_over(tmp_path, adapter, damage):
    first, second = save(tmp_path, adapter, 2), save(tmp_path, adapter, 10)
    file, manifest = second / "optimizer.pt", second / checkpoint.MANIFEST
    if damage == "missing":
        file.unlink()
    elif damage == "cut":
        os.truncate(file, 2)
    elif damage == "changed":
        file.write_bytes(b"STATE")
    elif damage == "no manifest":
        manifest.unlink()
    else:
        texts = {"garbled manifest": "{", "other schema": '{"schema": "other"}'}
        manifest.write_text(texts.get(damage, json.dumps({"schema": checkpoint.SCHEMA, "step": 10})))
    with pytest.raises(ValueError, match="checkpoint-10.*give an earlier checkpoint"):
        check_checkpoint(second)
    assert find_resume(tmp_path, "latest", 100) == first
    with pytest.raises(ValueError, match="checkpoint-10"):
        find_resume(tmp_path, str(second), 100)


def test_what_to_go_on_from(tmp_path, adapter):
    assert find_resume(tmp_path, None, 100) is None and find_resume(tmp_path, "auto", 100) is None
    with pytest.raises(ValueError, match="holds no complete checkpoint"):
        find_resume(tmp_path, "latest", 100)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        find_resume(tmp_path, str(tmp_path / "nowhere"), 100)
    paths = [save(tmp_path, adapter, step) for step in (2, 10, 4)]
    assert checkpoints(tmp_path) == [paths[1], paths[2], paths[0]]  # by step, not by name or time
    assert find_resume(tmp_path, "latest", 100) == find_resume(tmp_path, "auto", 100) == paths[1]
    assert find_resume(tmp_path / "other", str(paths[0]), 100) == paths[0]
    with pytest.raises(
        ValueError, match="checkpoint-2 is followed by checkpoint-10 in output_dir=.*another output_dir"
    ):
        find_resume(tmp_path, str(paths[0]), 100)
    for wanted in ("latest", str(paths[1])):
        assert find_resume(tmp_path, wanted, 10) == paths[1]
        with pytest.raises(ValueError, match="max_steps=9 is less than the 10 steps of checkpoint=.*; give 10 or more"):
            find_resume(tmp_path, wanted, 9)
    with pytest.raises(ValueError, match="holds checkpoint-10 of an earlier run.*--resume_from_checkpoint latest"):
        find_resume(tmp_path, None, 100)


@pytest.mark.parametrize("name", ["file", "file/below", "dangling", "n" * 300])
def test_an_output_folder_that_cannot_be_made_is_one_line(tmp_path, name):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "at all")
    with pytest.raises(ValueError, match="output_dir=.* cannot be made .*give a folder"):
        claim_output_dir(tmp_path / name, lock=False)


@pytest.mark.parametrize("wanted", [None, "auto"])
def test_a_finished_run_without_checkpoints_is_not_written_over(tmp_path, wanted):
    (tmp_path / "adapter").mkdir()
    with pytest.raises(ValueError, match="holds the adapter of a finished run without checkpoints; give another"):
        find_resume(tmp_path, wanted, 100)


def test_a_second_run_stays_out_until_the_first_has_ended(tmp_path):
    code = "import sys; from pathlib import Path; from opsd.resume import claim_output_dir as claim"
    code += "; claim(Path(sys.argv[1]), lock=True); print('claimed', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as first:
        assert first.stdout.readline() == "claimed\n"
        claim_output_dir(tmp_path / "run", lock=False)  # the other processes of a run
        with pytest.raises(ValueError, match="output_dir=.*/run is in use by another run; .*another output_dir"):
            claim_output_dir(tmp_path / "run", lock=True)
        first.kill()
    assert list((tmp_path / "run").iterdir()) == []
    claim_output_dir(tmp_path / "run", lock=True)


def test_a_step_that_is_trained_again_replaces_its_checkpoint(tmp_path, adapter):
    save(tmp_path, adapter, 2)
    folder = stage(tmp_path, adapter)
    (folder / "optimizer.pt").write_bytes(b"newer")
    path = publish(tmp_path, "checkpoint-2", 2)
    assert check_checkpoint(path) == 2 and (path / "optimizer.pt").read_bytes() == b"newer"
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-2"]


def test_old_checkpoints_are_removed_by_step(tmp_path, adapter):
    for step in (2, 4, 10):
        save(tmp_path, adapter, step)
    remove_old(tmp_path, None)
    assert len(checkpoints(tmp_path)) == 3
    remove_old(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-4"]


def test_a_resumed_run_names_what_differs(tmp_path):
    record = {"data": {"examples_sha256": "c" * 64}}
    record |= {"base_sha256_before": "a" * 64, "arguments": {"OPSDConfig": {"beta": 0.0, "output_dir": "x", "seed": 1}}}
    path = tmp_path / "run.json"
    with pytest.raises(FileNotFoundError, match="run.json"):
        compare_runs(path, record)
    path.write_text(json.dumps(record))
    assert compare_runs(path, record) == {}
    changed = {"OPSDConfig": {"beta": 1.0, "output_dir": "y", "seed": 1}}
    assert compare_runs(path, record | {"arguments": changed}) == {"beta": [0.0, 1.0]}
    other_rows = record | {"data": {"examples_sha256": "d" * 64}}
    assert compare_runs(path, other_rows) == {"examples_sha256": ["c" * 64, "d" * 64]}
    with pytest.raises(ValueError, match="base_sha256=bbb.*same model_name_or_path"):
        compare_runs(path, record | {"base_sha256_before": "b" * 64})


def test_folders_of_killed_processes_are_removed_and_those_in_use_are_not(tmp_path):
    first, lock = claim_folder(tmp_path)
    (first / "step-1").mkdir()
    second, other = claim_folder(tmp_path)
    assert first.is_dir() and second.is_dir()
    lock.close()  # what the end of a process does
    third, last = claim_folder(tmp_path)
    assert not first.exists() and second.is_dir() and third.is_dir()
    for handle in (other, last):
        handle.close()
