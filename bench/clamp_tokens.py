"""The numbers of a token under the entry clamp and under caps on whole tokens, and their summaries; used by bench/clamp_study.py.

"aligned": <g, g_true> / |g_true|^2, summed over tokens above and below: by how much a small step along -g lowers the true divergence, where
the unclamped gradient has 1. "kept": sum of |g| over sum of |g_true|. "cosine": of the two gradients over all tokens together. "against":
share of tokens with <g, g_true> < 0. g is the gradient to the student's last hidden state.
"""

import math

import torch

from opsd.divergence import divergence_entries
from opsd.fused_divergence import closed_form

CLIPS = (1e-6, 1e-3, 0.01, 0.05, 0.2, 1.0)
CLIP = 0.05  # the recipe's


@torch.no_grad()
def measure_tokens(student, teacher, weight, clip: float, true: torch.Tensor) -> dict[str, torch.Tensor]:
    """Per-token numbers `(n,)` from logits `(n, V)` after the temperature and the unclamped gradient `true` to the hidden state `(n, H)`.

    Gradients reach the hidden state through `weight` `(V, H)`.
    """
    student_log_probs, teacher_log_probs = student.log_softmax(-1), teacher.log_softmax(-1)
    entries = divergence_entries(student_log_probs, teacher_log_probs, 0.0)
    above = entries > clip
    objective, divergence, clamped, clipped_gradient = closed_form(student, teacher, 0.0, clip, "entry")
    clipped = clipped_gradient @ weight  # (n, H)
    columns = {
        "divergence": divergence,
        "objective": objective,
        "clamped": clamped,
        "teacher_mass": (teacher_log_probs.exp() * above).sum(-1),
        "student_mass": (student_log_probs.exp() * above).sum(-1),
        "positive": entries.clamp(min=0).sum(-1),
        "excess": (entries - clip).clamp(min=0).sum(-1),
        "top": teacher_log_probs.max(-1).values.exp(),
        "top_clamped": above.gather(-1, teacher_log_probs.argmax(-1, keepdim=True))[:, 0],
        "true_norm": true.norm(dim=-1),
        "clipped_norm": clipped.norm(dim=-1),
        "dot": (true * clipped).sum(-1),
        "pushed_down": ((clipped_gradient > 0) & above).sum(-1),  # clamped entries whose logit a step lowers
    }
    return {name: value.double() for name, value in columns.items()}


def summary(t: dict[str, torch.Tensor]) -> dict[str, float]:
    """Means and ratios over the tokens of `t`."""
    any_clamped = t["clamped"] > 0
    n = len(any_clamped)
    true_square = t["true_norm"].square().sum()
    return {
        "tokens": n,
        "divergence": (t["divergence"].sum() / n).item(),
        "objective": (t["objective"].sum() / n).item(),
        "negative_objective": (t["objective"] < 0).double().mean().item(),
        "clamped_tokens": any_clamped.double().mean().item(),
        "clamped_entries_of_a_clamped_token": (t["clamped"].sum() / any_clamped.sum().clamp(min=1)).item(),
        "divergence_of_clamped_tokens": (t["divergence"][any_clamped].sum() / t["divergence"].sum()).item(),
        "teacher_mass_clamped": t["teacher_mass"].mean().item(),
        "student_mass_clamped": t["student_mass"].mean().item(),
        "positive_entries_above": (t["excess"].sum() / t["positive"].sum()).item(),
        "clamped_token_clamps_teachers_top": t["top_clamped"][any_clamped].mean().item() if any_clamped.any() else 0.0,
        "clamped_entries_pushed_down": (t["pushed_down"].sum() / t["clamped"].sum().clamp(min=1)).item(),
        "cosine": (t["dot"].sum() / (true_square * t["clipped_norm"].square().sum()).sqrt()).item(),
        "kept": (t["clipped_norm"].sum() / t["true_norm"].sum()).item(),
        "aligned": (t["dot"].sum() / true_square).item(),
        "against": (t["dot"] < 0).double().mean().item(),
    }


def select(t: dict[str, torch.Tensor], rows: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: value[rows] for name, value in t.items()}


def bins(t: dict[str, torch.Tensor], key: torch.Tensor, edges: tuple[float, ...]) -> list[dict]:
    """A summary of every half-open bin [low, high) of `key` that has tokens."""
    found = []
    for low, high in zip(edges, edges[1:], strict=False):
        rows = (key >= low) & (key < high)
        if rows.any():
            found.append({"from": low, "to": None if math.isinf(high) else min(high, 1.0) if high < 2 else high})
            found[-1] |= summary(select(t, rows))
    return found


def kept_by(t: dict[str, torch.Tensor], mode: str, cap: float) -> torch.Tensor:
    """Weight of every token under a cap on its divergence: `token` drops what is above, `direction` scales it down to the cap."""
    above = t["divergence"] > cap
    return torch.where(above, cap / t["divergence"] if mode == "direction" else 0.0, 1.0)


def token_cap(t: dict[str, torch.Tensor], mode: str, cap: float | None = None) -> dict[str, float | str]:
    """What a cap on whole tokens does; without `cap`, the one that keeps as much gradient as the entry clamp."""
    if cap is None:
        goal, low, cap = t["clipped_norm"].sum(), 1e-9, t["divergence"].max().item()
        for _ in range(100):
            middle = math.sqrt(low * cap)
            enough = (kept_by(t, mode, middle) * t["true_norm"]).sum() >= goal
            low, cap = (low, middle) if enough else (middle, cap)
    weights = kept_by(t, mode, cap)
    norms, dots, true_square = (
        weights * t["true_norm"],
        weights * t["true_norm"].square(),
        t["true_norm"].square().sum(),
    )
    return {
        "clip_mode": mode,
        "cap": cap,
        "capped_tokens": (t["divergence"] > cap).double().mean().item(),
        "kept": (norms.sum() / t["true_norm"].sum()).item(),
        "cosine": (dots.sum() / (true_square * norms.square().sum()).sqrt()).item(),
        "aligned": (dots.sum() / true_square).item(),
    }
