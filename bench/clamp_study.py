"""What the entry clamp does to loss and gradient, token by token, on rollouts of an untrained student. docs/clamp.md reads its JSON.

    python bench/clamp_study.py --world smollm2 --rows gsm8k_train.jsonl --output results/clamp_smollm2.json
    python bench/clamp_study.py --world tiny --temperature 1 --top_p 1 --top_k 0 --output results/clamp_tiny.json

The first `--problems` rows, one completion each with a fixed seed, sampled as the recipe samples. Both roles are scored on it by the base
model, as at the first step of a run: the student sees the problem, the teacher also the reference solution. Per token, with the closed form
of opsd/fused_divergence.py at beta 0: entries, objective, and the gradient to the student's last hidden state with and without the clamp.
bench/clamp_tokens.py says what the numbers mean.
"""

import argparse
import collections
import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.clamp_tokens import CLIP, CLIPS, bins, measure_tokens, select, summary, token_cap
from opsd.args import DataArgs
from opsd.data import load_rows
from opsd.divergence import divergence_entries
from opsd.entry import exit_on_bad_input
from opsd.fused_divergence import closed_form
from opsd.model import end_token_ids, load_tokenizer
from opsd.prompts import render_ids, student_messages, teacher_messages
from opsd.rollout import SamplingSettings, derive_seed
from opsd.rollout_transformers import TransformersEngine
from opsd.runinfo import git_state, package_versions, sha256_file, write_json

POSITIONS = (0, 1, 2, 4, 8, 16, 32, 64, 128, math.inf)
CERTAINTY = (0.0, 0.5, 0.9, 0.99, 1.0 + 1e-6)  # the teacher's largest probability
CHUNK = 64  # tokens whose logits are alive at once


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--world", choices=("tiny", "smollm2"), required=True, help="Which built-in model to study.")
    parser.add_argument("--rows", type=Path, help="Rows with problem and solution; the tiny world brings its own.")
    parser.add_argument(
        "--cache_dir", type=Path, default=Path.home() / ".cache" / "opsd", help="Where worlds are built."
    )
    parser.add_argument("--problems", type=int, default=32, help="Rows used, from the start of the file.")
    parser.add_argument("--max_new_tokens", type=int, default=128, help="Tokens per completion.")
    parser.add_argument("--temperature", type=float, default=1.1, help="Of sampling and of both softmaxes.")
    parser.add_argument("--top_p", type=float, default=0.95, help="Nucleus mass; 1 = off.")
    parser.add_argument("--top_k", type=int, default=20, help="Candidates per token; 0 = off.")
    parser.add_argument("--seed", type=int, default=0, help="Of the completions.")
    parser.add_argument("--output", type=Path, required=True, help="JSON to write.")
    return parser.parse_args(argv)


def locate(arguments: argparse.Namespace) -> tuple[Path, Path, bool]:
    """(model folder, rows, whether the teacher thinks) of the world."""
    if arguments.world == "tiny":
        from tiny.build import build_tiny_world

        if arguments.rows is not None:
            raise ValueError(f"rows={arguments.rows} contradicts world=tiny, which brings its own rows; remove it")
        world = build_tiny_world(arguments.cache_dir, 0)
        return world / "model", world / "train.jsonl", True
    from tiny.smollm2 import build_smollm2

    if arguments.rows is None:
        raise ValueError("rows is not given; world=smollm2 needs a file with problem and solution")
    return build_smollm2(arguments.cache_dir), arguments.rows, False


