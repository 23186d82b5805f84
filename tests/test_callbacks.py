"""Weight average, stability guards and the schedule's sum: by arithmetic, across a resume, and through the training script."""

import json
import math
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from random_qwen3 import save_model
from safetensors.torch import load_file, save_file
from test_trainer import ScriptedEngine, adapter_state, make_trainer
from transformers import TrainerCallback, TrainerControl, TrainerState

import opsd_train
from callbacks.guards import Guards, TrainingStopped
from callbacks.preemption import SAME_REQUEST_S, Preemption
from callbacks.weight_average import FILE, WeightAverage
from opsd.adapter import check_adapter
from opsd.args import training_parser
from opsd.launch import resolve
from opsd.runinfo import read_jsonl
from opsd.schedule import learning_rates, plot_learning_rates

ROOT = Path(__file__).resolve().parent.parent


class Snapshots(TrainerCallback):
    def __init__(self, trainer):
        self.trainer, self.states = trainer, {}

    def on_step_end(self, args, state, control, **kwargs):
        self.states[state.global_step] = adapter_state(self.trainer)


def averaged(folder, tokenizer, path, last, **options):
    trainer = make_trainer(folder, tokenizer, path, **{"max_steps": 4, "wavg_last": last} | options)
    average, snapshots = WeightAverage(last), Snapshots(trainer)
    for callback in (average, snapshots):
        trainer.add_callback(callback)
    trainer.stateful.append(average)
    return trainer, average, snapshots


@pytest.mark.parametrize("last", [1, 3, 4])
def test_the_average_is_the_arithmetic_mean_of_the_last_steps(folder, tokenizer, tmp_path, last):
    trainer, average, snapshots = averaged(folder, tokenizer, tmp_path, last)
    trainer.train()
    trained = adapter_state(trainer)
    average.write_adapter(trainer, tmp_path / "mean")
    assert all(torch.equal(adapter_state(trainer)[name], value) for name, value in trained.items())
    check_adapter(tmp_path / "mean")
    saved = load_file(tmp_path / "mean" / "adapter_model.safetensors")
    steps = range(5 - last, 5)
    for name in trained:
        mean = sum(snapshots.states[step][name].double() for step in steps) / last
        assert torch.equal(saved[name.replace(".default", "")], mean.float())
    if last > 1:
        assert any(not torch.equal(saved[name.replace(".default", "")], value) for name, value in trained.items())


def test_a_resumed_run_averages_the_same_steps(folder, tokenizer, tmp_path):
    options = {"engine": "live", "save_strategy": "steps", "save_steps": 2}
    whole, average, _ = averaged(folder, tokenizer, tmp_path / "a", 3, **options)
    whole.train()
    average.write_adapter(whole, tmp_path / "whole")
    checkpoint = tmp_path / "a" / "run" / "checkpoint-2"
    assert (checkpoint / FILE).is_file()  # step 2 is the first of the last three
    resumed, average, _ = averaged(folder, tokenizer, tmp_path / "b", 3, **options)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    average.write_adapter(resumed, tmp_path / "resumed")
    files = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("whole", "resumed")]
    assert files[0] == files[1]


def test_an_average_of_too_few_steps_is_an_error(folder, tokenizer, tmp_path):
    trainer, average, _ = averaged(folder, tokenizer, tmp_path, 2)
    average.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
    with pytest.raises(RuntimeError, match="wavg_last=2 but 0 steps were averaged"):
        average.write_adapter(trainer, tmp_path / "mean")


def guarded(folder, tokenizer, path, **options):
    trainer = make_trainer(folder, tokenizer, path, **options)
    trainer.add_callback(Guards(trainer))
    return trainer


class PoisonedEngine(ScriptedEngine):
    """From a given step on, every sampled token is one whose embedding is not a number."""

    def __init__(self, step, token=99):
        super().__init__()
        self.step, self.token = step, token

    def generate(self, prompt_ids, sampling, seeds):
        rollouts = super().generate(prompt_ids, sampling, seeds)
        if self.synced[-1][0] < self.step:
            return rollouts
        return [type(r)(r.prompt_ids, (self.token,) * 3, (-1.0,) * 3, "length") for r in rollouts]


