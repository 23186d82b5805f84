"""Every ablation recipe: holds a reasoned difference with its reported effect, resolves on both bases, and trains two steps on the CPU."""

import json
import math
from pathlib import Path

import pytest
from made_up_rows import write_lines

from opsd.args import training_parser
from opsd.launch import resolve
from opsd.runinfo import read_jsonl
from opsd.setup_run import resolve_world
from opsd_train import train
from tiny import world
from tiny.build import world_digest
from tiny.pretrain import PretrainSettings, make_model
from tiny.tokenizer import build_tokenizer

ROOT = Path(__file__).resolve().parent.parent
ABLATIONS = sorted((ROOT / "recipes" / "ablations").glob("*.env"))
NAMED_BY_THE_ISSUE = {
    "direction_clip", "no_clip", "token_clip", "thinking_student", "matched_teacher", "trace_context", "position_gap",
    "published_padding", "completion_2048", "beta_0.5", "beta_1", "top_k_tail", "top_k_no_tail", "sampled_token", "bf16_logits",
    "merged_rollouts", "constant_lr", "unfiltered", "skip_first_tokens", "teacher_open_think", "weight_position",
    "weight_discrepancy", "weight_contrastive", "ema_teacher", "live_teacher", "reference_only", "reason_first", "weight_average",
}  # fmt: skip


FOR_TWO_STEPS = {
    "weight_average": {"wavg_last": 2},  # two steps have no last twenty
    "reason_first": {"reason_first_tokens": 8},
    "completion_2048": {"max_completion_length": 400},  # the tiny world's context has 512 positions
}


def values(*arguments: str) -> dict[str, str]:
    """Name -> value of a resolved recipe, as the launcher prints it."""
    lines = resolve(list(arguments), {}, gpus=0).report().splitlines()[:-1]
    pairs = (line.rsplit("  (", 1)[0].split(" = ", 1) for line in lines)
    return dict(pairs)


@pytest.fixture(scope="module")
def seed_recipe():
    return values(str(ROOT / "recipe.env"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The tiny world as recipes/tiny.env finds it, with its model not yet pretrained: what is tested is that everything runs."""
    root = tmp_path_factory.mktemp("cache")
    folder = root / f"tiny-0-{world_digest(0, PretrainSettings())}"
    words = build_tokenizer()
    make_model(words, seed=0).save_pretrained(folder / "model")
    words.save_pretrained(folder / "model")
    write_lines(folder / "train.jsonl", world.make_rows(0)[0])
    return root


def test_every_ablation_of_the_issue_has_its_recipe():
    assert {path.stem for path in ABLATIONS} >= NAMED_BY_THE_ISSUE
    assert len(ABLATIONS) >= 31


@pytest.mark.parametrize("path", ABLATIONS, ids=lambda path: path.stem)
def test_an_ablation_holds_its_difference_and_nothing_else(path, seed_recipe):
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ") and lines[1].startswith("# Reported: ") and lines[2] == ""
    assert lines[3].startswith("export OPSD_BASE_RECIPE=recipe.env  # ")
    assert lines[4].startswith(f"export OPSD_OUTPUT_DIR=runs/{path.stem}  # ")
    resolved = values(str(path))
    differing = {name for name, value in resolved.items() if value != seed_recipe.get(name)} - {
        "base_recipe",
        "output_dir",
    }
    written = {line.split("=")[0].removeprefix("export OPSD_").lower(): line for line in lines[5:]}
    assert all("  # " in line for line in written.values())
    stated = {name for name, line in written.items() if "stated" in line}  # equal to the seed recipe, for other bases
    assert differing == written.keys() - stated and (differing or stated)
    tiny = values(str(path), "--base_recipe", "recipes/tiny.env")
    assert tiny["world"] == "tiny" and all(tiny[name] == resolved[name] for name in differing - {"model_name_or_path"})


@pytest.mark.parametrize("path", ABLATIONS, ids=lambda path: path.stem)
def test_an_ablation_trains_two_steps_on_the_tiny_world(path, cache, tmp_path):
    flags = {
        "base_recipe": "recipes/tiny.env", "output_dir": tmp_path / "run", "max_steps": 2, "warmup_steps": 0, "rollouts_per_step": 4,
        "max_completion_length": 12, "rollout_engine": "transformers", "max_train_rows": 16, "evaluate_before": "false",
        "evaluate_after": "false", "disable_tqdm": "true", "save_strategy": "no",
    }  # fmt: skip
    flags |= FOR_TWO_STEPS.get(path.stem, {})
    arguments = resolve(
        [str(path), *(f"--{name}={value}" for name, value in flags.items())], {}, gpus=0
    ).training_arguments
    data_args, args, handoff, model_args = training_parser().parse_args_into_dataclasses(arguments)
    resolve_world(data_args, handoff, model_args, cache)
    trained = train(data_args, args, handoff, model_args, None)
    assert (trained / f"{'adapter_' if model_args.use_peft else ''}model.safetensors").is_file()
    assert (tmp_path / "run" / "adapter_wavg").is_dir() == (path.stem == "weight_average")
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(math.isfinite(row["loss/objective"]) and row["optim/grad_norm"] > 0 for row in rows)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "finished" and record["arguments"]["OPSDConfig"]["token_weight"] == args.token_weight
