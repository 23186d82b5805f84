"""The distillation loss from hidden states: exact, float32 logits, never more than one chunk of logits alive.

Takes the last hidden states of both roles at the completion tokens and the output projection, and returns what
`divergence.generalized_jsd` returns on the full logits. The gradient is known in closed form, so it is computed in the
forward pass, chunk by chunk, and the backward pass only multiplies by the upstream gradient; no logits are kept.

Derivation. Let `z` be the student's logits after the temperature `tau`, `p_s = softmax(z)`, `e_v` an entry of the
divergence (see `divergence`) and `h_v = d e_v / d log p_s[v]` its derivative:

    beta = 0        e_v = p_t (log p_t - log p_s)       h_v = -p_t
    beta = 1        e_v = p_s (log p_s - log p_t)       h_v = e_v + p_s
    0 < beta < 1    h_v = (1 - beta) p_s (log p_s - log m)      (the terms through m cancel: beta p_t + (1-beta) p_s = m)

The loss of a token is `sum_v min(e_v, c)`, whose derivative with respect to `log p_s[v]` is `k_v h_v`, with `k_v = 1`
where `e_v <= c` and 0 where the entry is clamped. With `d log p_s[u] / d z_v = 1[u = v] - p_s[v]`,

    d loss / d z_v = k_v h_v - p_s[v] sum_u k_u h_u

and the logits' own gradient is `1 / tau` of it. A token clip multiplies a token's `h` by 0 above the clip, a
direction-preserving clip by clip / divergence. Top-k is the same formula on grouped logits: the gradient of a kept entry
is its group's, and the tail's gradient is shared by the entries `v` it stands for as `exp(z_v - logsumexp of the tail)`.
"""

import dataclasses
import functools
import importlib.util
import math

import torch

from .divergence import STATISTICS, check_divergence_settings, entropy, group_top_k, weighted_log_ratio
from .projection import (
    OutputProjection,
    ProjectionGradients,
    check_projection,
    default_chunk_size,
    divide,
    inputs_with_gradient,
    operand_dtype_of,
)
from .teacher_scores import TopKProjection, TopKScores

BACKENDS = ("auto", "torch", "triton")


@dataclasses.dataclass(frozen=True)
class DivergenceSettings:
    """What defines the objective of a token; fields as in `divergence.generalized_jsd`."""

    beta: float
    temperature: float
    entry_clip: float
    clip_mode: str
    top_k: int | None
    tail: bool


def closed_form(student, teacher, beta: float, entry_clip: float, clip_mode: str):
    """Loss, divergence, clamped entries `(n,)` and gradient `(n, V)` from logits `(n, V)` after the temperature."""
    student_log_probs, teacher_log_probs = student.log_softmax(-1), teacher.log_softmax(-1)
    student_probs = student_log_probs.exp()
    if beta == 0.0:
        entries = weighted_log_ratio(teacher_log_probs, student_log_probs)
        slope = -teacher_log_probs.exp()
    elif beta == 1.0:
        entries = weighted_log_ratio(student_log_probs, teacher_log_probs)
        slope = entries + student_probs
    else:
        mixture = torch.logaddexp(teacher_log_probs + math.log(beta), student_log_probs + math.log1p(-beta))
        slope = (1.0 - beta) * weighted_log_ratio(student_log_probs, mixture)
        entries = beta * weighted_log_ratio(teacher_log_probs, mixture) + slope
    divergence = entries.sum(-1)
    clamped = torch.zeros_like(divergence)
    token_loss = divergence
    if clip_mode == "entry":
        above = entries > entry_clip
        clamped = above.sum(-1).to(divergence.dtype)
        token_loss = torch.where(above, entry_clip, entries).sum(-1)
        slope = torch.where(above, 0.0, slope)
    elif clip_mode != "none":
        token_loss = divergence.clamp(max=entry_clip)
        above_weight = 0.0 if clip_mode == "token" else entry_clip / divergence
        weight = torch.where(divergence > entry_clip, above_weight, 1.0)[:, None]  # (n, 1)
        slope = torch.where(weight > 0, slope * weight, 0.0)  # not a product alone: a stopped slope may be infinite
    gradient = slope - student_probs * slope.sum(-1, keepdim=True)
    return token_loss, divergence, clamped, gradient


