"""Sweeps: identity of a run, resuming, paired differences and the ledger, on made-up results and a stand-in for the launcher."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import sweep
from opsd.ledger import (
    Run,
    append_to_ledger,
    baseline_digest,
    mean_costs,
    paired,
    recipe_digest,
    summarise,
    sweep_table,
)
from opsd.sweep_plan import baseline_script, command_of, plan

ROOT = Path(__file__).resolve().parent.parent


def result(correct: list[int], *, n: int = 12, benchmark: str = "b", regime: str = "r", name: str = "x") -> dict:
    problems = [{"id": str(i), "answer": "1", "n": n, "correct": c} for i, c in enumerate(correct)]
    return {
        "name": name,
        "regime_hash": regime,
        "benchmark": {"sha256": benchmark},
        "problems": problems,
        "statistics": {"avg_at_k": sum(correct) / n / len(correct)},
    }


def test_the_hash_knows_a_recipe_and_not_its_repetition():
    arguments = ["--max_steps=100", "--lora_target_modules", "q", "v", "--seed=1", "--output_dir=a"]
    assert recipe_digest(arguments) == recipe_digest(["--seed=2", "--lora_target_modules", "q", "v", "--max_steps=100"])
    assert recipe_digest(arguments) != recipe_digest([*arguments, "--beta=1"])
    assert recipe_digest(arguments) != recipe_digest(["--max_steps=100", "--lora_target_modules", "v", "q"])


def test_paired_difference_and_its_sampling_error():
    a, b = result([6] * 30), result([12] * 15 + [6] * 15)
    difference, error = paired(a, b)
    assert difference == pytest.approx(0.25)
    one = 0.25 / 11  # p(1-p)/(n-1) of a problem with 6 of 12
    assert error == pytest.approx((30 * one + 15 * one) ** 0.5 / 30)


@pytest.mark.parametrize(("key", "word"), [("benchmark", "benchmark"), ("regime", "regime_hash")])
def test_results_that_do_not_belong_together_are_refused(key, word):
    with pytest.raises(ValueError, match=word):
        paired(result([1]), result([1], **{key: "other"}))


def test_summary_over_seeds_and_bold_only_when_zero_is_excluded():
    gain = summarise("a", [(0.10, 0.02), (0.14, 0.02)], [0.6, 0.64])
    assert gain["difference"] == pytest.approx(0.12)
    assert gain["standard_error"] == pytest.approx(0.02 / 2**0.5)
    assert gain["between_seed_sd"] == pytest.approx(0.04 / 2**0.5)
    nothing = summarise("b", [(0.01, 0.02)], [0.5])
    table = sweep_table([gain, nothing], "base model")
    assert "**+12.0 ± 1.4**" in table
    assert "| +1.0 ± 2.0 |" in table


def record(name: str) -> dict:
    rows = [summarise(name, [(0.1, 0.02)], [0.6])]
    return {
        "date": "2026-01-01",
        "question": name,
        "command": ["x"],
        "commit": None,
        "dirty": True,
        "against": "base",
        "rows": rows,
    }


def test_the_ledger_is_newest_first_and_replaces_its_own_entry(tmp_path):
    ledger = tmp_path / "LEDGER.md"
    for name, json_name in (("first", "a.json"), ("second", "b.json"), ("first again", "a.json")):
        append_to_ledger(ledger, record(name), json_name)
    text = ledger.read_text()
    assert text.startswith("# Ledger")
    assert text.index("first again") < text.index("second")
    assert text.count("\n## ") == 2


LAUNCHER = """
import json, pathlib, sys
options = dict(word[2:].split("=", 1) for word in sys.argv[1:] if word.startswith("--") and "=" in word)
folder = pathlib.Path(options["output_dir"])
if (folder / "fail").exists():
    sys.exit(3)
with open(folder.parent / "calls.txt", "a") as calls:
    calls.write(folder.name + " " + options["evaluate_before"] + chr(10))
