"""Loss options in a run: what is counted, what it is a mean over, and that each option is the definition's (opsd/divergence.py)."""

import math

import pytest
import torch
from test_trainer import adapter_state, examples, losses, make_trainer

from opsd.args import OPSDConfig
from opsd.batch import Layout, MicroBatch, build_inputs
from opsd.divergence import generalized_jsd
from opsd.objective import Objective, StepSize
from opsd.rollout import Rollout
from opsd.teacher import completion_hidden

LENGTHS = (3, 1, 6, 2)


def batch_and_heads():
    generator = torch.Generator().manual_seed(0)
    rows, rollouts = [], []
    for index, length in enumerate(LENGTHS):
        ids = torch.randint(0, 11, (length,), generator=generator).tolist()
        rows.append({"example_id": str(index), "prompt_ids": [1], "teacher_prompt_ids": [1, 2]})
        rollouts.append(Rollout((1,), tuple(ids), (-1.0,) * length, "length"))
    head = torch.nn.Linear(8, 11, bias=False)
    torch.nn.init.normal_(head.weight, generator=generator)
    head.weight.requires_grad_(False)
    student = torch.randn(sum(LENGTHS), 8, generator=generator).requires_grad_()
    teacher = torch.randn(sum(LENGTHS), 8, generator=generator)
    return MicroBatch(tuple(rows), tuple(rollouts)), head, student, teacher


def run(tokens=None, sequences=None, **options):
    batch, head, student, teacher = batch_and_heads()
    objective = Objective(OPSDConfig(max_steps=1, use_cpu=True, **options), head, head)
    counts = objective.counts([batch])
    size = StepSize(tokens or counts[0], sequences or counts[1])
    loss, sums = objective.loss(student, teacher, None, batch, size, 1)
    loss.backward()
    row = objective.row({name: float(value) for name, value in sums.items()})
    return loss.item(), student.grad, row, counts


def padded_logits():
    """(B, T, V) logits of both roles and the mask, for the definition."""
    _, head, student, teacher = batch_and_heads()
    shape = (len(LENGTHS), max(LENGTHS), 11)
    mask = torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]
    pair = [torch.zeros(shape).masked_scatter(mask[..., None], head(h).detach()) for h in (student, teacher)]
    return *pair, mask


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beta": 1.0},
        {"beta": 0.5, "entry_clip": 0.05},
        {"entry_clip": 0.05, "clip_mode": "token"},
        {"entry_clip": 0.05, "clip_mode": "direction"},
        {"clip_mode": "none"},
        {"loss_top_k": 3},
        {"loss_top_k": 3, "loss_tail": False},
        {"distill_temperature": 1.3},
    ],
)
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_options_mean_what_the_definition_says(options, reduction):
    loss, _, row, _ = run(**options, loss_reduction=reduction)
    definition = {"beta": 0.0} | options
    definition = {
        {"loss_top_k": "top_k", "loss_tail": "tail", "distill_temperature": "temperature"}.get(name, name): value
        for name, value in definition.items()
    }
    student, teacher, mask = padded_logits()
    expected, _ = generalized_jsd(student, teacher, mask, reduction=reduction, **definition)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert row["loss/objective"] == pytest.approx(expected.item(), rel=1e-5)
    if "loss_top_k" in options:
        assert 0.3 < row["loss/teacher_top_k_mass"] < 1 and 0 < row["loss/student_top_k_mass"] < 1


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_skipped_tokens_are_not_counted_and_have_no_gradient(reduction):
    loss, gradient, row, counts = run(skip_first_tokens=2, loss_reduction=reduction)
    student, teacher, mask = padded_logits()
    mask[:, :2] = False
    expected, sums = generalized_jsd(student, teacher, mask, beta=0.0, reduction=reduction)
    assert counts == (5, 2)  # of lengths 3, 1, 6, 2: one and four tokens stay
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert row["loss/divergence"] == pytest.approx(float(sums["divergence_sum"]) / 5, rel=1e-5)
    starts = [0, 3, 4, 10]
    skipped = [s + t for s, n in zip(starts, LENGTHS, strict=True) for t in range(min(n, 2))]
    assert (gradient[skipped] == 0).all() and (gradient.abs().sum(-1) > 0).sum() == 5


def test_the_loss_is_a_share_of_the_whole_step():
    loss, _, _, _ = run()
    share, _, row, _ = run(tokens=48, sequences=16)
    assert share == pytest.approx(loss * sum(LENGTHS) / 48, rel=1e-5)
    assert row["loss/objective"] == pytest.approx(loss, rel=1e-5)  # the record is per token of what it has seen


def test_sampled_token_objective_has_the_policy_gradient():
    loss, gradient, row, _ = run(objective="sampled_token")
    batch, head, student, teacher = batch_and_heads()
    ids = torch.tensor([t for c in batch.completions for t in c])
    student_logps = head(student).log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)
    teacher_logps = head(teacher).log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)
    advantage = (teacher_logps - student_logps).detach()
    expected = -(advantage * student_logps).mean()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient, student.grad, rtol=1e-4, atol=1e-6)
    assert row["loss/divergence"] == pytest.approx(-advantage.mean().item(), rel=1e-5)
    clipped, _, row, _ = run(objective="sampled_token", advantage_clip=0.1)
    assert clipped != pytest.approx(loss, rel=1e-2) and row["loss/clipped_token_fraction"] > 0.5


