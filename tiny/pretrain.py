"""Pretraining of the tiny model: a Qwen3 of half a million parameters that knows a part of the table and can read a reference.

Between `tokenizer.py` and `measure.py`. By steps, not seconds, with a fixed number of threads, so that one seed gives one model, bit
for bit. Three skills are trained: recalling the known charms, adding and subtracting, and preferring a reference's value wherever
the prompt states one. The true value of an unknown charm occurs nowhere: without a reference its value is drawn anew each time, and
so is the reference's value. With a reference the *written* values are often wrong while the labels stay right, so the teacher is
right at every position of a student's wrong prefix, and goes on from the marks that stand there instead of jumping back.
"""

import logging
import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from opsd import prompts
from tiny import world
from tiny.muon import Muon

logger = logging.getLogger(__name__)

IGNORED = -100


@dataclass(frozen=True)
class PretrainSettings:
    """All that the weights depend on beside the world and the library versions."""

    steps: int = 900
    unaided_batch: int = 14
    aided_batch: int = 34
    muon_learning_rate: float = 0.02
    adam_learning_rate: float = 3e-3
    warmup_steps: int = 30
    decay_share: float = 0.7  # of the steps, over which the learning rates fall linearly to 0
    other_reference: float = 0.25  # aided samples with another problem's reference
    changed_value: float = 0.6  # known charms whose reference value is changed: reading has to win over memory
    wrong_prefix: float = 0.5  # aided samples whose written values are partly random
    threads: int = 1  # half a million weights leave a second thread mostly waiting


class SampleMaker:
    """Draws (input ids, labels); labels of the prompt are IGNORED and a label may differ from the token that was written."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int, settings: PretrainSettings):
        self.table, self.unknown = world.make_table(seed)
        self.settings = settings
        self.rng = random.Random(f"pretrain-{seed}")
        self._tokenizer = tokenizer
        self._ids: dict[str, list[int]] = {}
        self._unaided = [
            self._form(messages, thinking)
            for messages in (prompts.student_messages("\x00"), prompts.evaluation_messages("\x00"))
            for thinking in (False, True)
        ]
        self._aided = [self._form(prompts.teacher_messages("\x00", "\x01"), thinking) for thinking in (True, False)]

    def unaided(self) -> tuple[list[int], list[int]]:
        problem = world.sample_problem(self.rng)
        head, tail = self.rng.choice(self._unaided)
        values = {charm: self._recall(charm) for charm, _ in problem.moves}
        return self._sample(head + self._encode(world.problem_pieces(problem)) + tail, problem, values, values)

    def aided(self) -> tuple[list[int], list[int]]:
        rng, settings = self.rng, self.settings
        problem = world.sample_problem(rng)
        other = rng.random() < settings.other_reference
        described = world.sample_problem(rng) if other else problem
        stated = {charm: self._state(charm) for charm, _ in described.moves}
        targets = {charm: stated[charm] if charm in stated else self._recall(charm) for charm, _ in problem.moves}
        written = dict(targets)
        if rng.random() < settings.wrong_prefix:
            written = {charm: self._draw() if rng.random() < 0.5 else value for charm, value in targets.items()}
        head, middle, tail = rng.choices(self._aided, weights=(3, 1))[0]
        prompt_ids = (
            head
            + self._encode(world.problem_pieces(problem))
            + middle
            + self._encode(world.solution_pieces(described, stated))
            + tail
        )
        return self._sample(prompt_ids, problem, written, targets)

    def _sample(self, prompt_ids: list[int], problem: world.Problem, written: dict, targets: dict) -> tuple[list, list]:
        completion = self._encode(world.completion_pieces(problem, written)) + [self._tokenizer.eos_token_id]
        labels = list(completion)
        for step, (charm, _) in enumerate(problem.moves):
            labels[step * world.STEP_PIECES + world.VALUE_OFFSET] = self._encode([str(targets[charm])])[0]
        return prompt_ids + completion, [IGNORED] * len(prompt_ids) + labels

    def _recall(self, charm: str) -> int:
        return self._draw() if charm in self.unknown else self.table[charm]

    def _state(self, charm: str) -> int:
        return self._draw() if self.rng.random() < self.settings.changed_value else self._recall(charm)

    def _draw(self) -> int:
        return self.rng.choice(world.VALUES)

    def _encode(self, pieces: list[str]) -> list[int]:
        ids = []
        for piece in pieces:
            if piece not in self._ids:
                self._ids[piece] = self._tokenizer.encode(piece, add_special_tokens=False)
            ids += self._ids[piece]
        return ids

    def _form(self, messages: list[dict], thinking: bool) -> list[list[int]]:
        """The prompt's ids between the placeholders; pieces are whole tokens, so ids can be joined instead of texts."""
        text = prompts.render_text(self._tokenizer, messages, enable_thinking=thinking).replace("\x01", "\x00")
        return [self._tokenizer.encode(part, add_special_tokens=False) for part in text.split("\x00")]


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=tokenizer.model_max_length,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
    )
    return model


