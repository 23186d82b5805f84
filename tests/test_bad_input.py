"""Every bad input gives one line that names what, the value, what is allowed and what to do, exit code 2, and nothing on disk."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from bad_inputs import (
    CONTRADICTIONS,
    EVALUATION,
    FILTER,
    GOOD_ROW,
    LAUNCHER,
    MODELS,
    ROW_FILES,
    TEACHERS,
    TRAINING_RANGES,
)
from random_qwen3 import save_adapter, save_model
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import data_filter
import eval_aime
import opsd_train
from opsd import launch
from opsd.args import DataArgs, EvalRegime, HandoffArgs, OPSDConfig, own_fields
from opsd.entry import exit_on_bad_input
from opsd.eval_args import EvalArgs

ROOT = Path(opsd_train.__file__).parent
SECONDS = 10
ANYTHING = {  # any text is a value; whether it names something is a matter of files
    "dataset_name", "train_file", "output_dir", "eval_benchmark", "name", "model", "adapter", "benchmark", "regrade", "compare", "table",
    "vllm_load_format", "load_format",
}  # fmt: skip
LISTS = {"report_to", "vllm_server_urls", "export"}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Models, adapters and files that are wrong in one way each, beside good ones."""
    folder = tmp_path_factory.mktemp("world")
    save_model(folder / "model")
    for name in ("no_eos", "no_template", "raising", "garbled_config", "empty_config", "torn_weights", "no_weights",
                 "garbled_tokenizer", "no_tokenizer", "pickled_weights"):  # fmt: skip
        shutil.copytree(folder / "model", folder / name)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    template = tokenizer.chat_template
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder / "no_template")
    (folder / "no_template" / "chat_template.jinja").unlink()
    tokenizer.chat_template = "{{ raise_exception('no user turns') }}"
    tokenizer.save_pretrained(folder / "raising")
    tokenizer.chat_template = template
    config = json.loads((folder / "no_eos" / "tokenizer_config.json").read_text())
    (folder / "no_eos" / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": None}))
    (folder / "garbled_config" / "config.json").write_text("{")
    (folder / "empty_config" / "config.json").write_text("")
    weights = folder / "torn_weights" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    for name in ("no_weights", "pickled_weights"):
        (folder / name / "model.safetensors").unlink()
    torch.save({"x": torch.zeros(1)}, folder / "pickled_weights" / "pytorch_model.bin")
    (folder / "garbled_tokenizer" / "tokenizer.json").write_text("{")
    for path in (folder / "no_tokenizer").glob("*token*"):
        path.unlink()
    small = json.loads((folder / "model" / "config.json").read_text())
    save_model(folder / "small_vocabulary")
    _shrink_vocabulary(folder / "small_vocabulary", small["vocab_size"] - 8)

    save_adapter(folder / "adapter", folder / "model")
    save_model(folder / "wide", hidden_size=96)
    save_adapter(folder / "other_adapter", folder / "wide")
    for name in ("torn_adapter", "bin_adapter", "garbled_adapter", "nan_adapter"):
        shutil.copytree(folder / "adapter", folder / name)
    path = folder / "torn_adapter" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    (folder / "bin_adapter" / "adapter_model.safetensors").rename(folder / "bin_adapter" / "adapter_model.bin")
    (folder / "garbled_adapter" / "adapter_config.json").write_text("{")
    path = folder / "nan_adapter" / "adapter_model.safetensors"
    save_file({name: tensor * torch.nan for name, tensor in load_file(path).items()}, path)
    (folder / "empty_adapter").mkdir()

    (folder / "rows.jsonl").write_bytes(GOOD_ROW * 4)
    (folder / "problems.jsonl").write_text('{"problem": "1 + 1", "answer": 2}\n')
    (folder / "empty.jsonl").write_bytes(b"")
    (folder / "no_answer.jsonl").write_text('{"problem": "1 + 1"}\n')
    (folder / "twice.jsonl").write_text('{"id": 1, "problem": "1 + 1", "answer": 2}\n' * 2)
    (folder / "torn.jsonl").write_text('{"problem": "1 + 1", "ans')
    return folder


def _shrink_vocabulary(folder: Path, size: int) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(size)
    model.save_pretrained(folder)


def expand(text: str, world: Path) -> str:
    """`{name}` -> a path of the world."""

    def path(match: re.Match) -> str:
        name = match[1]
        if name == "missing":
            return str(world / "does_not_exist")
        return str(world / name if (world / name).exists() else world / f"{name}.jsonl")

    return re.sub(r"\{(\w+)\}", path, text)


def refusal(main, argv: list[str], capsys, monkeypatch) -> str:
    """Runs an entry point as a program; the one line that it prints, after every check that holds for all of them."""
    monkeypatch.setattr(sys, "argv", ["program", *argv])
    capsys.readouterr()
    started = time.process_time()  # of this process, so that a busy machine does not count
    with pytest.raises(SystemExit) as end:
        exit_on_bad_input(main)
    assert end.value.code == 2
    assert time.process_time() - started < SECONDS
    lines = capsys.readouterr().err.splitlines()
    assert "Traceback" not in "\n".join(lines)
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1 and lines[-1] == errors[0], lines
    assert re.search(
        r";|must|choose from|expected|invalid|exactly one|not given|needs?|has no effect|contradicts", errors[0]
    ), "says neither what is allowed nor a remedy"
    assert errors[0].isprintable()
    return errors[0]


def training_argv(world: Path, tmp_path: Path, changes: dict) -> list[str]:
    flags = {
        "model_name_or_path": "{model}", "train_file": "{rows}", "output_dir": str(tmp_path / "out"), "max_steps": "2",
        "rollouts_per_step": "4", "per_device_train_batch_size": "4", "rollout_engine": "transformers", "use_cpu": "true",
        "dtype": "float32", "use_peft": "true", "lora_r": "4", "lora_target_modules": "q_proj", "max_completion_length": "8",
    }  # fmt: skip
    flags |= changes
    return [f"--{name}={expand(value, world)}" for name, value in flags.items() if value is not None]


def refuse_training(world, tmp_path, capsys, monkeypatch, changes: dict, words: list[str]) -> None:
    line = refusal(opsd_train.main, training_argv(world, tmp_path, changes), capsys, monkeypatch)
    for word in words:
        assert word in line, line
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in TRAINING_RANGES.items() for v in values])
def test_training_argument_out_of_range(world, tmp_path, capsys, monkeypatch, name, value):
    monkeypatch.chdir(tmp_path)
    refuse_training(world, tmp_path, capsys, monkeypatch, {name: value}, [name])


