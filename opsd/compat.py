"""The one place that imports from private paths of TRL, and checks that the version is the one they were written for."""

import importlib.metadata

from packaging.version import Version

TRL_RANGE = ("1.16", "1.17")


def check_trl_version() -> None:
    """Raises RuntimeError when TRL is outside the range whose private modules this file was written for."""
    found = Version(importlib.metadata.version("trl"))
    low, high = map(Version, TRL_RANGE)
    if not low <= found < high:
        raise RuntimeError(
            f"trl={found} must be >= {low} and < {high}: opsd imports from its private modules; run setup.sh"
        )


check_trl_version()

from trl.trainer.utils import use_adapter  # noqa: E402

__all__ = ["TRL_RANGE", "check_trl_version", "use_adapter"]
