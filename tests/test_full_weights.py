"""Full fine-tuning: exact gradients of every weight, a teacher that stays, an engine with all weights, and runs that can be resumed."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from random_qwen3 import save_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from opsd.args import OPSDConfig
from opsd.attention import NAME as VARLEN
from opsd.batch import Layout, MicroBatch
from opsd.divergence import generalized_jsd
from opsd.full_weights import FullWeights, check_full, check_model, check_saved, frozen_copy, sampling_dtype
from opsd.rollout_transformers import TransformersEngine
from opsd.trainer import OPSDTrainer

BETA, CLIP, TEMPERATURE = 0.3, 0.02, 1.1


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model_folder(request, tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "m", tie_word_embeddings=request.param)


def make_trainer(model_folder, tokenizer, tmp_path, **options) -> OPSDTrainer:
    defaults = dict(
        output_dir=str(tmp_path / "run"), max_steps=3, rollouts_per_step=4, per_device_train_batch_size=4, learning_rate=1e-3,
        report_to=["none"], save_strategy="no", use_cpu=True, bf16=False, disable_tqdm=True, max_completion_length=6, seed=3,
        rollout_engine="transformers", rollout_sync="merged", beta=BETA, entry_clip=CLIP, temperature=1.0,
        distill_temperature=TEMPERATURE,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation=VARLEN, dtype=torch.float32)
    ends = {"eos_ids": {tokenizer.eos_token_id}, "pad_id": tokenizer.pad_token_id}
    engine = TransformersEngine.from_pretrained(str(model_folder), dtype="float32", device="cpu", **ends)
    rows = [
        {"example_id": str(i), "prompt_ids": [10 + i, 11, 12], "teacher_prompt_ids": [40, 41, 10 + i, 12]}
        for i in range(8)
    ]
    layout = Layout(True, tokenizer.pad_token_id)
    return OPSDTrainer(model, OPSDConfig(**(defaults | options)), rows, tokenizer, engine, layout)


def state(trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def test_every_weight_gets_the_definition_s_gradient(model_folder, tokenizer, tmp_path):
    trainer = make_trainer(model_folder, tokenizer, tmp_path)
    examples = trainer.train_dataset[:4]
    trainer._sync_engine()
    rollouts = trainer._generate(examples)
    with torch.no_grad():  # away from the start, where teacher and student would differ by their prompts alone
        for index, parameter in enumerate(trainer.model.parameters()):
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))

    tokens = sum(len(r.completion_ids) for r in rollouts)
    trainer.compute_loss(
        trainer.model, MicroBatch(tuple(examples), tuple(rollouts)), num_items_in_batch=torch.tensor(tokens)
    ).backward()
    ours = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}

    student = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64)
    teacher = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64).requires_grad_(False)
    student.load_state_dict({k: v.double() for k, v in trainer.model.state_dict().items()})
    pairs = []
    for example, rollout in zip(examples, rollouts, strict=True):
        answer = list(rollout.completion_ids)
        for model, prompt in ((student, example["prompt_ids"]), (teacher, example["teacher_prompt_ids"])):
            pairs.append(model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1])
    loss, _ = generalized_jsd(
        torch.cat(pairs[::2]), torch.cat(pairs[1::2]), torch.ones(tokens, dtype=torch.bool), beta=BETA, temperature=TEMPERATURE,
        entry_clip=CLIP,
    )  # fmt: skip
    loss.backward()
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(ours[name].double(), parameter.grad, rtol=1e-3, atol=1e-6, msg=name)


def test_training_moves_every_weight_and_never_the_teacher(model_folder, tokenizer, tmp_path):
    trainer = make_trainer(model_folder, tokenizer, tmp_path)
    before, fixed = state(trainer), trainer.fixed_hash()
    trainer.train()
    assert all(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    assert trainer.fixed_hash() == fixed
    rows = [row for row in trainer.state.log_history if "rollout/sync_rel_err" in row]
    assert [row["rollout/sync_rel_err"] for row in rows] == [0.0, 0.0, 0.0]  # float32 into float32
    assert (
        max(row["rollout/logp_gap_max"] for row in rows) < 1e-4
    )  # the engine samples from the weights that are trained
    with torch.no_grad():
        next(trainer._frozen.parameters())[0, 0] += 1
    assert trainer.fixed_hash() != fixed


def test_a_resumed_run_ends_with_the_same_weights(model_folder, tokenizer, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1}
    whole = make_trainer(model_folder, tokenizer, tmp_path / "whole", **options)
    whole.train()
    resumed = make_trainer(model_folder, tokenizer, tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "run" / "checkpoint-2"))
    for name in ("tokens_generated", "tokens_trained"):  # of the whole run, not of its last part
        assert getattr(resumed.totals, name) == getattr(whole.totals, name) > 0
    assert resumed.totals.seconds > 0
    assert resumed.fixed_hash() == whole.fixed_hash()  # the teacher is the model it started from, not the checkpoint
    for name, parameter in resumed.model.named_parameters():
        assert torch.equal(parameter, whole.model.get_parameter(name)), name
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "run" / "checkpoint-3")
    for name, parameter in saved.named_parameters():
        assert torch.equal(parameter, whole.model.get_parameter(name)), name


def test_the_rounding_is_what_the_engine_lacks_of_the_update(model_folder):
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16).float()
    start = frozen_copy(model, torch.bfloat16)
    weights = FullWeights(model, start)
    assert all(torch.equal(w, start.get_parameter(name)) for name, w in weights)
    assert weights.relative_error == 0.0
    unmoved = weights.digest
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-4)  # smaller than bfloat16's steps at these weights
    lost = update = 0.0
    for name, rounded in weights:
        assert rounded.dtype == torch.bfloat16
        lost += (rounded.float() - model.get_parameter(name).detach()).double().square().sum()
        update += (model.get_parameter(name).detach() - start.get_parameter(name).float()).double().square().sum()
    assert weights.relative_error == pytest.approx(float((lost / update).sqrt()), rel=1e-6)
    assert 0.3 < weights.relative_error < 1.5 and weights.digest != unmoved


def test_a_model_that_bfloat16_cannot_hold_starts_as_what_it_can(model_folder):
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    stored = [parameter.detach().clone() for parameter in model.parameters()]
    weights = FullWeights(model, frozen_copy(model, torch.bfloat16))
    assert list(weights) and weights.relative_error == 0.0  # nothing is trained yet, so nothing is lost
    assert all(torch.equal(p, s.bfloat16().float()) for p, s in zip(model.parameters(), stored, strict=True))
    assert any(not torch.equal(p, s) for p, s in zip(model.parameters(), stored, strict=True))


def test_under_autocast_teacher_and_engine_are_bfloat16_and_the_student_is_not(model_folder, tokenizer, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    assert sampling_dtype(model, True) == torch.bfloat16 and sampling_dtype(model, False) == torch.float32
    trainer = make_trainer(model_folder, tokenizer, tmp_path, bf16=True, max_steps=1)
    trainer.train()
    assert trainer._frozen.dtype == torch.bfloat16 and trainer.teacher.tap.weight.dtype == torch.bfloat16
    assert trainer._tap.weight.dtype == torch.bfloat16 and trainer.model.dtype == torch.float32
    assert {p.dtype for p in trainer.optimizer.param_groups[0]["params"]} == {torch.float32}


def test_saved_models_are_proved_complete(model_folder, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(model_folder, folder)
    check_saved(folder)
    weights = load_file(folder / "model.safetensors")
    name = next(iter(weights))
    save_file(weights | {name: weights[name] * float("nan")}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"tensor {name} is empty or not finite"):
        check_model(folder)
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        check_model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no model.safetensors"):
        check_saved(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollout_sync": "adapter"}, "rollout_sync=adapter.*set rollout_sync=merged"),
        ({"teacher_kind": "ema"}, "teacher_kind=ema.*use base, live or model"),
        ({"teacher_kind": "adapter"}, "teacher_kind=adapter.*use base, live or model"),
        ({"wavg_last": 20}, "wavg_last=20.*use 0"),
        ({"dtype": "bfloat16"}, "dtype=bfloat16 with use_peft=false must be float32"),
        ({"mode": "zero2"}, "not possible with zero2.*use ddp"),
        ({"mode": "fsdp2"}, "not possible with fsdp2.*use ddp"),
    ],
)
def test_what_needs_an_adapter_is_refused_by_name(change, message):
    values = {
        "rollout_sync": "merged",
        "teacher_kind": "base",
        "wavg_last": 0,
        "dtype": "float32",
        "mode": "none",
    } | change
    args, model_args = SimpleNamespace(**values), SimpleNamespace(use_peft=False, dtype=values["dtype"])
    with pytest.raises(ValueError, match=message):
        check_full(args, model_args, values["mode"])
    model_args.use_peft = True
    check_full(args, model_args, values["mode"])
