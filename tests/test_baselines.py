"""The SFT and GRPO baselines: two steps each on a random model, whole adapters, caps, the reward, and the prompts of the student."""

import json
from pathlib import Path

import pytest
import yaml
from made_up_rows import make_row, write_lines
from random_qwen3 import save_model
from trl import GRPOConfig, SFTConfig

from baselines import grpo_train, sft_train
from baselines.common import load, parse, prepare, read_rows, sequences_per_step, within
from opsd.adapter import check_adapter
from opsd.entry import library_environment
from opsd.prompts import render_ids, student_messages
from opsd.recipe import read_caps
from opsd.runinfo import read_jsonl

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted((ROOT / "recipes" / "baselines").glob("*.yaml"))
MAX_NEW = 8


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """What both baselines are told about model, rows and budget."""
    root = tmp_path_factory.mktemp("baselines")
    model = save_model(root / "model")
    rows = write_lines(root / "rows.jsonl", [make_row(i % 4) for i in range(12)] + [make_row(Answer="x")])
    return [
        f"--model_name_or_path={model}", f"--train_file={rows}", "--answer_pattern=[0-9]+", "--use_peft=true", "--lora_r=4",
        "--lora_target_modules", "q_proj", "v_proj", "down_proj", "--lora_dropout=0", "--max_steps=2", "--learning_rate=1e-2",
        "--per_device_train_batch_size=4", "--use_cpu=true", "--gradient_checkpointing=false", "--disable_tqdm=true",
    ]  # fmt: skip


def sft(flags, output, *more):
    return parse(SFTConfig, [*flags, "--output_dir", str(output), "--max_length=512", *more])


def grpo(flags, output, *more):
    sampling = ["--num_generations=2", f"--max_completion_length={MAX_NEW}", "--use_vllm=false"]
    return parse(GRPOConfig, [*flags, "--output_dir", str(output), *sampling, *more])


def test_sft_trains_two_steps_on_prompt_and_solution(flags, tmp_path):
    run = prepare(sft(flags, tmp_path), tmp_path / "cache")
    model, tokenizer = load(run)
    rows = read_rows(run, tokenizer, "solution")
    dataset, longest = sft_train.examples(rows, tokenizer, run.args.max_length, run.data.overlong)
    prompt = render_ids(tokenizer, student_messages(make_row(0)["problem"]), enable_thinking=False)
    target = tokenizer(make_row(0)["solution"])["input_ids"] + [tokenizer.eos_token_id]
    assert dataset[0] == {"input_ids": prompt + target, "labels": [-100] * len(prompt) + target}
    assert len(dataset) == 12 and longest == max(map(len, dataset["input_ids"]))

    adapter = sft_train.train(run, ["sft"])
    assert check_adapter(adapter)[1] > 0, "the adapter did not move"
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["status"] == "finished" and record["trainer"] == "SFTTrainer" and record["steps"] == 2
    # 8 of the 12 sequences, whose lengths differ by nothing
    assert record["tokens_trained"] == 8 * longest and record["tokens_generated"] == 0
    assert record["gpu_seconds"] == 0 < record["wall_seconds"]
    assert record["base_sha256_after"] == record["base_sha256_before"]
    steps = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in steps] == [1, 2] and all(row["loss/objective"] > 0 for row in steps)


def test_grpo_trains_two_steps_on_sampled_groups(flags, tmp_path, monkeypatch):
    run = prepare(grpo(flags, tmp_path), tmp_path / "cache")
    trainers, build = [], grpo_train.build
    monkeypatch.setattr(grpo_train, "build", lambda *a: trainers.append(build(*a)) or trainers[0])
    # a reward that a random model gets: without it every advantage, and so every gradient, is zero
    seen = []

    def reward(self, completion_ids, answer, prompts, **columns):
        self.tokens += sum(map(len, completion_ids))
        seen.append((prompts, completion_ids))
        return [float(len(set(ids))) for ids in completion_ids]

    monkeypatch.setattr(grpo_train.BoxedAnswerReward, "__call__", reward)
    adapter = grpo_train.train(run, ["grpo"])
    assert check_adapter(adapter)[1] > 0, "the adapter did not move"
    trainer = trainers[0][0]
    sampled = [ids for _, completions in seen for ids in completions]
    assert len(sampled) == 2 * 4 and all(prompts[0] == prompts[1] != prompts[2] for prompts, _ in seen)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["tokens_generated"] == sum(map(len, sampled))
    prompt_ids, _, _ = trainer._tokenize_prompts(seen[0][0])
    problem = next(make_row(i)["problem"] for i in range(4) if make_row(i)["problem"] in seen[0][0][0][0]["content"])
    assert prompt_ids[0] == render_ids(trainer.processing_class, student_messages(problem), enable_thinking=False)
    assert record["tokens_trained"] == record["tokens_generated"] + 8 * len(prompt_ids[0])
    assert record["status"] == "finished" and record["trainer"] == "GRPOTrainer"
    assert record["base_sha256_after"] == record["base_sha256_before"]
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]


