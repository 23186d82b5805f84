"""From both roles' hidden states to the loss of a micro-batch: the one place that knows every loss option.

Data flow: opsd/trainer.py -> here -> opsd/fused_divergence.py or opsd/sampled_token.py, with the weights of opsd/token_weights.py. The loss
is the mean over the counted completion tokens of the whole optimizer step (`loss_reduction=token_mean`), or over each sequence's tokens and
then over the sequences that have any (`sequence_mean`, by a weight per sequence).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from opsd.args import OPSDConfig
from opsd.batch import MicroBatch
from opsd.divergence import mean_statistics
from opsd.fused_divergence import fused_generalized_jsd
from opsd.hidden_tap import HiddenTap
from opsd.sampled_token import sampled_token_logps, sampled_token_loss
from opsd.token_weights import contrastive_weights, discrepancy_weights, position_weights, relative_positions


@dataclass(frozen=True)
class StepSize:
    """What the loss is a mean over: counted tokens, and sequences with at least one, over all micro-batches and processes."""

    tokens: float
    sequences: float


class Objective:
    """The loss that `args` describes, on the output projections of both roles' models."""

    def __init__(self, args: OPSDConfig, student: HiddenTap, teacher: HiddenTap):
        self._args = args
        self._student, self._teacher = student, teacher
        self._logits_dtype = getattr(torch, args.logits_dtype)

    @property
    def needs_wrong_reference(self) -> bool:
        """Whether the loss wants a second teacher pass, with another row's reference."""
        return self._args.token_weight == "contrastive"

    def counts(self, micro_batches: Sequence[MicroBatch]) -> tuple[int, int]:
        """Completion tokens that are trained on, and sequences that have any."""
        counted = [max(len(c) - self._args.skip_first_tokens, 0) for m in micro_batches for c in m.completions]
        return sum(counted), sum(n > 0 for n in counted)

    def loss(
        self,
        student_hidden: torch.Tensor,  # (N, H)
        teacher_hidden: torch.Tensor,  # (N, H of the teacher)
        wrong_hidden: torch.Tensor | None,  # (N, H of the teacher), under the wrong reference
        inputs: MicroBatch,
        size: StepSize,
        processes: int,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """This process's share of the step's mean, times `processes`, and sums over its counted tokens for `row`."""
        args = self._args
        lengths = [len(c) for c in inputs.completions]
        device = student_hidden.device
        token_ids = torch.tensor([t for c in inputs.completions for t in c], device=device)
        mask = None
        if args.skip_first_tokens:
            mask = torch.cat([torch.arange(n, device=device) >= args.skip_first_tokens for n in lengths])
        weights = self._weights(student_hidden, teacher_hidden, wrong_hidden, token_ids, lengths, size)
        denominator = size.tokens / processes
        shared = {
            "temperature": args.distill_temperature,
            "token_weights": weights,
            "denominator": denominator,
            "logits_dtype": self._logits_dtype,
            "lm_head_bias": self._student.bias,
        }
        if args.objective == "sampled_token":
            loss, sums = sampled_token_loss(
                student_hidden,
                teacher_hidden,
                self._student.weight,
                token_ids,
                mask,
                advantage_clip=args.advantage_clip,
                **shared,
            )
        else:
            if self._teacher is not self._student:
                shared["teacher_lm_head_weight"] = self._teacher.weight
                shared["teacher_lm_head_bias"] = self._teacher.bias
            loss, sums = fused_generalized_jsd(
                student_hidden,
                teacher_hidden,
                self._student.weight,
                mask,
                beta=args.beta,
                entry_clip=args.entry_clip,
                clip_mode=args.clip_mode,
                top_k=args.loss_top_k or None,
                tail=args.loss_tail,
                backend=args.loss_backend,
                **shared,
            )
        sums["loss_sum"] = loss.detach() * denominator
        if weights is not None:
            sums["token_weight_sum"] = weights.sum() if mask is None else weights[mask].sum()
        return loss, sums

    def _weights(self, student_hidden, teacher_hidden, wrong_hidden, token_ids, lengths, size) -> torch.Tensor | None:
        """Token weights (N,), None where all are 1."""
        args, weights = self._args, None
        if args.token_weight == "position":
            positions = relative_positions(lengths, student_hidden.device)
            weights = position_weights(
                positions, args.token_weight_floor, args.token_weight_midpoint, args.token_weight_width
            )
        elif args.token_weight == "discrepancy":
            gaps = self._logps(teacher_hidden, token_ids, self._teacher)
            gaps = (gaps - self._logps(student_hidden, token_ids, self._student)).abs()
            weights = discrepancy_weights(gaps, lengths, args.token_weight_gain)
        elif args.token_weight == "contrastive":
            right, wrong = (self._logps(h, token_ids, self._teacher) for h in (teacher_hidden, wrong_hidden))
            weights = contrastive_weights(right, wrong, args.token_weight_floor, args.token_weight_scale)
        if args.loss_reduction == "sequence_mean":
            counted = torch.tensor(lengths, device=student_hidden.device) - args.skip_first_tokens
            own = size.tokens / (size.sequences * counted.clamp(min=1))
            own = own.repeat_interleave(torch.tensor(lengths, device=own.device))
            weights = own if weights is None else weights * own
        return weights

    def _logps(self, hidden: torch.Tensor, token_ids: torch.Tensor, tap: HiddenTap) -> torch.Tensor:
        """Log-probability of every sampled token under the loss's temperature, (N,), nats, without gradient."""
        return sampled_token_logps(
            hidden.detach(), tap.weight, token_ids, lm_head_bias=tap.bias, temperature=self._args.distill_temperature
        )

    def row(self, totals: dict[str, float]) -> dict[str, float]:
        """The loss's scalars, named area/name, from the step's sums over all micro-batches and processes; nats per counted token."""
        tokens = totals["tokens"]
        row = {"loss/objective": totals["loss_sum"] / tokens}
        if self._args.objective == "sampled_token":
            row["loss/divergence"] = totals["divergence_sum"] / tokens  # one-sample estimate of the reverse KL
            row["loss/clipped_token_fraction"] = totals["clipped_advantages"] / tokens
        else:
            means = mean_statistics(totals)
            row["loss/divergence"] = means["divergence"]
            row["loss/clipped_entry_fraction"] = means["clipped_entry_fraction"]
            row["loss/clipped_token_fraction"] = means["clipped_token_fraction"]
            row["policy/student_entropy"] = means["student_entropy"]
            row["policy/teacher_entropy"] = means["teacher_entropy"]
            if self._args.loss_top_k:
                row["loss/teacher_top_k_mass"] = means["teacher_top_k_mass"]
                row["loss/student_top_k_mass"] = means["student_top_k_mass"]
        if "token_weight_sum" in totals:
            row["loss/token_weight"] = totals["token_weight_sum"] / tokens
        return row
