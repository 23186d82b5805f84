"""`eval_aime.py` from the command line on a random model: base, adapters, every refusal, and with the real vLLM (slow) ten kills."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from random_qwen3 import save_adapter, save_model, save_tokenizer

import eval_aime
from opsd.eval_args import expand_adapters, parse_eval_args, regime_hash
from opsd.eval_setup import lora_targets
from opsd.runinfo import read_json, read_jsonl

ROOT = Path(__file__).resolve().parents[1]
SHORT = ["--max_new_tokens", "24", "--samples_per_problem", "4"]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A folder with model/, run/checkpoint-2 and run/checkpoint-10, other/ (an adapter of a wider model) and problems.jsonl."""
    folder = tmp_path_factory.mktemp("world")
    save_model(folder / "model")
    save_adapter(folder / "run" / "checkpoint-2", folder / "model", seed=1)
    save_adapter(folder / "run" / "checkpoint-10", folder / "model", seed=2, rank=8)
    (folder / "run" / "run.json").write_text('{"schema": "opsd-run/1", "commit": "abc"}')
    save_model(folder / "wide", hidden_size=96)
    save_adapter(folder / "other", folder / "wide")
    rows = [{"problem": f"What is {n} + 1?", "answer": n + 1} for n in range(3)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def arguments(world: Path, output_dir: Path, *more: str, engine: str = "transformers") -> list[str]:
    start = ["--model", str(world / "model"), "--benchmark", str(world / "problems.jsonl"), "--engine", engine]
    return [*start, *SHORT, "--report", "false", "--output_dir", str(output_dir), *more]


def test_base_model(world, tmp_path, capsys):
    eval_aime.main(arguments(world, tmp_path / "out"))
    line = capsys.readouterr().out.strip()
    assert line.startswith("model: PROBLEMS avg@4 = ") and "12/12 samples" in line
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["adapter"] is None and result["training"] is None and result["benchmark"]["problems"] == 3
    assert result["prompt"].endswith("<|im_start|>assistant\n") and "What is 0 + 1?" in result["prompt"]
    assert result["regime"]["samples_per_problem"] == 4 and result["engine"]["dtype"] == "float32"
    samples = read_jsonl(tmp_path / "out" / "samples.jsonl")
    assert len(samples) == 12 and not any("<|im_end|>" in s["text"] for s in samples if not s["truncated"])
    files = {".lock", "engines", "manifest.json", "runs.jsonl", "samples.jsonl", "result.json"}
    assert {p.name for p in (tmp_path / "out").iterdir()} == files
    (run,) = read_jsonl(tmp_path / "out" / "runs.jsonl")
    assert run["samples"] == 12 and run["tokens"] == sum(s["token_count"] for s in samples) and run["engines"] == 1


def test_an_engine_adapts_the_layers_that_some_adapter_changes():
    adapters = [{"target_modules": ["q_proj", "o_proj"]}, {"target_modules": ["q_proj", "up_proj"]}]
    assert lora_targets(adapters) == ("o_proj", "q_proj", "up_proj")
    for unknown in ({"target_modules": ".*_proj"}, {"target_modules": None}, {}):
        assert lora_targets([*adapters, unknown]) is None
    assert lora_targets([]) is None


def test_checkpoints_in_one_call(world, tmp_path, capsys):
    eval_aime.main(
        arguments(world, tmp_path / "out", "--adapter", str(world / "run" / "checkpoint-*"), "--report", "true")
    )
    assert capsys.readouterr().out.count("avg@4") == 2
    texts = {}
    page = (tmp_path / "out" / "report.html").read_text()
    assert "checkpoint-2" in page and "checkpoint-10" in page and "What is 0 + 1?" in page
    for step in (2, 10):
        folder = tmp_path / "out" / f"checkpoint-{step}"
        assert (folder / "report.html").is_file()
        result = json.loads((folder / "result.json").read_text())
        assert result["training"]["step"] == step and result["training"]["run"]["commit"] == "abc"
        assert result["adapter"] == str(world / "run" / f"checkpoint-{step}") and len(result["adapter_sha256"]) == 64
        texts[step] = [s["text"] for s in read_jsonl(folder / "samples.jsonl")]
    assert texts[2] != texts[10]
    read_outs(tmp_path / "out", capsys)


def read_outs(folder: Path, capsys) -> None:
    """--compare, --table and --export on two finished results."""
    one, two = (str(folder / f"checkpoint-{step}" / "result.json") for step in (2, 10))
    eval_aime.main(["--compare", one, "--", two, "--output_dir", str(folder / "compared")])
    assert "istinguishable" in capsys.readouterr().out.splitlines()[-1]
    assert json.loads((folder / "compared" / "comparison.json").read_text())["problems"] == 3
    eval_aime.main(["--table", one, two])
    printed = capsys.readouterr().out
    assert printed.count("| model+run/checkpoint-") == 2
    eval_aime.main(
        ["--table", str(folder / "checkpoint-2"), str(folder / "checkpoint-10")]
    )  # folders mean their results
    assert capsys.readouterr().out == printed
    eval_aime.main(["--compare", str(folder / "checkpoint-2"), "--", two])
    assert "istinguishable" in capsys.readouterr().out.splitlines()[-1]
    for form in ("lm-eval", "lighteval"):
        eval_aime.main(["--output_dir", str(folder / "checkpoint-2"), "--export", form])
        path = Path(capsys.readouterr().out.strip())
        assert path == folder / "checkpoint-2" / f"{form}.json" and "problems" in path.read_text()
    eval_aime.main(["--regrade", str(folder / "checkpoint-2" / "samples.jsonl"), "--report", "false"])
    assert "avg@4" in capsys.readouterr().out
    policy = [
        "anywhere",
        "anywhere",
        "after_think",
        "after_think",
    ]  # given, kept, given in the parser's other spelling, kept
    for flags, expected in zip(
        ([f"--box_policy={policy[0]}"], [], ["--box-policy", policy[2]], []), policy, strict=True
    ):
        samples = str(folder / "checkpoint-2" / "samples.jsonl")
        eval_aime.main(["--regrade", samples, "--report", "false", *flags])
        assert read_json(folder / "checkpoint-2" / "manifest.json")["regime"]["box_policy"] == expected
    eval_aime.main(["--regrade", samples, "--report", "false", "--box_policy", "outside_unfinished_think"])
    refused(["--table", one, str(folder / "checkpoint-2" / "manifest.json")], "has schema='opsd-eval-manifest/1'")
    refused(["--table", str(folder / "nowhere.json")], "nowhere.json does not exist")
    refused(["--table", str(folder)], "result.json does not exist")


def refused(argv: list[str], *words: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        eval_aime.main(argv)
    for word in words:
        assert word in str(error.value), str(error.value)


def test_adapters_that_cannot_be_served_are_refused_before_anything_is_written(world, tmp_path):
    def with_adapter(*folders) -> list[str]:
        return arguments(world, tmp_path / "out", "--adapter", *map(str, folders))

    (tmp_path / "empty").mkdir()
    shutil.copytree(world / "run" / "checkpoint-2", tmp_path / "torn")
    weights = tmp_path / "torn" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(with_adapter(tmp_path / "nowhere"), "nowhere does not exist")
    refused(with_adapter(tmp_path / "empty"), "has no adapter_config.json")
    refused(with_adapter(tmp_path / "torn"), "not a complete safetensors file")
    refused(with_adapter(world / "other"), "wrong base model")
    refused(with_adapter(str(tmp_path / "run-*")), "matches no folder")
    refused(with_adapter(world / "other", world / "other"), "given twice")
    refused(with_adapter(world / "run" / "checkpoint-2", tmp_path / "empty"), "has no adapter_config.json")
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_a_base_by_another_name_and_a_zero_one_are_warned_about(world, tmp_path, caplog):
    shutil.copytree(world / "model", tmp_path / "renamed")
    save_adapter(tmp_path / "zero", world / "model", scale=0.0)
    argv = arguments(world, tmp_path / "out", "--model", str(tmp_path / "renamed"), "--dry_run", "true")
    eval_aime.main([*argv, "--adapter", str(tmp_path / "zero")])
    assert "base_model_name_or_path=" in caplog.text and "it is the base model" in caplog.text


def test_what_does_not_fit_is_refused(world, tmp_path):
    def flags(*more) -> list[str]:
        return arguments(world, tmp_path / "out", *more)

    refused(flags("--max_new_tokens", "1000"), "max_new_tokens=1000 and the ", "context of 512 tokens")
    refused(flags("--model", "/nowhere"), "model_name_or_path=/nowhere")
    refused(flags("--benchmark", "aime2024"), "neither a file nor one of aime24")
    refused(flags("--temperature", "-1"), "temperature=-1.0 must be finite and >= 0")
    refused(flags("--samples", "3"), "unknown argument '--samples'; did you mean --")
    refused(flags("--max_problems", "0"), "max_problems=0 must be >= 1")
    refused(flags("--kv_cache_dtype", "fp8"), "kv_cache_dtype=fp8 needs engine=vllm")
    refused(flags("--enforce_eager", "true"), "enforce_eager=True needs engine=vllm")
    refused(flags("--compare", "a", "--dry_run", "true"), "compare has 1 files")
    refused(flags("--regrade", "x", "--dry_run", "true"), "--regrade and --dry_run cannot be combined")
    refused(["--output_dir", "x"], "model is not given")
    refused(["--model", "x"], "output_dir is not given")
    assert not (tmp_path / "out").exists()


def test_a_template_without_the_switch_is_refused_with_thinking(world, tmp_path):
    shutil.copytree(world / "model", tmp_path / "model")
    tokenizer = save_tokenizer(tmp_path / "model")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}>"
    tokenizer.save_pretrained(tmp_path / "model")
    argv = arguments(world, tmp_path / "out", "--model", str(tmp_path / "model"), "--dry_run", "true")
    refused(argv, "thinking=true cannot be rendered")
    eval_aime.main([*argv, "--thinking", "false"])


def test_a_block_opened_by_the_template_counts_as_unfinished(world, tmp_path):
    shutil.copytree(world / "model", tmp_path / "model")
    tokenizer = save_tokenizer(tmp_path / "model")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
    tokenizer.save_pretrained(tmp_path / "model")
    eval_aime.main(arguments(world, tmp_path / "out", "--model", str(tmp_path / "model")))
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    samples = read_jsonl(tmp_path / "out" / "samples.jsonl")
    assert manifest["text_prefix"].strip() == "<think>"
    assert all(s["reason"] == "no_box" for s in samples if "</think>" not in s["text"])
    assert any("\\boxed" in s["text"] and "</think>" not in s["text"] for s in samples)


def test_dry_run_estimates_and_writes_nothing(world, tmp_path, capsys):
    eval_aime.main(
        arguments(world, tmp_path / "out", "--dry_run", "true", "--adapter", str(world / "run" / "checkpoint-2"))
    )
    out = capsys.readouterr().out
    assert "12 completions on 1 engine" in out and "24 tokens" in out and not (tmp_path / "out").exists()


def test_bad_input_is_one_line_and_exit_code_2(tmp_path):
    command = [sys.executable, str(ROOT / "eval_aime.py"), "--modle", "x"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and "--modle" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_without_a_network_the_cache_alone_is_used(monkeypatch):
    from huggingface_hub import constants

    def no_address(*_):
        raise OSError("no address")

    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(eval_aime.socket, "getaddrinfo", lambda *_: [])
    eval_aime.stay_offline_without_a_network()
    assert constants.HF_HUB_OFFLINE is False
    monkeypatch.setattr(eval_aime.socket, "getaddrinfo", no_address)
    eval_aime.stay_offline_without_a_network()
    assert constants.HF_HUB_OFFLINE is True and os.environ["HF_HUB_OFFLINE"] == "1"


def test_compare_arguments():
    assert parse_eval_args(["--compare", "a", "b", "--", "c"])[2] == (["a", "b"], ["c"])
    assert parse_eval_args(["--compare", "a", "b"])[2] == (["a"], ["b"])
    for bad in (["a", "b", "c"], ["a", "--"], ["a", "--", "b", "--", "c"]):
        with pytest.raises(ValueError, match="compare"):
            parse_eval_args(["--compare", *bad])


def test_patterns_expand_in_natural_order(tmp_path):
    for step in (100, 25, 75):
        (tmp_path / f"checkpoint-{step}").mkdir()
    found = expand_adapters([str(tmp_path / "checkpoint-*")])
    assert [folder.name for folder in found] == ["checkpoint-25", "checkpoint-75", "checkpoint-100"]


def test_regime_hash_ignores_what_may_differ_between_comparable_runs():
    def of(*flags: str) -> str:
        return regime_hash(parse_eval_args(["--model", "m", "--output_dir", "o", *flags])[1])

    assert of() == of("--seed", "1") == of("--samples_per_problem", "3") != of("--top_p", "0.95")
    assert of() != of("--kv_cache_dtype", "fp8")


def start(argv: list[str], log: Path) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "eval_aime.py"), *argv]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with open(log, "ab") as stderr:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, env=environment)


