"""Divergence of a run's adapters on one fixed batch: the rollouts of its first step, scored before and after training.

    python -m bench.fixed_batch --run runs/smollm2 --output results/smollm2_fixed_batch.json

On-policy losses of different steps are taken on different samples and problems, so they need not fall; on a fixed batch they must.
"""

import argparse
import logging
import os
from pathlib import Path

from opsd.entry import exit_on_bad_input, library_environment
from opsd.runinfo import git_state, package_versions, read_json, read_jsonl, write_json

for key, value in library_environment(os.cpu_count()).items():
    os.environ.setdefault(key, value)

import torch  # noqa: E402
from peft import PeftModel  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from opsd.args import DataArgs  # noqa: E402
from opsd.batch import Layout, build_inputs  # noqa: E402
from opsd.data import load_training_examples  # noqa: E402
from opsd.divergence import mean_statistics  # noqa: E402
from opsd.fused_divergence import fused_generalized_jsd  # noqa: E402
from opsd.hidden_tap import HiddenTap  # noqa: E402
from opsd.model import load_tokenizer  # noqa: E402

logger = logging.getLogger(__name__)


def fixed_batch(run: Path, record: dict, step: int) -> tuple[list, list, list]:
    """Student prompts, teacher prompts and completions of the rollouts of `step`."""
    options = record["arguments"]
    tokenizer = load_tokenizer(options["ModelConfig"]["model_name_or_path"])
    data_args = DataArgs(**{**options["DataArgs"], "world": "none"})
    thinking = {name: options["OPSDConfig"][name] for name in ("student_thinking", "teacher_thinking")}
    examples, _ = load_training_examples(data_args, tokenizer, **thinking)
    row_of = {example_id: index for index, example_id in enumerate(examples["example_id"])}
    rollouts = [r for r in read_jsonl(run / "rollouts.jsonl") if r["step"] == step]
    if not rollouts:
        raise ValueError(f"step={step} has no rollout in {run / 'rollouts.jsonl'}; give a step that was trained")
    rows = [examples[row_of[r["example_id"]]] for r in rollouts]
    return (
        [row["prompt_ids"] for row in rows],
        [row["teacher_prompt_ids"] for row in rows],
        [r["completion_ids"] for r in rollouts],
    )


@torch.no_grad()
def hidden(model, tap: HiddenTap, prompts: list, completions: list) -> torch.Tensor:
    """Hidden states that predict the completion tokens, sequence by sequence, (N, H)."""
    parts = []
    for prompt, completion in zip(prompts, completions, strict=True):
        inputs = build_inputs([prompt], [completion], Layout(packed=False, pad_id=0))
        with tap.selecting(inputs.keep):
            parts.append(model(**inputs.forward, use_cache=False).logits)
    return torch.cat(parts)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--run", type=Path, required=True, help="Output folder of a training run.")
    parser.add_argument("--step", type=int, default=1, help="Optimizer step whose rollouts are the batch.")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING)
    logger.setLevel(logging.INFO)
    record = read_json(arguments.run / "run.json")
    options = record["arguments"]["OPSDConfig"]
    student_prompts, teacher_prompts, completions = fixed_batch(arguments.run, record, arguments.step)
    base = AutoModelForCausalLM.from_pretrained(
        record["arguments"]["ModelConfig"]["model_name_or_path"], dtype=torch.float32
    ).eval()
    tap = HiddenTap(base)
    teacher = hidden(base, tap, teacher_prompts, completions)
    folders = sorted(arguments.run.glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
    rows = []
    for name, folder in [("base", None), *((f.name, f) for f in folders), ("adapter", arguments.run / "adapter")]:
        model = base if folder is None else PeftModel.from_pretrained(base, str(folder)).eval()
        _, statistics = fused_generalized_jsd(
            hidden(model, tap, student_prompts, completions),
            teacher,
            tap.head.weight,
            None,
            beta=options["beta"],
            temperature=options["distill_temperature"],
        )
        means = mean_statistics(statistics)
        rows.append({"student": name, "divergence": means["divergence"], "student_entropy": means["student_entropy"]})
        logger.info("%s: divergence %.5f nats a token", name, means["divergence"])
        if folder is not None:
            base = model.unload()
    write_json(
        arguments.output,
        {
            "command": argv, "rows": rows, "sequences": len(completions), "tokens": sum(map(len, completions)),
            **git_state(), "versions": package_versions(),
        },
    )  # fmt: skip


if __name__ == "__main__":
    exit_on_bad_input(main)
