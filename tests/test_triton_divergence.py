"""The Triton kernel against the definition: in Triton's interpreter on a CPU, and compiled where there is a GPU.

The interpreter has to be chosen before Triton is imported, so without a GPU the tests run in one child process.
"""

import importlib.util
import math
import os
import subprocess
import sys

import pytest
import torch

from opsd.divergence import STATISTICS, generalized_jsd
from opsd.fused_divergence import fused_generalized_jsd

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
in_kernel = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="runs in the child process")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

BETAS = (0.0, 0.3, 1.0)
CLIPS = {"entry": 0.01, "token": 0.2, "direction": 0.2, "none": math.inf}


def make_case(tokens=6, vocab=33, hidden=8, dtype=torch.float32, spread=0.4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    student = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64)
    teacher = student + spread * torch.randn(tokens, hidden, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64) * 3 / hidden**0.5
    student, teacher, weight = (x.to(DEVICE, dtype) for x in (student, teacher, weight))
    return student.requires_grad_(), teacher, weight


def fused(student, teacher, weight, mask=None, **settings):
    return fused_generalized_jsd(student, teacher, weight, mask, **{"backend": "triton", "chunk_size": 4} | settings)


def definition(student, teacher, weight, mask=None, **settings):
    weight = weight.double()
    return generalized_jsd(student.double() @ weight.t(), teacher.double() @ weight.t(), mask, **settings)


def relative_error(value, reference):
    return ((value.double() - reference.double()).norm() / reference.double().norm().clamp(min=1e-30)).item()


@needs_triton
@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="this is the child process, or there is a GPU")
def test_kernel_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    child = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert child.returncode == 0, child.stdout[-4000:]
    assert " passed" in child.stdout


@in_kernel
@pytest.mark.parametrize("vocab", [33, 4097])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("clip_mode", list(CLIPS))
def test_equals_the_definition(vocab, beta, clip_mode):
    student, teacher, weight = make_case(vocab=vocab)
    weight.requires_grad_()
    clip = CLIPS[clip_mode] * (0.2 if 0 < beta < 1 else 1.0)
    settings = {"beta": beta, "clip_mode": clip_mode, "entry_clip": clip, "temperature": 1.1}
    mask = torch.arange(6, device=DEVICE) != 2
    loss, sums = fused(student, teacher, weight, mask, **settings)
    expected, expected_sums = generalized_jsd(
        student.double() @ weight.double().t(), (teacher.double() @ weight.double().t()).detach(), mask, **settings
    )
    torch.testing.assert_close(loss.double(), expected, atol=2e-6, rtol=1e-5)
    assert tuple(sums) == STATISTICS
    for name, value in sums.items():
        torch.testing.assert_close(value.double(), expected_sums[name], atol=1e-4, rtol=1e-5, msg=name)
    assert clip_mode == "none" or 0 < sums["clipped_tokens"] < 6
    got = torch.autograd.grad(-3.0 * loss, (student, weight))
    want = torch.autograd.grad(-3.0 * expected, (student, weight))
    for value, reference in zip(got, want, strict=True):
        assert relative_error(value, reference) < 2e-5
    assert (got[0][2] == 0).all()


@in_kernel
@pytest.mark.parametrize(("beta", "spread"), [(0.0, 3.0), (0.5, 0.4), (1.0, 0.4)])
def test_the_real_vocabulary(beta, spread):
    student, teacher, weight = make_case(tokens=1, vocab=151_936, spread=spread)
    settings = {"beta": beta, "entry_clip": 0.002, "temperature": 1.1}
    loss, sums = fused(student, teacher, weight, **settings)
    expected, expected_sums = definition(student, teacher, weight, **settings)
    assert sums["clipped_entries"] == expected_sums["clipped_entries"] > 0
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-5)
    (got,), (want,) = torch.autograd.grad(loss, student), torch.autograd.grad(expected, student)
    assert relative_error(got, want) < 1e-4


