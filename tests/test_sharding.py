"""Sharded configurations: what is refused by name, what accelerate makes of ours, and, slow, that they train what one process trains."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from random_qwen3 import save_model
from safetensors.torch import load_file
from test_processes import free_port, write_rows

from opsd.adapter import check_adapter
from opsd.launch import resolve
from opsd.sharding import adapter_parent, check_sharding, mode_of_config, mode_of_environment

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
MODES = {"cpu": "none", "cpu_ddp": "none", "ddp": "none", "fsdp2": "fsdp2", "single": "none", "zero2": "zero2"}


def test_every_shipped_configuration_is_of_a_supported_mode():
    assert {path.stem: mode_of_config(path) for path in CONFIGS} == MODES


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}, "use zero2 or fsdp2"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 1}}, "zero_stage=1 must be 2"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1}}, "fsdp_version=1 must be 2"),
        ({"distributed_type": "MEGATRON_LM"}, "MEGATRON_LM is not supported"),
        (["a list"], "must be a mapping"),
    ],
)
def test_other_configurations_are_refused_by_name(tmp_path, config, said):
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(ValueError, match=said):
        mode_of_config(path)


def test_the_environment_says_the_same_as_the_file():
    assert mode_of_environment({}) == "none"
    assert mode_of_environment({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}) == "fsdp2"
    deepspeed = {"ACCELERATE_USE_DEEPSPEED": "true"}
    assert mode_of_environment(deepspeed | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}) == "zero2"
    with pytest.raises(ValueError, match="zero_stage=3 is refused"):
        mode_of_environment(deepspeed | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"})


ALLOWED = {
    "deepspeed": None, "fsdp": "", "teacher_kind": "base", "rollout_engine": "vllm", "rollout_sync": "adapter",
    "wavg_last": 0, "bf16": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "changed", "said"),
    [
        ("none", {"deepspeed": "own.json"}, "OPSD_ACCELERATE_CONFIG"),
        ("none", {"fsdp": "full_shard"}, "OPSD_ACCELERATE_CONFIG"),
        ("zero2", {"teacher_kind": "ema"}, "teacher_kind=ema is not possible with zero2"),
        ("zero2", {"bf16": False}, "bf16=False with dtype=bfloat16"),
        ("fsdp2", {"teacher_kind": "adapter"}, "use ddp"),
        ("fsdp2", {"rollout_engine": "transformers"}, "use vllm or vllm_server"),
        ("fsdp2", {"rollout_sync": "merged"}, "use rollout_sync=adapter"),
        ("fsdp2", {"wavg_last": 3}, "wavg_last=3"),
    ],
)
def test_combinations_that_do_not_work_are_refused_with_the_one_that_does(mode, changed, said):
    model_args = SimpleNamespace(use_peft=True, dtype="bfloat16")
    check_sharding(mode, SimpleNamespace(**ALLOWED), model_args)
    with pytest.raises(ValueError, match=said):
        check_sharding(mode, SimpleNamespace(**ALLOWED | changed), model_args)


def test_the_launcher_refuses_before_anything_starts():
    argv = ["recipe.env", "--teacher_kind", "ema"]
    with pytest.raises(ValueError, match="not possible with fsdp2"):
        resolve(argv, {"OPSD_ACCELERATE_CONFIG": "fsdp2"}, gpus=4)
    command = resolve(["recipe.env"], {"OPSD_ACCELERATE_CONFIG": "zero2"}, gpus=4).command
    assert "accelerate_configs/zero2.yaml" in command


def test_adapters_lie_where_the_servers_can_read_them(tmp_path):
    args = SimpleNamespace(vllm_server_urls=["http://127.0.0.1:8001"], output_dir=str(tmp_path / "run"))
    assert adapter_parent(args) != tmp_path / "run"
    args.vllm_server_urls.append("http://gpu-host:8001")
    assert adapter_parent(args) == tmp_path / "run" and (tmp_path / "run").is_dir()


def train(tmp_path: Path, config: str, processes: int, output_dir: Path, *flags: str) -> list[dict]:
    """One run of tests/sharded_worker.py under accelerate; the metrics of its steps."""
    batch = 8 // processes // 2
    command = [
        sys.executable, "-m", "opsd.accelerate_launch", "--config_file", f"accelerate_configs/{config}.yaml", "--num_processes",
        str(processes), "--num_machines", "1", "--dynamo_backend", "no", "--num_cpu_threads_per_process", "1", "--main_process_port",
        str(free_port()), "tests/sharded_worker.py", "--use_peft=true", "--lora_r=4", "--lora_dropout=0", "--lora_target_modules",
        "q_proj", "v_proj", "--rollouts_per_step=8", "--max_completion_length=16", "--rollout_engine=vllm", "--learning_rate=1e-3",
        "--use_cpu=true", f"--model_name_or_path={tmp_path / 'model'}", f"--train_file={tmp_path / 'rows.jsonl'}",
        f"--output_dir={output_dir}", f"--per_device_train_batch_size={batch}", "--gradient_accumulation_steps=2",
        "--max_steps=3", "--save_steps=2", *flags,
    ]  # fmt: skip
    run = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    records = map(json.loads, (output_dir / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if "loss/divergence" in record]


@pytest.mark.slow  # the first ZeRO-2 run compiles DeepSpeed's CPU communication, which takes minutes
@pytest.mark.parametrize("config", ["zero2", "fsdp2"])
def test_two_sharded_processes_train_what_one_trains_and_resume(tmp_path, config):
    save_model(tmp_path / "model", max_position_embeddings=2048)
    write_rows(tmp_path / "rows.jsonl")
    one = train(tmp_path, "cpu", 1, tmp_path / "one")
    sharded = train(tmp_path, config, 2, tmp_path / "sharded")
    assert len(one) == len(sharded) == 3
    for expected, found in zip(one, sharded, strict=True):
        for name in ("loss/divergence", "optim/grad_norm"):
            assert found[name] == pytest.approx(expected[name], rel=1e-5), (found["step"], name)
    if config == "fsdp2":  # accelerate without its patch would have trained plain replicas
        assert (tmp_path / "sharded" / "checkpoint-2" / "pytorch_model_fsdp_0").is_dir()
    assert check_adapter(tmp_path / "sharded" / "adapter")[1] > 0
    weights = {
        name: load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("one", "sharded")
    }
    assert weights["one"].keys() == weights["sharded"].keys()
    for name, tensor in weights["one"].items():
        assert (tensor - weights["sharded"][name]).abs().max() < 1e-5, name
    records = {name: json.loads((tmp_path / name / "run.json").read_text()) for name in ("one", "sharded")}
    assert records["sharded"]["base_sha256_before"] == records["sharded"]["base_sha256_after"]
    assert records["sharded"]["base_sha256_after"] == records["one"]["base_sha256_after"]

    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "sharded" / "checkpoint-2", resumed / "checkpoint-2")
    shutil.copy(tmp_path / "sharded" / "run.json", resumed)
    (again,) = train(tmp_path, config, 2, resumed, "--resume_from_checkpoint=latest")
    assert again["step"] == 3
    assert again["loss/divergence"] == pytest.approx(sharded[2]["loss/divergence"], rel=1e-6)
    tensors = load_file(resumed / "adapter" / "adapter_model.safetensors")
    for name, tensor in weights["sharded"].items():
        assert (tensor - tensors[name]).abs().max() < 1e-6, name


def test_fsdp2_in_bfloat16_follows_one_process(tmp_path):
    save_model(tmp_path / "model", max_position_embeddings=2048)
    write_rows(tmp_path / "rows.jsonl")
    mixed = ("--dtype=bfloat16", "--bf16=true", "--save_strategy=no")
    one = train(tmp_path, "cpu", 1, tmp_path / "one", *mixed)
    sharded = train(tmp_path, "fsdp2", 2, tmp_path / "sharded", *mixed)
    assert len(one) == len(sharded) == 3
    for name in ("loss/divergence", "optim/grad_norm"):  # the gradients of two processes are added in float32
        assert sharded[0][name] == pytest.approx(one[0][name], rel=1e-4), name
        for expected, found in zip(one[1:], sharded[1:], strict=True):  # adapters are gathered in bfloat16
            assert found[name] == pytest.approx(expected[name], rel=1e-2), (found["step"], name)
    assert check_adapter(tmp_path / "sharded" / "adapter")[1] > 0
