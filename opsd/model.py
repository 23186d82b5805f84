"""The student: base model + LoRA adapter, and the hash that proves that the base never moved.

Data flow: ModelConfig -> `load_student` -> opsd/trainer.py. Without an adapter (`use_peft=false`) all weights are trained: see
opsd/full_weights.py.
"""

import logging
from pathlib import Path

import torch
from huggingface_hub.errors import HFValidationError
from peft import PeftModel, get_peft_model
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from trl import ModelConfig, get_peft_config

from opsd.adapter import refuse_unservable
from opsd.runinfo import sha256_tensors
from opsd.sharding import whole_named

logger = logging.getLogger(__name__)

ALL_LINEAR = "all-linear"


def check_model_args(model_args: ModelConfig) -> None:
    """Refuses, by name and before anything loads, what the method or the engine cannot honour. Raises ValueError."""
    if not model_args.model_name_or_path:
        raise ValueError("model_name_or_path is not given; name a hub id or a local folder")
    for name in ("load_in_4bit", "load_in_8bit"):
        if getattr(model_args, name):
            raise ValueError(f"{name}=true must be false: the engine would sample from other weights than are trained")
    if model_args.model_revision != "main" and Path(model_args.model_name_or_path).is_dir():
        raise ValueError(f"model_revision={model_args.model_revision} has no effect on a local folder; remove it")
    if not model_args.use_peft:
        return
    if model_args.lora_r <= 0:
        raise ValueError(f"lora_r={model_args.lora_r} must be > 0")
    if not model_args.lora_target_modules:
        raise ValueError("lora_target_modules is not given; name the projections, e.g. q_proj k_proj v_proj o_proj")
    if not model_args.lora_alpha > 0:
        raise ValueError(f"lora_alpha={model_args.lora_alpha} must be > 0")
    if model_args.lora_task_type != "CAUSAL_LM":
        raise ValueError(f"lora_task_type={model_args.lora_task_type} must be CAUSAL_LM; leave it out")
    if not 0 <= model_args.lora_dropout < 1:
        raise ValueError(f"lora_dropout={model_args.lora_dropout} must be in [0, 1)")
    refuse_unservable(
        {
            "use_dora": model_args.use_dora,
            "modules_to_save": model_args.lora_modules_to_save,
            "target_modules": model_args.lora_target_modules,
            "target_parameters": model_args.lora_target_parameters,
        },
        "the adapter",
    )


def load_config(name_or_path: str, revision: str = "main"):
    """The transformers config of a hub id or local folder. Raises FileNotFoundError with one line when there is none."""
    if looks_local(name_or_path) and not Path(name_or_path, "config.json").is_file():
        raise FileNotFoundError(
            f"model_name_or_path={name_or_path} has no config.json; give the folder of a model, or a hub id"
        )
    try:
        return AutoConfig.from_pretrained(name_or_path, revision=revision)
    except (OSError, HFValidationError) as error:
        raise FileNotFoundError(
            f"model_name_or_path={name_or_path} could not be read ({_first_line(error)}); check the name or the network"
        ) from None


def looks_local(name_or_path: str) -> bool:
    """Whether the text is meant as a path: absolute, relative with a dot, or more than one slash."""
    return name_or_path.startswith(("/", ".", "~")) or name_or_path.count("/") > 1


def load_tokenizer(name_or_path: str, revision: str = "main") -> PreTrainedTokenizerBase:
    """The tokenizer; one without an end token is refused. The pad token only fills padded batches and is never compared with."""
    config = load_config(name_or_path, revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, revision=revision)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the tokenizer of model_name_or_path={name_or_path} cannot be read ({_first_line(error)}); save it again"
        ) from None
    if not tokenizer("1 + 1", add_special_tokens=False)["input_ids"]:
        raise ValueError(
            f"the tokenizer of model_name_or_path={name_or_path} knows no text; is its tokenizer.json missing?"
        )
    largest, size = max(tokenizer.get_vocab().values()), config.get_text_config().vocab_size
    if largest >= size:
        raise ValueError(
            f"model_name_or_path={name_or_path} has a vocabulary of {size}, its tokenizer ids up to {largest}; give the tokenizer that "
            "belongs to the model"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of model_name_or_path={name_or_path} has no end token (eos); set one in its config"
        )
    return tokenizer


