"""Adapter folders: everything that is not a complete LoRA adapter for this base model is refused, and the message names it."""

import json

import pytest
import torch
from random_qwen3 import save_adapter, save_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from opsd.adapter import CONFIG, WEIGHTS, check_adapter, check_adapter_fits, read_adapter_config, refuse_unservable
from opsd.eval_estimate import linear_shapes
from opsd.runinfo import sha256_file


@pytest.fixture
def adapter(folder, tmp_path):
    return save_adapter(tmp_path / "adapter", folder)


def change_config(adapter, **values):
    path = adapter / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_weights(adapter, change):
    weights = load_file(adapter / WEIGHTS)
    change(weights)
    save_file(weights, adapter / WEIGHTS)


def first(weights, half: str) -> str:
    return sorted(name for name in weights if half in name)[0]


def test_a_complete_adapter(adapter):
    digest, norm = check_adapter(adapter)
    assert digest == sha256_file(adapter / WEIGHTS)
    squares = [t.double().square().sum() for n, t in load_file(adapter / WEIGHTS).items() if ".lora_B." in n]
    assert norm == pytest.approx(float(torch.stack(squares).sum().sqrt()))
    change_weights(adapter, lambda w: [t.zero_() for n, t in w.items() if ".lora_B." in n])
    assert check_adapter(adapter)[1] == 0.0 and check_adapter(adapter)[0] != digest


def test_missing_files(adapter, tmp_path):
    with pytest.raises(FileNotFoundError, match=f"adapter={tmp_path / 'nowhere'} does not exist"):
        check_adapter(tmp_path / "nowhere")
    (adapter / WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError, match=f"has no {WEIGHTS}"):
        check_adapter(adapter)
    (adapter / CONFIG).unlink()
    with pytest.raises(FileNotFoundError, match=f"has no {CONFIG}"):
        check_adapter(adapter)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "does not describe a LoRA"),
        ('{"peft_type": "IA3", "r": 4}', "does not describe a LoRA"),
    ],
)
def test_configurations_of_something_else(adapter, text, message):
    (adapter / CONFIG).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_adapter_config(adapter)


def test_a_torn_file(adapter):
    data = (adapter / WEIGHTS).read_bytes()
    for length in (len(data) - 1, len(data) // 2, 4, 0):
        (adapter / WEIGHTS).write_bytes(data[:length])
        with pytest.raises(ValueError, match="not a complete safetensors file"):
            check_adapter(adapter)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite(adapter, value):
    change_weights(adapter, lambda w: w[first(w, ".lora_A.")].view(-1)[:1].fill_(value))
    with pytest.raises(ValueError, match=r"tensor .*lora_A.* is not finite"):
        check_adapter(adapter)


def test_an_empty_tensor_as_sharded_models_save_it(adapter):
    def empty(weights):
        weights[first(weights, ".lora_B.")] = torch.empty(0)

    change_weights(adapter, empty)
    with pytest.raises(ValueError, match=r"lora_B.* is empty: .*sharded"):
        check_adapter(adapter)


def test_half_a_pair(adapter):
    change_weights(adapter, lambda w: w.pop(first(w, ".lora_B.")))
    with pytest.raises(ValueError, match="not pairs of lora_A and lora_B"):
        check_adapter(adapter)


def test_no_pairs_at_all(adapter):
    save_file({"something": torch.ones(2)}, adapter / WEIGHTS)
    with pytest.raises(ValueError, match="1 tensors that are not pairs"):
        check_adapter(adapter)


def test_a_rank_that_contradicts_the_configuration(adapter):
    change_config(adapter, r=8)
    with pytest.raises(ValueError, match="has rank 4, adapter_config.json says r=8"):
        check_adapter(adapter)


UNSERVABLE = {
    "use_dora": (True, "DoRA"),
    "bias": ("all", "trained biases"),
    "modules_to_save": (["lm_head"], "fully trained modules"),
    "target_modules": (["q_proj", "lm_head"], "output projection or the embedding"),
    "target_parameters": (["experts.weight"], "bare parameters"),
    "rank_pattern": ({"q_proj": 2}, "ranks that differ"),
    "alpha_pattern": ({"q_proj": 2}, "scalings that differ"),
}


@pytest.mark.parametrize("field", UNSERVABLE)
def test_what_vllm_does_not_serve_is_refused_by_name(adapter, field):
    value, what = UNSERVABLE[field]
    change_config(adapter, **{field: value})
    with pytest.raises(ValueError, match=rf"{field}=.*vLLM does not serve .*{what}"):
        check_adapter(adapter)


def test_an_embedding_target_is_refused():
    with pytest.raises(ValueError, match="embed_tokens"):
        refuse_unservable({"target_modules": ["embed_tokens"]}, "the adapter")
    refuse_unservable({"target_modules": ["q_proj"], "bias": "none", "modules_to_save": None}, "the adapter")


def test_an_adapter_for_another_base_model(folder, adapter, tmp_path):
    shapes, _ = linear_shapes(AutoConfig.from_pretrained(folder))
    check_adapter_fits(adapter, str(folder), shapes)
    other = save_adapter(tmp_path / "other", save_model(tmp_path / "wide", hidden_size=96))
    with pytest.raises(ValueError, match=rf"lora_.*but model={folder} has .*wrong base model"):
        check_adapter_fits(other, str(folder), shapes)
    fewer = {name: shape for name, shape in shapes.items() if ".layers.1." not in name}
    with pytest.raises(ValueError, match=r"targets model\.layers\.1\..*does not have; wrong base model"):
        check_adapter_fits(adapter, str(folder), fewer)
