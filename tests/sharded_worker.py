"""`opsd_train.py` with an engine that answers from the seed alone, so that runs on any layout see the same rollouts. Started by tests."""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from accelerate import state

import opsd_train
from opsd import setup_run
from opsd.adapter import check_adapter
from opsd.entry import exit_on_bad_input
from opsd.rollout import Rollout, in_order


class SeededEngine:
    """Completions of 1 to `max_new_tokens` printable tokens; proves on every sync that the adapter it is given is complete."""

    def __init__(self, *_, **__):
        self.norms = []

    def sync(self, adapter_dir, step):
        self.norms.append(check_adapter(adapter_dir)[1])
        if (step > 0) != (self.norms[-1] > 0):
            raise RuntimeError(f"the adapter of step {step} has norm {self.norms[-1]}")

    def generate(self, prompt_ids, sampling, seeds):
        return in_order(self.stream(prompt_ids, sampling, seeds), len(prompt_ids))

    def stream(self, prompt_ids, sampling, seeds):
        for index, (ids, seed) in enumerate(zip(prompt_ids, seeds, strict=True)):
            generator = random.Random(seed)
            length = generator.randrange(1, sampling.max_new_tokens + 1)
            completion = tuple(generator.randrange(10, 60) for _ in range(length))
            yield index, Rollout(tuple(ids), completion, (0.0,) * length, "length")

    def rest(self):
        pass

    def close(self):
        pass


def let_fsdp_run_on_gloo() -> None:
    """accelerate offers FSDP on GPUs only and falls back to plain data parallelism without one: keeps what was asked for."""
    original = state.AcceleratorState.__init__

    def init(self, *arguments, **options):
        original(self, *arguments, **options)
        if options.get("fsdp_plugin") is not None:
            self.distributed_type = state.DistributedType.FSDP
            self.fsdp_plugin = options["fsdp_plugin"]
            if self._mixed_precision != "no":
                self.fsdp_plugin.set_mixed_precision(self._mixed_precision)

    state.AcceleratorState.__init__ = init


if __name__ == "__main__":
    let_fsdp_run_on_gloo()
    setup_run.build_engine = SeededEngine
    exit_on_bad_input(opsd_train.main)