def end_token_ids(name_or_path: str, tokenizer: PreTrainedTokenizerBase, revision: str = "main") -> set[int]:
    """Ids that end a completion: the tokenizer's end token and those of the model's generation config, as vLLM stops on both."""
    ids = {tokenizer.eos_token_id}
    config = load_config(name_or_path, revision)
    try:
        declared = GenerationConfig.from_pretrained(name_or_path, revision=revision).eos_token_id
    except OSError:  # a model without generation_config.json declares its end token in config.json
        declared = config.get_text_config().eos_token_id
    if declared is None:
        return ids
    return ids | set(declared if isinstance(declared, list) else [declared])


def load_base(name_or_path: str, *, revision: str = "main", **options) -> PreTrainedModel:
    """A causal language model whose every weight comes from its safetensors files: no pickle is read, no weight is made up.

    `options`: dtype and attn_implementation. Raises ValueError for missing, torn or incomplete files.
    """
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            name_or_path, revision=revision, use_safetensors=True, output_loading_info=True, **options
        )
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"model_name_or_path={name_or_path}: the weights cannot be read ({_first_line(error)}); give a complete model in "
            "safetensors files"
        ) from None
    wrong = [str(key) for kind in ("missing_keys", "mismatched_keys") for key in sorted(info[kind])]
    if wrong:
        raise ValueError(
            f"model_name_or_path={name_or_path}: {len(wrong)} weights are missing or of another shape, first {wrong[0]}; give a complete "
            "model"
        )
    return model


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def load_student(
    model_args: ModelConfig, *, attn_implementation: str | None, seed: int, device: str | torch.device
) -> PeftModel | PreTrainedModel:
    """Base model in `model_args.dtype` with a fresh float32 LoRA adapter (B = 0, so that the student starts as the base), or without one.

    Raises ValueError when a target module does not exist in the model.
    """
    check_model_args(model_args)
    load_config(model_args.model_name_or_path, model_args.model_revision)
    dtype = "auto" if model_args.dtype == "auto" else getattr(torch, model_args.dtype)
    base = load_base(
        model_args.model_name_or_path,
        revision=model_args.model_revision,
        dtype=dtype,
        attn_implementation=attn_implementation,
    ).to(device)
    torch.manual_seed(seed)
    refuse_unsupported_head(base)
    if not model_args.use_peft:
        return base
    base.config.use_cache = False
    lora = get_peft_config(model_args)
    lora.target_modules = _targets(base, lora.target_modules)
    return get_peft_model(base, lora)


def _targets(base: PreTrainedModel, wanted: str | set[str] | list[str]) -> str | list[str]:
    """The target modules as PEFT takes them: a single name comes from TRL as text, which PEFT would read as a pattern of full names.

    Raises ValueError for a name that no module ends with; PEFT passes over it when another one matches.
    """
    if wanted == ALL_LINEAR:
        return wanted
    names = [wanted] if isinstance(wanted, str) else sorted(wanted)
    for target in names:
        if not any(name == target or name.endswith("." + target) for name, _ in base.named_modules()):
            raise ValueError(
                f"lora_target_modules={target} is no module of the model; use names such as q_proj, or {ALL_LINEAR}"
            )
    return names


def refuse_unsupported_head(base: PreTrainedModel) -> None:
    """Raises ValueError for output layers whose logits are more than hidden states times a matrix plus a bias."""
    head = base.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise ValueError(f"the output projection is {type(head).__name__}; only a linear layer is supported")
    text = base.config.get_text_config().to_dict()
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if text.get(name):
            raise ValueError(f"{name}={text[name]} in the model's config is not supported by the trainer")


def base_hash(model: PreTrainedModel | PeftModel) -> str:
    """sha256 over every weight that is not an adapter's, in name order: equal at both ends of a run, or the teacher moved."""
    named = ((n, p) for n, p in model.named_parameters() if ".lora_" not in n)
    return sha256_tensors(whole_named(sorted(named, key=lambda item: item[0])))
