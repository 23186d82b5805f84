"""The memory estimate against peaks measured on an H200, and the decisions that follow from it."""

import dataclasses
import math

import pytest
from transformers import Qwen3Config
from trl import ModelConfig

from opsd.args import OPSDConfig
from opsd.engines import plan_memory
from opsd.eval_estimate import GIB
from opsd.memory import Engine, StepShape, Student, announce, engine_items, make_plan, training_items

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def student():
    config = Qwen3Config(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, max_position_embeddings=40960,
    )  # fmt: skip
    return Student.of(config, weight_bytes=2, logit_bytes=4, lora_rank=64, lora_targets=TARGETS)


def gib(items: dict[str, int]) -> float:
    return sum(items.values()) / GIB


# peak of torch's allocated memory, GiB: one H200, engine excluded, LoRA r 64 in float32, packed bf16 rows
MEASURED = [
    # sequences, prompt, completion, recomputation on, off
    (4, 200, 1024, 7.43, 25.4),
    (8, 200, 1024, 8.04, 40.2),
    (16, 200, 1024, 9.62, 69.9),
    (4, 175, 1024, 7.15, 24.7),
    (4, 175, 2048, 7.67, 37.1),
    (4, 175, 4096, 8.71, 61.9),
]


# the same with Liger's kernels and fused adapters (results/bench_step.json)
MEASURED_WITH_LIGER = [
    (4, 200, 1024, 7.27, 16.2),
    (8, 200, 1024, 7.87, 25.5),
    (16, 200, 1024, 9.06, 44.1),
    (4, 175, 1024, 6.99, 15.6),
    (4, 175, 2048, 7.49, 23.4),
    (4, 175, 4096, 8.49, 39.0),
]


@pytest.mark.parametrize("liger", [False, True])
@pytest.mark.parametrize("row", range(6))
def test_the_estimate_is_within_a_tenth_of_the_measured_peaks(student, liger, row):
    sequences, prompt, completion, recomputed, kept = (MEASURED_WITH_LIGER if liger else MEASURED)[row]
    student = dataclasses.replace(student, liger=liger)
    step = StepShape(sequences, rollouts=32, prompt_tokens=prompt, completion_tokens=completion)
    assert gib(training_items(student, step, recompute=True)) == pytest.approx(recomputed, rel=0.1)
    assert gib(training_items(student, step, recompute=False)) == pytest.approx(kept, rel=0.1)


def test_items_of_known_size(student):
    step = StepShape(4, 32, 200, 1024)
    items = training_items(student, step, recompute=True)
    decoder = 28 * (2048 * (2048 + 1024 + 1024 + 2048) + 3 * 2048 * 6144)
    assert items["base weights"] == pytest.approx(2 * (decoder + 151936 * 2048), rel=1e-3)
    per_layer = 64 * ((2048 + 2048) * 2 + (2048 + 1024) * 2 + (2048 + 6144) * 3)
    assert items["adapter, gradients and Adam"] == 4 * 4 * 28 * per_layer
    engine = engine_items(Engine("vllm", reserved_bytes=40 * GIB), student, step, sleep=False)
    assert engine["engine's own copy of the base weights"] == items["base weights"]
    assert sum(engine.values()) == 40 * GIB


def plan(student, *, free, recompute="auto", sleep="auto", engine=None, sequences=4, completion=1024):
    step = StepShape(sequences, 32, 200, completion)
    engine = engine or Engine("vllm", reserved_bytes=42 * GIB)
    return make_plan(student, step, engine, recompute=recompute, sleep=sleep, free_bytes=free)


def test_memory_is_given_up_in_the_order_of_its_price(student):
    decisions = []
    for free in (140, 60, 40, 5):
        chosen = plan(student, free=free * GIB)
        decisions.append((chosen.recompute, chosen.sleep, chosen.fits))
    assert decisions == [
        (False, False, True),  # room for everything
        (True, False, True),  # 25 GiB of training do not fit beside the engine, 7.4 do
        (False, True, True),  # beside a sleeping engine activations fit again
        (True, True, False),  # nothing helps
    ]


def test_explicit_choices_are_kept(student):
    chosen = plan(student, free=140 * GIB, recompute="true", sleep="true")
    assert (chosen.recompute, chosen.sleep) == (True, True)
    refused = plan(student, free=30 * GIB, recompute="false", sleep="false")
    assert (refused.recompute, refused.sleep, refused.fits) == (False, False, False)


def test_without_a_gpu_nothing_is_given_up(student):
    chosen = plan(student, free=None)
    assert (chosen.recompute, chosen.sleep, chosen.fits) == (False, False, None)


def test_engines_elsewhere_cost_nothing_here(student):
    assert plan(student, free=140 * GIB, engine=Engine("vllm_server")).engine == {}
    live = plan(student, free=140 * GIB, engine=Engine("transformers")).engine
    assert live == {"KV cache while sampling": 32 * 1224 * 2 * 28 * 8 * 128 * 2}
    merged = plan(student, free=140 * GIB, engine=Engine("transformers", merged=True)).engine
    assert "engine's own copy of the weights" in merged


def test_full_fine_tuning_holds_a_second_copy(student):
    full = dataclasses.replace(student, lora_rank=None, lora_targets=())
    items = training_items(full, StepShape(4, 32, 200, 1024), recompute=True)
    assert items["frozen copy"] == items["base weights"]
    assert math.isclose(items["gradients and Adam"], 3 * items["base weights"])
    mixed = dataclasses.replace(full, weight_bytes=4, compute_bytes=2)
    held = training_items(mixed, StepShape(4, 32, 200, 1024), recompute=True)
    assert held["frozen copy"] == held["weights as autocast multiplies them"] == held["base weights"] / 2
    assert held["gradients and Adam"] == 3 * held["base weights"] == 2 * items["gradients and Adam"]
    assert held["loss chunk"] == items["loss chunk"]
    engine = engine_items(Engine("vllm", reserved_bytes=40 * GIB, merged=True), mixed, None, sleep=False)
    assert engine["engine's own copy of the base weights"] == held["frozen copy"]


def test_the_printed_estimate_names_every_item_and_the_remedy(student, caplog):
    chosen = plan(student, free=5 * GIB)
    with caplog.at_level("INFO", logger="opsd.memory"):
        announce(chosen, 5 * GIB)
    for name in (*chosen.training, *chosen.engine, "in all, of 5.0 GiB free", "sleeps", "lower micro_batch_size"):
        assert name in caplog.text


def test_arguments_reach_the_plan(student, tmp_path):
    model_args = ModelConfig(use_peft=True, dtype="bfloat16", lora_r=64, lora_target_modules=list(TARGETS))
    for asked in ("true", "false"):
        args = OPSDConfig(
            output_dir=str(tmp_path), max_steps=1, use_cpu=True, bf16=False, report_to=["none"], vllm_sleep=asked,
            recompute=asked, per_device_train_batch_size=4, max_completion_length=1024,
        )  # fmt: skip
        chosen, free = plan_memory(args, model_args, student.config, prompt_tokens=200)
        assert free is None and (chosen.recompute, chosen.sleep) == (asked == "true", asked == "true")
        assert chosen.training == training_items(student, StepShape(4, 32, 200, 1024), recompute=asked == "true")
