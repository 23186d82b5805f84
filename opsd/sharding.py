"""Ways of spreading one run over several GPUs: which work, which are refused by name before anything loads, and whole tensors from shards.

Used by opsd/launch.py (the configuration file), opsd_train.py (the environment that accelerate makes of it), opsd/model.py and
opsd/trainer.py. `none` is one process or data parallel; `zero2` shards gradients and optimizer state (DeepSpeed); `fsdp2` shards the base
weights as well (PyTorch). ZeRO-3 is not offered: the teacher is the student's own module with its adapter off, and a second forward pass
through partitioned modules breaks the trace by which DeepSpeed fetches them in the backward pass (huggingface/trl pull 6237).
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import torch
import yaml
from torch.distributed.tensor import DTensor

MEMORY_DISK = Path("/dev/shm")
THIS_HOST = ("127.0.0.1", "localhost", "::1")
PLAIN_TYPES = ("NO", "MULTI_GPU", "MULTI_CPU")
MODES = ("none", "zero2", "fsdp2")
# mode -> (argument, the values that are refused, why and what to use instead)
REFUSED = {
    "zero2": (
        ("teacher_kind", ("ema", "adapter"), "its matrices do not fit DeepSpeed's flat buffers; use ddp"),
    ),
    "fsdp2": (
        ("teacher_kind", ("ema", "adapter"), "its matrices would have to be whole on every process; use ddp"),
        (
            "rollout_engine",
            ("transformers",),
            "processes sample different numbers of tokens and would wait for each other's weights for ever; use vllm or "
            "vllm_server",
        ),
        ("rollout_sync", ("merged",), "merging needs whole weights; use rollout_sync=adapter"),
    ),
}  # fmt: skip


def mode_of_config(path: Path) -> str:
    """The mode that an accelerate configuration file asks for. Raises ValueError for one that this trainer does not support."""
    try:
        config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"accelerate_config={path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict):
        raise ValueError(f"accelerate_config={path} must be a mapping, as accelerate config writes it")
    kind = str(config.get("distributed_type", "NO"))
    if kind == "DEEPSPEED":
        return _deepspeed_mode(config.get("deepspeed_config", {}).get("zero_stage"), f"accelerate_config={path}")
    if kind == "FSDP":
        return _fsdp_mode(config.get("fsdp_config", {}).get("fsdp_version"), f"accelerate_config={path}")
    if kind not in PLAIN_TYPES:
        raise ValueError(f"accelerate_config={path}: distributed_type={kind} is not supported; use ddp, zero2 or fsdp2")
    return "none"


def mode_of_environment(environ: Mapping[str, str]) -> str:
    """The mode that `accelerate launch` has set up for this process."""
    if environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        return _deepspeed_mode(environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE"), "ACCELERATE_USE_DEEPSPEED=true")
    if environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        return _fsdp_mode(environ.get("FSDP_VERSION"), "ACCELERATE_USE_FSDP=true")
    return "none"


def _deepspeed_mode(stage: object, where: str) -> str:
    if str(stage) == "3":
        raise ValueError(
            f"{where}: zero_stage=3 is refused: the teacher's forward passes through the student's partitioned modules break its "
            "backward pass; use zero2 or fsdp2"
        )
    if str(stage) != "2":
        raise ValueError(
            f"{where}: zero_stage={stage} must be 2; use zero2, or fsdp2 to shard the base weights as well"
        )
    return "zero2"


def _fsdp_mode(version: object, where: str) -> str:
    if str(version) != "2":
        raise ValueError(f"{where}: fsdp_version={version} must be 2; use fsdp2")
    return "fsdp2"


def check_sharding(mode: str, args, model_args) -> None:
    """Refuses what does not work under `mode`, naming what does. `args`: OPSDConfig, `model_args`: ModelConfig. Raises ValueError."""
    for name in ("deepspeed", "fsdp"):
        if getattr(args, name):
            raise ValueError(
                f"{name}={getattr(args, name)} must not be given: sharding is chosen by OPSD_ACCELERATE_CONFIG, zero2 or fsdp2"
            )
    for name, values, why in REFUSED.get(mode, ()):
        if getattr(args, name) in values:
            raise ValueError(f"{name}={getattr(args, name)} is not possible with {mode}: {why}")
    if mode == "fsdp2" and args.wavg_last:
        raise ValueError(
            f"wavg_last={args.wavg_last} is not possible with fsdp2: it averages whole matrices; use 0 or ddp"
        )
    if mode == "zero2" and args.bf16 not in (None, model_args.dtype == "bfloat16"):
        raise ValueError(
            f"bf16={args.bf16} with dtype={model_args.dtype} is not possible with zero2: DeepSpeed casts the base weights to what it "
            "trains in; leave bf16 out, it follows dtype"
        )


def reduce_in_float32(accelerator) -> None:
    """Has FSDP2 add up gradients of processes in float32, as DDP does, and not in the dtype that it computes in."""
    plugin = accelerator.state.fsdp_plugin
    if plugin is not None and plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = dataclasses.replace(plugin.mixed_precision_policy, reduce_dtype=torch.float32)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor behind a shard; anything else as it is. Every process has to call it for the same tensors in the same order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_named(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The pairs with full tensors, one at a time."""
    for name, tensor in named:
        yield name, whole(tensor.detach())


def whole_matrices(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The adapter's full matrices by parameter name, one at a time, on every process."""
    return whole_named((name, p) for name, p in model.named_parameters() if ".lora_" in name)


def save_from_all(trainer, folder: str | None) -> None:
    """The trainer's `save_model`: gathers the adapter on every process, not the base, and has the first one write it."""
    state = {name: tensor.cpu() for name, tensor in whole_matrices(trainer.model)}
    if trainer.args.should_save:
        trainer._save(folder, state_dict=state)


def adapter_parent(args) -> Path | None:
    """Where adapters for the engine are written: memory, or the run's own folder when a server on another host has to read them.

    None: the system's temporary folder, on machines without a memory-backed disk.
    """
    hosts = {urlsplit(url).hostname for url in args.vllm_server_urls or []}
    if hosts - set(THIS_HOST):
        shared = Path(args.output_dir).resolve()
        shared.mkdir(parents=True, exist_ok=True)
        return shared
    return MEMORY_DISK if MEMORY_DISK.is_dir() else None
