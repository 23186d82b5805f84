"""Losses and log-probabilities of the sampled token only, chunked from hidden states.

`sampled_token_logps` repeats the sampler's own processing (temperature, top-k, top-p) on the trainer's logits; the trainer
compares it with the log-probabilities the engine returned. `sampled_token_loss` is the alternative objective that the
published code calls the "tinker loss": a policy gradient on the per-token reverse KL. With `l_s`, `l_t` the student's and
teacher's log-probability of the sampled token after the temperature and `A = stop_gradient(l_t - l_s)`,

    loss = -A l_s,          or with the sampler's log-probability l_r given:       loss = -A exp(l_s - l_r)

whose expectation over the student's own samples has the gradient of KL(student || teacher) (OPSD, arXiv 2601.18734; the
variant of the Thinking Machines post "On-Policy Distillation"). The published one has no clipping; here the advantage and
the ratio can be clipped. With `w = A` (times the ratio in ratio form; 0 where the ratio is clipped), the gradient with
respect to the student's logits after the temperature is `-w (onehot - p_s)`.
"""

import math

import torch

from .projection import (
    OutputProjection,
    ProjectionGradients,
    check_projection,
    default_chunk_size,
    divide,
    inputs_with_gradient,
    operand_dtype_of,
)

BLOCK = 128  # entries of a block in the search for a row's largest entries

# Sums over unmasked tokens; additive over micro-batches and processes, divide by `tokens`.
SAMPLED_TOKEN_STATISTICS = (
    "tokens",
    "divergence_sum",  # student_per_token_logps - teacher_per_token_logps, the one-sample estimate of the reverse KL
    "clipped_advantages",
    "clipped_ratios",
    "ratio_sum",
)