@pytest.mark.parametrize("max_grad_norm", [0.1, 0.0])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_loss_that_is_not_finite_never_reaches_the_weights(folder, tokenizer, tmp_path, max_grad_norm, accumulation):
    trainer = guarded(
        folder, tokenizer, tmp_path, engine=PoisonedEngine(2), max_steps=4, max_grad_norm=max_grad_norm,
        per_device=8 // accumulation, accumulation=accumulation,
    )  # fmt: skip
    snapshots = Snapshots(trainer)
    trainer.add_callback(snapshots)
    with torch.no_grad():
        trainer.model.get_input_embeddings().weight[99] = math.nan
    with pytest.raises(TrainingStopped, match=r"step 3: loss nan .*checkpoint-2 is the run up to there"):
        trainer.train()
    assert sorted(snapshots.states) == [1, 2]
    assert all(torch.equal(adapter_state(trainer)[name], value) for name, value in snapshots.states[2].items())
    check_adapter(tmp_path / "run" / "checkpoint-2")
    batch = read_jsonl(tmp_path / "run" / "stopped_batch.jsonl")
    assert len(batch) == 8 and all(row["completion_ids"] == [99, 99, 99] for row in batch)
    assert all(row["teacher_prompt_ids"] and row["prompt_ids"] for row in batch)


def test_a_gradient_that_overflows_stops_although_the_loss_is_finite(folder, tokenizer, tmp_path):
    trainer = guarded(folder, tokenizer, tmp_path, max_steps=3)

    class Overflow(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == 1:
                trainer.grad_norm = torch.tensor(math.inf)

    trainer.callback_handler.callbacks.insert(0, Overflow())
    with pytest.raises(TrainingStopped, match="step 2: loss .* or gradient norm inf is not finite"):
        trainer.train()


class ShrinkingEngine(ScriptedEngine):
    def generate(self, prompt_ids, sampling, seeds):
        self.lengths = (8, 9) if self.synced[-1][0] < 4 else (1, 2)
        return super().generate(prompt_ids, sampling, seeds)


def test_shrinking_completions_stop_the_run(folder, tokenizer, tmp_path):
    options = {"engine": ShrinkingEngine(), "max_steps": 10, "guard_window": 2}
    trainer = guarded(folder, tokenizer, tmp_path, guard_min_length=0.4, **options)
    with pytest.raises(
        TrainingStopped, match=r"step 6: rollout/mean_length is 1, below guard_min_length=0.4 of its start 8"
    ):
        trainer.train()
    assert (tmp_path / "run" / "checkpoint-6").is_dir()
    assert trainer.state.global_step == 6
    lax = guarded(folder, tokenizer, tmp_path / "lax", guard_min_length=0.1, **options | {"engine": ShrinkingEngine()})
    lax.train()
    assert lax.state.global_step == 10


@pytest.mark.parametrize(
    ("argument", "name", "values", "side"),
    [
        ("guard_min_entropy", "policy/student_entropy", [2.0, 2.0, 1.9, 0.5, 0.3], "below"),
        ("guard_max_divergence", "loss/divergence", [0.1, 0.1, 0.1, 0.2, 0.9], "above"),
    ],
)
def test_entropy_and_divergence_guards_by_value(folder, tokenizer, tmp_path, argument, name, values, side):
    limit = 0.5 if side == "below" else 3.0
    trainer = make_trainer(folder, tokenizer, tmp_path, max_steps=10, guard_window=2, **{argument: limit})
    guards = Guards(trainer)
    row = {"loss/objective": 0.0, "rollout/mean_length": 5.0, "policy/student_entropy": 2.0, "loss/divergence": 0.1}

    def log(value):
        guards.on_log(trainer.args, trainer.state, trainer.control, logs=row | {name: value})

    for value in values[:-1]:
        log(value)
    guards.save(tmp_path, 4)
    again = Guards(trainer)
    again.load(tmp_path)  # the windows survive a checkpoint
    guards = again
    with pytest.raises(TrainingStopped, match=f"{name} is .*, {side} {argument}={limit:g} of its start"):
        log(values[-1])


def test_guards_that_are_off_never_stop(folder, tokenizer, tmp_path):
    trainer = make_trainer(folder, tokenizer, tmp_path)
    guards = Guards(trainer)
    for value in (1.0, 1e9, -5.0, 0.0):
        row = {
            "loss/objective": 0.0,
            "rollout/mean_length": value,
            "policy/student_entropy": value,
            "loss/divergence": value,
        }
        guards.on_log(trainer.args, trainer.state, trainer.control, logs=row)
    guards.save(tmp_path, 4)
    assert not (tmp_path / "guards.json").exists()


@pytest.mark.parametrize("name", ["recipe.env", "recipes/paper.env", "recipes/ablations/constant_lr.env"])
def test_the_published_schedules_sum_to_the_same(name):
    arguments = resolve([str(ROOT / name)], {}, gpus=0).training_arguments
    _, args, _, _ = training_parser().parse_args_into_dataclasses(arguments)
    assert sum(learning_rates(args)) == pytest.approx(5e-4, rel=0.011)


def test_learning_rates_are_the_ones_that_training_uses(folder, tokenizer, tmp_path):
    for number, schedule in enumerate(("linear", "warmup_stable_decay")):
        kwargs = {"num_decay_steps": 2} if schedule == "warmup_stable_decay" else None
        trainer = make_trainer(
            folder, tokenizer, tmp_path / str(number), max_steps=5, lr_scheduler_type=schedule, warmup_steps=2,
            lr_scheduler_kwargs=kwargs,
        )  # fmt: skip
        trainer.train()
        used = [row["optim/learning_rate"] for row in trainer.state.log_history if "optim/learning_rate" in row]
        assert learning_rates(trainer.args) == pytest.approx(used)


def test_the_figure_is_a_png(tmp_path):
    plot_learning_rates([2e-5, 1e-5], tmp_path / "new" / "learning_rate.png")
    assert (tmp_path / "new" / "learning_rate.png").read_bytes().startswith(b"\x89PNG")


def test_the_training_script_stops_with_one_line_and_a_record(tmp_path):
    model = save_model(tmp_path / "model")
    state = load_file(model / "model.safetensors")
    state["model.norm.weight"][0] = math.inf  # every hidden state is infinite or not a number
    save_file(state, model / "model.safetensors", metadata={"format": "pt"})
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"problem": f"{i}+1?", "solution": f"{i + 1}"}) + "\n" for i in range(8)))
    arguments = [
        f"--model_name_or_path={model}", f"--train_file={rows}", "--use_peft=true", "--lora_target_modules", "q_proj", "v_proj",
        "--max_steps=2", "--rollouts_per_step=4", "--per_device_train_batch_size=4", "--max_completion_length=4",
        "--rollout_engine=transformers", "--use_cpu=true", "--wavg_last=1", "--plot_lr=true", "--dtype=float32",
        f"--output_dir={tmp_path / 'run'}", "--disable_tqdm=true",
    ]  # fmt: skip
    with pytest.raises(SystemExit) as stopped:  # text as the exit code: one line on stderr, status 1
        opsd_train.main(arguments)
    expected = "error: step 1: loss nan or gradient norm nan is not finite on some process; stopped_batch.jsonl in "
    assert str(stopped.value.code).startswith(expected) and "\n" not in stopped.value.code
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "stopped" and record["reason"].startswith("step 1: loss nan") and record["steps"] == 0
    assert record["summed_learning_rate"] == pytest.approx(5e-5 * 1.5)
    assert (tmp_path / "run" / "learning_rate.png").is_file() and not (tmp_path / "run" / "adapter").exists()
    batch = read_jsonl(tmp_path / "run" / "stopped_batch.jsonl")
    assert len(batch) == 4 and batch[0]["per_token_logps"][0] == "nan"


