"""Every test runs without a network, without telemetry and without the caller's own OPSD_* settings."""

import os

import pytest

from opsd.entry import library_environment

for name in [name for name in os.environ if name.startswith("OPSD_")]:
    del os.environ[name]

for name, value in library_environment(os.cpu_count()).items():
    os.environ.setdefault(name, value)
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small random Qwen3 model with its tokenizer."""
    from random_qwen3 import save_model

    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    """The tokenizer of `folder`."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
