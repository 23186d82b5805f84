"""A scheduler's SIGTERM or SIGUSR1: finish the optimizer step, save a checkpoint, end the training loop with a line that says how to go on.

opsd/accelerate_launch.py passes both signals on to every process. Which process hears it first does not matter: after each step they agree,
so that all of them save the same step. A scheduler and the launcher may both pass one request on, so a signal within `SAME_REQUEST_S` of
the first changes nothing; a later one ends the process at once, as without this callback.
"""

import os
import signal
import time

import torch
from accelerate.logging import get_logger
from transformers import TrainerCallback

logger = get_logger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
SAME_REQUEST_S = 10.0


class Preemption(TrainerCallback):
    """`requested` is true once training has stopped early because of a signal."""

    def __init__(self, accelerator):
        self._accelerator = accelerator
        self._received: int | None = None
        self._received_at = 0.0
        self._before: dict[int, object] = {}
        self.requested = False

    def _hear(self, number: int, _frame) -> None:
        now = time.monotonic()
        if self._received is None:
            self._received, self._received_at = number, now
        elif now - self._received_at > SAME_REQUEST_S:
            self._restore()
            os.kill(os.getpid(), number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def on_train_begin(self, args, state, control, **kwargs):
        self._before = {number: signal.signal(number, self._hear) for number in SIGNALS}

    def on_step_end(self, args, state, control, **kwargs):
        heard = torch.tensor(float(self._received is not None), device=self._accelerator.device)
        if self._accelerator.reduce(heard, reduction="sum") == 0:
            return
        name = signal.Signals(self._received).name if self._received is not None else "a signal to another process"
        logger.warning("%s: saving checkpoint-%d and stopping", name, state.global_step)
        self.requested = True
        control.should_log = True
        control.should_save = True
        control.should_training_stop = True

    def on_train_end(self, args, state, control, **kwargs):
        self._restore()