class MoveBase(TrainerCallback):
    """Writes to a base weight during training, as merging in place does."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        weights = next(p for name, p in model.named_parameters() if "mlp" in name and ".lora_" not in name)
        weights.data[0, 0] += 1e-3


def test_a_base_that_moves_is_named_and_stops_the_hand_off(tmp_path, monkeypatch):
    model = save_model(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"problem": f"{i}+1?", "solution": f"{i + 1}"}) + "\n" for i in range(8)))
    attach = opsd_train.attach_callbacks

    def attach_and_move(trainer, tokenizer):
        trainer.add_callback(MoveBase())
        return attach(trainer, tokenizer)

    monkeypatch.setattr(opsd_train, "attach_callbacks", attach_and_move)
    arguments = [
        f"--model_name_or_path={model}", f"--train_file={rows}", "--use_peft=true", "--lora_target_modules", "q_proj", "v_proj",
        "--max_steps=2", "--rollouts_per_step=4", "--per_device_train_batch_size=4", "--max_completion_length=4", "--save_steps=1",
        "--rollout_engine=transformers", "--use_cpu=true", "--dtype=float32", f"--output_dir={tmp_path / 'run'}", "--disable_tqdm=true",
    ]  # fmt: skip
    with pytest.raises(RuntimeError, match="the base weights changed during training .* so the teacher was not fixed"):
        opsd_train.main(arguments)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["base_sha256_before"] != record["base_sha256_after"]
    check_adapter(tmp_path / "run" / "checkpoint-2")  # what was computed is kept


class OneProcess:
    device = "cpu"

    def reduce(self, value, reduction):
        return value


def test_a_request_heard_twice_is_one_and_a_later_one_ends_at_once(monkeypatch):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))  # in place of the process's end
    try:
        callback, control = Preemption(OneProcess()), TrainerControl()
        callback.on_train_begin(None, None, control)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == []
        callback.on_step_end(None, TrainerState(global_step=3), control)
        assert control.should_save and control.should_training_stop and callback.requested
        now = time.monotonic()
        monkeypatch.setattr("callbacks.preemption.time.monotonic", lambda: now + SAME_REQUEST_S + 1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
        callback.on_train_end(None, None, control)
    finally:
        signal.signal(signal.SIGTERM, before)
