"""The definition of the objective: golden values, limits, gradients, clipping, top-k and degenerate inputs."""

import math

import pytest
import torch
import torch.nn.functional as F

from opsd.divergence import CLIP_MODES, STATISTICS, generalized_jsd, mean_statistics

BETAS = (0.0, 0.3, 0.5, 1.0)


def logits_pair(*shape, dtype=torch.float64, scale=2.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    student = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale
    teacher = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale
    return student.to(dtype), teacher.to(dtype)


def from_probabilities(*rows):
    return torch.tensor(rows, dtype=torch.float64).log()


def loss_of(student, teacher, mask=None, **settings):
    return generalized_jsd(student, teacher, mask, **settings)[0]


@pytest.mark.parametrize(
    ("beta", "expected"),
    [
        (0.0, 0.9 * math.log(0.9 / 0.8) + 0.1 * math.log(0.1 / 0.2)),
        (1.0, 0.8 * math.log(0.8 / 0.9) + 0.2 * math.log(0.2 / 0.1)),
        (
            0.25,  # m = 0.25 teacher + 0.75 student = (0.825, 0.175)
            0.25 * (0.9 * math.log(0.9 / 0.825) + 0.1 * math.log(0.1 / 0.175))
            + 0.75 * (0.8 * math.log(0.8 / 0.825) + 0.2 * math.log(0.2 / 0.175)),
        ),
    ],
)
def test_golden_values_by_hand(beta, expected):
    loss = loss_of(from_probabilities((0.8, 0.2)), from_probabilities((0.9, 0.1)), beta=beta)
    assert loss.item() == pytest.approx(expected, abs=1e-14)


def test_entry_clip_can_make_the_loss_negative():
    student, teacher = from_probabilities((0.8, 0.2)), from_probabilities((0.9, 0.1))
    student.requires_grad_()
    loss, sums = generalized_jsd(student, teacher, None, beta=0.0, entry_clip=0.05)
    assert loss.item() == pytest.approx(0.05 + 0.1 * math.log(0.5), abs=1e-14)
    assert loss.item() == pytest.approx(-0.019, abs=5e-4)
    loss.backward()
    # Only the second entry has a derivative, -p_t = -0.1, so the gradient is -0.1 (onehot - p_s).
    assert student.grad[0].tolist() == pytest.approx([0.1 * 0.8, -0.1 + 0.1 * 0.2], abs=1e-14)
    assert mean_statistics(sums)["clipped_entry_fraction"] == 0.5
    assert mean_statistics(sums)["clipped_token_fraction"] == 1.0


def test_temperature_divides_both_roles():
    student, teacher = logits_pair(3, 7)
    expected = loss_of(student / 1.1, teacher / 1.1, beta=0.0)
    assert loss_of(student, teacher, beta=0.0, temperature=1.1).item() == pytest.approx(expected.item(), abs=1e-14)


@pytest.mark.parametrize("vocab_size", [33, 4097])
def test_endpoints_are_kl_div(vocab_size):
    student, teacher = logits_pair(5, vocab_size)
    student_log_probs, teacher_log_probs = student.log_softmax(-1), teacher.log_softmax(-1)
    forward = F.kl_div(student_log_probs, teacher_log_probs, log_target=True, reduction="batchmean")
    reverse = F.kl_div(teacher_log_probs, student_log_probs, log_target=True, reduction="batchmean")
    torch.testing.assert_close(loss_of(student, teacher, beta=0.0), forward, atol=1e-12, rtol=0)
    torch.testing.assert_close(loss_of(student, teacher, beta=1.0), reverse, atol=1e-12, rtol=0)


def test_jsd_is_nonnegative_and_symmetric_at_one_half():
    student, teacher = logits_pair(200, 33, scale=4.0)
    for beta in (0.1, 0.5, 0.9):
        assert generalized_jsd(student, teacher, None, beta=beta, reduction="none")[0].min() >= 0
    torch.testing.assert_close(
        loss_of(student, teacher, beta=0.5), loss_of(teacher, student, beta=0.5), atol=1e-14, rtol=0
    )


@pytest.mark.parametrize("beta", BETAS)
def test_an_infinite_clip_is_the_identity(beta):
    student, teacher = logits_pair(6, 33)
    expected = loss_of(student, teacher, beta=beta, clip_mode="none")
    for clip_mode in CLIP_MODES:
        assert loss_of(student, teacher, beta=beta, clip_mode=clip_mode) == expected


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("clip_mode", ["entry", "token", "none"])
def test_gradcheck(beta, clip_mode):
    student, teacher = logits_pair(4, 9)
    student.requires_grad_()
    clip = {"entry": 0.05, "token": 0.3, "none": math.inf}[clip_mode]
    settings = {"beta": beta, "entry_clip": clip, "clip_mode": clip_mode, "temperature": 1.3}
    sums = generalized_jsd(student, teacher, None, **settings)[1]
    assert clip_mode == "none" or 0 < sums["clipped_tokens"]
    assert torch.autograd.gradcheck(lambda x: loss_of(x, teacher, **settings), (student,))


@pytest.mark.parametrize("tail", [True, False])
def test_gradcheck_top_k(tail):
    student, teacher = logits_pair(4, 9)
    student.requires_grad_()
    settings = {"beta": 0.4, "entry_clip": 0.05, "top_k": 3, "tail": tail}
    assert torch.autograd.gradcheck(lambda x: loss_of(x, teacher, **settings), (student,))


def test_direction_clip_scales_the_gradient_and_keeps_its_direction():
    student, teacher = logits_pair(50, 9)
    student.requires_grad_()
    unclipped = generalized_jsd(student, teacher, None, beta=0.0, reduction="none")[0]
    (full,) = torch.autograd.grad(unclipped.sum(), student)
    clip = unclipped.median().item()
    clipped = generalized_jsd(
        student, teacher, None, beta=0.0, entry_clip=clip, clip_mode="direction", reduction="none"
    )[0]
    torch.testing.assert_close(clipped, unclipped.clamp(max=clip))
    (scaled,) = torch.autograd.grad(clipped.sum(), student)
    scale = (clip / unclipped.detach()).clamp(max=1.0)
    assert 0 < (scale < 1).sum() < 50
    torch.testing.assert_close(scaled, full * scale[:, None])


def test_token_clip_stops_whole_tokens():
    student, teacher = logits_pair(50, 9)
    student.requires_grad_()
    unclipped = generalized_jsd(student, teacher, None, beta=0.0, reduction="none")[0].detach()
    clip = unclipped.median().item()
    loss, sums = generalized_jsd(student, teacher, None, beta=0.0, entry_clip=clip, clip_mode="token", reduction="none")
    torch.testing.assert_close(loss, unclipped.clamp(max=clip))
    loss.sum().backward()
    assert ((student.grad.abs().sum(-1) == 0) == (unclipped > clip)).all()
    assert sums["clipped_tokens"] == (unclipped > clip).sum()


def test_top_k_by_hand():
    student = from_probabilities((0.1, 0.2, 0.3, 0.4))
    teacher = from_probabilities((0.5, 0.3, 0.15, 0.05))
    with_tail = 0.5 * math.log(0.5 / 0.1) + 0.3 * math.log(0.3 / 0.2) + 0.2 * math.log(0.2 / 0.7)
    renormalised = 0.625 * math.log(0.625 * 3) + 0.375 * math.log(0.375 * 1.5)
    loss, sums = generalized_jsd(student, teacher, None, beta=0.0, top_k=2)
    assert loss.item() == pytest.approx(with_tail, abs=1e-14)
    assert loss_of(student, teacher, beta=0.0, top_k=2, tail=False).item() == pytest.approx(renormalised, abs=1e-14)
    means = mean_statistics(sums)
    assert means["teacher_top_k_mass"] == pytest.approx(0.8)
    assert means["student_top_k_mass"] == pytest.approx(0.3)


def test_top_k_of_the_whole_vocabulary_is_the_full_divergence():
    student, teacher = logits_pair(5, 33)
    for tail in (True, False):
        value = loss_of(student, teacher, beta=0.5, top_k=33, tail=tail)
        torch.testing.assert_close(value, loss_of(student, teacher, beta=0.5), atol=1e-13, rtol=0)


def test_statistics():
    student, teacher = logits_pair(40, 33)
    _, sums = generalized_jsd(student, teacher, None, beta=0.0, entry_clip=0.05)
    assert tuple(sums) == STATISTICS
    assert not any(value.requires_grad for value in sums.values())
    means = mean_statistics(sums)
    assert means["divergence"] == pytest.approx(loss_of(student, teacher, beta=0.0).item(), abs=1e-12)
    for role, logits in (("student", student), ("teacher", teacher)):
        expected = torch.distributions.Categorical(logits=logits).entropy().mean().item()
        assert means[f"{role}_entropy"] == pytest.approx(expected, abs=1e-12)
    entries = teacher.softmax(-1) * (teacher.log_softmax(-1) - student.log_softmax(-1))
    assert means["clipped_entry_fraction"] == pytest.approx((entries > 0.05).double().mean().item())
    assert means["clipped_token_fraction"] == pytest.approx((entries > 0.05).any(-1).double().mean().item())
    halves = [generalized_jsd(student[i::2], teacher[i::2], None, beta=0.0, entry_clip=0.05)[1] for i in (0, 1)]
    added = {name: halves[0][name] + halves[1][name] for name in STATISTICS}
    assert mean_statistics(added) == pytest.approx(means, abs=1e-12)


def test_reductions_and_masked_rows():
    student, teacher = logits_pair(3, 4, 9)
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    student[~mask], teacher[~mask] = math.nan, math.nan
    student.requires_grad_()
    settings = {"beta": 0.0, "entry_clip": 0.2}
    per_token_loss = loss_of(student, teacher, mask, reduction="none", **settings)
    assert (per_token_loss[~mask] == 0).all() and (per_token_loss[mask] != 0).all()
    mean = loss_of(student, teacher, mask, **settings)
    torch.testing.assert_close(mean, per_token_loss.sum() / 4)
    by_sequence = loss_of(student, teacher, mask, reduction="sequence_mean", **settings)
    torch.testing.assert_close(by_sequence, (per_token_loss[0].sum() / 3 + per_token_loss[1, 0]) / 2)
    (mean + by_sequence).backward()
    assert student.grad.isfinite().all() and (student.grad[~mask] == 0).all()


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "none"])
def test_fully_masked_input_keeps_the_graph(reduction):
    student, teacher = logits_pair(2, 3, 9)
    student.requires_grad_()
    mask = torch.zeros(2, 3, dtype=torch.bool)
    loss, sums = generalized_jsd(student, teacher, mask, beta=0.0, entry_clip=0.05, reduction=reduction)
    assert (loss == 0).all()
    loss.sum().backward()
    assert (student.grad == 0).all()
    assert mean_statistics(sums) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_logits_are_summed_in_float32(dtype):
    student, teacher = logits_pair(5, 33, dtype=dtype)
    value = loss_of(student, teacher, beta=0.5)
    assert value.dtype == torch.float32
    expected = loss_of(student.double(), teacher.double(), beta=0.5)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("clip_mode", CLIP_MODES)
