"""Between arguments and the first step: the layout, what the plan decides about sleeping, and the run's record."""

import sys
from types import SimpleNamespace

import pytest
import torch
from random_qwen3 import save_model
from transformers import AutoConfig, Gemma2Config

from opsd.args import OPSDConfig
from opsd.engines import plan_memory
from opsd.setup_run import check_optimizer, choose_layout


def arguments(**options) -> OPSDConfig:
    return OPSDConfig(max_steps=1, use_cpu=True, bf16=False, report_to=["none"], **options)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return AutoConfig.from_pretrained(save_model(tmp_path_factory.mktemp("model")))


def test_rows_are_packed_unless_something_asks_for_padding(config):
    assert choose_layout(arguments(), config, pad_id=0).packed
    assert not choose_layout(arguments(packing="false"), config, pad_id=0).packed
    gap = choose_layout(arguments(position_gap=True), config, pad_id=0)
    assert not gap.packed and gap.position_gap


def test_a_model_that_cannot_be_packed_is_padded_or_refused():
    windows = Gemma2Config(num_hidden_layers=2)
    assert not choose_layout(arguments(), windows, pad_id=0).packed
    with pytest.raises(ValueError, match="packing=true is not possible with layer types"):
        choose_layout(arguments(packing="true"), windows, pad_id=0)


@pytest.mark.parametrize("vllm_sleep", ["auto", "false"])
def test_without_a_gpu_no_engine_sleeps(config, vllm_sleep):
    model_args = SimpleNamespace(use_peft=True, dtype="float32", lora_r=4, lora_target_modules=["q_proj"])
    plan, free = plan_memory(arguments(vllm_sleep=vllm_sleep), model_args, config, prompt_tokens=8)
    assert (plan.sleep, free) == (False, None)


def test_an_optimizer_of_a_missing_package_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "lomo_optim", None)
    model = torch.nn.Linear(2, 2)
    check_optimizer(arguments(optim="adamw_torch"), model)
    with pytest.raises(ValueError, match="optim=lomo needs a package that is not installed"):
        check_optimizer(arguments(optim="lomo"), model)


def test_vllm_sleep_has_three_values():
    with pytest.raises(ValueError, match="vllm_sleep='maybe' must be one of auto, true, false"):
        arguments(vllm_sleep="maybe")


def test_bf16_follows_the_models_dtype():
    from opsd.args import parse_training_args

    words = ["--train_file=x", "--max_steps=1", "--use_cpu=true"]
    for dtype, expected in (("bfloat16", True), ("float32", False)):
        config = parse_training_args([*words, f"--dtype={dtype}"])[1]
        assert config.bf16 is expected
        assert config.mixed_precision == ("bf16" if expected else "no")
    assert torch.get_default_dtype() == torch.float32
