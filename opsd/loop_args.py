"""What the training loop that we inherit may be asked for: ranges of transformers' own arguments, and those that the method rules out.

Called by `OPSDConfig` (args.py) and `opsd_train.py`. transformers checks few of these, or ignores them silently. Imports nothing of
ours but the helpers of method_args.py.
"""

import importlib.util
import json
import math
from dataclasses import MISSING, fields
from pathlib import Path

from opsd.method_args import check

TRACKERS = ("none", "tensorboard", "wandb", "trackio")
# Arguments that must keep their default -> why
FIXED = {
    "remove_unused_columns": "rows hold our own columns",
    "dataloader_pin_memory": "rows are lists of token ids, not tensors",
    "push_to_hub": "nothing is uploaded by a training run; upload the adapter by hand",
    "auto_find_batch_size": "it would change the batch; lower micro_batch_size",
    "load_best_model_at_end": "training computes no score to choose by; evaluate the checkpoints with eval_aime.py",
    "fp16": "float16 loses small gradients; use dtype bfloat16 or float32",
    "label_smoothing_factor": "the loss has no labels",
    "neftune_noise_alpha": "noise in the embeddings would make rollouts and loss come from different students",
    "num_train_epochs": "it has no effect beside max_steps; set max_steps",
    "average_tokens_across_devices": "the loss is one mean over the tokens of all processes",
    "train_sampling_strategy": "the order of the rows follows from seed (data_seed) and step",
    "length_column_name": "the order of the rows follows from seed (data_seed) and step",
    "label_names": "the loss has no labels",
    "deepspeed": "choose how processes share the model with OPSD_ACCELERATE_CONFIG=zero2 or zero3",
    "fsdp": "choose how processes share the model with OPSD_ACCELERATE_CONFIG=fsdp2",
    "fsdp_config": "choose how processes share the model with OPSD_ACCELERATE_CONFIG=fsdp2",
}  # fmt: skip
EVALUATION = (
    "do_eval",
    "do_predict",
    "eval_steps",
    "eval_delay",
    "eval_on_start",
    "eval_accumulation_steps",
    "per_device_eval_batch_size",
    "prediction_loss_only",
    "include_for_metrics",
    "batch_eval_metrics",
    "bf16_full_eval",
    "fp16_full_eval",
    "metric_for_best_model",
    "greater_is_better",
)
FIXED |= dict.fromkeys(EVALUATION, "training evaluates nothing; score checkpoints with eval_aime.py")
# Arguments that take JSON -> whether they also take the name of a JSON file
JSON_ARGUMENTS = {"lr_scheduler_kwargs": False, "gradient_checkpointing_kwargs": False, "accelerator_config": True}
SEEDS = 2**32  # numpy takes no larger one


class PlainCpu:
    """accelerate numbers the CPU of several processes, and torch.load cannot resume onto a numbered CPU: part of `OPSDConfig`."""

    @property
    def device(self):
        """This process's device."""
        device = super().device
        return type(device)("cpu") if device.type == "cpu" else device


def check_loop(args) -> None:
    """Raises ValueError naming the first inherited argument that is out of range or ruled out."""
    check(bool(args.output_dir.strip()), "output_dir='' must name a folder; leave it out for its default")
    defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(args)}
    for name, reason in FIXED.items():
        value, default = getattr(args, name), defaults[name]
        check(value == default, f"{name}={value} must stay {default}: {reason}")
    for name, may_be_a_file in JSON_ARGUMENTS.items():
        _check_json(name, getattr(args, name), may_be_a_file)
    # the value is not repeated: it is a secret, and every user of the host can read a command line
    check(
        args.hub_token is None,
        "hub_token must not be given as an argument; export HF_TOKEN, which is never written anywhere",
    )
    for name in ("eval_strategy", "save_strategy", "logging_strategy"):
        value = getattr(args, name)
        allowed = {"eval_strategy": ("no",), "save_strategy": ("no", "steps"), "logging_strategy": ("steps",)}[name]
        text = value if type(value) is str else value.value
        check(text in allowed, f"{name}={text} must be {' or '.join(allowed)}; evaluate checkpoints with eval_aime.py")
    for name in ("save_steps", "logging_steps"):
        value = getattr(args, name)
        check(value > 0 and math.isfinite(value), f"{name}={value} must be > 0 steps, or a fraction of max_steps")
    limit = args.save_total_limit
    check(limit is None or limit > 0, f"save_total_limit={limit} must be > 0 checkpoints; leave it out to keep all")
    for name in ("seed", "data_seed"):
        value = getattr(args, name)
        check(value is None or 0 <= value < SEEDS, f"{name}={value} must be 0 to {SEEDS - 1}")
    check(args.max_grad_norm >= 0, f"max_grad_norm={args.max_grad_norm} must be >= 0; use 0 to disable clipping")
    value = args.weight_decay
    check(0 <= value < math.inf, f"weight_decay={value} must be finite and >= 0; use 0 to disable")
    for name in ("adam_beta1", "adam_beta2"):
        check(0 <= getattr(args, name) < 1, f"{name}={getattr(args, name)} must be in [0, 1)")
    check(0 < args.adam_epsilon < math.inf, f"adam_epsilon={args.adam_epsilon} must be finite and > 0")
    check(
        0 <= args.warmup_steps < math.inf, f"warmup_steps={args.warmup_steps} must be >= 0 and finite; use 0 for none"
    )
    check(
        args.dataloader_num_workers >= 0,
        f"dataloader_num_workers={args.dataloader_num_workers} must be >= 0; use 0 for none",
    )
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        check(getattr(args, name) > 0, f"{name}={getattr(args, name)} must be > 0")
    for tracker in args.report_to or []:
        check(tracker in TRACKERS, f"report_to={tracker} must be one of {', '.join(TRACKERS)}")
        known = tracker == "none" or importlib.util.find_spec(tracker) is not None
        check(known, f"report_to={tracker} needs the package {tracker}; install it, or use report_to=none")


def _check_json(name: str, value, may_be_a_file: bool) -> None:
    if not isinstance(value, str):
        return
    text, remedy = value, "give a JSON object" + " or a JSON file" * may_be_a_file
    if may_be_a_file and not value.startswith("{"):
        check(Path(value).is_file(), f"{name}={value} is not a file; {remedy}")
        text = Path(value).read_text(encoding="utf-8")
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}={value} is not JSON ({error}); {remedy}") from None
    check(isinstance(found, dict), f"{name}={value} is not a JSON object; {remedy}")


def check_batch(args) -> None:
    """Raises ValueError when batch, accumulation and processes do not make `rollouts_per_step`; the launcher derives them."""
    made = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    check(
        made == args.rollouts_per_step,
        f"per_device_train_batch_size={args.per_device_train_batch_size} x gradient_accumulation_steps="
        f"{args.gradient_accumulation_steps} x {args.world_size} processes must be rollouts_per_step={args.rollouts_per_step}; start with "
        "train_capped.sh, which derives them",
    )
