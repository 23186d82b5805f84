"""The one place that relies on private parts of a library, and checks that its version is one that they were looked up in."""

import importlib.metadata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from packaging.version import Version

PEFT_RANGE = ("0.21", "0.22")


def check_peft_version() -> None:
    """Raises RuntimeError when PEFT is outside the range whose private parts this file was written for."""
    found = Version(importlib.metadata.version("peft"))
    low, high = map(Version, PEFT_RANGE)
    if not low <= found < high:
        raise RuntimeError(
            f"peft={found} must be >= {low} and < {high}: opsd relies on its private parts; run setup.sh"
        )


check_peft_version()


@contextmanager
def adapters_off(layers: Sequence) -> Iterator[None]:
    """Switches PEFT's layers to their base weights inside the block, and back to what they were."""
    before = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, off in zip(layers, before, strict=True):
            layer._disable_adapters = off