for name, correct in (("before", 4), ("after", 8)):
    if name == "after" or options["evaluate_before"] == "true":
        target = folder / "eval" / name
        target.mkdir(parents=True)
        problems = [{"id": "0", "answer": "1", "n": 12, "correct": correct}]
        result = {"name": name, "regime_hash": "r", "benchmark": {"sha256": options["seed"]}, "problems": problems}
        result["statistics"] = {"avg_at_k": correct / 12}
        (target / "result.json").write_text(json.dumps(result))
record = {"tokens_generated": 100 + int(options["seed"]), "tokens_trained": 700, "gpu_seconds": 0.0, "wall_seconds": 9.0}
(folder / "run.json").write_text(json.dumps(record))
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Replaces the launcher by a script that writes the results of a run at once."""
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER)

    def stand_in_command(run, arguments, extra, *, before):
        return [
            sys.executable,
            str(script),
            f"--seed={run.seed}",
            f"--output_dir={run.folder}",
            f"--evaluate_before={str(before).lower()}",
        ]

    monkeypatch.setattr(sweep, "command_of", stand_in_command)
    return tmp_path


def call(folder: Path, *extra: str) -> None:
    sweep.main(
        ["recipes/tiny.env", "recipes/tiny_swapped.env", "--seeds=2", "--name=t", "--question=q", f"--output_dir={folder / 'runs'}",
         f"--results_dir={folder / 'results'}", *extra]
    )  # fmt: skip


def test_a_sweep_trains_each_run_once_and_measures_each_base_once(stand_in, capsys):
    call(stand_in)
    calls = (stand_in / "runs" / "calls.txt").read_text().splitlines()
    assert [line.split()[1] for line in calls] == ["true", "true", "false", "false"]
    call(stand_in)  # everything is finished
    assert len((stand_in / "runs" / "calls.txt").read_text().splitlines()) == 4
    data = json.loads((stand_in / "results" / "sweep_t.json").read_text())
    assert [row["recipe"] for row in data["rows"]] == ["base model", "tiny", "tiny_swapped"]
    assert data["rows"][1]["difference"] == pytest.approx(1 / 3)
    costs = {"tokens_generated": 100.5, "tokens_trained": 700, "gpu_seconds": None, "wall_seconds": 9}
    assert data["rows"][1]["costs"] == costs
    assert "tiny_swapped" in capsys.readouterr().out


def test_a_failed_run_stops_the_sweep_and_the_rest_resumes(stand_in):
    arguments = ["recipes/tiny.env", "--seeds=2", "--name=t", "--question=q"]
    folder = stand_in / "runs"
    call_arguments = [*arguments, f"--output_dir={folder}", f"--results_dir={stand_in / 'results'}"]
    digest = recipe_digest(sweep_training_arguments("recipes/tiny.env"))
    bad = Run("tiny", "recipes/tiny.env", digest, 1, folder / f"tiny-{digest}-seed1")
    bad.folder.mkdir(parents=True)
    (bad.folder / "fail").touch()
    with pytest.raises(RuntimeError, match="tiny, seed 1 ended with exit code 3"):
        sweep.main(call_arguments)
    (bad.folder / "fail").unlink()
    sweep.main(call_arguments)
    assert len((folder / "calls.txt").read_text().splitlines()) == 2


def sweep_training_arguments(recipe: str) -> list[str]:
    from opsd.launch import resolve

    return resolve([recipe], {}).training_arguments


def test_unknown_baseline_and_bad_counts_are_refused(stand_in):
    with pytest.raises(ValueError, match="against='nothing'"):
        call(stand_in, "--against=nothing")
    with pytest.raises(ValueError, match="parallel=2 needs as many gpus"):
        call(stand_in, "--parallel=2", "--gpus=0")


def test_a_baseline_is_a_run_of_its_own_script(tmp_path):
    arguments = argparse.Namespace(
        recipes=["recipes/baselines/sft_tiny.yaml"], seeds=[0], base_recipe="recipes/tiny.env", output_dir=tmp_path
    )
    (run,) = plan(arguments, [])
    (other,) = plan(arguments, ["--learning_rate=1e-4"])
    assert run.is_baseline and run.digest != other.digest
    command = command_of(run, arguments, ["--learning_rate=1e-4"], before=True)
    assert Path(command[1]).name == "sft_train.py"
    assert command[2:4] == ["--config", "recipes/baselines/sft_tiny.yaml"]
    assert {"--learning_rate=1e-4", "--seed=0", "--world_seed=0", "--evaluate_before=true"} <= set(command)
    assert not any("base_recipe" in word for word in command)
    for wrong in ("recipes/baselines/none.yaml", "recipes/baselines/dpo_tiny.yaml"):
        with pytest.raises(ValueError, match="must be an existing file named sft_"):
            baseline_script(wrong)


def test_the_identity_of_a_baseline_leaves_out_what_repeats_it():
    settings = {"learning_rate": 1e-3, "output_dir": "a", "seed": 1}
    assert baseline_digest(settings, []) == baseline_digest({"learning_rate": 1e-3, "output_dir": "b"}, [])
    assert baseline_digest(settings, []) != baseline_digest(settings | {"learning_rate": 1e-4}, [])


def test_costs_are_means_over_seeds_and_absent_without_a_gpu():
    cpu = {"tokens_generated": 0, "tokens_trained": 10, "gpu_seconds": 0.0, "wall_seconds": 3.0}
    assert mean_costs([cpu, cpu | {"tokens_trained": 20}]) == {
        "tokens_generated": 0,
        "tokens_trained": 15,
        "gpu_seconds": None,
        "wall_seconds": 3,
    }
    assert mean_costs([cpu | {"gpu_seconds": 8.0}])["gpu_seconds"] == 8
    old = {"tokens_generated": 5, "tokens_trained": 10}  # written before GPU seconds were
    row = summarise("x", [(0.0, 0.1)], [0.5], mean_costs([old]))
    assert sweep_table([row], "y").endswith("| 5 | 10 | – | – |")


SLEEPER = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: ((folder / "ended").touch(), sys.exit(0)))
(folder / "started").touch()
time.sleep(60)
"""
SWEEP = """
import sys
sys.path.insert(0, {root!r})
import sweep
sweep.command_of = lambda run, *_, **__: [sys.executable, {script!r}, str(run.folder)]
sweep.main(["recipes/tiny.env", "--seeds=1", "--name=t", "--question=q", "--output_dir={runs}", "--results_dir={runs}"])
"""


