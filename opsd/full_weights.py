"""Full fine-tuning (`use_peft=false`): every weight is trained, in float32, against a frozen copy of the model as it was.

There is no adapter to serve, so the engine gets all weights in the dtype it samples in, and what that rounding loses of the update is
reported (`rollout/sync_rel_err`; DESIGN.md section 3.1). Used by opsd/setup_run.py, opsd/trainer.py and opsd/checkpoint.py.
"""

import copy
from collections.abc import Iterator
from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from opsd.adapter import CONFIG, check_adapter
from opsd.merged_sync import RoundedWeights

# argument -> (what full fine-tuning allows, what to do)
ALLOWED = {
    "rollout_sync": (("merged",), "there is no adapter to serve; set rollout_sync=merged"),
    "teacher_kind": (("base", "live", "model"), "it is made of adapters; use base, live or model"),
    "wavg_last": ((0,), "it averages adapters; use 0"),
}  # fmt: skip


def check_full(args, model_args, mode: str) -> None:
    """Refuses what does not work without an adapter. `mode`: one of opsd/sharding.py's. Raises ValueError."""
    if model_args.use_peft:
        return
    for name, (allowed, remedy) in ALLOWED.items():
        if getattr(args, name) not in allowed:
            raise ValueError(f"{name}={getattr(args, name)} is not possible with use_peft=false: {remedy}")
    if model_args.dtype != "float32":
        raise ValueError(
            f"dtype={model_args.dtype} with use_peft=false must be float32: in less, most updates are rounded away; bf16=true still "
            "multiplies in bfloat16"
        )
    if mode != "none":
        raise ValueError(f"use_peft=false is not possible with {mode}: the engine needs whole weights; use ddp")


def samples_in_bfloat16(adapted: bool, bf16: bool) -> bool:
    """Whether engine, teacher and output projection compute in less than the trained weights: when all train under autocast."""
    return bf16 and not adapted


def sampling_dtype(model: PreTrainedModel | PeftModel, bf16: bool) -> torch.dtype:
    """What engine, teacher and output projection compute in."""
    return torch.bfloat16 if samples_in_bfloat16(isinstance(model, PeftModel), bf16) else model.dtype


@torch.no_grad()
def frozen_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model as it is now, in `dtype`, never to be trained.

    The model itself is rounded to what the copy holds, so that student, teacher and engine start as one: a model that is stored in
    bfloat16 stays as it is.
    """
    start = copy.deepcopy(model).to(dtype).requires_grad_(False).eval()
    for own, kept in zip(model.parameters(), start.parameters(), strict=True):
        own.copy_(kept)
    return start


class FullWeights(RoundedWeights):
    """Every weight of the student, in the dtype of `start`: the frozen copy, which computes as the engine does."""

    def __init__(self, model: PreTrainedModel, start: PreTrainedModel):
        super().__init__()
        self._model, self._start = model, start

    def changes(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
        start = dict(self._start.named_parameters())
        for name, weight in self._model.named_parameters():
            before = start[name].float()
            yield name, before, weight.float() - before, weight.to(start[name].dtype)


def check_saved(folder: Path) -> None:
    """Proves that `folder` holds a complete adapter, or a complete model. Raises FileNotFoundError or ValueError."""
    if (folder / CONFIG).is_file():
        check_adapter(folder)
    else:
        check_model(folder)


def check_model(folder: Path) -> None:
    """Proves that the model's safetensors files can be read and hold only finite numbers. Raises FileNotFoundError or ValueError."""
    from safetensors import SafetensorError, safe_open

    paths = sorted(folder.glob("model*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"model={folder} has no model.safetensors; give a folder written by save_pretrained")
    for path in paths:
        try:
            with safe_open(path, framework="pt") as weights:
                for name in weights.keys():
                    tensor = weights.get_tensor(name)
                    if tensor.numel() == 0 or not bool(tensor.isfinite().all()):
                        raise ValueError(f"{path}: tensor {name} is empty or not finite; use an earlier checkpoint")
        except SafetensorError as error:
            raise ValueError(f"{path} is not a complete safetensors file ({error}); save the model again") from None
