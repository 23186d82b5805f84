"""The frame of an optimizer step: which rows it samples for, and the sums of what it measures. Used by `opsd/trainer.py`."""

import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import Sampler

from opsd.rollout import derive_seed
from opsd.runinfo import read_json, write_json


class RolloutSampler(Sampler[int]):
    """Row indices for a whole run: one shuffled pass over the rows after another, cut to `count`.

    The order depends on the seed alone, not on the number of processes or steps; a step never sees a row twice unless there are fewer
    rows than rollouts in a step.
    """

    def __init__(self, rows: int, count: int, seed: int):
        self.rows, self.count, self.seed = rows, count, seed

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        for start in range(0, self.count, self.rows):
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", start // self.rows))
            order = torch.randperm(self.rows, generator=generator).tolist()
            yield from order[: self.count - start]


class RunTotals:
    """What a run has cost over all processes, kept in its checkpoints so that a resume adds to it."""

    FILE = "run_totals.json"

    def __init__(self):
        self.tokens_generated = self.tokens_trained = 0
        self._seconds_before, self._started = 0.0, time.perf_counter()

    def start(self) -> None:
        """Training begins now; building the model and the engine is not counted."""
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Wall seconds of training, earlier parts of the run included."""
        return self._seconds_before + time.perf_counter() - self._started

    def save(self, checkpoint: Path, step: int) -> None:
        """Part of a checkpoint; see `OPSDTrainer.stateful`."""
        counts = {"tokens_generated": self.tokens_generated, "tokens_trained": self.tokens_trained}
        write_json(checkpoint / self.FILE, counts | {"seconds": self.seconds})

    def load(self, checkpoint: Path) -> None:
        """Goes on from what `save` wrote. Raises FileNotFoundError when the checkpoint has none."""
        if not (checkpoint / self.FILE).is_file():
            raise FileNotFoundError(
                f"resume_from_checkpoint={checkpoint} has no {self.FILE}: it is of an older version; start the run anew"
            )
        record = read_json(checkpoint / self.FILE)
        self.tokens_generated, self.tokens_trained = record["tokens_generated"], record["tokens_trained"]
        self._seconds_before = record["seconds"]


class StepMetrics:
    """Sums over the micro-batches and processes of one optimizer step, and the times of its phases."""

    def __init__(self):
        self.sums: dict[str, torch.Tensor] = {}
        self.maxima: dict[str, torch.Tensor] = {}
        self.seconds: dict[str, float] = {}

    def add(self, sums: dict[str, torch.Tensor]) -> None:
        for name, value in sums.items():
            value = torch.as_tensor(value, dtype=torch.float64)
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def keep_largest(self, name: str, value: torch.Tensor) -> None:
        self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value

    def reduce(self, accelerator) -> dict[str, float]:
        """Sums and maxima over all processes, by name."""
        names = sorted(self.sums)
        device = accelerator.device
        stacked = torch.stack([self.sums[n].to(device) for n in names])
        totals = dict(zip(names, accelerator.reduce(stacked, reduction="sum").tolist(), strict=True))
        for name, value in self.maxima.items():
            totals[name] = accelerator.gather(value.to(device).reshape(1)).max().item()
        return totals
