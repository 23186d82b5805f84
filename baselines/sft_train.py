"""Supervised fine-tuning baseline on TRL's SFTTrainer: the student prompt, then the reference solution as the target.

    python baselines/sft_train.py --config recipes/baselines/sft_tiny.yaml --output_dir runs/sft_tiny
    accelerate launch --num_processes 4 baselines/sft_train.py --config recipes/baselines/sft.yaml

Same rows, prompts, adapter, caps and hand-off as `opsd_train.py`. One step trains on at most as many sequences as OPSD samples. The adapter
is trained and has to be evaluated in one mode (`student_thinking` = `eval_thinking`): siyan-zhao/OPSD issue 7 is what happens otherwise.
Nothing is sampled, so `tokens_generated` is 0: solutions are paid for elsewhere. No telemetry: TRL's trainers send none with the variables
of `library_environment`, which are set first.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from opsd.entry import exit_on_bad_input, library_environment

for key, value in library_environment(os.cpu_count()).items():
    os.environ.setdefault(key, value)

IGNORED = -100  # the label of tokens without a loss


def main(argv: list[str]) -> None:
    from trl import SFTConfig

    from baselines.common import parse, prepare
    from baselines.training import evaluate

    parsed = parse(SFTConfig, argv)
    check_sft_args(parsed[1])
    run = prepare(parsed, Path(os.environ.get("OPSD_CACHE") or Path.home() / ".cache" / "opsd"))
    evaluate(run, None)
    evaluate(run, train(run, sys.argv))


def check_sft_args(args) -> None:
    """Refuses what would change the number of sequences a step, or how tokens are counted. Raises ValueError."""
    for name in ("packing", "padding_free", "assistant_only_loss"):
        if getattr(args, name):
            raise ValueError(f"{name}=true must be false: a step counts sequences, and their labels are made here")
    if args.dataset_kwargs:
        raise ValueError(f"dataset_kwargs={args.dataset_kwargs} is set by sft_train.py; remove it")


def examples(rows, tokenizer, max_length: int | None, overlong: str):
    """(dataset of `input_ids` and `labels`, longest sequence): prompt, solution, end token; only the last two have a loss."""
    from datasets import Dataset

    from baselines.common import within

    targets = tokenizer(rows.texts, add_special_tokens=False)["input_ids"]
    targets = [ids + [tokenizer.eos_token_id] for ids in targets]
    lengths = [len(p) + len(t) for p, t in zip(rows.prompt_ids, targets, strict=True)]
    kept = range(len(lengths)) if max_length is None else within(lengths, max_length, "max_length", overlong)
    columns = {
        "input_ids": [rows.prompt_ids[i] + targets[i] for i in kept],
        "labels": [[IGNORED] * len(rows.prompt_ids[i]) + targets[i] for i in kept],
    }
    return Dataset.from_dict(columns), max(lengths[i] for i in kept)


def train(run, argv: list[str]) -> Path:
    """One run; returns the folder of the adapter."""
    from trl import SFTTrainer

    from baselines.common import check_context, load, read_rows
    from baselines.training import train_and_save

    model, tokenizer = load(run)
    rows = read_rows(run, tokenizer, run.data.privileged_column)
    dataset, longest = examples(rows, tokenizer, run.args.max_length, run.data.overlong)
    check_context(run, longest, "lower max_length, with overlong=drop")
    counts = rows.counts | {"examples": len(dataset), "longest_sequence": longest}
    run.args.dataset_kwargs = {"skip_prepare_dataset": True}  # the rows are labelled token ids; TRL must not cut them
    run.args.include_num_input_tokens_seen = "non_padding"
    trainer = SFTTrainer(model=model, args=run.args, train_dataset=dataset, processing_class=tokenizer)
    return train_and_save(run, trainer, counts, argv, lambda: 0, base_may_move=False)


if __name__ == "__main__":
    exit_on_bad_input(main)
