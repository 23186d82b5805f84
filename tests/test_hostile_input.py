"""Hostile input: nothing is unpickled, no remote code, secrets stay in the environment, and text from outside stays text."""

import ast
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from random_qwen3 import save_model
from test_bad_input import refusal

import data_filter
import opsd_train
from opsd import launch
from opsd.entry import library_environment, printable
from opsd.model import load_base
from opsd.recipe import Names, read_recipe
from opsd.report_html import completion
from opsd.server_process import server_command

ROOT = Path(opsd_train.__file__).parent
SOURCES = [p for folder in ("opsd", "callbacks", "tiny", "baselines") for p in sorted((ROOT / folder).glob("*.py"))]
SOURCES += sorted(ROOT.glob("*.py"))
SECRET_NAMES = ("HF_TOKEN", "OPSD_VLLM_API_KEY", "WANDB_API_KEY", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY")
SECRETS = {name: f"secret-of-{name.lower()}" for name in SECRET_NAMES}


def calls(path: Path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            yield node, name, {keyword.arg: keyword.value for keyword in node.keywords}


def test_nothing_unpickles_runs_text_or_trusts_remote_code():
    for path in SOURCES:
        imports = {
            alias.name.split(".")[0]
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in (node.names if isinstance(node, ast.Import) else [ast.alias(node.module or "")])
        }
        assert not imports & {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}, path
        for node, name, keywords in calls(path):
            where = f"{path.name}:{node.lineno}"
            if name == "load" and ast.unparse(node.func) == "torch.load":
                assert ast.literal_eval(keywords["weights_only"]) is True, where
            owner = ast.unparse(node.func)
            assert owner not in ("eval", "exec", "os.system", "yaml.load", "os.popen"), where
            assert "shell" not in keywords, where
            assert "trust_remote_code" not in keywords, where


class Explosive:
    def __init__(self, marker: Path):
        self.marker = str(marker)

    def __reduce__(self):
        return (open, (self.marker, "w"))


def test_weights_that_are_a_pickle_are_refused(tmp_path):
    save_model(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save({"x": Explosive(tmp_path / "marker")}, tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(ValueError, match="safetensors"):
        load_base(str(tmp_path / "model"))
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_states_of_a_checkpoint_cannot_run_code(tmp_path, name):
    """What transformers does with these files: `torch.load(…, weights_only=True)`."""
    with open(tmp_path / name, "wb") as out:
        pickle.dump(Explosive(tmp_path / "marker"), out)
    torch.save({"x": Explosive(tmp_path / "marker")}, tmp_path / f"zip-{name}")
    for path in (tmp_path / name, tmp_path / f"zip-{name}"):
        with pytest.raises(pickle.UnpicklingError):
            torch.load(path, weights_only=True)
    assert not (tmp_path / "marker").exists()
    import transformers.trainer

    source = Path(transformers.trainer.__file__)
    loads = [(node, keywords) for node, _, keywords in calls(source) if ast.unparse(node.func) == "torch.load"]
    assert loads and all(ast.literal_eval(keywords["weights_only"]) is True for _, keywords in loads)


def test_secrets_reach_neither_files_nor_logs(tmp_path):
    save_model(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"problem": "1 + 1", "solution": "It is 2."}\n' * 4)
    flags = {
        "model_name_or_path": tmp_path / "model", "train_file": tmp_path / "rows.jsonl", "output_dir": tmp_path / "out", "max_steps": 1,
        "rollouts_per_step": 2, "per_device_train_batch_size": 2, "max_completion_length": 4, "rollout_engine": "transformers",
        "use_cpu": "true", "dtype": "float32", "use_peft": "true", "lora_r": 4, "lora_target_modules": "q_proj",
    }  # fmt: skip
    command = [sys.executable, ROOT / "opsd_train.py", *(f"--{name}={value}" for name, value in flags.items())]
    run = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ) | SECRETS)
    assert run.returncode == 0, run.stderr[-2000:]
    assert json.loads((tmp_path / "out" / "run.json").read_text())["status"] == "finished"
    texts = {
        str(path): path.read_bytes().decode(errors="replace")
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    texts |= {"stdout": run.stdout, "stderr": run.stderr}
    for where, text in texts.items():
        assert not any(secret in text for secret in SECRETS.values()), where
    assert not list((tmp_path / "out").rglob("*.bin"))


def test_a_token_on_the_command_line_is_refused_without_being_repeated(tmp_path, capsys, monkeypatch):
    argv = [
        "--model_name_or_path=x",
        "--train_file=y",
        "--max_steps=1",
        "--use_cpu=true",
        f"--hub_token={SECRETS['HF_TOKEN']}",
    ]
    line = refusal(opsd_train.main, argv, capsys, monkeypatch)
    assert "hub_token" in line and SECRETS["HF_TOKEN"] not in line


def test_control_characters_do_not_reach_the_terminal(tmp_path, capsys, monkeypatch):
    assert printable("a\x1b[2Jb\rc\u202ed\x9b\n\te") == "a\\x1b[2Jb\\rc\\u202ed\\x9b\n\te"
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"\\u001b[2J\\u202e": 1}\n')
    argv = ["--input", str(rows), "--output", str(tmp_path / "o.jsonl"), "--report", str(tmp_path / "r.json")]
    assert "\\x1b[2J\\u202e" in refusal(data_filter.main, argv, capsys, monkeypatch)


def test_a_recipe_is_data(tmp_path, capsys, monkeypatch):
    marker = tmp_path / "marker"
    for text in (
        f"$(touch {marker})",
        f"`touch {marker}`",
        f"x; touch {marker}",
        f'"$(touch {marker})"',
        f"x && touch {marker}",
    ):
        recipe = tmp_path / "recipe.env"
        recipe.write_text(f"export OPSD_MAX_STEPS={text}\n")
        refusal(launch.main, [str(tmp_path / "command"), str(recipe)], capsys, monkeypatch)
    (tmp_path / "recipe.env").write_text(f"export OPSD_OUTPUT_DIR='$(touch {marker})'\n")
    settings = read_recipe(tmp_path / "recipe.env", Names(["output_dir"], []))
    assert settings["output_dir"].text == f"$(touch {marker})"  # quoted: text, in a shell as here
    assert not marker.exists()


def test_model_text_in_a_report_is_escaped():
    sample = {"correct": False, "extracted": "<b>1</b>", "sample_index": 0, "reason": "int", "token_count": 3, "truncated": False,
              "text": "<script>alert(1)</script>\x1b[2J</pre>"}  # fmt: skip
    page = completion(sample, '<img src=x onerror="x">')
    assert "<script" not in page and "<img" not in page and "<b>" not in page and "\x1b" not in page


def test_file_names_from_data_reach_no_path(tmp_path):
    """Ids of rows and problems are anything; everything that is written has a name of ours."""
    rows = tmp_path / "rows.jsonl"
    row = {"id": "../../escape", "problem": "1 + 1", "solution": "2", "Answer": "2", "source": "/etc/passwd"}
    rows.write_text(json.dumps(row) + "\n")
    (tmp_path / "out").mkdir()
    flags = ["--answer_pattern", "", "--min_trace_tokens", "0", "--benchmark_output", str(tmp_path / "out" / "b.jsonl")]
    output = ["--output", str(tmp_path / "out" / "o.jsonl"), "--report", str(tmp_path / "out" / "r.json")]
    data_filter.main(["--input", str(rows), *output, *flags])
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["b.jsonl", "o.jsonl", "out", "r.json", "rows.jsonl"]


def test_the_server_binds_to_loopback_and_telemetry_is_off():
    command = server_command("model", 1, dtype="float32", max_model_len=8, max_num_seqs=1, max_lora_rank=8)
    assert command[command.index("--host") + 1] == "127.0.0.1" and not any(
        "api" in word and "key" in word for word in command
    )
    environment = library_environment(1)
    for name in ("DO_NOT_TRACK", "VLLM_NO_USAGE_STATS", "HF_HUB_DISABLE_TELEMETRY"):
        assert environment[name] == "1"