def texts(folder: Path) -> dict:
    samples = read_jsonl(folder / "samples.jsonl")
    keyed = {(s["problem_id"], s["sample_index"]): (s["text"], s["seed"], s["correct"]) for s in samples}
    assert len(keyed) == len(samples)
    return keyed


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [("--temperature", "1.0"), ("--temperature", "0.0")])
def test_vllm_killed_ten_times_gives_the_same_samples(world, tmp_path, sampling):
    """float32 on a CPU: whether a completion runs alone, in another batch or after an interruption, its tokens are the same."""
    more = ["--adapter", str(world / "run" / "checkpoint-2"), "--samples_per_problem", "100", "--max_new_tokens", "200"]
    more += ["--max_num_seqs", "16", *sampling]
    assert start(arguments(world, tmp_path / "whole", *more, engine="vllm"), tmp_path / "log").wait() == 0
    generator = random.Random(0)
    path = tmp_path / "killed" / "samples.jsonl"
    kills = 0
    while kills < 10:
        before = path.read_bytes().count(b"\n") if path.exists() else 0
        process = start(arguments(world, tmp_path / "killed", *more, engine="vllm"), tmp_path / "log")
        wanted = before + generator.randrange(1, 25)
        while process.poll() is None and (path.read_bytes().count(b"\n") if path.exists() else 0) < wanted:
            time.sleep(0.01)
        assert process.poll() is None, (tmp_path / "log").read_text()[-2000:]
        time.sleep(generator.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
    assert start(arguments(world, tmp_path / "killed", *more, engine="vllm"), tmp_path / "log").wait() == 0
    assert texts(tmp_path / "killed") == texts(tmp_path / "whole")


@pytest.mark.slow
def test_vllm_takes_many_prompts_at_once(world, tmp_path):
    """More prompt tokens than one step holds: on a CPU a prompt must not be split, since its seeded generator cannot be rewound."""
    more = ["--samples_per_problem", "100", "--max_num_seqs", "256", "--max_new_tokens", "4"]
    process = start(arguments(world, tmp_path / "out", *more, engine="vllm"), tmp_path / "log")
    assert process.wait() == 0, (tmp_path / "log").read_text()[-2000:]
    assert len(texts(tmp_path / "out")) == 300


def test_published_scores_are_compared_from_the_command_line(tmp_path, capsys):
    anchor, seed = "anchor=54.22,sd=1.48,runs=5", "seed=56.94,53.06,56.11"
    eval_aime.main(["--compare", anchor, "--", seed, "--output_dir", str(tmp_path)])
    assert "about 26 runs a side would give 80 % power" in capsys.readouterr().out.splitlines()[-1]
    assert json.loads((tmp_path / "comparison.json").read_text())["distinguishable"] is False
    refused(["--compare", anchor, "--", "result.json"], "a published score is compared with one other published score")
    refused(["--compare", anchor, seed, "--", seed], "a published score is compared with one other published score")
    refused(["--compare", "anchor=54.22,sd=x", "--", seed], "must read name=54.22,sd=1.48,runs=5")
    refused(["--compare", "a=54,54", "--", "b=56,56"], "are all alike (sd 0)")
    eval_aime.main(["--compare", "a=54,54", "--", "b=55,56"])
    assert "istinguishable" in capsys.readouterr().out.splitlines()[-1]
