"""Accuracies of a tiny model: unaided in every prompt mode, with the reference, with a swapped one; the teacher token by token.

Between `pretrain.py` and `build.py`. Sampling is a plain batched loop with a KV cache, so that building the world needs no vLLM.
"""

import math
import random

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from opsd import prompts
from opsd.grading import is_correct
from tiny import world

MAX_NEW_TOKENS = 40
CHUNK = 250


@torch.inference_mode()
def sample(
    model: Qwen3ForCausalLM, prompt_ids: list[list[int]], temperature: float, generator: torch.Generator
) -> list[list[int]]:
    """Completions with their end token; prompts of one length share a batch, so nothing is padded. `temperature` 0 is greedy."""
    by_length: dict[int, list[int]] = {}
    for index, ids in enumerate(prompt_ids):
        by_length.setdefault(len(ids), []).append(index)
    completions: list[list[int]] = [[] for _ in prompt_ids]
    for _, indices in sorted(by_length.items()):
        for chunk in (indices[i : i + CHUNK] for i in range(0, len(indices), CHUNK)):
            rows = _sample_chunk(model, torch.tensor([prompt_ids[i] for i in chunk]), temperature, generator)
            for index, row in zip(chunk, rows, strict=True):
                completions[index] = row
    return completions


def _sample_chunk(
    model: Qwen3ForCausalLM, ids: torch.Tensor, temperature: float, generator: torch.Generator
) -> list[list[int]]:
    eos = model.config.eos_token_id
    rows: list[list[int]] = [[] for _ in range(ids.shape[0])]
    cache, finished = None, torch.zeros(ids.shape[0], dtype=torch.bool)
    for _ in range(MAX_NEW_TOKENS):
        output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, logits = output.past_key_values, output.logits[:, -1].float()  # (B, V)
        if temperature == 0:
            token = logits.argmax(-1)
        else:
            token = torch.multinomial(F.softmax(logits / temperature, -1), 1, generator=generator)[:, 0]
        for row, value, done in zip(rows, token.tolist(), finished.tolist(), strict=True):
            if not done:
                row.append(value)
        finished |= token == eos
        if finished.all():
            break
        ids = token[:, None]
    return rows


def accuracy(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompt_ids: list[list[int]],
    answers: list[str],
    temperature: float,
    seed: int = 0,
) -> float:
    generator = torch.Generator().manual_seed(seed)
    completions = sample(model, prompt_ids, temperature, generator)
    correct = [
        is_correct(tokenizer.decode(ids, skip_special_tokens=True), answer)
        for ids, answer in zip(completions, answers, strict=True)
    ]
    return sum(correct) / len(correct)


def measure(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, heldout: list[dict], seed: int
) -> dict[str, float]:
    """Accuracies on the held-out problems (fraction 0 to 1, one completion each) and the teacher's calibration, in nats."""
    table, _ = world.make_table(seed)
    problems = [row["problem"] for row in heldout]
    answers = [row["answer"] for row in heldout]
    solutions = [world.solution_with(world.parse_problem(problem), table) for problem in problems]
    swapped = swapped_solutions(problems, solutions, seed)

    def render(messages: list[list[dict]], thinking: bool) -> list[list[int]]:
        return [prompts.render_ids(tokenizer, each, enable_thinking=thinking) for each in messages]

    student = [prompts.student_messages(problem) for problem in problems]
    evaluation = [prompts.evaluation_messages(problem) for problem in problems]
    teacher = [prompts.teacher_messages(*pair) for pair in zip(problems, solutions, strict=True)]
    misled = [prompts.teacher_messages(*pair) for pair in zip(problems, swapped, strict=True)]
    cases = {
        "student_thinking_off": render(student, False),
        "evaluation_thinking_off": render(evaluation, False),
        "evaluation_thinking_on": render(evaluation, True),
        "privileged": render(teacher, True),
        "swapped": render(misled, True),
    }
    result = {}
    for name, prompt_ids in cases.items():
        result[f"{name}_sampled"] = accuracy(model, tokenizer, prompt_ids, answers, 1.0)
        result[f"{name}_greedy"] = accuracy(model, tokenizer, prompt_ids, answers, 0.0)
    return result | calibration(
        model, cases["student_thinking_off"], cases["privileged"], cases["swapped"], problems, table, tokenizer
    )


def swapped_solutions(problems: list[str], solutions: list[str], seed: int) -> list[str]:
    """For each problem the solution of another one that shares no charm with it."""
    rng = random.Random(f"swap-{seed}")
    charms = [world.parse_problem(problem).charms for problem in problems]
    swapped = []
    for own in charms:
        while charms[other := rng.randrange(len(problems))] & own:
            pass
        swapped.append(solutions[other])
    return swapped


@torch.inference_mode()
def calibration(
    model: Qwen3ForCausalLM,
    student: list[list[int]],
    teacher: list[list[int]],
    swapped: list[list[int]],
    problems: list[str],
    table: dict[str, int],
    tokenizer: PreTrainedTokenizerFast,
) -> dict[str, float]:
    """On the student's own samples: the mean probability of what is right there (charm values by the table, marks by the written
    values), separately for values and marks; marks after a wrong value count, since the teacher must go on from what stands there."""
    completions = sample(model, student, 1.0, torch.Generator().manual_seed(1))
    sums = {name: [0.0, 0] for name in ("value", "mark", "mark_after_wrong")}
    swapped_value = [0.0, 0]
    for teacher_ids, swapped_ids, completion_ids, text in zip(teacher, swapped, completions, problems, strict=True):
        problem = world.parse_problem(text)
        pieces = [tokenizer.decode([token]) for token in completion_ids]
        probabilities = _completion_probabilities(model, teacher_ids, completion_ids)  # (T, V)
        misled = _completion_probabilities(model, swapped_ids, completion_ids)
        if len(pieces) < len(problem.moves) * world.STEP_PIECES:
            continue  # a malformed sample has no steps to look at; rare at temperature 1
        position, wrong = problem.start, False
        for step, (charm, right) in enumerate(problem.moves):
            at = step * world.STEP_PIECES + world.VALUE_OFFSET
            if not (pieces[at].isdigit() and pieces[at + 2].isdigit()):
                break
            truth = tokenizer.convert_tokens_to_ids(str(table[charm]))
            _add(sums["value"], probabilities[at, truth])
            _add(swapped_value, misled[at, truth])
            wrong |= int(pieces[at]) != table[charm]
            position = world.move(position, int(pieces[at]), right)
            _add(
                sums["mark_after_wrong" if wrong else "mark"],
                probabilities[at + 2, tokenizer.convert_tokens_to_ids(str(position))],
            )
            position = int(pieces[at + 2])
    sums["value_swapped"] = swapped_value
    return {f"teacher_p_{name}": total / count if count else math.nan for name, (total, count) in sums.items()}


def _add(total: list, value: torch.Tensor) -> None:
    probability = float(value)
    if not math.isfinite(probability):
        raise RuntimeError(f"probability={probability} must be finite; the pretrained weights are broken")
    total[0] += probability
    total[1] += 1


def _completion_probabilities(
    model: Qwen3ForCausalLM, prompt_ids: list[int], completion_ids: list[int]
) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([prompt_ids + completion_ids])).logits[0].float()
    return F.softmax(logits[len(prompt_ids) - 1 : -1], -1)  # (T, V)
