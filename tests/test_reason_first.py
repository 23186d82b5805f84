"""`reason_first_tokens`: the base model writes the analysis, the teacher alone reads it, and every step writes a new one."""

import pytest
from made_up_rows import make_row, write_lines
from random_qwen3 import save_model
from test_trainer import ScriptedEngine, losses, make_trainer

from opsd.args import DataArgs, OPSDConfig
from opsd.data import load_training_examples
from opsd.rollout import Rollout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)


@pytest.fixture(scope="module")
def rows(tokenizer, tmp_path_factory):
    path = write_lines(tmp_path_factory.mktemp("rows") / "rows.jsonl", [make_row(i) for i in range(8)])
    examples, counts = load_training_examples(
        DataArgs(train_file=str(path)), tokenizer, student_thinking=False, teacher_thinking=True, reason_first=True
    )
    assert counts["longest_analysis_prompt_ids"] > 0
    return list(examples)


class AnalysingEngine(ScriptedEngine):
    """Writes `text` where an analysis is asked for, and remembers what it served when."""

    def __init__(self, tokenizer, text):
        super().__init__()
        self.text = tokenizer(text, add_special_tokens=False)["input_ids"]
        self.calls, self.serving = [], None

    def sync(self, adapter_dir, step):
        self.serving = "base" if adapter_dir is None else "adapter"

    def generate(self, prompt_ids, sampling, seeds):
        self.calls.append((self.serving, sampling.max_new_tokens, tuple(map(tuple, prompt_ids)), tuple(seeds)))
        if self.serving == "base":
            return [Rollout(tuple(ids), tuple(self.text), (-1.0,) * len(self.text), "stop") for ids in prompt_ids]
        return super().generate(prompt_ids, sampling, seeds)


def test_the_base_writes_the_analysis_and_only_the_teacher_reads_it(folder, tokenizer, rows, tmp_path):
    engine = AnalysingEngine(tokenizer, "KEYIDEA")
    trainer = make_trainer(folder, tokenizer, tmp_path, engine=engine, rows=rows, reason_first_tokens=9, max_steps=2)
    trainer.train()
    assert [(serving, tokens) for serving, tokens, *_ in engine.calls] == [("base", 9), ("adapter", 8)] * 2
    assert engine.calls[0][3] != engine.calls[2][3]  # a new analysis every step
    for example, rollout in zip(trainer.micro_batches[0].examples, trainer.micro_batches[0].rollouts, strict=True):
        teacher = tokenizer.decode(example["teacher_prompt_ids"]).replace(" ", "")
        assert "KEYIDEA" in teacher and teacher.count("assistant") == 2
        assert teacher.index("KEYIDEA") > teacher.index("Writenotesonly")
        assert "KEYIDEA" not in tokenizer.decode(rollout.prompt_ids).replace(" ", "")
    assert [row["teacher/empty_analyses"] for row in trainer.state.log_history if "teacher/empty_analyses" in row] == [
        0,
        0,
    ]


def test_an_empty_analysis_leaves_the_plain_prompt_and_is_counted(folder, tokenizer, rows, tmp_path):
    plain = make_trainer(folder, tokenizer, tmp_path, rows=rows, max_steps=1)
    empty = make_trainer(
        folder,
        tokenizer,
        tmp_path,
        engine=AnalysingEngine(tokenizer, " "),
        rows=rows,
        reason_first_tokens=9,
        max_steps=1,
    )
    plain.train(), empty.train()
    assert losses(empty) == losses(plain)
    assert [r["teacher/empty_analyses"] for r in empty.state.log_history if "teacher/empty_analyses" in r] == [8]


def test_the_live_engine_writes_with_the_base_weights(folder, tokenizer, rows, tmp_path):
    options = {"rows": rows, "reason_first_tokens": 9, "max_steps": 1, "engine": "live"}
    fresh = make_trainer(folder, tokenizer, tmp_path, **options)
    moved = make_trainer(folder, tokenizer, tmp_path, **options)
    for name, parameter in moved.model.named_parameters():
        if ".lora_B." in name:
            parameter.data.fill_(0.5)
    analyses = [t._with_analyses(rows) for t in (fresh, moved)]
    assert [e["teacher_prompt_ids"] for e in analyses[0]] == [e["teacher_prompt_ids"] for e in analyses[1]]


def test_a_scoring_prompt_that_does_not_fit_the_context_is_an_error(folder, tokenizer, rows, tmp_path):
    engine = AnalysingEngine(tokenizer, "long " * 800)
    trainer = make_trainer(folder, tokenizer, tmp_path, engine=engine, rows=rows, reason_first_tokens=4000)
    with pytest.raises(ValueError, match="more than the 4088 that the model's context leaves; lower it"):
        trainer.train()


@pytest.mark.parametrize(
    "options", [{"teacher_kind": "live"}, {"rollout_sync": "merged", "rollout_engine": "transformers"}]
)
def test_teachers_that_cannot_write_are_refused(options):
    with pytest.raises(ValueError, match="reason_first_tokens > 0 needs"):
        OPSDConfig(max_steps=1, use_cpu=True, reason_first_tokens=8, **options)