def test_bf16_logits_change_the_loss_a_little():
    exact, rounded = run()[0], run(logits_dtype="bfloat16")[0]
    assert rounded != exact and rounded == pytest.approx(exact, rel=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_tail": False}, "loss_tail=False has no effect: it needs loss_top_k > 0"),
        ({"beta": 1.0, "loss_top_k": 5, "loss_tail": False}, "loss_tail=false with beta=1 .* is refused"),
        ({"objective": "sampled_token", "entry_clip": 0.05}, "entry_clip=0.05 has no effect: objective=sampled_token"),
        ({"objective": "sampled_token", "beta": 0.5}, "beta=0.5 has no effect"),
        ({"advantage_clip": 1.0}, "advantage_clip=1.0 has no effect: it needs objective=sampled_token"),
        ({"advantage_clip": 0.0}, "advantage_clip=0.0 must be > 0 nats"),
        ({"skip_first_tokens": -1}, "skip_first_tokens=-1 must be >= 0"),
        ({"loss_top_k": -1}, "loss_top_k=-1 must be >= 0"),
        ({"loss_backend": "triton", "loss_top_k": 5}, "loss_backend=triton supports neither"),
        ({"token_weight_gain": 1.0}, "token_weight_gain=1.0 has no effect: it needs token_weight=discrepancy"),
        ({"token_weight": "position", "token_weight_scale": 1.0}, "needs token_weight=contrastive"),
        ({"token_weight": "position", "token_weight_floor": 1.0}, r"token_weight_floor=1.0 must be in \[0, 1\)"),
        ({"wrong_reference_seed": 3}, "wrong_reference_seed=3 has no effect"),
        ({"teacher_ema_decay": 0.9}, "teacher_ema_decay=0.9 has no effect: it needs teacher_kind=ema"),
        ({"teacher_kind": "ema", "teacher_ema_decay": 1.0}, "use teacher_kind=live for 0, base for 1"),
        ({"teacher_kind": "adapter"}, "teacher_kind=adapter needs teacher_adapter"),
        ({"teacher_model": "x"}, "teacher_model=x has no effect"),
        ({"teacher_kind": "model", "teacher_model": "http://host:8000"}, "loss_top_k=0 must be > 0"),
        ({"teacher_kind": "model", "teacher_model": "x", "objective": "sampled_token"}, "needs objective=divergence"),
        ({"teacher_kind": "ghost"}, "teacher_kind='ghost' must be one of base, live, ema, adapter, model"),
        ({"first_token_from_padding": True}, "set position_gap=true"),
        ({"logging_nan_inf_filter": True}, "would hide a non-finite loss"),
        ({"guard_window": 3}, "guard_window=3 has no effect: no guard is on"),
        ({"guard_max_divergence": 1.0}, "guard_max_divergence=1.0 must be > 1"),
        ({"guard_min_length": 1.0}, r"guard_min_length=1.0 must be in \[0, 1\)"),
        ({"guard_min_entropy": 0.5, "objective": "sampled_token"}, "measures neither"),
        ({"reason_first_tokens": -1}, "reason_first_tokens=-1 must be >= 0"),
        ({"reason_first_tokens": 8, "token_weight": "contrastive"}, "contradicts token_weight=contrastive"),
    ],
)
def test_contradictions_and_idle_parameters_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        OPSDConfig(max_steps=10, use_cpu=True, **options)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_skip_and_reduction_do_not_depend_on_micro_batches(folder, tokenizer, tmp_path, reduction):
    options = dict(max_steps=1, optim="sgd", max_grad_norm=0.0, skip_first_tokens=2, loss_reduction=reduction)
    whole = make_trainer(folder, tokenizer, tmp_path, **options)
    split = make_trainer(folder, tokenizer, tmp_path, per_device=1, accumulation=8, **options)
    whole.train(), split.train()
    assert losses(split)[0] == pytest.approx(losses(whole)[0], rel=1e-5)
    for name, value in adapter_state(whole).items():
        torch.testing.assert_close(adapter_state(split)[name], value, rtol=1e-5, atol=1e-6)


def test_a_step_without_a_counted_token_stops(folder, tokenizer, tmp_path):
    trainer = make_trainer(folder, tokenizer, tmp_path, skip_first_tokens=50)
    with pytest.raises(RuntimeError, match="no completion is longer than skip_first_tokens=50"):
        trainer.train()


def test_published_padding_predicts_the_first_token_of_short_prompts_from_padding(folder, tokenizer, tmp_path):
    trainer = make_trainer(folder, tokenizer, tmp_path, packed=False)
    prompts, completions = [[5, 6, 7, 8, 9], [10, 11]], [[3, 4], [3, 4]]
    hidden = {}
    for name, published in (("ours", False), ("published", True)):
        layout = Layout(False, tokenizer.pad_token_id, position_gap=True, first_token_from_padding=published)
        inputs = build_inputs(prompts, completions, layout)
        hidden[name] = completion_hidden(trainer.model.eval(), trainer._tap, inputs).detach()
    same = (hidden["ours"] == hidden["published"]).all(-1).tolist()
    assert same == [True, True, False, True]  # only the short row's first token
    assert math.isfinite(hidden["published"].abs().sum())


def test_the_published_layout_trains(folder, tokenizer, tmp_path):
    trainer = make_trainer(
        folder, tokenizer, tmp_path, packed=False, position_gap=True, first_token_from_padding=True, rows=examples()
    )
    trainer.train()
    assert all(map(math.isfinite, losses(trainer)))
