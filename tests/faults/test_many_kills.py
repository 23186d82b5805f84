"""The slow suite of kills: chains of them on one run, a full disk, no memory, killed engines, killed filters; sixty and more.

    TRUST_FIGURES=kills.json python -m pytest -q -m slow tests/faults

Every case counts the runs that did not reach their end; with TRUST_FIGURES the counts are written to that file.
"""

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
from harness import Nursery, World, check_disk, outcome
from test_kills import finish_and_compare

from opsd.runinfo import read_jsonl, write_json

pytestmark = pytest.mark.slow
SURVIVED: Counter = Counter()
CHAINS = int(os.environ.get("KILL_CHAINS", 14))


@pytest.fixture(scope="module")
def nursery():
    nursery = Nursery()
    yield nursery
    nursery.close()
    if "TRUST_FIGURES" in os.environ:
        write_json(Path(os.environ["TRUST_FIGURES"]), {"kills": dict(SURVIVED), "total": sum(SURVIVED.values())})


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World.build(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def uninterrupted(nursery, world):
    """(outcome, file operations, seconds) of a run that nothing disturbs."""
    folder, started = world.folder / "whole", time.monotonic()
    assert nursery.run("opsd_train", world.training(folder), world.folder / "whole.log", folder=folder) == 0
    seconds = time.monotonic() - started
    return outcome(folder), int((world.folder / "whole.count").read_text()), seconds


@pytest.mark.parametrize("seed", range(CHAINS))
def test_a_chain_of_kills(nursery, world, uninterrupted, tmp_path, seed):
    """Up to five kills of one run: before a random file operation, or SIGKILL or SIGTERM after a random time."""
    expected, operations, seconds = uninterrupted
    generator, folder, log = random.Random(seed), tmp_path / "run", tmp_path / "log"
    arguments = world.training(folder, "--resume_from_checkpoint", "auto")
    for _ in range(5):
        kind = generator.choice(["SIGKILL before a file operation"] * 3 + ["SIGKILL", "SIGTERM"])
        if kind == "SIGKILL before a file operation":
            fatal = generator.randrange(1, operations)
            code = nursery.run("opsd_train", arguments, log, folder=folder, fatal=fatal)
        else:
            pid = nursery.start("opsd_train", arguments, log, folder=folder)
            time.sleep(generator.uniform(0, seconds))
            os.kill(pid, signal.Signals[kind])  # a run that has ended waits to be collected, so the id is still its own
            code = nursery.wait(pid)
        check_disk(folder)
        ended = (folder / "run.json").exists() and json.loads((folder / "run.json").read_text())["status"] == "finished"
        SURVIVED[kind] += code != 0 or not ended
        assert code in (0, -signal.SIGKILL, -signal.SIGTERM), log.read_text()[-2000:]
    finish_and_compare(nursery, world, folder, log, expected)


@pytest.mark.parametrize("largest_file", [1000, 3000, 6000, 10_000, 16_000, 21_000])
def test_a_write_that_fails(nursery, world, uninterrupted, tmp_path, largest_file):
    """A file may not grow beyond a limit, as on a full disk: the run stops, nothing half-written has a name."""
    folder, log = tmp_path / "run", tmp_path / "log"
    log.write_bytes(b"")
    limits = {"RLIMIT_FSIZE": largest_file}
    code = nursery.run("opsd_train", world.training(folder), log, folder=folder, limits=limits)
    assert code != 0
    SURVIVED["write refused by a size limit"] += 1
    resumed = [] if not [p for p in folder.glob("checkpoint-*")] else ["--resume_from_checkpoint", "latest"]
    check_disk(folder)
    assert nursery.run("opsd_train", world.training(folder, *resumed), log, folder=folder) == 0, log.read_text()[-2000:]
    check_disk(folder)
    assert outcome(folder) == uninterrupted[0]


@pytest.mark.parametrize("kilobytes", [16, 64, 128, 192])
def test_a_full_disk(nursery, world, uninterrupted, tmp_path, kilobytes):
    disk, log = tmp_path / "disk", tmp_path / "log"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        folder = disk / "run"
        assert nursery.run("opsd_train", world.training(folder), log, folder=folder) != 0
        assert "No space left" in log.read_text() or "inline_container" in log.read_text()  # Python's and torch's words
        SURVIVED["disk full"] += 1
        check_disk(folder)
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        finish_and_compare(nursery, world, folder, log, uninterrupted[0])
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("megabytes", [8, 32, 64, 128])
def test_no_memory(nursery, world, uninterrupted, tmp_path, megabytes):
    pages = int(Path(f"/proc/{nursery.pid}/statm").read_text().split()[0])
    folder, log = tmp_path / "run", tmp_path / "log"
    limits = {"RLIMIT_AS": pages * os.sysconf("SC_PAGE_SIZE") + megabytes * 2**20}
    code = nursery.run("opsd_train", world.training(folder), log, folder=folder, limits=limits)
    SURVIVED["address space limit"] += code != 0
    if code:
        finish_and_compare(nursery, world, folder, log, uninterrupted[0])


def test_a_filter_killed_before_each_of_its_file_operations(nursery, world, tmp_path):
    whole = tmp_path / "whole"
    flags = ["--input", world.folder / "rows.jsonl", "--answer_pattern", "", "--min_trace_tokens", "0"]

    def run(folder: Path, **options) -> int:
        folder.mkdir(exist_ok=True)
        outputs = ["--output", folder / "kept.jsonl", "--report", folder / "counts.json"]
        return nursery.run("data_filter", [*flags, *outputs], folder.with_suffix(".log"), folder=folder, **options)

    assert run(whole) == 0
    kept = (whole / "kept.jsonl").read_bytes()
    for fatal in range(1, int(whole.with_suffix(".count").read_text()) + 1):
        folder = tmp_path / f"killed-{fatal}"
        assert run(folder, fatal=fatal) == -signal.SIGKILL
        SURVIVED["filter, SIGKILL before a file operation"] += 1
        names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
        assert names <= {"kept.jsonl", "counts.json"}
        assert "kept.jsonl" not in names or (folder / "kept.jsonl").read_bytes() == kept
        assert run(folder) == 0 and (folder / "kept.jsonl").read_bytes() == kept


@pytest.mark.parametrize("victim", ["evaluator", "evaluator", "engine", "engine"])
def test_a_killed_evaluation(nursery, world, tmp_path, victim):
    rows = [{"problem": f"What is {n} + 1?", "answer": n + 1} for n in range(4)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {"model": world.folder / "model", "benchmark": tmp_path / "problems.jsonl", "engine": "transformers", "report": "false",
             "max_new_tokens": 24, "samples_per_problem": 16, "max_num_seqs": 2}  # fmt: skip

    def words(folder: Path) -> list[str]:
        return [f"--{name}={value}" for name, value in flags.items()] + [f"--output_dir={folder}"]

    def samples(folder: Path) -> dict:
        found = read_jsonl(folder / "samples.jsonl") if (folder / "samples.jsonl").exists() else []
        keyed = {(s["problem_id"], s["sample_index"]): s["text"] for s in found}
        assert len(keyed) == len(found)
        return keyed

    folder, log = tmp_path / "out", tmp_path / "log"
    pid = nursery.start("eval_aime", words(folder), log)
    while len(samples(folder)) < 3:
        time.sleep(0.02)
    if victim == "evaluator":
        os.kill(pid, signal.SIGKILL)
        assert nursery.wait(pid) == -signal.SIGKILL
    else:
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            if b"eval_worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                os.kill(int(child), signal.SIGKILL)
        assert nursery.wait(pid) == 1 and "samples are kept in" in log.read_text()
    SURVIVED[f"{victim}, SIGKILL"] += 1
    before = samples(folder)
    assert 0 < len(before) < 64 and not (folder / "result.json").exists()
    assert nursery.run("eval_aime", words(folder), log) == 0, log.read_text()[-2000:]
    after = samples(folder)
    assert len(after) == 64 and all(after[key] == text for key, text in before.items())
