"""Puts a model into the teacher's state and back within a millisecond, several times a micro-batch. Used by opsd/teacher.py.

PEFT's `disable_adapter`, `eval` and `train` look at every module, every time, which takes tens of milliseconds at 28 layers while the GPU
waits. Here the modules are listed once. `requires_grad` is left alone, unlike in PEFT's context: FSDP2 asks in its first forward
pass, which is a teacher's, what will be trained.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft.tuners.tuners_utils import BaseTunerLayer

from opsd.compat import adapters_off


class Switches:
    """Of one model, whose modules must not be exchanged afterwards; what their `forward` does may change."""

    def __init__(self, model: torch.nn.Module):
        self._modules = list(model.modules())
        self._adapted = [module for module in self._modules if isinstance(module, BaseTunerLayer)]

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """No gradients and no dropout inside the block."""
        training = [module for module in self._modules if module.training]
        for module in training:
            object.__setattr__(module, "training", False)
        try:
            with torch.no_grad():
                yield
        finally:
            for module in training:
                object.__setattr__(module, "training", True)

    @contextmanager
    def adapter_off(self) -> Iterator[None]:
        """The base model alone inside the block."""
        with adapters_off(self._adapted):
            yield
