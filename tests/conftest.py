"""Every test runs without a network, without telemetry and without the caller's own OPSD_* settings."""

import os
import shutil

for name in [name for name in os.environ if name.startswith("OPSD_")]:
    del os.environ[name]

os.environ.update(
    DO_NOT_TRACK="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    VLLM_NO_USAGE_STATS="1",
)
if shutil.which("nvidia-smi") is None:
    # deepspeed cannot find out by itself that there is no accelerator; vLLM's compiled sampler costs minutes on a CPU
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
