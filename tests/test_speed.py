"""Faster layers compute the same thing."""

import dataclasses
import importlib.machinery
import sys
import types

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from test_trainer import adapter_state, losses, make_trainer

from opsd.speed import AdaptedProduct, choose_liger, drop_input_casts, fuse_adapters


def test_dropped_input_casts_change_nothing_in_float32(folder, tokenizer, tmp_path):
    plain = make_trainer(folder, tokenizer, tmp_path)
    plain.train()
    faster = make_trainer(folder, tokenizer, tmp_path)
    layers = sum(isinstance(module, BaseTunerLayer) for module in faster.model.modules())
    assert drop_input_casts(faster.model) == layers > 0
    faster.train()
    assert losses(faster) == losses(plain)


def test_fused_adapters_train_alike(folder, tokenizer, tmp_path):
    plain = make_trainer(folder, tokenizer, tmp_path, gradient_checkpointing=True)
    plain.train()
    faster = make_trainer(folder, tokenizer, tmp_path, gradient_checkpointing=True)
    assert fuse_adapters(faster.model) == 14
    faster.train()
    assert losses(faster) == pytest.approx(losses(plain), rel=1e-5)
    for name, matrix in adapter_state(plain).items():
        torch.testing.assert_close(adapter_state(faster)[name], matrix, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("with_bias", [False, True])
def test_adapted_product_is_right_to_second_digits_of_its_gradient(with_bias):
    generator = torch.Generator().manual_seed(0)

    def matrix(*shape, trained=False):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(trained)

    x, weight, a, b = (
        matrix(2, 3, 5, trained=True),
        matrix(4, 5),
        matrix(2, 5, trained=True),
        matrix(4, 2, trained=True),
    )
    bias = matrix(4) if with_bias else None
    expected = torch.nn.functional.linear(x, weight, bias) + 0.7 * (x @ a.t() @ b.t())
    torch.testing.assert_close(AdaptedProduct.apply(x, weight, bias, a, b, 0.7), expected)
    assert torch.autograd.gradcheck(lambda x, a, b: AdaptedProduct.apply(x, weight, bias, a, b, 0.7), (x, a, b))


def test_fused_adapters_keep_what_peft_does_in_bfloat16():
    torch.manual_seed(0)
    model = get_peft_model(
        torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 16)).to(torch.bfloat16),
        LoraConfig(r=4, lora_alpha=8, target_modules=["0", "1"]),
    )
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(x)
        with model.disable_adapter():
            base = model(x)
        assert fuse_adapters(model) == 2
        torch.testing.assert_close(model(x), expected, atol=0.05, rtol=0.02)
        with model.disable_adapter():
            assert torch.equal(model(x), base)


def test_only_plain_layers_are_fused():
    def model(**options):
        return get_peft_model(
            torch.nn.Sequential(torch.nn.Linear(4, 4)), LoraConfig(r=2, target_modules=["0"], **options)
        )

    assert fuse_adapters(model()) == 1
    assert fuse_adapters(model(lora_dropout=0.1)) == 0
    assert fuse_adapters(model(use_dora=True)) == 0
    assert fuse_adapters(model(lora_bias=True)) == 0


@dataclasses.dataclass
class Args:
    use_liger_kernel: bool
    device: torch.device
    liger_kernel_config: dict | None = None


def test_liger_is_refused_where_it_cannot_be_had():
    args = Args(True, torch.device("cpu"))
    with pytest.raises(ValueError, match="use_liger_kernel=true needs a CUDA device"):
        choose_liger(args, "qwen3")
    off = Args(False, torch.device("cpu"))
    choose_liger(off, "qwen3")
    assert off.liger_kernel_config is None


def test_liger_leaves_the_forward_pass_of_the_output_layer_alone(monkeypatch):
    args = Args(True, torch.device("cuda"))
    known = types.ModuleType("liger_kernel.transformers.monkey_patch")
    known.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen3": None}
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, known.__name__, known)
    choose_liger(args, "qwen3")
    assert args.liger_kernel_config["rms_norm"] and not args.liger_kernel_config["fused_linear_cross_entropy"]
    with pytest.raises(ValueError, match="no kernels for model type mamba"):
        choose_liger(args, "mamba")
