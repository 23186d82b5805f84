"""The privileged role: whose weights score the student's tokens.

`base` is the initial policy, i.e. the same model with its adapter switched off, which costs no memory and cannot drift because the base
weights are never written (DESIGN.md section 3.1). `live` is the student itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from opsd.compat import use_adapter


@contextmanager
def teacher_weights(model: PreTrainedModel, kind: str) -> Iterator[None]:
    """Puts the teacher's weights in place inside the block, without gradients and without dropout."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            if kind == "base":
                with use_adapter(model, None):
                    yield
            elif kind == "live":
                yield
            else:
                raise ValueError(f"teacher_kind={kind!r} must be base or live")
    finally:
        model.train(training)