def test_the_reward_is_the_graders_verdict(flags, tmp_path):
    run = prepare(grpo(flags, tmp_path), tmp_path / "cache")
    _, tokenizer = load(run)
    reward = grpo_train.BoxedAnswerReward(tokenizer, {tokenizer.eos_token_id})
    texts = ["So \\boxed{3}", "So \\boxed{3} or \\boxed{2}", "no box", "<think>\\boxed{3}", "\\boxed{3"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    ids[0].append(tokenizer.eos_token_id)
    assert reward(completion_ids=ids, answer=["3"] * 5, prompts=None, trainer_state=None) == [1.0, 0, 0, 0, 0]
    assert reward.tokens == sum(map(len, ids))
    assert reward.__name__ == "correct"


@pytest.mark.parametrize("parsed", [sft, grpo])
def test_budgets_above_the_caps_are_refused(parsed, flags, tmp_path):
    steps, rollouts = read_caps(ROOT / "train_capped.sh")
    for more, message in (
        ([f"--max_steps={steps + 1}"], f"max_steps={steps + 1} must be 1 to {steps}"),
        (["--max_steps=-1"], "max_steps=-1 must be 1"),
        ([f"--gradient_accumulation_steps={rollouts // 4 + 1}"], f"are {rollouts + 4} sequences a step"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(parsed(flags, tmp_path, *more), tmp_path / "cache")
    assert not list(tmp_path.iterdir()), "something was written before the refusal"
    assert sequences_per_step(parsed(flags, tmp_path, "--gradient_accumulation_steps=2")[1]) == 8


def test_full_fine_tuning_of_a_baseline_is_refused(flags, tmp_path):
    with pytest.raises(ValueError, match="use_peft=false must be true: the baselines train and save an adapter"):
        prepare(sft(flags, tmp_path, "--use_peft=false"), tmp_path / "cache")


def test_settings_that_break_the_counting_are_refused(flags, tmp_path):
    for more in (["--num_iterations=2"], ["--steps_per_generation=2"], ["--generation_batch_size=8"]):
        with pytest.raises(ValueError, match="a step must sample the 4 sequences"):
            grpo_train.check_grpo_args(grpo(flags, tmp_path, *more)[1])
    with pytest.raises(ValueError, match="chat_template_kwargs"):
        grpo_train.check_grpo_args(grpo(flags, tmp_path, "--chat_template_kwargs", '{"enable_thinking": true}')[1])
    with pytest.raises(ValueError, match="packing=true must be false"):
        sft_train.check_sft_args(sft(flags, tmp_path, "--packing=true")[1])
    with pytest.raises(ValueError, match="max_length=5 tokens is exceeded by 1 of 2 rows \\(longest 6\\)"):
        within([4, 6], 5, "max_length", "error")
    assert within([4, 6], 5, "max_length", "drop") == [0]


def test_a_mode_that_differs_between_training_and_evaluation_is_warned_about(flags, tmp_path, caplog):
    prepare(sft(flags, tmp_path, "--evaluate_after=true", "--eval_thinking=false"), tmp_path)
    assert not caplog.records
    prepare(sft(flags, tmp_path, "--evaluate_after=true", "--eval_thinking=true"), tmp_path)
    assert "scored in a mode that it was not trained in" in caplog.text


def test_precision_follows_the_model_and_nothing_is_reported(flags, tmp_path):
    assert library_environment(1)["HF_HUB_DISABLE_TELEMETRY"] == "1"  # the variable that TRL's telemetry honours
    args = sft(flags, tmp_path)[1]
    assert args.bf16 is False and args.report_to in ("none", ["none"], [])
    assert sft(flags, tmp_path, "--dtype=bfloat16")[1].bf16 is True


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_parse_within_the_caps_and_name_one_mode(path):
    config = GRPOConfig if path.stem.startswith("grpo") else SFTConfig
    data_args, args, handoff, model_args, own = parse(config, ["--config", str(path), "--bf16=false", "--use_cpu=true"])
    steps, rollouts = read_caps(ROOT / "train_capped.sh")
    assert args.max_steps <= steps and sequences_per_step(args) == rollouts
    assert handoff.eval_thinking == own.student_thinking
    assert model_args.use_peft and yaml.safe_load(path.read_text())["lora_r"] == model_args.lora_r
    assert len(RECIPES) == 4
