"""Weights of the tokens' losses: three published answers to which tokens deserve the gradient, on one interface.

    position     The later the better. A logistic in the relative position `x = (t + 1/2) / T` of token t (from 0) among the T of its
                 completion: `floor + (1 - floor) sigmoid((x - midpoint) / width)`. arXiv 2605.21606; the constants 0.25, 0.30, 0.10 and the
                 mean per sequence (`loss_reduction=sequence_mean`) are those of its authors' code (SaFo-Lab/PW-OPSD at 77af8f1).
    discrepancy  The earlier the better, in the measure of what happened: with `d_t = |log p_teacher - log p_student|` of the sampled token,
                 `1 + gain (1 - sum_{u<t} d_u / sum_u d_u)`. arXiv 2606.22600, algorithm 1 as in TRL 1.16 (experimental.iw_opd, gamma 0.5).
                 There it multiplies the policy gradient on the sampled token; here it multiplies whichever objective is chosen.
    contrastive  Where the *content* of the reference matters: the gap to the student under the right reference minus the gap under a wrong
                 one, `e_t = log p(y_t | right) - log p(y_t | wrong)` (the student's own term cancels), becomes
                 `floor + (1 - floor) tanh(|e_t| / scale)`. From arXiv 2606.11709, which builds e_t into a reward-based advantage
                 as tanh(e_t / 0.02); this is our adaptation of it to a distillation loss without rewards, not the published method. One
                 wrong reference per row; the paper averages over several.

The first two disagree on the direction. Weights carry no gradient and are not renormalised, as published: they also change the step's size.
All tensors are (N,), the completion tokens of a micro-batch one sequence after another.
"""

from collections.abc import Sequence

import torch


def relative_positions(lengths: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """(t + 1/2) / T of every token, (N,)."""
    return torch.cat([(torch.arange(length, device=device) + 0.5) / length for length in lengths])


def position_weights(positions: torch.Tensor, floor: float, midpoint: float, width: float) -> torch.Tensor:
    """Logistic in the relative position, (N,) in (floor, 1)."""
    return floor + (1 - floor) * torch.sigmoid((positions - midpoint) / width)


def discrepancy_weights(gaps: torch.Tensor, lengths: Sequence[int], gain: float) -> torch.Tensor:
    """From `gaps` (N,), nats, not negative: 1 + gain at a completion's first token, falling to 1 as its discrepancy is used up.

    A completion without any discrepancy has the weight 1 + gain throughout: nothing was accumulated at any of its tokens.
    """
    weights = []
    for own in gaps.split(list(lengths)):
        before = own.cumsum(0) - own
        weights.append(1 + gain * (1 - before / own.sum().clamp(min=torch.finfo(own.dtype).tiny)))
    return torch.cat(weights)


def contrastive_weights(
    right_per_token_logps: torch.Tensor, wrong_per_token_logps: torch.Tensor, floor: float, scale: float
) -> torch.Tensor:
    """From the teacher's log-probabilities of the sampled tokens (N,) under either reference, (N,) in [floor, 1)."""
    return floor + (1 - floor) * torch.tanh((right_per_token_logps - wrong_per_token_logps).abs() / scale)
