"""The tiny world for many steps with a checkpoint and an evaluation every so often: what a run holds stays flat (slow).

SOAK_STEPS=2000 TRUST_SOAK_TINY=soak.json python -m pytest -q -m slow tests/faults/test_soak_tiny.py

SOAK_CACHE names a folder in which the world is kept (tests do not read OPSD_ variables). Real vLLM, real recipe,
evaluation in a process of its own as in the hand-off. The figures are drawn beside the JSON.
"""

import os
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from test_soak import held
from transformers import TrainerCallback

import opsd_train
from opsd.args import parse_training_args
from opsd.launch import resolve
from opsd.runinfo import read_json, write_json
from opsd.setup_run import resolve_world

ROOT = Path(__file__).resolve().parent.parent.parent
STEPS = int(os.environ.get("SOAK_STEPS", 2000))
EVALUATE_EVERY = max(STEPS // 10, 1)
HELD = ("resident_mib", "file_handles", "threads", "shared_memory_entries", "disk_files", "disk_mib")


class Watch(TrainerCallback):
    """What this process and its run hold, ten times between two evaluations; the evaluations themselves."""

    def __init__(self, output_dir: Path, model: str, benchmark: str):
        self.output_dir, self.model, self.benchmark = output_dir, model, benchmark
        self.rows, self.scores = [], []

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % max(EVALUATE_EVERY // 10, 1):
            return
        growing = ("metrics.jsonl", "rollouts.jsonl", "trainer_state.json")  # one entry a step or a rollout, by design
        sizes = [p.stat().st_size for p in self.output_dir.rglob("*") if p.is_file() and p.name not in growing]
        row = {"step": state.global_step, **held(self.output_dir), "disk_mib": sum(sizes) / 2**20}
        self.rows.append(row)

    def on_save(self, args, state, control, **kwargs):
        if state.global_step % EVALUATE_EVERY:
            return
        folder = self.output_dir.parent / f"eval-{state.global_step}"
        words = f"--model {self.model} --adapter {self.output_dir / f'checkpoint-{state.global_step}'} --output_dir {folder}"
        words += f" --benchmark {self.benchmark} --max_problems 10 --samples_per_problem 4 --max_new_tokens 40 --thinking false"
        command = [sys.executable, str(ROOT / "eval_aime.py"), *words.split(), "--report", "false"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        (result,) = folder.rglob("result.json")
        self.scores.append({"step": state.global_step, "avg_at_k": read_json(result)["statistics"]["avg_at_k"]})


def draw(path: Path, rows: list[dict], scores: list[dict]) -> None:
    figure, axes = plt.subplots(1, len(HELD) + 1, figsize=(3 * len(HELD) + 3, 2.6), constrained_layout=True)
    for axis, name in zip(axes, HELD, strict=False):
        axis.plot([row["step"] for row in rows], [row[name] for row in rows])
        axis.set_ylim(bottom=0)
        axis.set_title(name.replace("_", " "))
    axes[-1].plot([s["step"] for s in scores], [100 * s["avg_at_k"] for s in scores], marker="o")
    axes[-1].set_ylim(0, 100)
    axes[-1].set_title("avg@4, 10 problems, %")
    figure.savefig(path, dpi=80)
    plt.close(figure)


@pytest.mark.slow
def test_nothing_grows_on_the_tiny_world(tmp_path, monkeypatch):
    cache = Path(os.environ.get("SOAK_CACHE", tmp_path / "cache"))
    words = resolve([str(ROOT / "recipes" / "tiny.env"), f"--output_dir={tmp_path / 'run'}"], {}, gpus=0)
    words = [word for word in words.training_arguments if not word.startswith(("--max_steps", "--evaluate_"))]
    words += [f"--max_steps={STEPS}", f"--save_steps={max(EVALUATE_EVERY // 4, 1)}", "--save_total_limit=2"]
    data_args, args, handoff, model_args = parse_training_args(words)  # the launcher's cap is not what is tested
    resolve_world(data_args, handoff, model_args, cache)
    watch = Watch(tmp_path / "run", model_args.model_name_or_path, handoff.eval_benchmark)
    attach = opsd_train.attach_callbacks

    def attach_and_watch(trainer, tokenizer):
        trainer.add_callback(watch)
        return attach(trainer, tokenizer)

    monkeypatch.setattr(opsd_train, "attach_callbacks", attach_and_watch)
    assert opsd_train.train(data_args, args, handoff, model_args, None) is not None
    assert len(watch.scores) == 10
    if "TRUST_SOAK_TINY" in os.environ:
        path = Path(os.environ["TRUST_SOAK_TINY"])
        write_json(path, {"steps": STEPS, "evaluations": watch.scores, "rows": watch.rows})
        draw(path.with_suffix(".png"), watch.rows, watch.scores)
    first, last = watch.rows[len(watch.rows) // 5], watch.rows[-1]  # the beginning fills caches
    assert last["resident_mib"] < first["resident_mib"] * 1.05 + 8
    for name in ("file_handles", "threads", "shared_memory_entries", "disk_files"):
        assert last[name] <= first[name] + 1, (name, first, last)
    assert last["disk_mib"] < first["disk_mib"] * 1.05 + 1
