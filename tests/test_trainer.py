"""The trainer on a random model of a few thousand parameters: what is on-policy, what moves, and what does not depend on batching."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from opsd.args import OPSDConfig
from opsd.attention import NAME as VARLEN
from opsd.batch import Layout
from opsd.model import base_hash
from opsd.rollout import Rollout, derive_seed
from opsd.rollout_transformers import TransformersEngine
from opsd.trainer import OPSDTrainer, RolloutSampler

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def examples(count: int = 16, *, equal_contexts: bool = False) -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    rows = []
    for index in range(count):
        prompt = torch.randint(10, 60, (3 + index % 5,), generator=generator).tolist()
        context = (
            prompt if equal_contexts else torch.randint(10, 60, (4 + index % 7,), generator=generator).tolist() + prompt
        )
        rows.append({"example_id": str(index), "prompt_ids": prompt, "teacher_prompt_ids": context})
    return rows


class ScriptedEngine:
    """Answers every prompt with ids drawn from the request's seed, so that rollouts do not depend on the weights or on batching."""

    def __init__(self, lengths=(1, 9)):
        self.lengths, self.synced = lengths, []

    def sync(self, adapter_dir, step):
        self.synced.append((step, (adapter_dir / "adapter_model.safetensors").read_bytes()))

    def generate(self, prompt_ids, sampling, seeds):
        rollouts = []
        for ids, seed in zip(prompt_ids, seeds, strict=True):
            generator = torch.Generator().manual_seed(seed)
            length = int(torch.randint(*self.lengths, (1,), generator=generator))
            tokens = torch.randint(0, 60, (length,), generator=generator).tolist()
            rollouts.append(Rollout(tuple(ids), tuple(tokens), (-1.0,) * length, "length"))
        return rollouts

    def rest(self):
        pass

    def close(self):
        pass


def make_trainer(
    folder,
    tokenizer,
    tmp_path,
    *,
    packed=True,
    engine=None,
    rows=None,
    per_device=8,
    accumulation=1,
    api_key=None,
    **options,
):
    defaults = dict(
        output_dir=str(tmp_path / "run"), max_steps=2, rollouts_per_step=8, per_device_train_batch_size=per_device,
        gradient_accumulation_steps=accumulation, learning_rate=1e-2, report_to=["none"], save_strategy="no", use_cpu=True, bf16=False,
        gradient_checkpointing=False, disable_tqdm=True, max_completion_length=8, seed=3,
    )  # fmt: skip
    args = OPSDConfig(**(defaults | options))
    base = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=VARLEN if packed else "sdpa", dtype=torch.float32
    )
    torch.manual_seed(5)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, task_type="CAUSAL_LM"))
    if engine == "live":
        engine = TransformersEngine(model, eos_ids={tokenizer.eos_token_id}, pad_id=tokenizer.pad_token_id, live=True)
    layout = Layout(packed=packed, pad_id=tokenizer.pad_token_id)
    return OPSDTrainer(model, args, rows or examples(), tokenizer, engine or ScriptedEngine(), layout, api_key=api_key)


def losses(trainer) -> list[float]:
    return [row["loss/objective"] for row in trainer.state.log_history if "loss/objective" in row]