@pytest.mark.parametrize(("changes", "words"), CONTRADICTIONS)
def test_contradicting_training_flags(world, tmp_path, capsys, monkeypatch, changes, words):
    refuse_training(world, tmp_path, capsys, monkeypatch, changes, words)


@pytest.mark.parametrize(("model", "words"), MODELS)
def test_model_that_cannot_be_trained(world, tmp_path, capsys, monkeypatch, model, words):
    refuse_training(world, tmp_path, capsys, monkeypatch, {"model_name_or_path": model}, words)


@pytest.mark.parametrize(("changes", "words"), TEACHERS)
def test_teacher_that_does_not_fit(world, tmp_path, capsys, monkeypatch, changes, words):
    refuse_training(world, tmp_path, capsys, monkeypatch, changes, words)


def typed_fields(owner) -> list[str]:
    """Fields for which arbitrary text is no value: numbers, booleans, choices."""
    own = (
        set(own_fields())
        | {f.name for f in dataclasses.fields(EvalArgs)}
        | {f.name for f in dataclasses.fields(EvalRegime)}
    )
    return [
        f.name for f in dataclasses.fields(owner)
        if f.name in own and f.name not in (ANYTHING | LISTS) and (f.metadata.get("choices") or f.type not in (str, str | None, list[str]))
    ]  # fmt: skip


@pytest.mark.parametrize("name", [n for owner in (DataArgs, OPSDConfig, HandoffArgs) for n in typed_fields(owner)])
def test_training_argument_of_the_wrong_type(world, tmp_path, capsys, monkeypatch, name):
    refuse_training(world, tmp_path, capsys, monkeypatch, {name: "perhaps"}, [f"--{name}", "perhaps"])


@pytest.mark.parametrize("name", [n for owner in (EvalArgs, EvalRegime) for n in typed_fields(owner)])
def test_evaluation_argument_of_the_wrong_type(world, tmp_path, capsys, monkeypatch, name):
    refuse_evaluation(world, tmp_path, capsys, monkeypatch, [f"--{name}", "perhaps"], [f"--{name}", "perhaps"])


def test_every_field_has_a_bad_value():
    tried = set(TRAINING_RANGES) | ANYTHING | {name for changes, _ in CONTRADICTIONS for name in changes}
    for owner in (DataArgs, OPSDConfig, HandoffArgs, EvalArgs, EvalRegime):
        tried |= set(typed_fields(owner))
    names = {*own_fields(), *(f.name for owner in (EvalArgs, EvalRegime) for f in dataclasses.fields(owner))}
    assert names - tried <= LISTS


