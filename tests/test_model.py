"""The student model: what is refused before anything loads, the base hash, the hidden tap, and the ids that end a completion."""

import json

import pytest
import torch
from random_qwen3 import save_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, Gemma2ForCausalLM
from trl import ModelConfig

from opsd.hidden_tap import HiddenTap
from opsd.model import (
    base_hash,
    check_model_args,
    end_token_ids,
    load_config,
    load_student,
    load_tokenizer,
    refuse_unsupported_head,
)

TARGETS = ["q_proj", "v_proj"]


def model_args(folder="m", **changes):
    defaults = dict(
        model_name_or_path=str(folder), use_peft=True, lora_r=4, lora_dropout=0.0, lora_target_modules=TARGETS, dtype="float32"
    )  # fmt: skip
    return ModelConfig(**(defaults | changes))


REFUSED = [
    ({"model_name_or_path": None}, "model_name_or_path is not given"),
    ({"load_in_4bit": True}, "load_in_4bit=true must be false"),
    ({"load_in_8bit": True}, "load_in_8bit=true must be false"),
    ({"lora_r": 0}, "lora_r=0 must be > 0"),
    ({"lora_target_modules": None}, "lora_target_modules is not given"),
    ({"lora_dropout": 1.0}, "lora_dropout=1.0 must be in"),
    ({"use_dora": True}, "use_dora=True: vLLM does not serve DoRA"),
    ({"lora_modules_to_save": ["embed_tokens"]}, "modules_to_save=.*fully trained modules"),
    ({"lora_target_modules": ["q_proj", "lm_head"]}, "target_modules=.*output projection"),
]


@pytest.mark.parametrize(
    ("changes", "message"), REFUSED, ids=[next(iter(c)) + str(i) for i, (c, _) in enumerate(REFUSED)]
)
def test_what_cannot_be_honoured_is_refused_before_loading(changes, message):
    with pytest.raises(ValueError, match=message):
        check_model_args(model_args(**changes))


def test_models_that_are_not_there(tmp_path):
    (tmp_path / "empty").mkdir()
    for path in (str(tmp_path / "none"), "./none", "~/none", str(tmp_path / "empty")):
        with pytest.raises(FileNotFoundError, match="has no config.json; give the folder of a model, or a hub id"):
            load_config(path)
    with pytest.raises(FileNotFoundError, match="model_name_or_path=no-owner could not be read"):
        load_config("no-owner")  # a hub id, and no hub in reach


def test_a_tokenizer_without_an_end_token(folder, tmp_path):
    broken = save_model(tmp_path / "broken")
    tokenizer = AutoTokenizer.from_pretrained(broken)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(broken)
    with pytest.raises(ValueError, match=r"has no end token \(eos\)"):
        load_tokenizer(str(broken))
    assert load_tokenizer(str(folder)).eos_token == "<|im_end|>"


def test_end_tokens_of_tokenizer_and_generation_config(tmp_path):
    folder = save_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    eos = tokenizer.eos_token_id
    path = folder / "generation_config.json"
    for declared, expected in ((eos, {eos}), ([eos, 7], {eos, 7}), (9, {eos, 9})):
        path.write_text(json.dumps({"eos_token_id": declared}))
        assert end_token_ids(str(folder), tokenizer) == expected
    path.write_text("{}")
    assert end_token_ids(str(folder), tokenizer) == {eos}
    path.unlink()  # then the model's own configuration counts
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [eos, 5]}))
    assert end_token_ids(str(folder), tokenizer) == {eos, 5}


def test_the_student_starts_as_the_base_with_a_float32_adapter(folder):
    student = load_student(model_args(folder, dtype="bfloat16"), attn_implementation="sdpa", seed=1, device="cpu")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ids = torch.tensor([[10, 20, 30]])
    with torch.no_grad():
        assert torch.equal(student.eval()(ids).logits, base.eval()(ids).logits)
    trained = {n: p for n, p in student.named_parameters() if p.requires_grad}
    assert trained and all(".lora_" in n and p.dtype == torch.float32 for n, p in trained.items())
    again = load_student(model_args(folder, dtype="bfloat16"), attn_implementation="sdpa", seed=1, device="cpu")
    assert all(torch.equal(p, dict(again.named_parameters())[n]) for n, p in trained.items())
    other = load_student(model_args(folder, dtype="bfloat16"), attn_implementation="sdpa", seed=2, device="cpu")
    assert not all(torch.equal(p, dict(other.named_parameters())[n]) for n, p in trained.items())


def test_a_target_that_the_model_does_not_have(folder):
    with pytest.raises(ValueError, match="no_such_proj"):
        load_student(
            model_args(folder, lora_target_modules=["no_such_proj"]), attn_implementation="sdpa", seed=1, device="cpu"
        )


def test_the_base_hash_sees_the_base_and_only_the_base(folder):
    student = load_student(model_args(folder), attn_implementation="sdpa", seed=1, device="cpu")
    before = base_hash(student)
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            if ".lora_" in name:
                parameter.add_(1.0)
    assert base_hash(student) == before
    weight = student.get_base_model().model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(torch.inf))
    assert base_hash(student) != before


def test_the_tap_returns_the_hidden_states_that_the_projection_gets(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([[10, 20, 30, 40], [11, 21, 31, 41]])
    with torch.no_grad():
        logits = model(ids).logits
        tap = HiddenTap(model)
        assert torch.equal(model(ids).logits, logits)  # outside `selecting` nothing changes
        keep = torch.tensor([7, 0, 5])
        with tap.selecting(keep):
            hidden = model(ids).logits
        assert hidden.shape == (3, model.config.hidden_size)
        torch.testing.assert_close(hidden @ tap.head.weight.T, logits.flatten(0, 1)[keep])
        with pytest.raises(ZeroDivisionError), tap.selecting(keep):
            raise ZeroDivisionError
        assert torch.equal(model(ids).logits, logits)  # also after an error inside


def test_heads_that_are_more_than_a_matrix_are_refused():
    config = Gemma2Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, final_logit_softcapping=30.0,
    )  # fmt: skip
    with pytest.raises(ValueError, match="final_logit_softcapping=30.0"):
        refuse_unsupported_head(Gemma2ForCausalLM(config))
