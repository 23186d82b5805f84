"""Seconds per 32 rollouts of 1,024 tokens at the Qwen3-1.7B shape: adapter, merged, eager, with and without log-probabilities and seeds.

    python -m bench.shape --output_dir /tmp/shape && python -m bench.rollout --shape /tmp/shape --output results/bench_rollout.json

Every engine variant runs in a process of its own. Floor of a decode step: the weights once through memory.
"""

import argparse
import dataclasses
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from bench.reference import COPY_BYTES_PER_S, TARGETS, WEIGHT_BYTES
from opsd.entry import exit_on_bad_input, library_environment
from opsd.runinfo import git_state, hardware, package_versions, write_json

logger = logging.getLogger(__name__)

ENGINES = {
    "inproc": {"environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, "options": {}},
    "process": {"environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, "options": {}},
    "eager": {"environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, "options": {"enforce_eager": True}},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One measured way of sampling with an engine."""

    name: str
    adapter: bool
    seeds: bool


CASES = (Case("adapter, seeds", True, True), Case("adapter, no seeds", True, False), Case("base, seeds", False, True))


def write_adapter(folder: Path, model_path: Path, scale: float) -> Path:
    """A rank-64 adapter on all projections with random B of standard deviation `scale`."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("cuda"):
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path), dtype=torch.bfloat16)
        torch.manual_seed(0)
        model = get_peft_model(base, LoraConfig(r=64, lora_alpha=128, target_modules=list(TARGETS)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0, scale)
    model.save_pretrained(folder)
    return folder


def measure(shape: Path, engine_name: str, sequences: int, new_tokens: int, logps: bool) -> dict:
    """Builds one engine and times every case twice; runs in its own process."""
    started = time.perf_counter()
    from transformers import AutoTokenizer

    from opsd.engines import TUNING
    from opsd.rollout import SamplingSettings, VLLMEngine

    prompts = [[7 + (i * 131 + j) % 100000 for j in range(200)] for i in range(sequences)]
    engine = VLLMEngine(
        str(shape / "model"),
        canary_ids=prompts[0][:64],
        eos_ids={AutoTokenizer.from_pretrained(shape / "model").eos_token_id},
        max_model_len=200 + new_tokens,
        dtype="bfloat16",
        max_num_seqs=sequences,
        gpu_memory_utilization=0.3,
        max_lora_rank=64,
        lora_targets=list(TARGETS),
        with_logps=logps,
        tuning=TUNING,
        **ENGINES[engine_name]["options"],
    )
    loaded = time.perf_counter() - started
    sampling = SamplingSettings(1.1, 0.95, 20, new_tokens, ignore_eos=True)
    rows = []
    for case in CASES:
        synced = time.perf_counter()
        engine.sync(shape / "adapter" if case.adapter else None, 1)
        synced = time.perf_counter() - synced
        seconds = []
        for repeat in range(2):
            seeds = [repeat * 1000 + i if case.seeds else None for i in range(sequences)]
            begun = time.perf_counter()
            engine.generate(prompts, sampling, seeds)
            seconds.append(time.perf_counter() - begun)
        rows.append(
            {
                "engine": engine_name,
                "case": case.name,
                "log_probabilities": logps,
                "seconds": seconds,
                "ms_per_step": 1000 * min(seconds) / new_tokens,
                "tokens_per_s": sequences * new_tokens / min(seconds),
                "sync_s": synced,
                "load_s": loaded,
            }
        )
    engine.close()
    return {"rows": rows}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--shape", type=Path, required=True, help="Folder written by bench.shape.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--engines", nargs="+", choices=tuple(ENGINES), default=list(ENGINES))
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--new_tokens", type=int, default=1024)
    parser.add_argument("--logps", nargs="+", choices=("true", "false"), default=["true"])
    parser.add_argument("--child", default=None, help="Internal: the one engine to measure in this process.")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING)
    logger.setLevel(logging.INFO)
    if arguments.child:
        engine, logps = arguments.child.split(",")
        result = measure(arguments.shape, engine, arguments.sequences, arguments.new_tokens, logps == "true")
        write_json(arguments.output, result)
        return
    if not (arguments.shape / "adapter").is_dir():
        write_adapter(arguments.shape / "adapter", arguments.shape / "model", 5e-4)
    rows = []
    for engine in arguments.engines:
        for logps in arguments.logps:
            part = arguments.output.with_suffix(f".{engine}.{logps}.json")
            command = [
                sys.executable,
                "-m",
                "bench.rollout",
                *argv,
                "--child",
                f"{engine},{logps}",
                "--output",
                str(part),
            ]
            environment = library_environment(os.cpu_count()) | dict(os.environ) | ENGINES[engine]["environment"]
            subprocess.run(command, check=True, env=environment)
            rows += json.loads(part.read_text())["rows"]
            part.unlink()
    for row in rows:
        logger.info("%s", json.dumps(row))
    floor = 1000 * WEIGHT_BYTES / COPY_BYTES_PER_S
    write_json(
        arguments.output,
        {
            "command": argv,
            "floor_ms_per_step": floor,
            "rows": rows,
            **git_state(),
            "versions": package_versions(),
            "hardware": hardware(),
        },
    )


if __name__ == "__main__":
    exit_on_bad_input(main)
