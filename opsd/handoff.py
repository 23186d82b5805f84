"""The hand-off from training to evaluation: `eval_aime.py` in a process of its own, so that a GPU is free for its engine."""

import logging
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from opsd.args import EvalRegime
from opsd.full_weights import samples_in_bfloat16

logger = logging.getLogger(__name__)


class Handoff:
    """Runs the evaluator on the trained model with one regime, and compares results."""

    def __init__(self, script: Path, model_args, handoff, regime: EvalRegime, output_dir: Path, bf16: bool):
        self._script = script
        self._output_dir = output_dir
        self._base, self._adapted = model_args.model_name_or_path, model_args.use_peft
        dtype = "bfloat16" if samples_in_bfloat16(self._adapted, bf16) else model_args.dtype  # as rollouts are sampled
        self._command = ["--benchmark", handoff.eval_benchmark or "aime24", "--dtype", dtype or "auto"]
        if handoff.eval_max_problems is not None:
            self._command += ["--max_problems", str(handoff.eval_max_problems)]
        for name, value in asdict(regime).items():
            self._command += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]

    def check(self) -> None:
        """Refuses, before hours of training, an evaluation that could not start: a dry run of the evaluator."""
        self._call([*self._command, "--model", self._base, "--dry_run", "true"])

    def run(self, name: str, trained: Path | None = None) -> Path:
        """Evaluates the base model, or what was trained; returns the folder with result.json. Raises RuntimeError when it fails."""
        output_dir = self._output_dir / name
        model = self._base if self._adapted or trained is None else str(trained)
        adapter = ["--adapter", str(trained)] if self._adapted and trained is not None else []
        self._call([*self._command, "--model", model, *adapter, "--output_dir", str(output_dir), "--name", name])
        return output_dir

    def compare(self, before: str, after: str) -> None:
        """Prints the paired comparison of two results of this run."""
        sides = [str(self._output_dir / name / "result.json") for name in (before, after)]
        self._call(["--compare", sides[0], "--", sides[1]])

    def _call(self, arguments: list[str]) -> None:
        command = [sys.executable, str(self._script), *arguments]
        logger.info("evaluating: %s", " ".join(command))
        code = _run_and_pass_signals_on(command)
        if code == 2:
            raise ValueError(
                "the evaluation is refused, see the line above; correct it, or leave evaluate_before and evaluate_after out"
            )
        if code:
            raise RuntimeError(
                f"eval_aime.py ended with exit code {code}; the training result is complete, run it again by hand"
            )


def _run_and_pass_signals_on(command: list[str]) -> int:
    """The exit code of `command`. SIGTERM and SIGUSR1 end it, and then this process, with the line to go on with."""
    received: list[int] = []
    children: list[subprocess.Popen] = []

    def stop(number: int, _frame) -> None:
        received.append(number)
        for child in children:
            child.terminate()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        children.append(subprocess.Popen(command))
        if received:  # while it was being started
            children[0].terminate()
        code = children[0].wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        logger.warning(
            "%s during the evaluation: finished completions are kept; to go on: the same command, with --resume once there is a checkpoint",
            signal.Signals(received[0]).name,
        )
        raise SystemExit(128 + received[0])
    return code
