"""Sampled-token log-probabilities against a brute-force sampler, and the policy-gradient loss against autograd."""

import itertools
import math

import pytest
import torch

from opsd.sampled_token import SAMPLED_TOKEN_STATISTICS, largest, sampled_token_logps, sampled_token_loss


def make_case(tokens=10, vocab=23, hidden=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    student = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64)
    teacher = student + 0.5 * torch.randn(tokens, hidden, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64)
    token_ids = torch.randint(vocab, (tokens,), generator=generator)
    return student.requires_grad_(), teacher, weight, token_ids


def by_definition(logits, top_p, top_k):
    """Probability of every kept entry of one row, found by adding entries one at a time."""
    order = sorted(range(len(logits)), key=lambda v: -logits[v])
    if top_k:
        order = order[:top_k]
    weights = [math.exp(logits[v]) for v in order]
    total = sum(weights)
    reached, kept = 0.0, []
    for v, weight in zip(order, weights, strict=True):
        kept.append(v)
        reached += weight / total
        if reached >= top_p:
            break
    mass = sum(math.exp(logits[v]) for v in kept)
    return {v: math.exp(logits[v]) / mass for v in kept}, mass


@pytest.mark.parametrize(("top_p", "top_k"), itertools.product((1.0, 0.95, 0.6, 1e-6), (0, 1, 5, 100)))
def test_sampled_token_logps(top_p, top_k):
    hidden, _, weight, _ = make_case(tokens=4)
    logits = (hidden @ weight.t()).detach() / 1.1
    outside = 0
    for row in range(4):
        kept, mass = by_definition(logits[row].tolist(), top_p, top_k)
        assert sum(kept.values()) == pytest.approx(1.0)
        token_ids = torch.arange(23)
        logps = sampled_token_logps(
            hidden[row].expand(23, -1),
            weight,
            token_ids,
            temperature=1.1,
            top_p=top_p,
            top_k=top_k,
            logits_dtype=torch.float64,
            chunk_size=7,
        )
        assert logps.shape == (23,) and not logps.requires_grad and logps.isfinite().all()
        for v in range(23):
            expected = math.log(kept[v]) if v in kept else logits[row, v].item() - math.log(mass)
            assert logps[v].item() == pytest.approx(expected, abs=1e-12)
        outside += 23 - len(kept)
    assert outside > 0 or (top_p == 1.0 and top_k in (0, 100))


@pytest.mark.slow
def test_sampled_token_logps_equal_vllm():
    sampler = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler", reason="vLLM is not installed")
    hidden, _, weight, token_ids = make_case(tokens=400, vocab=97)
    logits = ((hidden @ weight.t()).detach() / 1.1).float()
    k, p = torch.full((400,), 20), torch.full((400,), 0.95)
    processed = sampler.apply_top_k_top_p_pytorch(logits.clone(), k, p, True).log_softmax(-1)
    sampled = processed.exp().multinomial(1, generator=torch.Generator().manual_seed(0)).squeeze(1)
    logps = sampled_token_logps(hidden, weight, sampled, temperature=1.1, top_p=0.95, top_k=20)
    torch.testing.assert_close(logps.float(), processed.gather(1, sampled[:, None]).squeeze(1), atol=1e-5, rtol=0)


def reference_loss(student, teacher, weight, token_ids, *, sampler=None, advantage_clip=math.inf, ratio_clip=math.inf):
    """Per-token loss with autograd on the full logits, temperature 1.1."""
    rows = torch.arange(len(token_ids))
    student_logps = (student @ weight.t() / 1.1).log_softmax(-1)[rows, token_ids]
    teacher_logps = (teacher @ weight.t() / 1.1).log_softmax(-1)[rows, token_ids]
    advantage = (teacher_logps - student_logps).detach().clamp(-advantage_clip, advantage_clip)
    if sampler is None:
        return -advantage * student_logps
    ratio = (student_logps - sampler).exp()
    return -torch.min(ratio * advantage, ratio.clamp(1 - ratio_clip, 1 + ratio_clip) * advantage)