def test_a_terminated_sweep_ends_its_runs(tmp_path):
    script, runs = tmp_path / "sleeper.py", tmp_path / "runs"
    script.write_text(SLEEPER)
    program = SWEEP.format(root=str(ROOT), script=str(script), runs=runs)
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    deadline = time.monotonic() + 60
    while not list(runs.glob("*/started")) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 128 + signal.SIGTERM
    assert len(list(runs.glob("*/ended"))) == 1


SLOW_SECOND_RUN = """
import pathlib, sys, time
arguments = [f"--output_dir={sys.argv[1]}", "--seed=" + sys.argv[1][-1], "--evaluate_before=true"]
if (pathlib.Path(sys.argv[1]).parent / "wait").exists() and sys.argv[1].endswith("1"):
    (pathlib.Path(sys.argv[1]).parent / "waiting").touch()
    time.sleep(60)
sys.argv[1:] = arguments
"""


def test_a_killed_sweep_goes_on_and_trains_nothing_twice(tmp_path):
    script, runs = tmp_path / "launcher.py", tmp_path / "runs"
    script.write_text(SLOW_SECOND_RUN + LAUNCHER)
    runs.mkdir()
    (runs / "wait").touch()
    program = SWEEP.format(root=str(ROOT), script=str(script), runs=runs).replace("--seeds=1", "--seeds=2")
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, start_new_session=True)
    deadline = time.monotonic() + 60
    while not (runs / "waiting").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    (runs / "wait").unlink()
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    finished = [line.split()[0][-5:] for line in (runs / "calls.txt").read_text().splitlines()]
    assert finished == ["seed0", "seed1"]
    assert (runs / "sweep_t.json").is_file()
