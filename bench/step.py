"""Training phase of a step at the Qwen3-1.7B shape, with scripted rollouts: seconds, phases and peak memory, beside the published style.

    python -m bench.shape --output_dir /tmp/shape && python -m bench.step --shape /tmp/shape --output results/bench_step.json

`step`: 32 rollouts of 1,024 tokens, teacher prompts of 600. `micro`: 4 sequences with teacher prompts of 3,000 to 8,000 tokens, ours
(packed, float32 logits, fused loss) and the published style (padded, all logits in bf16, full tensors). `growth`: completions of
512 to 8,192 tokens.
"""

import argparse
import gc
import json
import logging
import os
import time
from pathlib import Path

from bench.reference import STUDENT_PROMPT, TARGETS, TEACHER_PROMPT
from opsd.entry import exit_on_bad_input, library_environment
from opsd.runinfo import git_state, hardware, package_versions, write_json

for key, value in library_environment(os.cpu_count()).items():
    os.environ.setdefault(key, value)

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from transformers.integrations.liger import apply_liger_kernel  # noqa: E402

from opsd.args import parse_training_args  # noqa: E402
from opsd.attention import NAME as VARLEN  # noqa: E402
from opsd.batch import Layout, MicroBatch, build_inputs  # noqa: E402
from opsd.model import load_student  # noqa: E402
from opsd.rollout import Rollout  # noqa: E402
from opsd.speed import choose_liger, drop_input_casts, fuse_adapters  # noqa: E402
from opsd.teacher import teacher_weights  # noqa: E402
from opsd.trainer import OPSDTrainer  # noqa: E402

logger = logging.getLogger(__name__)

MATMUL_FLOPS = 780e12  # measured bf16 rate of one H200 at these shapes
GROWTH_SEQUENCES = 16  # with fewer, short completions are bound by launches and not by tokens
BETA, CLIP, TEMPERATURE = 0.0, 0.05, 1.1


class ScriptedEngine:
    """No sampling: the bench hands micro-batches over by itself."""

    def close(self) -> None:
        """Nothing to stop."""


def make_trainer(shape: Path, *, packed: bool, recompute: bool, fast: bool = True) -> OPSDTrainer:
    arguments = (
        f"--model_name_or_path {shape / 'model'} --train_file {shape / 'train.jsonl'} --output_dir {shape / 'bench'} --dtype bfloat16 "
        f"--max_steps 1 --save_strategy no --per_device_train_batch_size 4 --gradient_accumulation_steps 8 --use_peft true --lora_r 64 "
        f"--lora_alpha 128 --lora_dropout 0 --lora_target_modules {' '.join(TARGETS)} --learning_rate 1e-5 --beta {BETA} "
        f"--entry_clip {CLIP} --temperature {TEMPERATURE} --distill_temperature {TEMPERATURE} --top_p 0.95 --top_k 20 "
        f"--gradient_checkpointing {str(recompute).lower()} --use_liger_kernel {str(fast).lower()}"
    )
    _, args, _, model_args = parse_training_args(arguments.split())
    model = load_student(model_args, attn_implementation=VARLEN if packed else "sdpa", seed=0, device="cuda")
    drop_input_casts(model)  # published runs keep the adapter in bf16 and cast nothing
    if fast:
        choose_liger(args, "qwen3")
        fuse_adapters(model)
    rows = [{"example_id": "0", "prompt_ids": [7], "teacher_prompt_ids": [7]}]
    trainer = OPSDTrainer(model, args, rows, None, ScriptedEngine(), Layout(packed=packed, pad_id=0))
    if fast:
        apply_liger_kernel(trainer.model, args.liger_kernel_config)  # as the training loop does when it starts
    trainer.create_optimizer()
    trainer.model_wrapped, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.model_wrapped.train()
    if recompute:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
        trainer.model.enable_input_require_grads()
    return trainer


def make_batch(
    sequences: int, student_prompt: tuple[int, int], teacher_prompt: tuple[int, int], completion: int, seed: int = 0
) -> MicroBatch:
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        return torch.randint(7, 150000, (count,), generator=generator).tolist()

    def spread(low: int, high: int, index: int) -> int:
        return low if sequences == 1 else low + (high - low) * index // (sequences - 1)

    examples, rollouts = [], []
    for index in range(sequences):
        prompt = ids(spread(*student_prompt, index))
        examples.append(
            {"example_id": str(index), "prompt_ids": prompt, "teacher_prompt_ids": ids(spread(*teacher_prompt, index))}
        )
        rollouts.append(Rollout(tuple(prompt), tuple(ids(completion)), (-3.0,) * completion, "length"))
    return MicroBatch(tuple(examples), tuple(rollouts))


def ours(trainer: OPSDTrainer, batch: MicroBatch, total_tokens: int) -> None:
    loss = trainer.compute_loss(
        trainer.model_wrapped, batch, num_items_in_batch=torch.tensor(total_tokens, device="cuda")
    )
    trainer.accelerator.backward(loss)


