"""Averages the trainable weights over the last N optimizer steps (`wavg_last`) and saves the mean as an adapter of its own.

The mean is the arithmetic one of every matrix. For LoRA that averages A and B separately, so its product is not the mean of the products;
within the last steps of an annealed run the difference is of second order in how far the weights moved. Sums are float64, so that the order
of the additions does not show. Part of every checkpoint within the window: a resumed run averages the same steps.
"""

import logging
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

logger = logging.getLogger(__name__)

FILE = "weight_average.safetensors"
ADAPTER = "adapter_wavg"


class WeightAverage(TrainerCallback):
    """`last`: how many steps, 0 = off. Saved and restored through the trainer's `stateful` list."""

    def __init__(self, last: int):
        self._last = last
        self._sums: dict[str, torch.Tensor] = {}
        self._model = None
        self.steps = 0

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._model = model
        if any(isinstance(parameter, DTensor) or parameter.numel() == 0 for _, parameter in self._trainable()):
            raise ValueError(
                f"wavg_last={self._last} needs whole weights on every process; use DDP or ZeRO-2, or wavg_last=0"
            )

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step <= state.max_steps - self._last:
            return
        for name, parameter in self._trainable():
            value = parameter.detach().double()
            self._sums[name] = self._sums[name].to(value.device) + value if name in self._sums else value
        self.steps += 1

    def _trainable(self):
        return [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]

    def save(self, folder: Path, step: int) -> None:
        """Writes the sums so far into a checkpoint, when there are any."""
        if self.steps:
            save_file(self._sums, folder / FILE, metadata={"steps": str(self.steps)})

    def load(self, folder: Path) -> None:
        """Takes up the sums of a checkpoint. A checkpoint from before the window has none."""
        self._sums, self.steps = {}, 0
        if (folder / FILE).is_file():
            with safe_open(folder / FILE, framework="pt") as state:
                self._sums = {name: state.get_tensor(name) for name in state.keys()}
                self.steps = int(state.metadata()["steps"])

    def write_adapter(self, trainer, folder: Path) -> None:
        """Saves the mean to `folder` as a normal adapter; the trained weights are back in place afterwards.

        Raises RuntimeError when fewer steps were seen than asked for: a run that stopped early, or resumed with another `wavg_last`.
        """
        if self.steps != self._last:
            raise RuntimeError(
                f"wavg_last={self._last} but {self.steps} steps were averaged: the run must reach max_steps, and a resumed run must keep "
                "the wavg_last that it was started with"
            )
        own = {parameter: parameter.data for _, parameter in self._trainable()}
        for name, parameter in self._trainable():
            parameter.data = (self._sums[name].to(parameter.device) / self.steps).to(parameter.dtype)
        try:
            trainer.save_model(str(folder))
        finally:
            for parameter, value in own.items():
                parameter.data = value
        logger.info("mean of the last %d steps saved as %s", self.steps, ADAPTER)
