"""Writes the tables of docs/scaling.md from opsd/memory.py and results/; no number in them is typed.

python -m bench.scaling            rewrites the blocks between `<!-- layouts -->`, `<!-- sharding -->` and their ends

The shapes are those that the Qwen3 models' config.json files state. Estimates per GPU, in GiB, for the reference recipe on four GPUs: bf16,
LoRA r 64 on every linear layer, 32 rollouts of 1,024 tokens a step, recomputation on.
"""

import argparse
from pathlib import Path

from transformers import Qwen3Config

from bench.readme_tables import ROOT, fill
from bench.reference import TARGETS
from opsd.entry import exit_on_bad_input
from opsd.eval_estimate import GIB, kv_bytes_per_token
from opsd.memory import CONTEXT, MARGIN, StepShape, Student, training_items
from opsd.runinfo import read_json, write_text

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "scaling.md"
GPUS = 4
ROLLOUTS = 32
STEP = StepShape(sequences=8, rollouts=ROLLOUTS // GPUS, prompt_tokens=512, completion_tokens=1024)
# name -> hidden size, feed-forward size, layers, attention heads, whether embedding and output projection are one matrix
SHAPES = {
    "Qwen3-1.7B": (2048, 6144, 28, 16, True),
    "Qwen3-4B": (2560, 9728, 36, 32, True),
    "Qwen3-8B": (4096, 12288, 36, 32, False),
    "Qwen3-32B": (5120, 25600, 64, 64, False),
}


def config_of(name: str) -> Qwen3Config:
    hidden, feed_forward, layers, heads, tied = SHAPES[name]
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=tied,
    )


def row(name: str) -> list[float]:
    """Per GPU: base weights, the rest of training, training with ddp, training with fsdp2, the engine's weights, its cache."""
    config = config_of(name)
    student = Student.of(config, weight_bytes=2, logit_bytes=4, lora_rank=64, lora_targets=TARGETS, liger=True)
    items = training_items(student, STEP, recompute=True)
    base, everything = items["base weights"], sum(items.values())
    head = 2 * config.vocab_size * config.hidden_size
    layer = (base - head) // config.num_hidden_layers  # two of them are whole at a time: one computes, one is fetched
    adapter = items["adapter, gradients and Adam"]
    sharded = (base - head + adapter) // GPUS + head + 2 * layer + everything - base - adapter
    cache = STEP.rollouts * (STEP.prompt_tokens + STEP.completion_tokens) * kv_bytes_per_token(config, 2)
    needed = [MARGIN * bytes_ + CONTEXT for bytes_ in (everything, sharded)]
    return [bytes_ / GIB for bytes_ in (base, everything - base, *needed, base, cache)]


def table() -> str:
    lines = [
        f"| model | base weights | rest of training | training, ddp | training, fsdp2 on {GPUS} | engine's weights, in all "
        f"| KV cache of {STEP.rollouts} rollouts |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in SHAPES:
        lines.append(f"| {name} | " + " | ".join(f"{value:.1f}" for value in row(name)) + " |")
    return "\n".join(lines)


def measured() -> str:
    """The training step under each mode on one GPU, from bench/sharding.py's files."""
    lines = ["| mode | training s | adapter written s | peak GiB |", "|---|---|---|---|"]
    records = [read_json(path) for path in sorted((ROOT / "results").glob("bench_sharding_*.json"))]
    for row in (row for record in records for row in record["rows"]):
        figures = (row["time/train_s"], row["time/adapter_save_s"], row["memory/peak_gib"])
        lines.append("| {} | {:.2f} | {:.2f} | {:.1f} |".format(row["mode"], *figures))
    commands = ", ".join(f"`python -m bench.sharding {' '.join(record['command'])}`" for record in records)
    return "\n".join(lines) + f"\n\n{commands}, data in the files they name."


def main(argv: list[str]) -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False).parse_args(argv)
    write_text(DOCUMENT, fill(DOCUMENT.read_text(encoding="utf-8"), {"layouts": table(), "sharding": measured()}))


if __name__ == "__main__":
    exit_on_bad_input(main)