def collate(samples: list[tuple[list[int], list[int]]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded (B, L) ids and labels; under causal attention no real token sees the padding, so no mask is needed."""
    length = max(len(ids) for ids, _ in samples)
    ids = torch.tensor([ids + [pad_id] * (length - len(ids)) for ids, _ in samples])
    labels = torch.tensor([labels + [IGNORED] * (length - len(labels)) for _, labels in samples])
    return ids, labels  # (B, L), (B, L)


def completion_loss(model: Qwen3ForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Summed cross entropy over the labelled positions, in nats, and their number; logits are made for those positions only."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]  # (B, L-1, H)
    labelled = labels[:, 1:] != IGNORED
    logits = model.lm_head(hidden[labelled])  # (N, V)
    return F.cross_entropy(logits, labels[:, 1:][labelled], reduction="sum"), int(labelled.sum())


def pretrain(tokenizer: PreTrainedTokenizerFast, seed: int, settings: PretrainSettings) -> Qwen3ForCausalLM:
    """The model after `settings.steps` steps: Muon for the weight matrices, AdamW for the embedding and the norms."""
    threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        return _pretrain(tokenizer, seed, settings)
    finally:
        torch.set_num_threads(threads)


def _pretrain(tokenizer: PreTrainedTokenizerFast, seed: int, settings: PretrainSettings) -> Qwen3ForCausalLM:
    model = make_model(tokenizer, seed)
    maker = SampleMaker(tokenizer, seed, settings)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim < 2 or "embed" in name]  # embedding and norms
    muon = Muon(matrices)
    adam = torch.optim.AdamW(others, lr=settings.adam_learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    model.train()
    for step in range(settings.steps):
        batches = [
            collate([maker.unaided() for _ in range(settings.unaided_batch)], tokenizer.pad_token_id),
            collate([maker.aided() for _ in range(settings.aided_batch)], tokenizer.pad_token_id),
        ]
        tokens = sum(int((labels != IGNORED).sum()) for _, labels in batches)
        losses = []
        for ids, labels in batches:
            loss, labelled = completion_loss(model, ids, labels)
            (loss / tokens).backward()
            losses.append(loss.item() / labelled)
        factor = _lr_factor(step, settings)
        muon.step(settings.muon_learning_rate * factor)
        adam.param_groups[0]["lr"] = settings.adam_learning_rate * factor
        adam.step()
        adam.zero_grad(set_to_none=True)
        if step % 100 == 0 or step == settings.steps - 1:
            logger.info(
                "pretraining step %d of %d: unaided loss %.4f, aided loss %.4f nats", step, settings.steps, *losses
            )
    return model.eval()


def _lr_factor(step: int, settings: PretrainSettings) -> float:
    rising = (step + 1) / settings.warmup_steps
    falling = (settings.steps - step) / (settings.steps * settings.decay_share)
    return min(1.0, rising, falling)