def token_terms(student, teacher, settings: DivergenceSettings):
    """Token losses `(n,)`, statistics `(n, len(STATISTICS))` and gradient `(n, V)` of one chunk of logits."""
    beta, clip, mode = settings.beta, settings.entry_clip, settings.clip_mode
    student_log_probs, teacher_log_probs = student.log_softmax(-1), teacher.log_softmax(-1)
    entropies = [entropy(student_log_probs), entropy(teacher_log_probs)]
    compared = student.shape[-1]
    if settings.top_k is None:
        token_loss, divergence, clamped, gradient = closed_form(student, teacher, beta, clip, mode)
        masses = [torch.ones_like(divergence), torch.ones_like(divergence)]
    else:
        kept, teacher_kept, indices = group_top_k(student, teacher, settings.top_k, settings.tail)
        compared = kept.shape[-1]
        token_loss, divergence, clamped, grouped = closed_form(kept, teacher_kept, beta, clip, mode)
        masses = [log_probs.gather(-1, indices).exp().sum(-1) for log_probs in (teacher_log_probs, student_log_probs)]
        if compared > settings.top_k:
            gradient = (student - kept[:, -1:]).exp() * grouped[:, -1:]
        else:
            gradient = torch.zeros_like(student)
        gradient = gradient.scatter(-1, indices, grouped[:, : settings.top_k])
    clipped = clamped > 0 if mode == "entry" else divergence > clip
    ones = torch.ones_like(divergence)
    columns = [ones, ones * compared, divergence, clamped, clipped.to(ones.dtype), *entropies, *masses]
    return token_loss, torch.stack(columns, dim=-1), gradient


@functools.cache
def compiled_token_terms():
    """`token_terms` fused by the compiler: fewer passes over the logits than eager torch, more than the Triton kernel."""
    return torch.compile(token_terms, dynamic=True)


def torch_pass(student, teacher, student_hidden, teacher_hidden, settings, chunk_size, token_weights, wants):
    """Loss sum, summed statistics and `ProjectionGradients` of all chunks: any device, any dtype, every option."""
    fuse = student_hidden.is_cuda and settings.top_k is None and importlib.util.find_spec("triton") is not None
    terms = compiled_token_terms() if fuse else token_terms
    zeros = functools.partial(torch.zeros, dtype=student.compute_dtype, device=student_hidden.device)
    loss_sum, sums = zeros(()), zeros(len(STATISTICS))
    gradients = ProjectionGradients(student, student_hidden, wants)
    for start in range(0, student_hidden.shape[0], chunk_size):
        rows = slice(start, start + chunk_size)
        logits = student.logits(student_hidden[rows], settings.temperature)
        teacher_logits = teacher.logits(teacher_hidden[rows], settings.temperature)
        token_loss, statistics, gradient = terms(logits, teacher_logits, settings)
        if student.softcap is not None:
            gradient = gradient * (1.0 - (logits * (settings.temperature / student.softcap)) ** 2)
        loss_sum += (token_loss if token_weights is None else token_loss * token_weights[rows]).sum()
        sums += statistics.sum(0)
        gradients.add(rows, gradient, token_weights)
    return loss_sum, sums, gradients


