"""The distillation objective, defined on logits: generalised Jensen-Shannon divergence with a per-entry clamp.

This file is the definition. It materialises `(tokens, V)` tensors and differentiates with autograd, so it is for tests,
small models and reading; training calls `fused_divergence.fused_generalized_jsd`, which must agree with it.

With `p_s`, `p_t` the student's and teacher's next-token distributions after the temperature, one vocabulary entry is

    beta = 0        p_t (log p_t - log p_s)                                        forward KL, KL(teacher || student)
    beta = 1        p_s (log p_s - log p_t)                                        reverse KL, KL(student || teacher)
    0 < beta < 1    beta p_t (log p_t - log m) + (1 - beta) p_s (log p_s - log m),  m = beta p_t + (1 - beta) p_s

in nats (GKD, arXiv 2306.13649, eq. 1; OPSD, arXiv 2601.18734). The endpoints are special cases, not limits. The published
OPSD objective clamps each entry from above before the sum over the vocabulary (`clip_mode="entry"`). At the endpoints
entries can be negative, so a clamped token can be negative; a clamped entry has no gradient.
"""

import math

import torch
from torch.distributed.tensor import DTensor

CLIP_MODES = ("entry", "token", "direction", "none")
REDUCTIONS = ("token_mean", "sequence_mean", "none")

# Order of the sums in the statistics; every one is additive over micro-batches and processes.
STATISTICS = (
    "tokens",
    "entries",
    "divergence_sum",
    "clipped_entries",
    "clipped_tokens",
    "student_entropy_sum",
    "teacher_entropy_sum",
    "teacher_top_k_mass_sum",
    "student_top_k_mass_sum",
)


def check_divergence_settings(beta, temperature, entry_clip, clip_mode, top_k, tail) -> None:
    """Raise `ValueError` on settings that have no meaning, before any tensor is touched."""
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta={beta} must be between 0 (forward KL) and 1 (reverse KL)")
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be finite and > 0; use 1 to leave the logits as they are")
    if clip_mode not in CLIP_MODES:
        raise ValueError(f"clip_mode={clip_mode!r} must be one of {', '.join(CLIP_MODES)}")
    if not entry_clip > 0.0:
        raise ValueError(f"entry_clip={entry_clip} must be > 0 nats; use inf to disable")
    if clip_mode == "none" and entry_clip != math.inf:
        raise ValueError(f"entry_clip={entry_clip} has no effect with clip_mode='none'; use inf or another clip_mode")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} must be >= 1 vocabulary entries; use None for the whole vocabulary")
    if top_k is None and not tail:
        raise ValueError("tail=False has no effect without top_k; set top_k or leave tail=True")


def divergence_entries(student_log_probs: torch.Tensor, teacher_log_probs: torch.Tensor, beta: float) -> torch.Tensor:
    """Entries of the divergence in nats, shape of the inputs. An entry of probability zero contributes zero."""
    if beta == 0.0:
        return weighted_log_ratio(teacher_log_probs, student_log_probs)
    if beta == 1.0:
        return weighted_log_ratio(student_log_probs, teacher_log_probs)
    mixture = torch.logaddexp(teacher_log_probs + math.log(beta), student_log_probs + math.log1p(-beta))
    student_entries = weighted_log_ratio(student_log_probs, mixture)
    return beta * weighted_log_ratio(teacher_log_probs, mixture) + (1.0 - beta) * student_entries


