"""Merged rollouts: the base never moves, the engine gets exactly the merged weights, and the reported error is what rounding loses."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from random_qwen3 import save_adapter
from transformers import AutoModelForCausalLM

from opsd.args import OPSDConfig
from opsd.attention import NAME as VARLEN
from opsd.batch import Layout
from opsd.engines import check_engine
from opsd.merged_sync import MergedWeights
from opsd.model import base_hash
from opsd.rollout import EngineDied, SamplingSettings, VLLMEngine
from opsd.rollout_transformers import TransformersEngine
from opsd.trainer import OPSDTrainer

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SAMPLING = SamplingSettings(1.0, 1.0, 0, 10)
PROMPTS, SEEDS = [[10, 20, 30], [11, 21]], [1, 2]


@pytest.fixture(scope="module")
def adapter(folder, tmp_path_factory):
    return save_adapter(tmp_path_factory.mktemp("adapter"), folder)


def load(folder, adapter, dtype=torch.float32) -> PeftModel:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), str(adapter))


def push_merged(model, engine, step: int) -> float:
    """As the trainer does it; the relative error of the merge."""
    weights = MergedWeights(model)
    engine.load_weights(weights, step)
    return weights.relative_error


def own_copy(folder, tokenizer) -> TransformersEngine:
    ends = {"eos_ids": {tokenizer.eos_token_id}, "pad_id": tokenizer.pad_token_id}
    return TransformersEngine.from_pretrained(str(folder), dtype="float32", device="cpu", **ends)


def test_a_hundred_syncs_leave_the_base_bit_identical(folder, adapter):
    model = load(folder, adapter, torch.bfloat16)
    before = base_hash(model)
    for _step in range(100):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_B." in name:
                    parameter.mul_(1.01)
        for _name, _weight in MergedWeights(model):
            pass
    assert base_hash(model) == before


def test_the_engine_samples_from_the_merged_model(folder, adapter, tokenizer):
    model, engine = load(folder, adapter), own_copy(folder, tokenizer)
    base = engine.generate(PROMPTS, SAMPLING, SEEDS)
    assert push_merged(model, engine, step=4) < 1e-5  # float32 loses next to nothing
    assert engine.served == "weights merged at step 4"
    merged = engine.generate(PROMPTS, SAMPLING, SEEDS)
    expected = own_copy(folder, tokenizer)
    expected.sync(adapter, step=4)
    assert [r.completion_ids for r in merged] == [r.completion_ids for r in expected.generate(PROMPTS, SAMPLING, SEEDS)]
    assert [r.completion_ids for r in merged] != [r.completion_ids for r in base]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.zero_()
    push_merged(model, engine, step=5)  # merged into the base, not into what was merged before
    assert engine.generate(PROMPTS, SAMPLING, SEEDS) == base


def test_the_error_is_what_peft_loses_by_merging_in_place(folder, adapter):
    model = load(folder, adapter, torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.mul_(1e-3)  # updates as small as those of a run's first steps
    in_place = copy.deepcopy(model)
    in_place.merge_adapter()
    merged = MergedWeights(model)
    lost = update = 0.0
    layers = dict(in_place.get_base_model().named_modules())
    for name, weight in merged:
        layer = layers[name.removesuffix(".weight")]
        assert torch.equal(weight, layer.get_base_layer().weight)
        delta = layer.get_delta_weight("default").float()
        before = dict(model.get_base_model().named_modules())[name.removesuffix(".weight")].get_base_layer().weight
        lost += (weight.float() - before.float() - delta).square().sum()
        update += delta.square().sum()
    assert merged.relative_error == pytest.approx(float((lost / update).sqrt()), rel=1e-4)
    assert 0.3 < merged.relative_error < 1.0


def test_a_zero_adapter_has_no_error(folder):
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM"))
    merged = MergedWeights(model)
    for name, weight in merged:
        assert torch.equal(weight, base.get_submodule(name.removesuffix(".weight")).get_base_layer().weight)
    assert merged.relative_error == 0.0


def make_trainer(folder, tokenizer, tmp_path, engine, **options) -> OPSDTrainer:
    defaults = dict(
        output_dir=str(tmp_path / "run"), max_steps=3, rollouts_per_step=4, per_device_train_batch_size=4, learning_rate=1e-2,
        report_to=["none"], save_strategy="no", use_cpu=True, bf16=False, disable_tqdm=True, max_completion_length=6, seed=3,
    )  # fmt: skip
    base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=VARLEN, dtype=torch.float32)
    torch.manual_seed(5)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, task_type="CAUSAL_LM"))
    if engine == "live":
        engine = TransformersEngine(model, eos_ids={tokenizer.eos_token_id}, pad_id=tokenizer.pad_token_id, live=True)
    rows = [
        {"example_id": str(i), "prompt_ids": [10 + i, 11, 12], "teacher_prompt_ids": [40, 41, 10 + i, 12]}
        for i in range(8)
    ]
    return OPSDTrainer(
        model, OPSDConfig(**(defaults | options)), rows, tokenizer, engine, Layout(True, tokenizer.pad_token_id)
    )


def test_training_with_merged_rollouts_reports_the_rounding(folder, tokenizer, tmp_path):
    engine = own_copy(folder, tokenizer)
    trainer = make_trainer(folder, tokenizer, tmp_path, engine, rollout_engine="transformers", rollout_sync="merged")
    before = base_hash(trainer.model)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "rollout/sync_rel_err" in row]
    assert [row["rollout/sync_rel_err"] == 0 for row in rows] == [True, False, False]  # step 1 samples from the base
    assert max(row["rollout/sync_rel_err"] for row in rows) < 1e-4  # in float32
    assert max(row["rollout/logp_gap_max"] for row in rows) < 1e-3
    assert base_hash(trainer.model) == before


def test_an_engine_that_dies_leaves_a_checkpoint_to_resume_from(folder, tokenizer, tmp_path):
    class Mortal(TransformersEngine):
        calls = 0

        def generate(self, prompt_ids, sampling, seeds):
            self.calls += 1
            if self.calls == 3:
                raise EngineDied("vLLM server http://127.0.0.1:1 does not answer")
            return super().generate(prompt_ids, sampling, seeds)

    whole = make_trainer(folder, tokenizer, tmp_path / "whole", "live")
    whole.train()
    dying = make_trainer(folder, tokenizer, tmp_path / "dying", "live")
    dying.engine = Mortal(dying.model, eos_ids={tokenizer.eos_token_id}, pad_id=tokenizer.pad_token_id, live=True)
    with pytest.raises(EngineDied, match="does not answer"):
        dying.train()
    checkpoint = tmp_path / "dying" / "run" / "checkpoint-2"
    resumed = make_trainer(folder, tokenizer, tmp_path / "resumed", "live")
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == 3
    for (name, left), (_, right) in zip(resumed.model.named_parameters(), whole.model.named_parameters(), strict=True):
        assert torch.equal(left, right), name


def config(**options):
    return OPSDConfig(output_dir="x", max_steps=1, use_cpu=True, bf16=False, report_to=["none"], **options)


def test_combinations_that_cannot_work_are_refused_by_name():
    with pytest.raises(ValueError, match="rollout_sync=merged.*rollout_engine=vllm on a CPU"):
        check_engine(config(rollout_sync="merged"), None)
    with pytest.raises(ValueError, match="rollout_sync=merged.*vllm_server"):
        config(rollout_engine="vllm_server", rollout_sync="merged", vllm_server_urls=["http://h:1"])
    server = config(rollout_engine="vllm_server", vllm_server_urls=["http://127.0.0.1:8001"])
    with pytest.raises(ValueError, match="OPSD_VLLM_API_KEY is not set"):
        check_engine(server, None)
    check_engine(server, "key")
    check_engine(config(rollout_engine="transformers", rollout_sync="merged"), None)
    with pytest.raises(ValueError, match="vllm_server_urls=None must be given with rollout_engine=vllm_server"):
        config(rollout_engine="vllm_server")
    with pytest.raises(ValueError, match="and with no other engine"):
        config(vllm_server_urls=["http://127.0.0.1:8001"])
    for url in ("127.0.0.1:8001", "http://user:key@host:1", "http://host:1/v1"):
        with pytest.raises(ValueError, match="must look like"):
            config(rollout_engine="vllm_server", vllm_server_urls=[url])
    with pytest.raises(ValueError, match="contradicts recompute=false"):
        config(recompute="false", gradient_checkpointing=True)


@pytest.mark.gpu
def test_merged_weights_in_vllm_on_a_gpu(folder, adapter, tokenizer):
    engine = VLLMEngine(
        str(folder), canary_ids=list(range(10, 30)), eos_ids={tokenizer.eos_token_id}, max_model_len=64, dtype="float32",
        max_num_seqs=4, gpu_memory_utilization=0.1, max_lora_rank=None,
    )  # fmt: skip
    model = load(folder, adapter).cuda()
    base = engine.generate(PROMPTS, SAMPLING, SEEDS)
    push_merged(model, engine, step=1)
    merged = engine.generate(PROMPTS, SAMPLING, SEEDS)
    assert [r.completion_ids for r in merged] != [r.completion_ids for r in base]
    for rollout in merged:
        with torch.no_grad():
            logits = model(torch.tensor([rollout.prompt_ids + rollout.completion_ids]).cuda()).logits[0].float()
        log_probs = logits[len(rollout.prompt_ids) - 1 : -1].log_softmax(-1).cpu()
        expected = log_probs.gather(-1, torch.tensor(rollout.completion_ids)[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(rollout.per_token_logps), expected, atol=5e-2, rtol=0)
    engine.close()