def fused_generalized_jsd(
    student_hidden: torch.Tensor,
    teacher_hidden: torch.Tensor | TopKScores,
    lm_head_weight: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    beta: float,
    temperature: float = 1.0,
    entry_clip: float = math.inf,
    clip_mode: str = "entry",
    top_k: int | None = None,
    tail: bool = True,
    token_weights: torch.Tensor | None = None,
    denominator: float | torch.Tensor | None = None,
    backend: str = "auto",
    logits_dtype: torch.dtype = torch.float32,
    chunk_size: int | None = None,
    lm_head_bias: torch.Tensor | None = None,
    teacher_lm_head_weight: torch.Tensor | None = None,
    teacher_lm_head_bias: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Divergence loss from hidden states `(N, H)` (teacher `(N, H')`) and the projection `(V, H)`; objective as in
    `divergence.generalized_jsd`, to which this is equal.

    `mask` `(N,)` picks the tokens that count. `token_weights` `(N,)` multiply each token's loss (position weights; 0
    skips a token). The weighted sum is divided by `denominator`: default the number of unmasked tokens (of this call),
    or the token count of the whole optimizer step. `logit_scale` and `softcap` apply to both roles.
    `teacher_hidden` may be the `top_k` entries that a server returned. The teacher uses the student's projection and bias
    unless `teacher_lm_head_weight` (and its bias) is given.

    Returns the loss (float32 or wider) and the `STATISTICS`: detached sums over unmasked tokens, unweighted; add them up
    over micro-batches and processes, then `divergence.mean_statistics`. Gradients flow to `student_hidden`, and to
    `lm_head_weight` and `lm_head_bias` where they require it, through the student's logits only.
    """
    check_divergence_settings(beta, temperature, entry_clip, clip_mode, top_k, tail)
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} must be one of {', '.join(BACKENDS)}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be >= 1 tokens; use None to choose by memory")
    settings = DivergenceSettings(beta, temperature, entry_clip, clip_mode, top_k, tail)
    teacher_bias = teacher_lm_head_bias if teacher_lm_head_weight is not None else lm_head_bias
    if teacher_lm_head_weight is None and teacher_lm_head_bias is not None:
        raise ValueError("teacher_lm_head_bias has no effect without teacher_lm_head_weight; pass both or neither")
    teacher_weight = lm_head_weight if teacher_lm_head_weight is None else teacher_lm_head_weight
    check_projection(student_hidden, lm_head_weight, lm_head_bias, "student")
    rebuilt = isinstance(teacher_hidden, TopKScores)
    if not rebuilt:
        check_projection(teacher_hidden, teacher_weight, teacher_bias, "teacher")
    elif top_k != teacher_hidden.shape[1]:
        raise ValueError(f"top_k={top_k} must be the teacher's {teacher_hidden.shape[1]} entries a token")
    vocab_size, tokens = lm_head_weight.shape[0], student_hidden.shape[0]
    if teacher_weight.shape[0] != vocab_size or teacher_hidden.shape[0] != tokens:
        raise ValueError(
            f"student scores {tokens} tokens over {vocab_size} entries, teacher {teacher_hidden.shape[0]} over "
            f"{teacher_weight.shape[0]}; both roles must score the same tokens over one vocabulary"
        )
    if top_k is not None and top_k > vocab_size:
        raise ValueError(f"top_k={top_k} must be <= the vocabulary, {vocab_size} entries")
    for name, tensor in (("mask", mask), ("token_weights", token_weights)):
        if tensor is not None and tensor.shape != (tokens,):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected ({tokens},), one value a token")

    inputs = inputs_with_gradient(hidden=student_hidden, weight=lm_head_weight, bias=lm_head_bias)
    project = functools.partial(
        OutputProjection,
        logit_scale=logit_scale,
        softcap=softcap,
        logits_dtype=logits_dtype,
        operand_dtype=operand_dtype_of(student_hidden),
    )
    with torch.no_grad(), torch.autocast(student_hidden.device.type, enabled=False):
        student = teacher = project(lm_head_weight, lm_head_bias)
        if teacher_lm_head_weight is not None:
            teacher = project(teacher_weight, teacher_bias)
        if rebuilt:
            teacher = TopKProjection(vocab_size, student.compute_dtype, tail)
        student_rows, teacher_rows = student_hidden.detach(), teacher_hidden.detach()
        kept = None if mask is None else mask.nonzero().squeeze(1)  # masked rows are never projected
        if kept is not None:
            student_rows, teacher_rows = student_rows[kept], teacher_rows[kept]
            token_weights = None if token_weights is None else token_weights[kept]
        run_pass = pick_backend(backend, student, teacher, student_rows, settings)
        chunk = chunk_size or default_chunk_size(vocab_size, logits_dtype.itemsize)
        loss, sums, gradients = run_pass(
            student, teacher, student_rows, teacher_rows, settings, chunk, token_weights, tuple(inputs)
        )
        denominator = max(student_rows.shape[0], 1) if denominator is None else denominator
        loss, scale = divide(loss, logit_scale / temperature, denominator)
    if inputs:
        loss = gradients.attach(loss, scale, inputs, kept)
    return loss, dict(zip(STATISTICS, sums.unbind(), strict=True))


def pick_backend(backend: str, student, teacher, student_hidden, settings: DivergenceSettings):
    """The pass to run; `auto` is Triton on a CUDA device where it can do what is asked, otherwise torch."""
    if backend == "torch" or (backend == "auto" and not student_hidden.is_cuda):
        return torch_pass
    installed = importlib.util.find_spec("triton") is not None
    if backend == "triton" and not installed:
        raise ValueError("backend='triton' but triton is not installed; install it or use backend='torch'")
    plain = settings.top_k is None and student.softcap is None and student.bias is None and teacher.bias is None
    if backend == "auto" and not (installed and plain and student.compute_dtype == torch.float32):
        return torch_pass
    from .triton_divergence import triton_pass

    return triton_pass