def weighted_log_ratio(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """`p (log p - log q)` with 0 where `p` is 0, also when both logarithms are -inf."""
    probs = log_p.exp()
    return probs * torch.where(probs > 0, log_p - log_q, 0.0)


def group_top_k(student_logits, teacher_logits, top_k: int, tail: bool):
    """Logits of the teacher's `top_k` entries, and of all the others together as one last entry when `tail`.

    The tail's logit is the logsumexp of the entries it replaces, so a softmax of the result is the distribution over
    "each of the top k, or something else". Without a tail the softmax renormalises the top k.
    Returns student and teacher logits `(n, K + tail)` and the indices `(n, K)`.
    """
    indices = teacher_logits.topk(top_k, dim=-1).indices  # (n, K)
    groups = []
    for logits in (student_logits, teacher_logits):
        kept = logits.gather(-1, indices)
        if tail and top_k < logits.shape[-1]:
            rest = logits.scatter(-1, indices, -math.inf).logsumexp(-1, keepdim=True)
            kept = torch.cat([kept, rest], dim=-1)
        groups.append(kept)
    return groups[0], groups[1], indices


def apply_clip(student_log_probs, teacher_log_probs, *, beta, entry_clip, clip_mode):
    """Per-token loss, unclipped divergence and number of clamped entries, each `(n,)`."""
    entries = divergence_entries(student_log_probs.detach(), teacher_log_probs, beta)
    divergence = entries.sum(-1)
    if clip_mode == "entry":
        stopped = entries > entry_clip
    elif clip_mode == "token":
        stopped = (divergence > entry_clip)[:, None].expand_as(entries)
    else:
        # An infinite divergence has no direction left to preserve.
        stopped = (divergence.isinf() & (clip_mode == "direction"))[:, None].expand_as(entries)
    # What is stopped may be infinite; computing the rest against a harmless teacher keeps 0 * inf out of the gradient.
    kept = divergence_entries(student_log_probs, torch.where(stopped, 0.0, teacher_log_probs), beta)
    if clip_mode == "entry":
        return torch.where(stopped, entry_clip, kept).sum(-1), divergence, stopped.sum(-1).to(divergence.dtype)
    clamped = torch.zeros_like(divergence)
    if clip_mode == "direction":
        kept = kept * torch.where(divergence > entry_clip, entry_clip / divergence, 1.0)[:, None]
    return torch.where(stopped[:, 0], entry_clip, kept.sum(-1)), divergence, clamped


def generalized_jsd(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    beta: float,
    temperature: float = 1.0,
    entry_clip: float = math.inf,
    clip_mode: str = "entry",
    top_k: int | None = None,
    tail: bool = True,
    reduction: str = "token_mean",
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Divergence between student and teacher logits `(..., T, V)` over the tokens where `mask` `(..., T)` is true.

    `entry_clip` (nats) caps, by `clip_mode`: each vocabulary entry before the sum (`entry`, the published objective);
    the token's sum (`token`: value and gradient stop there); the token's weight (`direction`: a token above the cap
    counts as the cap and its gradient is scaled by cap / divergence, direction unchanged); nothing (`none`).
    `top_k` compares the teacher's top k entries and, unless `tail=False`, everything else as one more entry.
    Softmax and sums are in float32, or float64 for float64 logits. Gradient through the student only.

    `reduction`: `token_mean` over all unmasked tokens, `sequence_mean` (mean over each sequence's tokens, then over the
    sequences that have any), `none` (per-token loss, 0 where masked). Without any token the loss is 0, gradient 0.

    Returns the loss and the `STATISTICS`: detached sums over unmasked tokens, see `mean_statistics`.
    """
    check_divergence_settings(beta, temperature, entry_clip, clip_mode, top_k, tail)
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} must be one of {', '.join(REDUCTIONS)}")
    sharded = any(isinstance(logits, DTensor) for logits in (student_logits, teacher_logits))
    if sharded:
        raise ValueError("logits are DTensors; vocabulary-sharded logits are not supported, pass the full vocabulary")
    if student_logits.shape != teacher_logits.shape:
        shapes = f"{tuple(student_logits.shape)} and {tuple(teacher_logits.shape)}"
        raise ValueError(f"student and teacher logits have shapes {shapes}; they must score the same tokens")
    if top_k is not None and top_k > student_logits.shape[-1]:
        raise ValueError(f"top_k={top_k} must be <= the vocabulary, {student_logits.shape[-1]} entries")
    if mask is None:
        mask = torch.ones(student_logits.shape[:-1], dtype=torch.bool, device=student_logits.device)
    mask = mask.bool()
    dtype = torch.promote_types(student_logits.dtype, torch.float32)
    student = student_logits[mask].to(dtype) / temperature  # (n, V)
    teacher = teacher_logits.detach()[mask].to(dtype) / temperature  # (n, V)
    student_log_probs, teacher_log_probs = student.log_softmax(-1), teacher.log_softmax(-1)
    student_entropy, teacher_entropy = entropy(student_log_probs), entropy(teacher_log_probs)
    teacher_mass = student_mass = torch.ones_like(student_entropy)
    if top_k is not None:
        student_kept, teacher_kept, indices = group_top_k(student, teacher, top_k, tail)
        teacher_mass = teacher_log_probs.gather(-1, indices).exp().sum(-1)
        student_mass = student_log_probs.detach().gather(-1, indices).exp().sum(-1)
        student_log_probs, teacher_log_probs = student_kept.log_softmax(-1), teacher_kept.log_softmax(-1)
    token_loss, divergence, clamped = apply_clip(
        student_log_probs, teacher_log_probs, beta=beta, entry_clip=entry_clip, clip_mode=clip_mode
    )
    clipped_tokens = clamped > 0 if clip_mode == "entry" else divergence > entry_clip
    columns = [torch.ones_like(clamped), torch.full_like(clamped, student_log_probs.shape[-1]), divergence, clamped]
    columns += [clipped_tokens, student_entropy, teacher_entropy, teacher_mass, student_mass]
    sums = {name: column.detach().sum(dtype=dtype) for name, column in zip(STATISTICS, columns, strict=True)}

    if reduction == "token_mean":
        return token_loss.sum() / max(token_loss.numel(), 1), sums
    per_token_loss = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_scatter(mask, token_loss)
    if reduction == "none":
        return per_token_loss, sums
    lengths = mask.sum(-1)  # (...)
    sequence_means = per_token_loss.sum(-1) / lengths.clamp(min=1)
    return sequence_means.sum() / (lengths > 0).sum().clamp(min=1), sums


def entropy(log_probs: torch.Tensor) -> torch.Tensor:
    """Entropy in nats over the last axis, detached."""
    log_probs = log_probs.detach()
    return -weighted_log_ratio(log_probs, torch.zeros_like(log_probs)).sum(-1)


def mean_statistics(sums: dict[str, float]) -> dict[str, float]:
    """Means and fractions from summed statistics (of one call, or added up over micro-batches and processes).

    Without any token there is nothing to report, so the result is empty.
    """
    values = {name: float(sums[name]) for name in STATISTICS}
    tokens = values["tokens"]
    if tokens == 0:
        return {}
    return {
        "divergence": values["divergence_sum"] / tokens,
        "clipped_entry_fraction": values["clipped_entries"] / values["entries"],
        "clipped_token_fraction": values["clipped_tokens"] / tokens,
        "student_entropy": values["student_entropy_sum"] / tokens,
        "teacher_entropy": values["teacher_entropy_sum"] / tokens,
        "teacher_top_k_mass": values["teacher_top_k_mass_sum"] / tokens,
        "student_top_k_mass": values["student_top_k_mass_sum"] / tokens,
    }
