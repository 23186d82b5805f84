"""The same run on one, two and four processes, through the launcher, gives the same losses and the same adapter (gloo, CPU)."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from random_qwen3 import save_model
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
RECIPE = {
    "use_peft": "true", "lora_r": 4, "lora_dropout": 0, "lora_target_modules": "'q_proj v_proj'", "rollouts_per_step": 8,
    "max_completion_length": 16, "rollout_engine": "transformers", "learning_rate": "1e-3", "use_cpu": "true",
}  # fmt: skip


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def write_rows(path: Path) -> None:
    rows = [{"problem": f"{n}+1", "solution": f"\\boxed{{{n + 1}}}", "Answer": str(n + 1)} for n in range(64)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_recipe(folder: Path, max_steps: int, **options: str) -> Path:
    """A recipe on a tiny random model, with its rows, in `folder`."""
    save_model(folder / "model", max_position_embeddings=2048)
    write_rows(folder / "rows.jsonl")
    values = (
        RECIPE
        | options
        | {
            "max_steps": max_steps,
            "model_name_or_path": folder / "model",
            "train_file": folder / "rows.jsonl",
        }
    )
    recipe = folder / "run.env"
    recipe.write_text("".join(f"export OPSD_{name.upper()}={value}\n" for name, value in values.items()))
    return recipe


def launch(recipe: Path, output_dir: Path, *flags: str, **environment: str) -> subprocess.Popen:
    """Starts `train_capped.sh`; its standard error lands in a file beside the output folder."""
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    name = output_dir.name + environment.get("NODE_RANK", "")
    with open(output_dir.parent / f"{name}.stderr", "ab") as stderr:
        return subprocess.Popen(
            ["bash", str(ROOT / "train_capped.sh"), str(recipe), "--output_dir", str(output_dir), *flags],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr,
            env={**os.environ, "OPSD_PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **environment},
        )  # fmt: skip


def steps(output_dir: Path) -> list[dict]:
    """The metrics of every optimizer step."""
    records = map(json.loads, (output_dir / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if "loss/divergence" in record]


def check_same(folder: Path, max_steps: int, processes: tuple[str, ...], **options: str) -> None:
    recipe = write_recipe(folder, max_steps, **options)
    weights = "model/model.safetensors" if options else "adapter/adapter_model.safetensors"
    for count in processes:
        run = launch(recipe, folder / count, OPSD_NUM_PROCESSES=count, MASTER_PORT=str(free_port()))
        assert run.wait() == 0, (folder / f"{count}.stderr").read_text()[-3000:]
    first, *others = processes
    expected = load_file(folder / first / weights)
    assert len(steps(folder / first)) == max_steps
    start = load_file(folder / "model" / "model.safetensors") if options else {}
    moved = [
        tensor - start[name] if options else tensor for name, tensor in expected.items() if options or "lora_B" in name
    ]
    assert max(tensor.abs().max() for tensor in moved) > 1e-3
    for count in others:
        for one, other in zip(steps(folder / first), steps(folder / count), strict=True):
            for name in ("loss/divergence", "optim/grad_norm", "optim/learning_rate", "rollout/mean_length"):
                assert other[name] == pytest.approx(one[name], rel=1e-5), (
                    f"{count} processes, step {one['step']}: {name}"
                )
        found = load_file(folder / count / weights)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert (found[name] - tensor).abs().max() <= 1e-5, f"{count} processes: {name}"


def test_two_processes_train_what_one_trains(tmp_path):
    check_same(tmp_path, 2, ("1", "2"))


def test_two_processes_train_every_weight_as_one_does(tmp_path):
    check_same(tmp_path, 2, ("1", "2"), use_peft="false", rollout_sync="merged", dtype="float32")


@pytest.mark.slow
def test_nothing_depends_on_the_number_of_processes(tmp_path):
    check_same(tmp_path, 5, ("1", "2", "4"))