def published(trainer: OPSDTrainer, batch: MicroBatch, total_tokens: int) -> None:
    """Padded sequences, logits of every position in bf16, full-size distributions, mean over the micro-batch."""
    completion = max(map(len, batch.completions))
    teacher_inputs = build_inputs(batch.teacher_prompts, batch.completions, trainer.layout, "cuda").forward
    student_inputs = build_inputs(batch.student_prompts, batch.completions, trainer.layout, "cuda").forward
    student_logits = trainer.model_wrapped(**student_inputs, use_cache=False).logits[:, -completion - 1 : -1]
    with teacher_weights(trainer.model, "base"):
        teacher_logits = trainer.model(**teacher_inputs, use_cache=False).logits[:, -completion - 1 : -1]
    student_logits, teacher_logits = student_logits.to(torch.bfloat16), teacher_logits.to(torch.bfloat16)
    log_probs = (student_logits / TEMPERATURE).log_softmax(-1)
    teacher_log_probs = (teacher_logits / TEMPERATURE).log_softmax(-1)
    entries = F.kl_div(log_probs, teacher_log_probs, reduction="none", log_target=True)
    loss = entries.clamp(max=CLIP).sum() / (completion * len(batch.rollouts))
    trainer.accelerator.backward(loss)


def timed(run, repeats: int = 3) -> dict:
    """Best seconds of `repeats` after one warm-up, and peak memory above what was allocated before, in GiB."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return {"seconds": min(seconds), "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def floor_seconds(trainer: OPSDTrainer, batches: list[MicroBatch], recompute: bool) -> float:
    """Matrix products of the real tokens at the measured rate: teacher forward, student forward, backward, and the output projections."""
    operations = sum(trainer.floating_point_ops(b) for b in batches)
    if recompute:
        weights = trainer.model.num_parameters() - trainer.model.get_input_embeddings().weight.numel()
        operations += sum(2 * weights * (sum(map(len, b.student_prompts)) + b.completion_tokens) for b in batches)
    return operations / MATMUL_FLOPS


def run_step(trainer: OPSDTrainer, batches: list[MicroBatch], micro_step=ours) -> None:
    """Forward and backward of all micro-batches, then the optimizer step."""
    total = sum(b.completion_tokens for b in batches)
    for batch in batches:
        micro_step(trainer, batch, total)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


def measured(trainer: OPSDTrainer, batches: list[MicroBatch], recompute: bool, micro_step=ours) -> dict:
    """Floor, seconds and peak memory of one step over `batches`."""
    floor = floor_seconds(trainer, batches, recompute)
    return {"recompute": recompute, "floor_s": floor, **timed(lambda: run_step(trainer, batches, micro_step))}


def measure_ours(trainer: OPSDTrainer, parts: list[str], recompute: bool):
    """Yields the rows of the packed variant."""
    prompts = (STUDENT_PROMPT, STUDENT_PROMPT), (TEACHER_PROMPT, TEACHER_PROMPT)
    if "step" in parts:
        for size in (4, 8, 16):
            batches = [make_batch(size, *prompts, 1024, seed) for seed in range(32 // size)]
            yield {"part": "step", "variant": "ours", "micro_batch": size, **measured(trainer, batches, recompute)}
    if "growth" in parts and recompute:
        for completion in (512, 1024, 2048, 4096, 8192):
            batches = [make_batch(GROWTH_SEQUENCES, *prompts, completion)]
            row = measured(trainer, batches, recompute)
            row["us_per_token"] = 1e6 * row["seconds"] / batches[0].input_tokens
            yield {
                "part": "growth",
                "variant": "ours",
                "micro_batch": GROWTH_SEQUENCES,
                "completion": completion,
                **row,
            }
    if "micro" in parts:
        yield from measure_micro(trainer, "ours", recompute, ours)


def measure_micro(trainer: OPSDTrainer, variant: str, recompute: bool, micro_step):
    """Yields one row per completion length: 4 sequences with long teacher prompts."""
    for completion in (1024, 2048, 4096):
        batches = [make_batch(4, (150, 200), (3000, 8000), completion)]
        row = measured(trainer, batches, recompute, micro_step)
        yield {"part": "micro", "variant": variant, "completion": completion, **row}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--shape", type=Path, required=True, help="Folder written by bench.shape.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=("step", "micro", "growth"), default=["step", "micro", "growth"])
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING)
    logger.setLevel(logging.INFO)
    rows = []
    for recompute in (True, False):
        trainer = make_trainer(arguments.shape, packed=True, recompute=recompute)
        for row in measure_ours(trainer, arguments.parts, recompute):
            rows.append(row)
            logger.info("%s", json.dumps(row))
        trainer.close()
        del trainer
        gc.collect()  # a trainer is full of cycles, and its model would count as the next one's memory
        torch.cuda.empty_cache()
    if "micro" in arguments.parts:
        trainer = make_trainer(arguments.shape, packed=False, recompute=True, fast=False)
        for row in measure_micro(trainer, "published style", True, published):
            rows.append(row)
            logger.info("%s", json.dumps(row))
    write_json(
        arguments.output,
        {"command": argv, "rows": rows, **git_state(), "versions": package_versions(), "hardware": hardware()},
    )


if __name__ == "__main__":
    exit_on_bad_input(main)
