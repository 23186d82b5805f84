"""`reason_first_tokens`: the teacher first writes its own analysis of every reference, and scores with that in its context.

Data flow of a step: examples (with the texts that opsd/data.py keeps for this) -> analyses by the rollout engine serving the base model
-> scoring prompts of three turns (opsd/prompts.py) -> opsd/trainer.py. The student sees none of it.
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from opsd import prompts
from opsd.args import OPSDConfig
from opsd.rollout import SamplingSettings, derive_seed


class ReasonFirst:
    """Adds the teacher's analysis to examples; `longest_prompt` is what the model's context leaves for the scoring prompt, in tokens."""

    def __init__(self, args: OPSDConfig, tokenizer: PreTrainedTokenizerBase, longest_prompt: int):
        self._args, self._tokenizer, self._longest_prompt = args, tokenizer, longest_prompt
        self._sampling = SamplingSettings(args.temperature, args.top_p, args.top_k, args.reason_first_tokens)
        self._prefix = prompts.teacher_prefix_text(
            tokenizer, args.teacher_prefix, teacher_thinking=args.teacher_thinking
        )

    def with_analyses(self, examples: Sequence[dict], engine, step: int) -> tuple[list[dict], int]:
        """The examples with new `teacher_prompt_ids`, and how many analyses were empty.

        The engine must serve the base model. An empty analysis leaves the teacher its plain prompt: there is nothing to add.
        """
        seeds = [derive_seed(self._args.seed, step, example["example_id"], "analysis") for example in examples]
        rollouts = engine.generate([e["analysis_prompt_ids"] for e in examples], self._sampling, seeds)
        extended, empty = [], 0
        for example, rollout in zip(examples, rollouts, strict=True):
            analysis = self._tokenizer.decode(rollout.completion_ids, skip_special_tokens=True).strip()
            empty += not analysis
            extended.append(
                example | {"teacher_prompt_ids": self._prompt_ids(example, analysis)} if analysis else example
            )
        return extended, empty

    def _prompt_ids(self, example: dict, analysis: str) -> list[int]:
        messages = prompts.reason_first_messages(
            example["problem"],
            example["privileged_context"],
            analysis,
            include_problem=self._args.teacher_sees_problem,
        )
        ids = prompts.render_ids(
            self._tokenizer, messages, enable_thinking=self._args.teacher_thinking, prefix=self._prefix
        )
        if len(ids) > self._longest_prompt:
            raise ValueError(
                f"reason_first_tokens={self._args.reason_first_tokens}: the teacher prompt of example {example['example_id']} has "
                f"{len(ids)} tokens with its analysis, more than the {self._longest_prompt} that the model's context leaves; lower it"
            )
        return ids
