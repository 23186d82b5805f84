"""The fused loss against the definition, in value, gradient and statistics, on every option of the torch backend."""

import math

import pytest
import torch

from opsd.divergence import CLIP_MODES, STATISTICS, generalized_jsd
from opsd.fused_divergence import fused_generalized_jsd

BETAS = (0.0, 0.3, 1.0)
CLIPS = {"entry": 0.02, "token": 0.15, "direction": 0.15, "none": math.inf}


def make_case(tokens=12, vocab=33, hidden=8, dtype=torch.float64, spread=0.5, seed=0):
    """Student hidden, teacher hidden `spread` apart, and a projection whose logits have standard deviation 2."""
    generator = torch.Generator().manual_seed(seed)
    student = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64)
    teacher = student + spread * torch.randn(tokens, hidden, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64) * 2 / hidden**0.5
    return student.to(dtype).requires_grad_(), teacher.to(dtype), weight.to(dtype)


def fused(student, teacher, weight, mask=None, **settings):
    settings = {"logits_dtype": torch.float64, "backend": "torch", "chunk_size": 5} | settings
    return fused_generalized_jsd(student, teacher, weight, mask, **settings)


def definition(student, teacher, weight, mask=None, **settings):
    """The reference in float64 from the same rounded inputs."""
    weight = weight.double()
    return generalized_jsd(student.double() @ weight.t(), teacher.double() @ weight.t(), mask, **settings)


def gradient_of(loss, *inputs, upstream=1.0):
    return torch.autograd.grad(loss * upstream, inputs, retain_graph=True)


def relative_error(value, reference):
    return ((value.double() - reference).norm() / reference.norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("clip_mode", CLIP_MODES)
@pytest.mark.parametrize(("top_k", "tail"), [(None, True), (4, True), (4, False), (33, True)])
def test_every_option_equals_the_definition(beta, clip_mode, top_k, tail):
    student, teacher, weight = make_case()
    clip = CLIPS[clip_mode] * (0.2 if 0 < beta < 1 else 1.0)  # the mixture's divergences are smaller
    settings = {"beta": beta, "clip_mode": clip_mode, "entry_clip": clip, "temperature": 1.1}
    settings |= {"top_k": top_k, "tail": tail}
    mask = torch.arange(12) % 4 != 2
    loss, sums = fused(student, teacher, weight, mask, **settings)
    expected, expected_sums = definition(student, teacher, weight, mask, **settings)
    torch.testing.assert_close(loss, expected, atol=1e-12, rtol=1e-12)
    assert tuple(sums) == STATISTICS
    for name, value in sums.items():
        torch.testing.assert_close(value, expected_sums[name], atol=1e-10, rtol=1e-10, msg=name)
        assert not value.requires_grad
    assert clip_mode == "none" or 0 < sums["clipped_tokens"]
    (got,), (want,) = gradient_of(loss, student, upstream=-3.0), gradient_of(expected, student, upstream=-3.0)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-10)
    assert (got[~mask] == 0).all() and got.norm() > 0


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("clip_mode", ["entry", "token", "none"])
def test_gradcheck(beta, clip_mode):
    student, teacher, weight = make_case(tokens=3, vocab=7, hidden=4)
    weight.requires_grad_()
    bias = torch.linspace(-1, 1, 7, dtype=torch.float64, requires_grad=True)
    separate = {"teacher_lm_head_weight": weight.detach().clone(), "logit_scale": 0.7, "softcap": 3.0}
    settings = {"beta": beta, "clip_mode": clip_mode, "entry_clip": CLIPS[clip_mode], "temperature": 1.3}

    def loss(student, weight, bias):
        return fused(student, teacher, weight, lm_head_bias=bias, **separate, **settings)[0]

    assert torch.autograd.gradcheck(loss, (student, weight, bias))


@pytest.mark.parametrize("clip_mode", CLIP_MODES)
def test_projection_and_bias_gradients(clip_mode):
    student, teacher, weight = make_case()
    weight.requires_grad_()
    bias = torch.linspace(-1, 1, 33, dtype=torch.float64).requires_grad_()
    weights = torch.arange(12, dtype=torch.float64) / 6
    settings = {"beta": 0.0, "clip_mode": clip_mode, "entry_clip": CLIPS[clip_mode]}
    loss, _ = fused(student, teacher, weight, lm_head_bias=bias, token_weights=weights, denominator=20.0, **settings)
    logits = student @ weight.t() + bias
    teacher_logits = (teacher @ weight.t() + bias).detach()
    expected = (weights * generalized_jsd(logits, teacher_logits, None, reduction="none", **settings)[0]).sum() / 20
    torch.testing.assert_close(loss, expected)
    inputs = (student, weight, bias)
    for got, want in zip(gradient_of(loss, *inputs), gradient_of(expected, *inputs), strict=True):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-9)


