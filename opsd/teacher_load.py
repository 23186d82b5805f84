"""Loads the teachers that are not the student's own weights, and refuses the ones that do not fit. Used by `opsd/teacher.py`."""

import logging
from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from opsd.adapter import WEIGHTS, check_adapter, read_adapter_config
from opsd.args import OPSDConfig
from opsd.method_args import is_address
from opsd.model import load_base, load_tokenizer

logger = logging.getLogger(__name__)

ADAPTER = "default"  # PEFT's name of the student's adapter


def lora_layers(model: PeftModel) -> dict[str, LoraLayer]:
    """The student's adapted layers by the name that its saved adapter uses, as in `model.layers.0.self_attn.q_proj`."""
    base = model.get_base_model()
    return {name: module for name, module in base.named_modules() if isinstance(module, LoraLayer)}


def pair_for(layer: LoraLayer, b: torch.Tensor, a: torch.Tensor) -> dict[torch.nn.Parameter, torch.Tensor]:
    """B (out, r) and A (r, in) for the parameters of a LoRA layer."""
    return {layer.lora_B[ADAPTER].weight: b, layer.lora_A[ADAPTER].weight: a}


def adapter_matrices(student: PeftModel, adapter_dir: Path) -> dict[torch.nn.Parameter, torch.Tensor]:
    """The frozen adapter as matrices for the student's LoRA layers; a layer that the frozen one leaves alone gets zeros.

    Raises ValueError for an adapter that touches a layer which the student does not adapt, or of another model.
    """
    digest, norm = check_adapter(adapter_dir)
    config = read_adapter_config(adapter_dir)
    rank_root = config["r"] ** 0.5 if config.get("use_rslora") else config["r"]
    scaling = config["lora_alpha"] / rank_root
    layers = lora_layers(student)
    state = {
        key.removeprefix("base_model.model."): tensor.float()
        for key, tensor in load_file(adapter_dir / WEIGHTS).items()
    }
    touched = {key.split(".lora_")[0] for key in state}
    for name in sorted(touched - layers.keys()):
        raise ValueError(
            f"teacher_adapter={adapter_dir} adapts {name}, which the student does not; add it to lora_target_modules, or merge that "
            "adapter into a model and use teacher_kind=model"
        )
    matrices = {}
    for name, layer in layers.items():
        own = layer.lora_A[ADAPTER].weight
        out_features, in_features = layer.get_base_layer().weight.shape
        b, a = torch.zeros(out_features, 1), torch.zeros(1, in_features)
        if name in touched:
            b, a = state[f"{name}.lora_B.weight"] * (scaling / layer.scaling[ADAPTER]), state[f"{name}.lora_A.weight"]
        if b.shape[0] != out_features or a.shape[1] != in_features:
            raise ValueError(
                f"teacher_adapter={adapter_dir}: {name} is {b.shape[0]}x{a.shape[1]}, the student's is {out_features}x{in_features}"
            )
        matrices |= pair_for(layer, b.to(own.device), a.to(own.device))
    logger.info("teacher: adapter %s (norm %.6g, sha256 %s)", adapter_dir, norm, digest[:12])
    return matrices


def load_teacher(name_or_path: str, student: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Another model as a frozen teacher, with the student's attention and device."""
    model = load_base(name_or_path, dtype=dtype, attn_implementation=student.config._attn_implementation).to(
        student.device
    )
    rows, own_rows = model.get_output_embeddings().weight.shape[0], student.get_output_embeddings().weight.shape[0]
    if rows != own_rows:
        raise ValueError(
            f"teacher_model={name_or_path} scores {rows} vocabulary entries, the student {own_rows}; use a model with as many"
        )
    logger.info("teacher: model %s, %.3g parameters", name_or_path, model.num_parameters())
    return model.requires_grad_(False).eval()


def check_teacher(args: OPSDConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses, before a model is loaded, a teacher that does not exist or does not share the student's vocabulary."""
    if args.teacher_kind == "adapter":
        check_adapter(Path(args.teacher_adapter))
    if args.teacher_kind != "model" or is_address(args.teacher_model):  # a server is asked when the trainer is built
        return
    try:
        theirs = load_tokenizer(args.teacher_model).get_vocab()
    except (ValueError, FileNotFoundError) as error:  # the loader names the student's argument
        raise type(error)(str(error).replace("model_name_or_path=", "teacher_model=")) from None
    ours = tokenizer.get_vocab()
    differing = sorted(set(theirs.items()) ^ set(ours.items()), key=lambda item: (item[1], item[0]))
    if differing:
        token, index = differing[0]
        raise ValueError(
            f"teacher_model={args.teacher_model} has {len(theirs)} tokens, the student {len(ours)}; {len(differing)} entries differ, the "
            f"first is id {index}, {token!r}: a teacher must share the student's vocabulary"
        )