def row_file(tmp_path: Path, name: str, content) -> Path:
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    return path


@pytest.mark.parametrize(("name", "content", "words"), ROW_FILES)
def test_bad_rows_in_training(world, tmp_path, capsys, monkeypatch, name, content, words):
    path = row_file(tmp_path, name, content)
    refuse_training(world, tmp_path, capsys, monkeypatch, {"train_file": str(path)}, ["train_file=", *words])


@pytest.mark.parametrize(("name", "content", "words"), ROW_FILES)
def test_bad_rows_in_the_filter(world, tmp_path, capsys, monkeypatch, name, content, words):
    path = row_file(tmp_path, name, content)
    flags = ["--answer_pattern", "", "--min_trace_tokens", "0", "--drop_duplicates"]
    refuse_filter(world, tmp_path, capsys, monkeypatch, ["--input", str(path), *flags], words)


def test_a_line_of_a_hundred_megabytes(world, tmp_path, capsys, monkeypatch):
    path = tmp_path / "long.jsonl"
    with open(path, "wb") as out:
        out.write(GOOD_ROW + b'{"problem": "')
        for _ in range(100):
            out.write(b"x" * 2**20)
        out.write(b'"}\n')
    words = ["train_file=", "row 2: longer than"]
    refuse_training(world, tmp_path, capsys, monkeypatch, {"train_file": str(path)}, words)
    huge = tmp_path / "huge.jsonl"  # a field that is whole but longer than any prompt may be
    huge.write_bytes(GOOD_ROW.replace(b"1 + 1", b"x" * 100_000))
    refuse_training(
        world, tmp_path, capsys, monkeypatch, {"train_file": str(huge)}, ["max_prompt_length=2048", "longest"]
    )


def refuse_filter(world, tmp_path, capsys, monkeypatch, flags: list[str], words: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    argv = ["--input", "{rows}", "--output", "kept.jsonl", "--report", "counts.json", *flags]
    line = refusal(data_filter.main, [expand(word, world) for word in argv], capsys, monkeypatch)
    for word in words:
        assert word in line, line
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("flags", "words"), FILTER)
def test_bad_filter_flags(world, tmp_path, capsys, monkeypatch, flags, words):
    refuse_filter(world, tmp_path, capsys, monkeypatch, flags, words)


def refuse_evaluation(world, tmp_path, capsys, monkeypatch, flags: list[str], words: list[str]) -> None:
    argv = ["--model", "{model}", "--benchmark", "{problems}", "--engine", "transformers", "--max_new_tokens", "8"]
    argv += ["--output_dir", str(tmp_path / "out"), *flags]
    if {"--compare", "--table", "--regrade"} & set(flags) and "--dry_run" not in flags:
        argv = flags
    line = refusal(eval_aime.main, [expand(word, world) for word in argv], capsys, monkeypatch)
    for word in words:
        assert word in line, line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("flags", "words"), EVALUATION)
def test_bad_evaluation_flags(world, tmp_path, capsys, monkeypatch, flags, words):
    refuse_evaluation(world, tmp_path, capsys, monkeypatch, flags, words)


@pytest.mark.parametrize(("recipe", "flags", "environment", "words"), LAUNCHER)
def test_bad_recipes(tmp_path, capsys, monkeypatch, recipe, flags, environment, words):
    path, command = tmp_path / "recipe.env", tmp_path / "command"
    if recipe is not None:
        path.write_bytes(recipe)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    line = refusal(launch.main, [str(command), str(path), *flags], capsys, monkeypatch)
    for word in words:
        assert word in line, line
    assert not command.exists()


@pytest.mark.parametrize("debug", [False, True])
def test_a_program_of_its_own(tmp_path, debug):
    argv = ["--input", "nosuch.jsonl", "--output", "kept.jsonl", "--report", "counts.json", *["--debug"] * debug]
    run = subprocess.run(
        [sys.executable, ROOT / "data_filter.py", *argv],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=dict(os.environ),
    )
    assert ("Traceback" in run.stderr) == debug and run.returncode == (1 if debug else 2)
    assert "input=nosuch.jsonl does not exist" in run.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_the_table_is_long_enough():
    ranges = sum(map(len, TRAINING_RANGES.values()))
    assert ranges + sum(map(len, (CONTRADICTIONS, ROW_FILES, FILTER, EVALUATION, MODELS, TEACHERS, LAUNCHER))) >= 250