def adapter_state(trainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("beta", [0.0, 1.0, 0.5])
def test_equal_contexts_give_zero_loss_at_the_start(folder, tokenizer, tmp_path, beta):
    trainer = make_trainer(folder, tokenizer, tmp_path, rows=examples(equal_contexts=True), max_steps=1, beta=beta)
    trainer.train()
    assert abs(losses(trainer)[0]) <= (0 if beta in (0.0, 1.0) else 1e-6)


def test_different_contexts_give_a_loss(folder, tokenizer, tmp_path):
    trainer = make_trainer(folder, tokenizer, tmp_path, max_steps=1)
    trainer.train()
    assert losses(trainer)[0] > 1e-3


def test_the_adapter_moves_and_the_base_does_not(folder, tokenizer, tmp_path):
    trainer = make_trainer(folder, tokenizer, tmp_path, engine="live", max_steps=3)
    before, digest = adapter_state(trainer), base_hash(trainer.model)
    trainer.train()
    assert base_hash(trainer.model) == digest
    after = adapter_state(trainer)
    assert all(not torch.equal(before[name], after[name]) for name in before if ".lora_B." in name)


def test_the_base_hash_sees_one_changed_weight(folder, tokenizer, tmp_path):
    trainer = make_trainer(folder, tokenizer, tmp_path)
    digest = base_hash(trainer.model)
    with torch.no_grad():
        next(p for n, p in trainer.model.named_parameters() if ".lora_" not in n)[0, 0].add_(1e-6)
    assert base_hash(trainer.model) != digest


@pytest.mark.parametrize(("per_device", "accumulation"), [(4, 2), (1, 8), (2, 4)])
@pytest.mark.parametrize("packed", [True, False])
def test_the_gradient_does_not_depend_on_micro_batches(folder, tokenizer, tmp_path, per_device, accumulation, packed):
    whole = make_trainer(folder, tokenizer, tmp_path, max_steps=1, optim="sgd", max_grad_norm=0.0)
    whole.train()
    split = make_trainer(
        folder, tokenizer, tmp_path, packed=packed, per_device=per_device, accumulation=accumulation, max_steps=1, optim="sgd",
        max_grad_norm=0.0,
    )  # fmt: skip
    split.train()
    assert losses(split)[0] == pytest.approx(losses(whole)[0], rel=1e-5)
    for name, value in adapter_state(whole).items():
        torch.testing.assert_close(adapter_state(split)[name], value, rtol=1e-5, atol=1e-6)


def test_every_rollout_call_serves_the_adapter_of_its_step(folder, tokenizer, tmp_path):
    engine = ScriptedEngine()
    trainer = make_trainer(folder, tokenizer, tmp_path, engine=engine, max_steps=3, per_device=2, accumulation=4)
    trainer.train()
    assert [step for step, _ in engine.synced] == [0, 1, 2]  # once per optimizer step, before its rollouts
    assert len({weights for _, weights in engine.synced}) == 3


def test_the_live_sampler_and_the_trainer_agree_on_log_probabilities(folder, tokenizer, tmp_path):
    trainer = make_trainer(
        folder,
        tokenizer,
        tmp_path,
        engine="live",
        max_steps=3,
        temperature=1.1,
        top_p=0.95,
        top_k=20,
        distill_temperature=1.1,
    )
    trainer.train()
    gaps = [row["rollout/logp_gap_max"] for row in trainer.state.log_history if "rollout/logp_gap_max" in row]
    assert len(gaps) == 3
    assert max(gaps) < 1e-4


def test_a_stale_sampler_shows_in_the_gap(folder, tokenizer, tmp_path):
    class StaleEngine(TransformersEngine):
        def generate(self, prompt_ids, sampling, seeds):
            with self._model.disable_adapter():  # samples from the base whatever was synced
                return super().generate(prompt_ids, sampling, seeds)

    trainer = make_trainer(folder, tokenizer, tmp_path, max_steps=3, learning_rate=5e-2)
    trainer.engine = StaleEngine(
        trainer.model, eos_ids={tokenizer.eos_token_id}, pad_id=tokenizer.pad_token_id, live=True
    )
    trainer.train()
    gaps = [row["rollout/logp_gap"] for row in trainer.state.log_history if "rollout/logp_gap" in row]
    assert gaps[0] < 1e-4 < 1e-2 < gaps[-1]


def test_an_engine_that_answers_another_prompt_stops_the_run(folder, tokenizer, tmp_path):
    class WrongPrompt(ScriptedEngine):
        def generate(self, prompt_ids, sampling, seeds):
            return super().generate([ids[::-1] for ids in prompt_ids], sampling, seeds)

    trainer = make_trainer(folder, tokenizer, tmp_path, engine=WrongPrompt())
    with pytest.raises(RuntimeError, match="answered other prompt ids"):
        trainer.train()


def test_an_empty_completion_stops_the_run(folder, tokenizer, tmp_path):
    trainer = make_trainer(folder, tokenizer, tmp_path, engine=ScriptedEngine(lengths=(0, 1)))
    with pytest.raises(RuntimeError, match="empty completion"):
        trainer.train()


def test_gradient_checkpointing_changes_nothing(folder, tokenizer, tmp_path):
    plain = make_trainer(folder, tokenizer, tmp_path)
    plain.train()
    checkpointed = make_trainer(folder, tokenizer, tmp_path, gradient_checkpointing=True)
    checkpointed.train()
    assert losses(plain) == pytest.approx(losses(checkpointed), rel=1e-6)


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(folder, tokenizer, tmp_path):
    options = dict(engine="live", max_steps=4, save_strategy="steps", save_steps=2)
    whole = make_trainer(folder, tokenizer, tmp_path / "a", **options)
    whole.train()
    resumed = make_trainer(folder, tokenizer, tmp_path / "b", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "run" / "checkpoint-2"))
    assert losses(resumed) == losses(whole)
    for name, value in adapter_state(whole).items():
        assert torch.equal(adapter_state(resumed)[name], value)


def test_five_steps_reproduce_the_committed_trajectory(folder, tokenizer, tmp_path):
    trainer = make_trainer(folder, tokenizer, tmp_path, max_steps=5, beta=0.0, entry_clip=0.05, distill_temperature=1.1)
    trainer.train()
    recorded = json.loads((Path(__file__).parent / "golden" / "trajectory.json").read_text())
    got = torch.tensor(losses(trainer))
    want = torch.tensor(recorded["losses"])
    assert (got - want).abs().max() < 1e-5
    assert (got - want).abs().mean() < 5e-6


def test_order_and_seeds_depend_on_nothing_but_the_seed():
    order = list(RolloutSampler(10, 25, seed=1))
    assert order == list(RolloutSampler(10, 25, seed=1)) != list(RolloutSampler(10, 25, seed=2))
    assert sorted(order[:10]) == sorted(order[10:20]) == list(range(10))
    assert order == list(RolloutSampler(10, 40, seed=1))[:25]  # a longer run starts with the same rows
    assert derive_seed(0, 1, "7") == derive_seed(0, 1, "7") != derive_seed(0, 17, "")
    assert 0 <= derive_seed("anything") < 2**31