@in_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("logits_dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_as_good_as_plain_torch(dtype, logits_dtype):
    student, teacher, weight = make_case(vocab=4097, dtype=dtype)
    settings = {"beta": 0.0, "entry_clip": 0.01, "logits_dtype": logits_dtype}
    expected, _ = definition(student, teacher, weight, beta=0.0, entry_clip=0.01)
    (want,) = torch.autograd.grad(expected, student)
    errors = []
    for backend in ("triton", "torch"):
        loss, _ = fused(student, teacher, weight, backend=backend, **settings)
        (got,) = torch.autograd.grad(loss, student)
        assert got.dtype == dtype
        errors.append(relative_error(got, want))
    assert errors[0] <= 2 * errors[1] + 1e-3
    assert logits_dtype != torch.float32 or errors[0] < 5e-3


@in_kernel
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("clip_mode", ["entry", "token", "direction"])
def test_extreme_and_identical_logits(beta, clip_mode):
    student, teacher, weight = make_case()
    settings = {"beta": beta, "entry_clip": 0.05, "clip_mode": clip_mode}
    huge, _ = fused(student, teacher, weight * 1e4, **settings)
    assert huge.isfinite() and torch.autograd.grad(huge, student)[0].isfinite().all()
    same, _ = fused(student, student.detach(), weight, **settings)
    assert same.item() == 0 if beta in (0.0, 1.0) else abs(same.item()) < 1e-6
    assert torch.autograd.grad(same, student)[0].abs().max() < 1e-6


@in_kernel
@pytest.mark.parametrize("beta", BETAS)
def test_excluded_entries(beta):
    student, teacher, weight = make_case()
    student, teacher = student.detach().abs().requires_grad_(), teacher.abs()
    excluded = weight.clone()
    excluded[[5, 6]] = -math.inf  # with positive hidden states their logits are -inf for both roles
    loss, _ = fused(student, teacher, excluded, beta=beta, entry_clip=0.01)
    kept = [v for v in range(33) if v not in (5, 6)]
    expected, _ = definition(student, teacher, weight[kept], beta=beta, entry_clip=0.01)
    assert loss.item() == pytest.approx(expected.item(), abs=2e-6)
    other = weight.clone()
    other[7] = -math.inf  # the teacher excludes what the student may choose, and the other way round
    for pair in ((weight, other), (other, weight)):
        loss, _ = fused(student, teacher, pair[0], teacher_lm_head_weight=pair[1], beta=beta, entry_clip=0.01)
        logits = [(h.double() @ w.double().t()) for h, w in zip((student, teacher), pair, strict=True)]
        expected, _ = generalized_jsd(*logits, None, beta=beta, entry_clip=0.01)
        assert loss.item() == pytest.approx(expected.item(), abs=2e-6)


@in_kernel
def test_chunks_weights_and_separate_teacher_projection():
    student, teacher, weight = make_case(vocab=70)
    weights = torch.linspace(0, 2, 6, device=DEVICE)
    options = {"token_weights": weights, "denominator": 5.0, "logit_scale": 0.5, "beta": 0.0, "entry_clip": 0.01}
    options |= {"teacher_lm_head_weight": weight.flip(0).contiguous()}
    results = []
    for backend, chunk_size in (("torch", 6), ("triton", 1), ("triton", 4), ("triton", 100)):
        loss, _ = fused(student, teacher, weight, backend=backend, chunk_size=chunk_size, **options)
        results.append((loss, torch.autograd.grad(loss, student)[0]))
    for loss, gradient in results[1:]:
        torch.testing.assert_close(loss, results[0][0], atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(gradient, results[0][1], atol=2e-6, rtol=1e-4)


@in_kernel
def test_no_token():
    student, teacher, weight = make_case()
    loss, _ = fused(student, teacher, weight, torch.zeros(6, dtype=torch.bool, device=DEVICE), beta=0.0)
    loss.backward()
    assert loss.item() == 0 and (student.grad == 0).all()


@in_kernel
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_k": 3}, "top_k=3 is not supported by backend='triton'"),
        ({"softcap": 30.0}, "softcap=30.0 is not supported"),
        ({"lm_head_bias": torch.zeros(33)}, "lm_head_bias is not supported"),
        ({"logits_dtype": torch.float64}, "logits_dtype=torch.float64 is not supported"),
    ],
)
def test_what_triton_does_not_do_is_refused(settings, message):
    student, teacher, weight = make_case()
    settings = {name: value.to(DEVICE) if torch.is_tensor(value) else value for name, value in settings.items()}
    with pytest.raises(ValueError, match=message):
        fused(student, teacher, weight, beta=0.0, **settings)
    fused(student, teacher, weight, beta=0.0, **settings | {"backend": "auto"})


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="about the compiled kernel")
def test_a_cpu_tensor_is_refused():
    student = teacher = weight = torch.ones(3, 4)
    with pytest.raises(ValueError, match="backend='triton' needs a CUDA device"):
        fused(student, teacher, weight, beta=0.0)


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="about the compiled kernel")
@pytest.mark.parametrize(("itemsize", "beta", "clip"), [(4, 0.0, 1), (2, 1.0, 2), (4, 0.5, 1)])
def test_kernel_compiles_for_hopper(itemsize, beta, clip):
    """The interpreter accepts what the compiler does not; compiling needs no GPU."""
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from opsd.divergence_kernel import divergence_rows
    from opsd.triton_divergence import FEW_LANES, LAUNCH

    shape = LAUNCH[itemsize, 0.0 < beta < 1.0] | {"FEW": FEW_LANES, "DEPTH": 256}
    options = {name: shape.pop(name) for name in ("num_warps", "maxnreg")}
    constants = shape | {"KIND": {0.0: 0, 1.0: 1, 0.5: 2}[beta], "CLIP": clip, "WRITE_GRADIENT": True}
    logits = {4: "*fp32", 2: "*bf16"}[itemsize]
    types = [logits, logits, "*bf16", "*fp32", "i32", "i32", "i32", "i32", "fp32", "fp32", "fp32"]
    names = divergence_rows.arg_names
    signature = dict(zip(names, types, strict=False)) | dict.fromkeys(constants, "constexpr")
    source = ASTSource(divergence_rows, signature, {(names.index(name),): value for name, value in constants.items()})
    assert triton_compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]