def test_excluded_entries_and_extreme_logits(beta, clip_mode):
    student, teacher = logits_pair(4, 9)
    student[:, -2:], teacher[:, -2:] = -math.inf, -math.inf  # an entry neither role can produce counts as nothing
    clip = math.inf if clip_mode == "none" else 0.05
    settings = {"beta": beta, "entry_clip": clip, "clip_mode": clip_mode}
    expected = loss_of(student[:, :-2], teacher[:, :-2], **settings)
    torch.testing.assert_close(loss_of(student, teacher, **settings), expected, atol=1e-14, rtol=0)
    extreme = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0]], dtype=torch.float32, requires_grad=True)
    loss = loss_of(extreme, -extreme.detach(), **settings)
    loss.backward()
    assert loss.isfinite() and extreme.grad.isfinite().all()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("clip_mode", ["entry", "token", "direction"])
def test_infinite_entries_are_clipped_without_nan_gradients(beta, clip_mode):
    student, teacher = logits_pair(2, 5)
    student[0, 1], teacher[1, 2] = -math.inf, -math.inf
    student.requires_grad_()
    loss = loss_of(student, teacher, beta=beta, entry_clip=0.1, clip_mode=clip_mode)
    loss.backward()
    assert loss.isfinite() and student.grad.isfinite().all()


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_identical_distributions_give_exactly_zero(beta):
    student, _ = logits_pair(5, 4097, dtype=torch.float32)
    student.requires_grad_()
    loss = loss_of(student, student.detach().clone(), beta=beta, entry_clip=0.05)
    loss.backward()
    assert loss.item() == 0 and student.grad.abs().max() < 1e-8


