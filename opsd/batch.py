"""Rollouts -> model inputs: packed rows or padded batches, and the positions whose output predicts a completion token.

Data flow: Rollout (opsd/rollout.py) + teacher prompt -> MicroBatch -> opsd/trainer.py. The student and the teacher see the same completion
ids after different prompts; both predict token t of a completion from the position just before it, never from padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from opsd.rollout import Rollout
from opsd.teacher_scores import TopKScores


@dataclass(frozen=True)
class Layout:
    """How sequences become tensors: `packed` rows without padding, or padded batches.

    The two last fields repeat the published code's right padding, and only change padded batches; see `_padded`.
    """

    packed: bool
    pad_id: int
    position_gap: bool = False
    first_token_from_padding: bool = False


@dataclass(frozen=True)
class ModelInputs:
    """Arguments of the model's forward, and `keep`: flat positions (B*L) whose hidden states predict the completion tokens, (N,)."""

    forward: dict[str, torch.Tensor | int]
    keep: torch.Tensor


def build_inputs(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    layout: Layout,
    device: torch.device | str = "cpu",
) -> ModelInputs:
    """Inputs for `prompts[i] + completions[i]`; every prompt and completion has at least one token."""
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        if not prompt or not completion:
            raise ValueError(
                f"sequence {index} has {len(prompt)} prompt and {len(completion)} completion tokens; both must be > 0"
            )
    if layout.packed:
        return _packed(prompts, completions, device)
    return _padded(prompts, completions, layout, device)


def _packed(prompts, completions, device) -> ModelInputs:
    ids, positions, keep, bounds = [], [], [], [0]
    for prompt, completion in zip(prompts, completions, strict=True):
        length = len(prompt) + len(completion)
        ids.extend(prompt)
        ids.extend(completion)
        positions.extend(range(length))
        keep.extend(range(bounds[-1] + len(prompt) - 1, bounds[-1] + length - 1))
        bounds.append(bounds[-1] + length)
    boundaries = torch.tensor(bounds, dtype=torch.int32, device=device)
    longest = max(end - start for start, end in zip(bounds, bounds[1:], strict=False))
    forward = {
        "input_ids": torch.tensor([ids], device=device),
        "position_ids": torch.tensor([positions], device=device),
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    return ModelInputs(forward, torch.tensor(keep, device=device))


def _padded(prompts, completions, layout: Layout, device) -> ModelInputs:
    """Prompts are left-padded, so that a completion follows its prompt without a gap; `position_gap` right-pads them as published.

    With the gap, positions count the padding, and the first completion token is predicted from the last *real* prompt token. The
    published code predicts it from the last position before the completion, which is padding for all but the longest prompt:
    `first_token_from_padding`.
    """
    longest_prompt = max(map(len, prompts))
    longest_completion = max(map(len, completions))
    shape = (len(prompts), longest_prompt + longest_completion)
    ids = torch.full(shape, layout.pad_id)
    mask = torch.zeros(shape, dtype=torch.long)
    positions = torch.zeros(shape, dtype=torch.long)
    keep = []
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        start = 0 if layout.position_gap else longest_prompt - len(prompt)
        end = longest_prompt + len(completion)
        ids[row, start : start + len(prompt)] = torch.tensor(prompt)
        ids[row, longest_prompt:end] = torch.tensor(completion)
        mask[row, start : start + len(prompt)] = 1
        mask[row, longest_prompt:end] = 1
        positions[row, start:] = torch.arange(shape[1] - start)
        first = longest_prompt - 1 if layout.first_token_from_padding else start + len(prompt) - 1
        predictors = [first, *range(longest_prompt, end - 1)]
        keep.extend(row * shape[1] + p for p in predictors)
    forward = {"input_ids": ids.to(device), "attention_mask": mask.to(device), "position_ids": positions.to(device)}
    return ModelInputs(forward, torch.tensor(keep, device=device))


@dataclass(frozen=True)
class MicroBatch:
    """The sequences of one forward and backward pass: tokens of both roles stay aligned because `completion_ids` is shared."""

    examples: tuple[dict, ...]  # rows with example_id, prompt_ids, teacher_prompt_ids
    rollouts: tuple[Rollout, ...]
    teacher_scores: tuple[TopKScores, ...] = ()  # from a teacher behind a server, otherwise none

    @property
    def student_prompts(self) -> list[tuple[int, ...]]:
        return [r.prompt_ids for r in self.rollouts]

    @property
    def teacher_prompts(self) -> list[list[int]]:
        return [e["teacher_prompt_ids"] for e in self.examples]

    @property
    def wrong_teacher_prompts(self) -> list[list[int]]:
        """Teacher prompts with another row's reference (`token_weight=contrastive`)."""
        return [e["negative_teacher_prompt_ids"] for e in self.examples]

    @property
    def completions(self) -> list[tuple[int, ...]]:
        return [r.completion_ids for r in self.rollouts]

    @property
    def completion_tokens(self) -> int:
        return sum(map(len, self.completions))

    @property
    def input_tokens(self) -> int:
        """Tokens that go through the transformer, both roles together."""
        prompts = sum(map(len, self.student_prompts)) + sum(map(len, self.teacher_prompts))
        return prompts + 2 * self.completion_tokens


def split_micro_batches(
    examples: Sequence[dict], rollouts: Sequence[Rollout], count: int, scores: Sequence[TopKScores] | None = None
) -> list[MicroBatch]:
    """Splits the rollouts of a step into `count` micro-batches of equal size whose token counts are as even as a greedy pass makes them.

    The longest sequence goes first, always to the lightest micro-batch that still has room.
    """
    if len(rollouts) % count:
        raise ValueError(f"{len(rollouts)} rollouts do not divide into {count} micro-batches")
    size = len(rollouts) // count
    weight = [
        2 * len(r.completion_ids) + len(r.prompt_ids) + len(e["teacher_prompt_ids"])
        for e, r in zip(examples, rollouts, strict=True)
    ]
    groups: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for index in sorted(range(len(rollouts)), key=lambda i: (-weight[i], i)):
        lightest = min((g for g in range(count) if len(groups[g]) < size), key=lambda g: (loads[g], g))
        groups[lightest].append(index)
        loads[lightest] += weight[index]
    return [
        MicroBatch(
            *(tuple(column[i] for i in sorted(g)) for column in (examples, rollouts, scores) if column is not None)
        )
        for g in groups
    ]
