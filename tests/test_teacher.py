"""Every kind of teacher: whose weights score the tokens, that the student is left alone, that a moving average survives a checkpoint."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from random_qwen3 import save_adapter, save_model
from test_trainer import adapter_state, examples, losses, make_trainer
from transformers import AutoModelForCausalLM, TrainerCallback

from opsd.args import OPSDConfig
from opsd.batch import build_inputs
from opsd.hidden_tap import HiddenTap
from opsd.model import base_hash
from opsd.teacher import EMA_FILE, Teacher, completion_hidden, teacher_weights
from opsd.teacher_load import ADAPTER, check_teacher, lora_layers


def some_inputs(trainer):
    rows = examples(3)
    return build_inputs([r["teacher_prompt_ids"] for r in rows], [(5, 6, 7), (8,), (9, 10)], trainer.layout)


def hidden_of(model, trainer):
    """What a model of its own, without any of the trainer's machinery, answers."""
    return completion_hidden(model.eval(), HiddenTap(model), some_inputs(trainer)).detach()


class DeltaLog(TrainerCallback):
    """The effective weights of every adapted layer after every optimizer step."""

    def __init__(self, model):
        self.model, self.deltas = model, []

    def on_step_end(self, args, state, control, **kwargs):
        layers = lora_layers(self.model)
        self.deltas.append({n: layer.get_delta_weight(ADAPTER).detach().clone() for n, layer in layers.items()})


def trained_ema(folder, tokenizer, path, **options):
    options = {"teacher_kind": "ema", "teacher_ema_decay": 0.5, "max_steps": 3, "learning_rate": 5e-2} | options
    trainer = make_trainer(folder, tokenizer, path, **options)
    log = DeltaLog(trainer.model)
    trainer.add_callback(log)
    trainer.train()
    trainer.teacher.advance(3)
    return trainer, log.deltas


def test_ema_is_the_average_of_the_effective_weights(folder, tokenizer, tmp_path):
    trainer, deltas = trained_ema(folder, tokenizer, tmp_path)
    merged = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=trainer.model.config._attn_implementation)
    with torch.no_grad():
        for name, module in merged.named_modules():
            if name in deltas[0]:
                module.weight += 0.125 * deltas[0][name] + 0.25 * deltas[1][name] + 0.5 * deltas[2][name]
    expected = hidden_of(merged, trainer)
    torch.testing.assert_close(trainer.teacher.hidden(some_inputs(trainer)), expected, rtol=1e-4, atol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=trainer.model.config._attn_implementation)
    assert (hidden_of(base, trainer) - expected).abs().max() > 1e-2  # the average is far from where it started


def test_ema_starts_as_the_initial_policy(folder, tokenizer, tmp_path):
    ema = make_trainer(folder, tokenizer, tmp_path, teacher_kind="ema", max_steps=1)
    base = make_trainer(folder, tokenizer, tmp_path, teacher_kind="base", max_steps=1)
    ema.train(), base.train()
    assert losses(ema) == losses(base)


def test_ema_survives_a_checkpoint_bit_for_bit(folder, tokenizer, tmp_path):
    options = {
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "teacher_kind": "ema",
        "teacher_ema_decay": 0.5,
    }
    whole = make_trainer(folder, tokenizer, tmp_path / "a", **options)
    whole.train()
    resumed = make_trainer(folder, tokenizer, tmp_path / "b", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "run" / "checkpoint-2"))
    assert losses(resumed) == losses(whole)
    for name, value in adapter_state(whole).items():
        assert torch.equal(adapter_state(resumed)[name], value)
    (tmp_path / "a" / "run" / "checkpoint-2" / EMA_FILE).unlink()
    with pytest.raises(FileNotFoundError, match="was not trained with teacher_kind=ema"):
        resumed.teacher.load(tmp_path / "a" / "run" / "checkpoint-2")