def main(argv: list[str]) -> None:
    from transformers import AutoModelForCausalLM

    arguments = parse(argv)
    model_dir, rows_file, teacher_thinking = locate(arguments)
    tokenizer = load_tokenizer(str(model_dir))
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa").eval()
    rules = (
        {"answer_pattern": r"-?\d{1,6}", "min_trace_tokens": 2000} if arguments.world == "tiny" else {}
    )  # as the recipes do
    data = DataArgs(train_file=str(rows_file), max_train_rows=arguments.problems, **rules)
    rows = [row.values for row in load_rows(data)[0]]
    prompts = [render_ids(tokenizer, student_messages(r["problem"]), enable_thinking=False) for r in rows]
    teachers = [
        render_ids(tokenizer, teacher_messages(r["problem"], r["solution"]), enable_thinking=teacher_thinking)
        for r in rows
    ]
    sampling = SamplingSettings(arguments.temperature, arguments.top_p, arguments.top_k, arguments.max_new_tokens)
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    engine = TransformersEngine(model, eos_ids=end_token_ids(str(model_dir), tokenizer), pad_id=pad, batch_size=16)
    seeds = [derive_seed(arguments.seed, "clamp", i) for i in range(len(rows))]
    rollouts = engine.generate(prompts, sampling, seeds)

    weight = model.get_output_embeddings().weight.detach()  # (V, H)
    tables = {clip: collections.defaultdict(list) for clip in CLIPS}
    positions, excess = [], collections.Counter()
    for rollout, teacher_prompt in zip(rollouts, teachers, strict=True):
        completion = list(rollout.completion_ids)
        student, teacher = (
            hidden_at_completion(model, prompt, completion) for prompt in (rollout.prompt_ids, teacher_prompt)
        )
        positions += range(len(completion))
        for start in range(0, len(completion), CHUNK):
            part = slice(start, start + CHUNK)
            logits, teacher_logits = (h[part] @ weight.T / arguments.temperature for h in (student, teacher))
            true = closed_form(logits, teacher_logits, 0.0, math.inf, "none")[3] @ weight
            for clip in CLIPS:
                for name, value in measure_tokens(logits, teacher_logits, weight, clip, true).items():
                    tables[clip][name].append(value)
            entries = divergence_entries(logits.log_softmax(-1), teacher_logits.log_softmax(-1), 0.0)
            for row, column in (entries > CLIP).nonzero().tolist():
                excess[column] += entries[row, column].item() - CLIP
    tables = {clip: {name: torch.cat(parts) for name, parts in table.items()} for clip, table in tables.items()}
    t, position = tables[CLIP], torch.tensor(positions)
    total = sum(excess.values())
    result = {
        "schema": "opsd-clamp/1",
        **git_state(),
        "versions": package_versions(),
        "world": arguments.world,
        "rows": {"file": rows_file.name, "sha256": sha256_file(rows_file), "used": len(rows)},
        "settings": {k: v for k, v in vars(arguments).items() if k in SETTINGS} | {"entry_clip": CLIP, "beta": 0.0},
        "all": summary(t),
        "by_position": bins(t, position, POSITIONS),
        "by_teacher_certainty": bins(t, t["top"], CERTAINTY),
        "clamped_tokens_only": summary(select(t, t["clamped"] > 0)),
        "by_clip": [{"entry_clip": clip} | summary(tables[clip]) for clip in CLIPS],
        "matched_token_caps": [token_cap(t, mode) for mode in ("token", "direction")],
        "token_caps": [token_cap(t, mode, cap) for mode in ("token", "direction") for cap in CLIPS[3:]],
        "largest_clamped_entries": [
            {"token": tokenizer.decode([i]), "share_of_excess": value / total} for i, value in excess.most_common(15)
        ],
    }
    write_json(arguments.output, result)


SETTINGS = ("problems", "max_new_tokens", "temperature", "top_p", "top_k", "seed")


@torch.no_grad()
def hidden_at_completion(model, prompt_ids, completion: list[int]) -> torch.Tensor:
    """Last hidden states `(T, H)` that predict the completion."""
    ids = torch.tensor([[*prompt_ids, *completion]])
    return model.base_model(input_ids=ids).last_hidden_state[0, len(prompt_ids) - 1 : -1]


if __name__ == "__main__":
    exit_on_bad_input(main)
