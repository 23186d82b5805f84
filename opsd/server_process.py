"""Starts a vLLM server for `opsd/rollout_server.py`: its command, its environment, its log, and its end with this process.

    OPSD_VLLM_API_KEY=... CUDA_VISIBLE_DEVICES=1 python -m opsd.server_process --model Qwen/Qwen3-1.7B --port 8001 --max_model_len 3072

The key travels in the environment, where other users of the host cannot read it, and never on the command line.
"""

import argparse
import logging
import os
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from opsd.entry import exit_on_bad_input, library_environment
from opsd.eval_worker import die_with_parent
from opsd.recipe import process_environment
from opsd.rollout import EngineDied, vllm_lora_rank
from opsd.runinfo import hardware

logger = logging.getLogger(__name__)

LOG_TAIL_LINES = 15
# vLLM's own entry module: `vllm serve` takes the same flags, but its console script does not run with the CPU package
MODULE = "vllm.entrypoints.launchers.api_server.entry"


@dataclass
class StartedServer:
    """A server that this process started and ends."""

    url: str
    process: subprocess.Popen
    log: Path

    def last_words(self) -> str:
        """How the process ended and the end of its log, for an error message."""
        code = self.process.poll()
        how = "still runs" if code is None else f"ended with exit code {code}"
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return f"; process {self.process.pid} {how}, end of its log {self.log}:\n" + "\n".join(
            f"  | {line}" for line in lines
        )

    def wait_until_ready(self, timeout_s: float) -> None:
        """Returns when the server answers. Raises EngineDied when it ends before, or does not answer in time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise EngineDied(f"vLLM server {self.url} did not start{self.last_words()}")
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5.0):
                    return
            except OSError:
                time.sleep(0.5)
        raise EngineDied(f"vLLM server {self.url} was not ready after {timeout_s:.0f} s{self.last_words()}")

    def stop(self) -> None:
        """Asks the server and its engine process to end, then kills what is left of them."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            logger.warning("process %d did not end and is killed", self.process.pid)
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # its session holds only what it started
        except ProcessLookupError:
            logger.debug("nothing is left of process %d", self.process.pid)
        self.process.wait()


def server_command(
    model: str,
    port: int,
    *,
    dtype: str,
    max_model_len: int,
    max_num_seqs: int,
    max_lora_rank: int,
    host: str = "127.0.0.1",
    gpu_memory_utilization: float = 0.9,
    enforce_eager: bool = False,
    load_format: str = "auto",
    tensor_parallel_size: int = 1,
) -> list[str]:
    """The command of a server that `ServerEngine` can use. `tensor_parallel_size`: GPUs that hold one copy of the model together."""
    if tensor_parallel_size < 1:
        raise ValueError(f"tensor_parallel_size={tensor_parallel_size} must be >= 1 GPUs; 1 = the model on one GPU")
    command = [sys.executable, "-m", MODULE, "--model", model, "--host", host, "--port", str(port)]
    command += ["--dtype", dtype, "--max-model-len", str(max_model_len), "--max-num-seqs", str(max_num_seqs)]
    command += ["--gpu-memory-utilization", str(gpu_memory_utilization), "--load-format", load_format]
    command += ["--tensor-parallel-size", str(tensor_parallel_size)]
    command += ["--enable-lora", "--max-loras", "1", "--max-cpu-loras", "1"]
    command += ["--max-lora-rank", str(vllm_lora_rank(max_lora_rank))]
    command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    if not hardware()["gpus"]:  # as in VLLMEngine: seeded requests cannot be cut in two on a CPU
        command.append("--no-enable-chunked-prefill")
    return command + (["--enforce-eager"] if enforce_eager else [])


def server_environment(environment: dict[str, str], api_key: str | None) -> dict[str, str]:
    """The caller's environment with the key and what lets adapters be loaded. Raises ValueError without a key."""
    if not api_key:
        raise ValueError(
            "OPSD_VLLM_API_KEY is not set; export a key of your own: a server is never started without one"
        )
    return environment | {"VLLM_API_KEY": api_key, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}


def start_server(
    model: str, port: int, *, api_key: str, log: Path, environment: dict[str, str], gpu: str | None = None, **options
) -> StartedServer:
    """Starts one server on this host, on the GPU (or GPUs, `1,2`) given; `options` are those of `server_command`.

    Returns at once; `wait_until_ready` says when it can be used. `environment` is the caller's.
    """
    variables = server_environment(environment, api_key)
    if gpu is not None:
        variables["CUDA_VISIBLE_DEVICES"] = gpu
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as output:
        process = subprocess.Popen(
            server_command(model, port, **options),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=variables,
            cwd=log.parent,
            start_new_session=True,  # an interrupt from the terminal reaches the trainer alone, which ends the servers in order
            preexec_fn=die_with_parent,
        )
    host = options.get("host", "127.0.0.1")
    logger.info("vLLM server on port %d starts, process %d, log %s", port, process.pid, log)
    return StartedServer(f"http://{host}:{port}", process, log)


def main(argv: list[str]) -> None:
    """Becomes a server that the trainer can use; ends with Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", required=True, help="Hub id or folder, the same as the trainer's.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument(
        "--max_model_len", type=int, required=True, help="Longest prompt and completion together, in tokens."
    )
    parser.add_argument("--host", default="127.0.0.1", help="Address to listen on; loopback unless other hosts train.")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max_num_seqs", type=int, default=256, help="Completions sampled at once.")
    parser.add_argument("--max_lora_rank", type=int, default=64, help="The trainer's lora_r, or more.")
    parser.add_argument("--gpu_memory_utilization", type=float, default=0.9)
    parser.add_argument(
        "--tensor_parallel_size",
        type=int,
        default=1,
        help="GPUs of this server that share the model, from 8B on; 1 = off.",
    )
    parser.add_argument("--enforce_eager", action="store_true", help="No CUDA graphs.")
    options = vars(parser.parse_args(argv))
    environment = process_environment()
    variables = server_environment(environment, environment.get("OPSD_VLLM_API_KEY"))
    command = server_command(options.pop("model"), options.pop("port"), **options)
    os.execve(command[0], command, library_environment(os.cpu_count()) | variables)


if __name__ == "__main__":
    exit_on_bad_input(main)