@pytest.mark.parametrize("rank", [2, 8])
def test_a_frozen_adapter_of_another_rank_and_fewer_layers(folder, tokenizer, tmp_path, rank):
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = LoraConfig(r=rank, lora_alpha=3 * rank, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    other = get_peft_model(base, config)
    for name, parameter in other.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.3)
    other.save_pretrained(tmp_path / "frozen")
    trainer = make_trainer(
        folder, tokenizer, tmp_path, teacher_kind="adapter", teacher_adapter=str(tmp_path / "frozen"), max_steps=2
    )
    before = trainer.teacher.hidden(some_inputs(trainer))
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation=trainer.model.config._attn_implementation),
        tmp_path / "frozen",
    )
    tap = HiddenTap(loaded.get_base_model())
    expected = completion_hidden(loaded.eval(), tap, some_inputs(trainer)).detach()
    torch.testing.assert_close(before, expected, rtol=1e-5, atol=1e-5)
    trainer.train()
    assert torch.equal(
        trainer.teacher.hidden(some_inputs(trainer)), before
    )  # trained twice, and the teacher stood still


def test_a_frozen_adapter_on_layers_that_the_student_lacks_is_refused(folder, tokenizer, tmp_path):
    save_adapter(tmp_path / "frozen", folder)
    trainer = make_trainer(folder, tokenizer, tmp_path)
    narrow = get_peft_model(trainer.model.unload(), LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    args = OPSDConfig(max_steps=1, use_cpu=True, teacher_kind="adapter", teacher_adapter=str(tmp_path / "frozen"))
    with pytest.raises(ValueError, match="adapts model.layers.0.mlp.down_proj, which the student does not"):
        Teacher(args, narrow, None)


def test_the_same_model_as_a_second_model_is_the_base_teacher(folder, tokenizer, tmp_path):
    base = make_trainer(folder, tokenizer, tmp_path, max_steps=2)
    other = make_trainer(folder, tokenizer, tmp_path, max_steps=2, teacher_kind="model", teacher_model=str(folder))
    base.train(), other.train()
    assert losses(base) == pytest.approx(losses(other), rel=1e-6)


def test_a_wider_model_teaches(folder, tokenizer, tmp_path):
    wide = save_model(tmp_path / "wide", seed=3, hidden_size=96)
    trainer = make_trainer(folder, tokenizer, tmp_path, max_steps=2, teacher_kind="model", teacher_model=str(wide))
    trainer.train()
    assert all(0 < loss < 20 for loss in losses(trainer))
    weights = trainer.teacher.tap.weight
    assert weights.shape[1] == 96 and not weights.requires_grad


def test_a_model_with_another_vocabulary_is_refused_by_name(folder, tokenizer, tmp_path):
    stored = save_model(tmp_path / "other") / "tokenizer.json"
    stored.write_text(stored.read_text().replace('"~":', '"<novel>":'))
    args = OPSDConfig(max_steps=1, use_cpu=True, teacher_kind="model", teacher_model=str(tmp_path / "other"))
    with pytest.raises(ValueError, match=r"teacher_model=.*2 entries differ.*'<novel>'"):
        check_teacher(args, tokenizer)
    check_teacher(OPSDConfig(max_steps=1, use_cpu=True, teacher_kind="model", teacher_model=str(folder)), tokenizer)


def test_a_teacher_that_does_not_exist_is_refused(tokenizer, tmp_path):
    for kind in ("adapter", "model"):
        args = OPSDConfig(
            max_steps=1, use_cpu=True, teacher_kind=kind, **{f"teacher_{kind}": str(tmp_path / "nowhere" / "x")}
        )
        with pytest.raises(
            FileNotFoundError, match=r"^(adapter=.* does not exist|teacher_model=.* has no config.json)"
        ):
            check_teacher(args, tokenizer)


@pytest.mark.parametrize("kind", ["base", "live", "ema", "adapter"])
def test_the_student_is_left_as_it_was(folder, tokenizer, tmp_path, kind):
    options = {"teacher_adapter": str(save_adapter(tmp_path / "frozen", folder))} if kind == "adapter" else {}
    trainer = make_trainer(folder, tokenizer, tmp_path, teacher_kind=kind, **options)
    state, digest = adapter_state(trainer), base_hash(trainer.model)
    storage = {n: p.data_ptr() for n, p in trainer.model.named_parameters()}
    trainer.model.train()
    trainer.teacher.hidden(some_inputs(trainer))
    assert trainer.model.training and base_hash(trainer.model) == digest
    assert {n: p.data_ptr() for n, p in trainer.model.named_parameters()} == storage
    assert all(torch.equal(adapter_state(trainer)[name], value) for name, value in state.items())


def test_an_error_inside_the_teacher_puts_the_student_back(folder, tokenizer, tmp_path):
    trainer = make_trainer(folder, tokenizer, tmp_path, teacher_kind="ema")
    state = adapter_state(trainer)
    with pytest.raises(KeyboardInterrupt), trainer.teacher.weights():
        raise KeyboardInterrupt
    assert all(torch.equal(adapter_state(trainer)[name], value) for name, value in state.items())


def test_dropout_does_not_reach_the_teacher(folder, tokenizer, tmp_path):
    trainer = make_trainer(folder, tokenizer, tmp_path, teacher_kind="live")
    for layer in lora_layers(trainer.model).values():
        layer.lora_dropout[ADAPTER] = torch.nn.Dropout(0.5)
        torch.nn.init.normal_(layer.lora_B[ADAPTER].weight, std=0.3)
    trainer.model.train()
    inputs = some_inputs(trainer)
    assert torch.equal(trainer.teacher.hidden(inputs), trainer.teacher.hidden(inputs))
    once, twice = (completion_hidden(trainer.model, trainer._tap, inputs) for _ in range(2))
    assert not torch.equal(once, twice)  # the student has it


def test_the_live_teacher_moves_with_the_student(folder, tokenizer, tmp_path):
    live = make_trainer(
        folder, tokenizer, tmp_path, teacher_kind="live", rows=examples(equal_contexts=True), max_steps=3
    )
    live.train()
    assert losses(live) == [0.0, 0.0, 0.0]  # equal contexts and equal weights: nothing to learn, ever


@pytest.mark.parametrize("kind", ["ema", "adapter"])
def test_sharded_weights_are_refused(folder, kind, tmp_path):
    options = {"teacher_adapter": str(tmp_path)} if kind == "adapter" else {}
    args = OPSDConfig(max_steps=1, use_cpu=True, teacher_kind=kind, **options)
    with pytest.raises(ValueError, match=f"teacher_kind={kind} needs whole weights on every process"):
        Teacher(args, None, None, sharded=True)


def test_the_base_teacher_is_the_model_in_memory_not_the_one_on_disk(folder, tokenizer, tmp_path):
    trainer = make_trainer(folder, tokenizer, tmp_path)
    before = trainer.teacher.hidden(some_inputs(trainer))
    with torch.no_grad():
        trainer.model.get_base_model().model.norm.weight.mul_(2.0)  # a base that was edited after it was loaded
    torch.testing.assert_close(trainer.teacher.hidden(some_inputs(trainer)), 2 * before)


def test_switches_change_nothing_that_they_do_not_put_back(folder, tokenizer, tmp_path):
    model = make_trainer(folder, tokenizer, tmp_path).model.train()
    model.get_base_model().set_attn_implementation("sdpa")
    model.get_base_model().model.layers[0].mlp.eval()  # stays as it is
    ids = torch.tensor([[10, 11, 12]])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.add_(0.1)
    before = [module.training for module in model.modules()]
    trained = [parameter.requires_grad for parameter in model.parameters()]
    adapted = model(ids).logits
    with pytest.raises(RuntimeError, match="inside"), teacher_weights(model, "base"):
        assert not torch.is_grad_enabled() and not any(module.training for module in model.modules())
        assert [parameter.requires_grad for parameter in model.parameters()] == trained
        base = model(ids).logits
        raise RuntimeError("inside")
    assert [module.training for module in model.modules()] == before and torch.is_grad_enabled()
    assert torch.equal(model(ids).logits, adapted) and not torch.equal(base, adapted)
    with model.disable_adapter():
        assert torch.equal(model(ids).logits, base)