def kept_log_mass(logits: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """Logsumexp `(n,)` of the entries that a sampler with top-k and then top-p keeps, from logits `(n, V)`.

    Top-k first; then, on the renormalised top-k, the smallest set of most likely entries whose mass reaches `top_p`.
    """
    vocab_size = logits.shape[-1]
    if top_k == 0 and top_p == 1.0:
        return logits.logsumexp(-1)
    kept = largest(logits, min(top_k, vocab_size) if top_k else vocab_size)  # (n, K), descending
    if top_p < 1.0:
        probs = kept.softmax(-1)
        mass_before = probs.cumsum(-1) - probs
        beyond = mass_before >= top_p
        beyond[:, 0] = False
        kept = kept.masked_fill(beyond, -math.inf)
    return kept.logsumexp(-1)


def largest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` largest entries of every row `(n, V)`, descending.

    The row is cut into blocks; its largest entries can only lie in the `count` blocks with the largest maxima, so one pass over the row
    and a search among few candidates find them, where `topk` reads the row many times.
    """
    blocks = logits.shape[-1] // BLOCK
    if blocks <= 2 * count:
        return logits.topk(count, dim=-1).values
    split = blocks * BLOCK
    blocked = logits[:, :split].unflatten(-1, (blocks, BLOCK))  # (n, blocks, BLOCK)
    best = blocked.amax(-1).topk(count, dim=-1).indices  # (n, count)
    candidates = blocked.gather(1, best[:, :, None].expand(-1, -1, BLOCK)).flatten(1)
    return torch.cat([candidates, logits[:, split:]], dim=-1).topk(count, dim=-1).values


def sampled_token_logps(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
    chunk_size: int | None = None,
    lm_head_bias: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """Log-probability `(N,)`, in nats and without gradient, with which a sampler would draw `token_ids` `(N,)`.

    What vLLM calls processed log-probabilities: logits / temperature, top-k (0 off), top-p on the renormalised top-k
    (1.0 off), renormalised on what is kept. A sampled token that the trainer's own logits would not keep gets the same
    formula, its logit minus the kept entries' logsumexp, i.e. its untruncated log-probability minus the log of the kept
    mass: finite, and continuous where a token enters the kept set.
    """
    check_projection(hidden, lm_head_weight, lm_head_bias, "student")
    _check_sampling(temperature, top_p, top_k)
    _check_tokens(token_ids, hidden.shape[0])
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        projection = OutputProjection(
            lm_head_weight,
            lm_head_bias,
            logit_scale=logit_scale,
            softcap=softcap,
            logits_dtype=logits_dtype,
            operand_dtype=operand_dtype_of(hidden),
        )
        chunk = chunk_size or default_chunk_size(lm_head_weight.shape[0], logits_dtype.itemsize)
        per_token_logps = torch.empty(hidden.shape[0], dtype=projection.compute_dtype, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits = projection.logits(hidden.detach()[rows], temperature)
            sampled = logits.gather(-1, token_ids[rows, None]).squeeze(-1)
            per_token_logps[rows] = sampled - kept_log_mass(logits, top_p, top_k)
    return per_token_logps


def sampled_token_loss(
    student_hidden: torch.Tensor,
    teacher_hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    token_ids: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    temperature: float = 1.0,
    sampler_per_token_logps: torch.Tensor | None = None,
    advantage_clip: float = math.inf,
    ratio_clip: float = math.inf,
    token_weights: torch.Tensor | None = None,
    denominator: float | torch.Tensor | None = None,
    logits_dtype: torch.dtype = torch.float32,
    chunk_size: int | None = None,
    lm_head_bias: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sampled-token reverse KL from hidden states `(N, H)` and the sampled `token_ids` `(N,)`.

    `sampler_per_token_logps` `(N,)` (nats) selects the ratio form. `advantage_clip` clamps the advantage to plus or minus
    that many nats; `ratio_clip` is PPO's epsilon: the ratio is clamped to [1 - eps, 1 + eps] where that lowers the
    objective. inf turns either off. `token_weights`, `denominator` and the gradients are as in
    `fused_divergence.fused_generalized_jsd`; both roles use one projection. Returns the loss and the
    `SAMPLED_TOKEN_STATISTICS`.
    """
    check_projection(student_hidden, lm_head_weight, lm_head_bias, "student")
    check_projection(teacher_hidden, lm_head_weight, lm_head_bias, "teacher")
    _check_sampling(temperature, 1.0, 0)
    if not advantage_clip > 0.0:
        raise ValueError(f"advantage_clip={advantage_clip} must be > 0 nats; use inf to disable")
    if not ratio_clip > 0.0:
        raise ValueError(f"ratio_clip={ratio_clip} must be > 0; use inf to disable")
    if ratio_clip != math.inf and sampler_per_token_logps is None:
        raise ValueError(f"ratio_clip={ratio_clip} has no effect without sampler_per_token_logps; pass them or use inf")
    tokens = student_hidden.shape[0]
    _check_tokens(token_ids, tokens)
    for name, tensor in (("mask", mask), ("token_weights", token_weights), ("sampler", sampler_per_token_logps)):
        if tensor is not None and tensor.shape != (tokens,):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected ({tokens},), one value a token")

    inputs = inputs_with_gradient(hidden=student_hidden, weight=lm_head_weight, bias=lm_head_bias)
    with torch.no_grad(), torch.autocast(student_hidden.device.type, enabled=False):
        projection = OutputProjection(
            lm_head_weight,
            lm_head_bias,
            logit_scale=logit_scale,
            softcap=softcap,
            logits_dtype=logits_dtype,
            operand_dtype=operand_dtype_of(student_hidden),
        )
        kept = None if mask is None else mask.nonzero().squeeze(1)
        given = (student_hidden.detach(), teacher_hidden.detach(), token_ids, sampler_per_token_logps, token_weights)
        student_rows, teacher_rows, token_ids, sampler_logps, token_weights = (
            tensor if kept is None or tensor is None else tensor[kept] for tensor in given
        )
        chunk = chunk_size or default_chunk_size(lm_head_weight.shape[0], logits_dtype.itemsize)
        gradients = ProjectionGradients(projection, student_rows, tuple(inputs))
        loss = torch.zeros((), dtype=projection.compute_dtype, device=student_rows.device)
        sums = torch.zeros(len(SAMPLED_TOKEN_STATISTICS), dtype=projection.compute_dtype, device=student_rows.device)
        for start in range(0, student_rows.shape[0], chunk):
            rows = slice(start, start + chunk)
            ids = token_ids[rows, None]
            logits = projection.logits(teacher_rows[rows], temperature)
            teacher_logps = logits.gather(-1, ids).squeeze(-1) - logits.logsumexp(-1)
            logits = projection.logits(student_rows[rows], temperature)
            log_probs = logits.log_softmax(-1)
            student_logps = log_probs.gather(-1, ids).squeeze(-1)
            sampler = None if sampler_logps is None else sampler_logps[rows]
            token_loss, slope, statistics = _policy_terms(
                student_logps, teacher_logps, sampler, advantage_clip, ratio_clip
            )
            loss += (token_loss if token_weights is None else token_loss * token_weights[rows]).sum()
            sums += statistics.sum(0)
            gradient = log_probs.exp_().mul_(-slope[:, None]).scatter_add_(-1, ids, slope[:, None])
            if softcap is not None:
                gradient *= 1.0 - (logits * (temperature / softcap)) ** 2
            gradients.add(rows, gradient, token_weights)
        denominator = max(student_rows.shape[0], 1) if denominator is None else denominator
        loss, scale = divide(loss, logit_scale / temperature, denominator)
    if inputs:
        loss = gradients.attach(loss, scale, inputs, kept)
    return loss, dict(zip(SAMPLED_TOKEN_STATISTICS, sums.unbind(), strict=True))


def _policy_terms(student_logps, teacher_logps, sampler_logps, advantage_clip, ratio_clip):
    """Token losses, their derivative with respect to `student_logps`, and statistics, from log-probabilities `(n,)`."""
    divergence = student_logps - teacher_logps
    advantage = (-divergence).clamp(-advantage_clip, advantage_clip)
    clipped_advantages = divergence.abs() > advantage_clip
    ratio = torch.ones_like(divergence)
    clipped_ratios = torch.zeros_like(clipped_advantages)
    if sampler_logps is None:
        token_loss, slope = -advantage * student_logps, -advantage
    else:
        ratio = (student_logps - sampler_logps).exp()
        clamped = ratio.clamp(1.0 - ratio_clip, 1.0 + ratio_clip)
        token_loss = -torch.minimum(ratio * advantage, clamped * advantage)
        clipped_ratios = clamped * advantage < ratio * advantage
        slope = torch.where(clipped_ratios, 0.0, -advantage * ratio)
    columns = [torch.ones_like(divergence), divergence, clipped_advantages, clipped_ratios, ratio]
    return token_loss, slope, torch.stack([column.to(divergence.dtype) for column in columns], dim=-1)


def _check_sampling(temperature: float, top_p: float, top_k: int) -> None:
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be finite and > 0; use 1 to leave the logits as they are")
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p={top_p} must be in (0, 1]; use 1.0 to disable")
    if top_k < 0:
        raise ValueError(f"top_k={top_k} must be >= 0 entries; use 0 to disable")


def _check_tokens(token_ids: torch.Tensor, tokens: int) -> None:
    if token_ids.shape != (tokens,) or token_ids.dtype != torch.long:
        raise ValueError(
            f"token_ids have shape {tuple(token_ids.shape)} and dtype {token_ids.dtype}; expected ({tokens},) int64, "
            "one sampled token per hidden state"
        )
