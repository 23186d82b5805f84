"""What the callbacks leave on disk: every step once in metrics.jsonl, every rollout in rollouts.jsonl unless log_rollouts is off."""

from types import SimpleNamespace

import pytest
from test_trainer import make_trainer

from callbacks.metrics_jsonl import MetricsJsonl
from callbacks.rollout_log import RolloutLog
from opsd.runinfo import read_jsonl, write_jsonl


@pytest.mark.parametrize("log_rollouts", [True, False])
def test_every_step_and_rollout_is_recorded_once(folder, tokenizer, tmp_path, log_rollouts):
    trainer = make_trainer(folder, tokenizer, tmp_path, log_rollouts=log_rollouts)
    trainer.add_callback(MetricsJsonl(tmp_path / "metrics.jsonl"))
    trainer.add_callback(RolloutLog(trainer, tmp_path / "rollouts.jsonl", tokenizer, write=trainer.args.log_rollouts))
    trainer.train()
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert all("/" in name for row in rows for name in row if name not in ("step", "epoch"))
    assert (tmp_path / "rollouts.jsonl").exists() == log_rollouts
    if log_rollouts:
        rollouts = read_jsonl(tmp_path / "rollouts.jsonl")
        assert [r["step"] for r in rollouts] == [1] * 8 + [2] * 8
        assert all(r["text"] == tokenizer.decode(r["completion_ids"]) for r in rollouts)


def test_steps_that_are_trained_again_are_cut_first(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_jsonl(path, [{"step": step, "loss/objective": 0.0} for step in (1, 2, 3)])
    callback = MetricsJsonl(path)
    state = SimpleNamespace(is_world_process_zero=True, global_step=2)
    callback.on_train_begin(None, state, None)
    callback.on_log(None, SimpleNamespace(global_step=3), None, logs={"loss/objective": 1.0})
    callback.on_train_end(None, state, None)
    assert [(row["step"], row["loss/objective"]) for row in read_jsonl(path)] == [(1, 0.0), (2, 0.0), (3, 1.0)]