def test_separate_teacher_projection_scale_and_softcap():
    student, teacher, weight = make_case()
    other = torch.randn(33, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    other_bias = other[:, 0].clone()
    teacher = teacher[:, :5]
    options = {"teacher_lm_head_weight": other, "teacher_lm_head_bias": other_bias, "logit_scale": 0.5, "softcap": 2.0}
    loss, _ = fused(student, teacher, weight, beta=0.4, entry_clip=0.02, temperature=0.8, **options)
    logits = 2.0 * torch.tanh(0.5 * (student @ weight.t()) / 2.0)
    teacher_logits = 2.0 * torch.tanh(0.5 * (teacher @ other.t() + other_bias) / 2.0)
    expected, _ = generalized_jsd(logits, teacher_logits, None, beta=0.4, entry_clip=0.02, temperature=0.8)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient_of(loss, student), gradient_of(expected, student))


def test_chunks_and_micro_batches_do_not_change_the_result():
    student, teacher, weight = make_case()
    settings = {"beta": 0.0, "entry_clip": 0.02}
    whole, sums = fused(student, teacher, weight, chunk_size=None, **settings)
    (expected,) = gradient_of(whole, student)
    for chunk_size in (1, 5, 12, 1000):
        loss, _ = fused(student, teacher, weight, chunk_size=chunk_size, **settings)
        torch.testing.assert_close(loss, whole)
        torch.testing.assert_close(gradient_of(loss, student)[0], expected)
    count = torch.tensor(12.0)  # the step's token count, as a tensor from an all-reduce
    parts = [
        fused(student[i : i + 3], teacher[i : i + 3], weight, denominator=count, **settings) for i in range(0, 12, 3)
    ]
    total = sum(loss for loss, _ in parts)
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(gradient_of(total, student)[0], expected)
    for name in STATISTICS:
        torch.testing.assert_close(sum(part[name] for _, part in parts), sums[name])


@pytest.mark.parametrize("vocab", [33, 4097, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_inputs_against_float64(vocab, dtype):
    student, teacher, weight = make_case(tokens=6, vocab=vocab, hidden=16, dtype=dtype, spread=0.1)
    settings = {"beta": 0.0, "temperature": 1.1, "entry_clip": 0.005}
    loss, _ = fused(student, teacher, weight, logits_dtype=torch.float32, **settings)
    expected, sums = definition(student, teacher, weight, **settings)
    assert loss.dtype == torch.float32 and sums["clipped_entries"] > 0
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3, abs=1e-6)
    (got,), (want,) = gradient_of(loss, student, upstream=7.0), gradient_of(expected, student, upstream=7.0)
    assert got.dtype == dtype
    assert relative_error(got, want.double()) < {torch.float32: 1e-4, torch.bfloat16: 5e-3, torch.float16: 1e-3}[dtype]


def test_bf16_logits_repeat_the_published_rounding():
    student, teacher, weight = make_case(dtype=torch.bfloat16)
    loss, _ = fused(student, teacher, weight, logits_dtype=torch.bfloat16, beta=0.0)
    rounded = [(hidden.detach().float() @ weight.float().t()).bfloat16().float() for hidden in (student, teacher)]
    torch.testing.assert_close(loss, generalized_jsd(*rounded, None, beta=0.0)[0])


def test_non_contiguous_inputs():
    student, teacher, weight = make_case()
    expected, _ = fused(student, teacher, weight, beta=0.5)
    strided = [tensor.detach().t().contiguous().t() for tensor in (student, teacher, weight)]
    strided[0].requires_grad_()
    loss, _ = fused(*strided, beta=0.5)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient_of(loss, strided[0]), gradient_of(expected, student))


@pytest.mark.parametrize("tokens", [0, 4])
def test_no_unmasked_token_gives_zero_and_keeps_the_graph(tokens):
    student, teacher, weight = make_case(tokens=tokens)
    weight.requires_grad_()
    mask = torch.zeros(tokens, dtype=torch.bool)
    loss, sums = fused(student, teacher, weight, mask, beta=0.0, entry_clip=0.05)
    assert loss.item() == 0 and sums["tokens"] == 0
    loss.backward()
    assert (student.grad == 0).all() and (weight.grad == 0).all()


def test_masked_rows_may_hold_anything():
    student, teacher, weight = make_case()
    mask = torch.arange(12) < 7
    expected, _ = fused(student, teacher, weight, mask, beta=0.0)
    with torch.no_grad():
        student[~mask], teacher[~mask] = math.nan, math.inf
    loss, _ = fused(student, teacher, weight, mask, beta=0.0)
    loss.backward()
    assert loss == expected and student.grad.isfinite().all()


