"""The same run on one and on two processes, through the launcher, gives the same losses (gloo, CPU)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from random_qwen3 import save_model

ROOT = Path(__file__).resolve().parent.parent
RECIPE = {
    "use_peft": "true", "lora_r": 4, "lora_dropout": 0, "lora_target_modules": "'q_proj v_proj'", "max_steps": 3,
    "rollouts_per_step": 8, "max_completion_length": 16, "rollout_engine": "transformers", "learning_rate": "1e-3", "use_cpu": "true",
}  # fmt: skip


@pytest.mark.slow
def test_losses_do_not_depend_on_the_number_of_processes(tmp_path):
    save_model(tmp_path / "model", max_position_embeddings=2048)
    rows = [{"problem": f"{n}+1", "solution": f"\\boxed{{{n + 1}}}", "Answer": str(n + 1)} for n in range(64)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = RECIPE | {"model_name_or_path": tmp_path / "model", "train_file": tmp_path / "rows.jsonl"}
    (tmp_path / "run.env").write_text(
        "".join(f"export OPSD_{name.upper()}={value}\n" for name, value in values.items())
    )
    metrics = {}
    for processes in ("1", "2", "4"):
        output_dir = tmp_path / processes
        run = subprocess.run(
            ["bash", str(ROOT / "train_capped.sh"), str(tmp_path / "run.env"), "--output_dir", str(output_dir)],
            capture_output=True, text=True, stdin=subprocess.DEVNULL,
            env={**os.environ, "OPSD_PYTHON": sys.executable, "OPSD_NUM_PROCESSES": processes, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert run.returncode == 0, run.stderr[-3000:]
        lines = (output_dir / "metrics.jsonl").read_text().splitlines()
        metrics[processes] = [record for record in map(json.loads, lines) if "loss/divergence" in record]
        assert len(metrics[processes]) == 3
    for processes in ("2", "4"):
        for one, other in zip(metrics["1"], metrics[processes], strict=True):
            for name in ("loss/divergence", "optim/grad_norm", "optim/learning_rate", "rollout/mean_length"):
                assert other[name] == pytest.approx(one[name], rel=1e-5), (
                    f"{processes} processes, step {one['step']}: {name}"
                )
