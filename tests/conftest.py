"""Every test runs without a network, without telemetry and without the caller's own OPSD_* settings."""

import os

from opsd.runinfo import library_environment

for name in [name for name in os.environ if name.startswith("OPSD_")]:
    del os.environ[name]

for name, value in library_environment(os.cpu_count()).items():
    os.environ.setdefault(name, value)
os.environ["HF_HUB_OFFLINE"] = "1"
