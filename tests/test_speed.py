"""Faster layers compute the same thing."""

import subprocess
import sys
from pathlib import Path

import pytest
from peft.tuners.tuners_utils import BaseTunerLayer
from test_trainer import adapter_state, folder, losses, make_trainer, tokenizer  # noqa: F401

from opsd.speed import drop_input_casts


def test_dropped_input_casts_change_nothing_in_float32(folder, tokenizer, tmp_path):  # noqa: F811
    plain = make_trainer(folder, tokenizer, tmp_path)
    plain.train()
    faster = make_trainer(folder, tokenizer, tmp_path)
    layers = sum(isinstance(module, BaseTunerLayer) for module in faster.model.modules())
    assert drop_input_casts(faster.model) == layers > 0
    faster.train()
    assert losses(faster) == losses(plain)


SCRIPT = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
import conftest, pathlib, tempfile
from random_qwen3 import save_model
from test_trainer import losses, make_trainer
from transformers import AutoTokenizer
from opsd.speed import compile_layers
place = pathlib.Path(tempfile.mkdtemp(dir={place!r}))
model = save_model(place / "model")
tokenizer = AutoTokenizer.from_pretrained(model)
values = []
for compiled in (False, True):
    trainer = make_trainer(model, tokenizer, place, gradient_checkpointing=True)
    if compiled:
        assert compile_layers(trainer.model, backend="aot_eager") == 2
    trainer.train()
    values.append(losses(trainer))
assert all(abs(a - b) < 1e-5 for a, b in zip(*values)), values
"""


@pytest.mark.slow
def test_compile_layers_gives_the_same_losses(tmp_path):
    tests = Path(__file__).resolve().parent
    script = SCRIPT.format(root=str(tests.parent), tests=str(tests), place=str(tmp_path))
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "TORCHDYNAMO_DISABLE": "0", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