@pytest.mark.parametrize("advantage_clip", [math.inf, 0.3])
@pytest.mark.parametrize(("use_sampler", "ratio_clip"), [(False, math.inf), (True, math.inf), (True, 0.1)])
def test_sampled_token_loss(advantage_clip, use_sampler, ratio_clip):
    student, teacher, weight, token_ids = make_case()
    weight.requires_grad_()
    mask = torch.arange(10) != 3
    noise = 0.3 * torch.randn(10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    options = {"temperature": 1.1, "logits_dtype": torch.float64}
    sampler = None
    if use_sampler:
        sampler = sampled_token_logps(student, weight, token_ids, **options) + noise
    clips = {"advantage_clip": advantage_clip, "ratio_clip": ratio_clip}
    weights = torch.linspace(0.5, 1.5, 10, dtype=torch.float64)
    loss, sums = sampled_token_loss(
        student,
        teacher,
        weight,
        token_ids,
        mask,
        sampler_per_token_logps=sampler,
        token_weights=weights,
        denominator=7.0,
        chunk_size=4,
        **clips,
        **options,
    )
    per_token_loss = reference_loss(student, teacher, weight, token_ids, sampler=sampler, **clips)
    expected = (per_token_loss * weights)[mask].sum() / 7
    torch.testing.assert_close(loss, expected)
    got = torch.autograd.grad(2.0 * loss, (student, weight))
    # The advantage is detached, but the reference's teacher shares the weight: take it from a detached copy.
    frozen = weight.detach()
    rows = torch.arange(10)
    student_logps = (student @ weight.t() / 1.1).log_softmax(-1)[rows, token_ids]
    teacher_logps = (teacher @ frozen.t() / 1.1).log_softmax(-1)[rows, token_ids]
    advantage = (teacher_logps - student_logps).detach().clamp(-advantage_clip, advantage_clip)
    objective = advantage * student_logps
    if sampler is not None:
        ratio = (student_logps - sampler).exp()
        objective = torch.min(ratio * advantage, ratio.clamp(1 - ratio_clip, 1 + ratio_clip) * advantage)
    want = torch.autograd.grad(2.0 * -(objective * weights)[mask].sum() / 7, (student, weight))
    for value, reference in zip(got, want, strict=True):
        torch.testing.assert_close(value, reference)
    assert tuple(sums) == SAMPLED_TOKEN_STATISTICS and sums["tokens"] == 9
    divergence = (student_logps - teacher_logps)[mask]
    torch.testing.assert_close(sums["divergence_sum"], divergence.detach().sum())
    assert sums["clipped_advantages"] == (divergence.abs() > advantage_clip).sum()
    assert (sums["clipped_ratios"] > 0) == (ratio_clip != math.inf)


def test_expected_gradient_is_that_of_the_reverse_kl():
    student, teacher, weight, _ = make_case(tokens=1)
    log_p, log_q = (student @ weight.t()).log_softmax(-1), (teacher @ weight.t()).log_softmax(-1)
    (want,) = torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), student)
    every_token = torch.arange(23)
    loss, _ = sampled_token_loss(
        student.expand(23, -1),
        teacher.expand(23, -1),
        weight,
        every_token,
        None,
        token_weights=log_p.detach()[0].exp(),
        denominator=1.0,
        logits_dtype=torch.float64,
    )
    torch.testing.assert_close(torch.autograd.grad(loss, student)[0], want)


def test_softcap_bias_and_gradcheck():
    student, teacher, weight, token_ids = make_case(tokens=3, vocab=7, hidden=4)
    token_ids = token_ids % 7
    bias = torch.linspace(-1, 1, 7, dtype=torch.float64, requires_grad=True)
    weight.requires_grad_()
    options = {"logits_dtype": torch.float64, "logit_scale": 0.6, "softcap": 2.0, "temperature": 0.9}
    sampler = sampled_token_logps(student, weight, token_ids, lm_head_bias=bias, **options) + 0.1
    loss, _ = sampled_token_loss(
        student, teacher, weight, token_ids, None, sampler_per_token_logps=sampler, lm_head_bias=bias, **options
    )
    got = torch.autograd.grad(loss, (student, weight, bias))
    logits = 2.0 * torch.tanh(0.6 * (student @ weight.t() + bias) / 2.0) / 0.9
    teacher_logits = 2.0 * torch.tanh(0.6 * (teacher @ weight.t() + bias).detach() / 2.0) / 0.9
    rows = torch.arange(3)
    student_logps = logits.log_softmax(-1)[rows, token_ids]
    advantage = teacher_logits.log_softmax(-1)[rows, token_ids] - student_logps.detach()
    want = torch.autograd.grad(-(advantage * (student_logps - sampler).exp()).mean(), (student, weight, bias))
    for value, reference in zip(got, want, strict=True):
        torch.testing.assert_close(value, reference)


def test_no_unmasked_token_gives_zero_and_keeps_the_graph():
    student, teacher, weight, token_ids = make_case()
    loss, _ = sampled_token_loss(student, teacher, weight, token_ids, torch.zeros(10, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0 and (student.grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(dtype):
    student, teacher, weight, token_ids = (x.to(dtype) if x.is_floating_point() else x for x in make_case())
    student = student.detach().requires_grad_()
    loss, _ = sampled_token_loss(student, teacher, weight, token_ids, None, temperature=1.1)
    (got,) = torch.autograd.grad(loss, student)
    wide = student.detach().double().requires_grad_()
    expected = reference_loss(wide, teacher.double(), weight.double(), token_ids).mean()
    (want,) = torch.autograd.grad(expected, wide)
    assert loss.dtype == torch.float32 and got.dtype == dtype
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert (got.double() - want).norm() / want.norm() < (1e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"advantage_clip": 0.0}, "advantage_clip=0.0 must be > 0 nats"),
        ({"ratio_clip": 0.2}, "ratio_clip=0.2 has no effect without sampler_per_token_logps"),
        ({"mask": torch.ones(3)}, "mask has shape"),
        ({"token_ids": torch.zeros(10)}, "expected .10,. int64"),
    ],
)
def test_bad_input_is_named(settings, message):
    student, teacher, weight, token_ids = make_case()
    arguments = {"token_ids": token_ids, "mask": None} | settings
    with pytest.raises(ValueError, match=message):
        sampled_token_loss(student, teacher, weight, **arguments)


@pytest.mark.parametrize(("settings", "message"), [({"top_p": 0.0}, "top_p=0.0"), ({"top_k": -1}, "top_k=-1")])
def test_bad_sampling_settings_are_named(settings, message):
    student, _, weight, token_ids = make_case()
    with pytest.raises(ValueError, match=message):
        sampled_token_logps(student, weight, token_ids, **settings)


@pytest.mark.parametrize(("vocab", "count"), [(23, 5), (5000, 20), (151_936, 20), (128 * 41, 20)])
@pytest.mark.parametrize("ties", [False, True])
def test_largest_is_topk(vocab, count, ties):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(3, vocab, generator=generator)
    logits[1] = logits[1].sort().values  # all of the largest in one block, or in the entries after the last block
    if ties:
        logits = (4 * logits).round() / 4
    assert torch.equal(largest(logits, count), logits.topk(count, dim=-1).values)