def test_identical_contexts_give_exactly_zero():
    student, _, weight = make_case(vocab=4097, dtype=torch.float32)
    for beta in (0.0, 1.0):
        loss, _ = fused(student, student.detach(), weight, beta=beta, entry_clip=0.05, logits_dtype=torch.float32)
        assert loss.item() == 0
        assert gradient_of(loss, student)[0].abs().max() < 1e-7


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("clip_mode", ["entry", "token", "direction"])
def test_excluded_entries_and_extreme_logits(beta, clip_mode):
    student, teacher, weight = make_case(vocab=9)
    bias = torch.zeros(9, dtype=torch.float64)
    bias[3] = -math.inf  # an entry that is excluded for both roles
    settings = {"beta": beta, "entry_clip": 0.05, "clip_mode": clip_mode}
    loss, _ = fused(student, teacher, weight, lm_head_bias=bias, **settings)
    allowed = torch.arange(9) != 3
    expected, _ = fused(student, teacher, weight[allowed], **settings)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient_of(loss, student), gradient_of(expected, student))
    teacher_only = {"teacher_lm_head_weight": weight, "teacher_lm_head_bias": bias}
    for case in (
        fused(student, teacher, weight, **teacher_only, **settings),
        fused(student, teacher, weight * 1e4, **settings),
    ):
        assert case[0].isfinite() and gradient_of(case[0], student)[0].isfinite().all()


def test_without_gradients_nothing_is_attached():
    student, teacher, weight = make_case()
    with torch.no_grad():
        assert not fused(student, teacher, weight, beta=0.0)[0].requires_grad
    assert not fused(student.detach(), teacher, weight, beta=0.0)[0].requires_grad


def test_autocast_multiplies_in_the_autocast_dtype():
    student, teacher, weight = make_case(dtype=torch.float32)
    expected, _ = fused(student.bfloat16(), teacher.bfloat16(), weight.bfloat16(), beta=0.0, logits_dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = fused(student, teacher, weight, beta=0.0, logits_dtype=torch.float32)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_backward_twice_gives_the_same_gradient():
    student, teacher, weight = make_case()
    loss, _ = fused(student, teacher, weight, beta=0.0)
    assert torch.equal(gradient_of(loss, student)[0], gradient_of(loss, student)[0])


@pytest.mark.parametrize("beta", BETAS)
def test_trl_agrees_without_a_clip(beta):
    oracle = pytest.importorskip("trl.kernels.chunked_divergence", reason="this TRL has no chunked divergence")
    student, teacher, weight = make_case(dtype=torch.float32)
    loss, _ = fused(student, teacher, weight, beta=beta, temperature=1.1, logits_dtype=torch.float32)
    per_token_loss, _ = oracle.ChunkedDivergenceFunction.apply(
        student, weight, None, teacher, weight, None, beta, 1.1, 1.0, None, 1.0, None
    )
    torch.testing.assert_close(loss, per_token_loss.mean(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(
        gradient_of(loss, student), gradient_of(per_token_loss.mean(), student), atol=1e-7, rtol=1e-4
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "cuda"}, "backend='cuda' must be one of auto, torch, triton"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"logits_dtype": torch.int8}, "logits_dtype=torch.int8"),
        ({"logit_scale": 0.0}, "logit_scale=0.0"),
        ({"softcap": -1.0}, "softcap=-1.0"),
        ({"top_k": 34}, "top_k=34 must be <= the vocabulary, 33"),
        ({"teacher_lm_head_bias": torch.zeros(33)}, "teacher_lm_head_bias has no effect"),
        ({"teacher_lm_head_weight": torch.zeros(32, 8)}, "over one vocabulary"),
        ({"teacher_lm_head_weight": torch.zeros(0)}, "vocabulary-sharded projection is not supported"),
        ({"token_weights": torch.zeros(3)}, "token_weights has shape"),
        ({"mask": torch.zeros(3)}, "mask has shape"),
        ({"entry_clip": 0.0}, "entry_clip=0.0 must be > 0 nats"),
    ],
)
def test_bad_input_is_named(settings, message):
    student, teacher, weight = make_case()
    with pytest.raises(ValueError, match=message):
        fused(student, teacher, weight, beta=0.0, **settings)


def test_sharded_projection_is_refused(tmp_path):
    student, teacher, weight = make_case(dtype=torch.float32)
    if not torch.distributed.is_available():
        pytest.skip("this torch has no distributed package")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        sharded = torch.distributed.tensor.distribute_tensor(weight, mesh, [torch.distributed.tensor.Shard(0)])
        with pytest.raises(ValueError, match="vocabulary-sharded projection is not supported"):
            fused(student, teacher, sharded, beta=0.0)
    finally:
        torch.distributed.destroy_process_group()
