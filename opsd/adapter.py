"""LoRA adapters on disk: what vLLM can serve, and proof that a saved one is complete.

Used by the trainer before anything loads, by every engine before it serves a folder, and by `eval_aime.py`.
"""

import json
import math
from pathlib import Path

from opsd.runinfo import sha256_file

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def read_adapter_config(adapter_dir: Path) -> dict:
    """The adapter's configuration. Raises FileNotFoundError or ValueError, naming the folder, when it is not a LoRA adapter."""
    adapter_dir = Path(adapter_dir)
    if not adapter_dir.is_dir():
        raise FileNotFoundError(f"adapter={adapter_dir} does not exist; give the folder that holds {CONFIG}")
    for name in (CONFIG, WEIGHTS):
        if not (adapter_dir / name).is_file():
            raise FileNotFoundError(
                f"adapter={adapter_dir} has no {name}; give a folder written by PEFT's save_pretrained"
            )
    try:
        config = json.loads((adapter_dir / CONFIG).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{adapter_dir / CONFIG} is not JSON ({error}); save the adapter again") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA" or not isinstance(config.get("r"), int):
        raise ValueError(f"{adapter_dir / CONFIG} does not describe a LoRA adapter; only LoRA adapters are served")
    refuse_unservable(config, str(adapter_dir))
    return config


def refuse_unservable(config: dict, name: str) -> None:
    """Raises ValueError for LoRA variants that vLLM cannot serve natively, by name."""
    targets = config.get("target_modules") or []
    reasons = {
        "use_dora": (config.get("use_dora"), "DoRA"),
        "bias": (config.get("bias") not in (None, "none"), "trained biases"),
        "modules_to_save": (bool(config.get("modules_to_save")), "fully trained modules"),
        "target_modules": (
            "lm_head" in targets or "embed_tokens" in targets,
            "LoRA on the output projection or the embedding",
        ),
        "target_parameters": (bool(config.get("target_parameters")), "LoRA on bare parameters"),
        "rank_pattern": (bool(config.get("rank_pattern")), "ranks that differ between modules"),
        "alpha_pattern": (bool(config.get("alpha_pattern")), "scalings that differ between modules"),
    }
    for field, (present, what) in reasons.items():
        if present:
            raise ValueError(f"{name}: {field}={config.get(field)!r}: vLLM does not serve {what}; train without it")


def plain_names(targets: str | list[str]) -> list[str] | None:
    """The targeted layers' own names, such as q_proj; None for patterns and paths, which vLLM reads differently from PEFT."""
    names = [targets] if isinstance(targets, str) else sorted(targets)
    return names if all(name.isidentifier() for name in names) else None


def check_adapter(adapter_dir: Path) -> tuple[str, float]:
    """(sha256 of the weights file, `adapter_norm`)."""
    norm = adapter_norm(adapter_dir)
    return sha256_file(Path(adapter_dir) / WEIGHTS), norm


def adapter_norm(adapter_dir: Path) -> float:
    """Proves that the folder holds a complete adapter: every A has its B, no tensor is empty or non-finite.

    Returns the Frobenius norm over all B matrices: 0.0 before the first optimizer step.
    """
    from safetensors import SafetensorError, safe_open
    from torch import float64
    from torch.linalg import vector_norm

    config = read_adapter_config(adapter_dir)
    path = Path(adapter_dir) / WEIGHTS
    names, squares = set(), 0.0
    try:
        with safe_open(path, framework="pt") as weights:
            for name in weights.keys():
                tensor = weights.get_tensor(name)
                if tensor.numel() == 0:
                    raise ValueError(
                        f"{path}: tensor {name} is empty: it was saved from a sharded model; gather before saving"
                    )
                norm = float(vector_norm(tensor, dtype=float64))
                if not math.isfinite(norm):
                    raise ValueError(f"{path}: tensor {name} is not finite; use an earlier checkpoint")
                if ".lora_A." in name and tensor.shape[0] != config["r"]:
                    raise ValueError(f"{path}: tensor {name} has rank {tensor.shape[0]}, {CONFIG} says r={config['r']}")
                if ".lora_B." in name:
                    squares += norm**2
                names.add(name)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file ({error}); save the adapter again") from None
    halves = {n.replace(".lora_A.", ".lora_B.") for n in names if ".lora_A." in n}
    if not halves or halves != {n for n in names if ".lora_B." in n}:
        raise ValueError(
            f"{path} holds {len(names)} tensors that are not pairs of lora_A and lora_B; save the adapter again"
        )
    return math.sqrt(squares)


def check_adapter_fits(adapter_dir: Path, model_path: str, hidden_shapes: dict[str, tuple[int, int]]) -> None:
    """Raises ValueError when the adapter's matrices do not fit the base model.

    `hidden_shapes` maps module names of the base model (as in `model.layers.0.self_attn.q_proj`) to (out, in) features.
    """
    from safetensors import safe_open

    with safe_open(Path(adapter_dir) / WEIGHTS, framework="pt") as weights:
        for name in weights.keys():
            module = name.removeprefix("base_model.model.").split(".lora_")[0]
            shape = weights.get_slice(name).get_shape()
            expected = hidden_shapes.get(module)
            side = 1 if ".lora_A." in name else 0
            if expected is None:
                raise ValueError(
                    f"adapter={adapter_dir} targets {module}, which model={model_path} does not have; wrong base model"
                )
            if shape[side] != expected[side]:
                raise ValueError(
                    f"adapter={adapter_dir}: {name} has shape {tuple(shape)}, but model={model_path} has {expected[0]}x"
                    f"{expected[1]} there; wrong base model"
                )