def test_gradient_flows_through_the_student_only():
    student, teacher = logits_pair(3, 9)
    student.requires_grad_()
    teacher.requires_grad_()
    loss_of(student, teacher, beta=0.5).backward()
    assert teacher.grad is None and student.grad is not None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 1.5}, "beta=1.5"),
        ({"beta": 0.0, "temperature": 0.0}, "temperature=0.0"),
        ({"beta": 0.0, "entry_clip": -1}, "entry_clip=-1 must be > 0 nats; use inf to disable"),
        ({"beta": 0.0, "entry_clip": math.nan}, "entry_clip=nan"),
        ({"beta": 0.0, "clip_mode": "vocab"}, "clip_mode='vocab'"),
        ({"beta": 0.0, "clip_mode": "none", "entry_clip": 0.05}, "entry_clip=0.05 has no effect"),
        ({"beta": 0.0, "top_k": 0}, "top_k=0"),
        ({"beta": 0.0, "top_k": 10}, "top_k=10 must be <= the vocabulary, 9"),
        ({"beta": 0.0, "tail": False}, "tail=False"),
        ({"beta": 0.0, "reduction": "batchmean"}, "reduction='batchmean'"),
    ],
)
def test_bad_settings_are_named(settings, message):
    student, teacher = logits_pair(2, 9)
    with pytest.raises(ValueError, match=message):
        generalized_jsd(student, teacher, None, **settings)


def test_shapes_must_agree():
    student, teacher = logits_pair(2, 9)
    with pytest.raises(ValueError, match="must score the same tokens"):
        generalized_jsd(student, teacher[:, :8], None, beta=0.0)
