"""What happens between parsed arguments and the first optimizer step: logging, world, layout, engine, trainer, and the run's record."""

import dataclasses
import logging
import math
from pathlib import Path

import torch
from transformers import Trainer

from opsd.args import OPSDConfig
from opsd.attention import NAME as VARLEN
from opsd.attention import supports_packing
from opsd.batch import Layout
from opsd.engines import build_engine, check_engine, plan_memory
from opsd.entry import log_to_stderr
from opsd.memory import announce
from opsd.model import end_token_ids, load_config, load_student
from opsd.runinfo import git_state, hardware, package_versions, write_json, write_text
from opsd.speed import choose_liger, drop_input_casts, fuse_adapters
from opsd.trainer import OPSDTrainer

logger = logging.getLogger(__name__)

SECRETS = ("hub_token", "push_to_hub_token")  # arguments that are not written to run.json


def configure_logging() -> None:
    """One configuration for the whole process: our messages at INFO on stderr, the libraries' warnings."""
    log_to_stderr(("opsd", "callbacks", "tiny"))


def resolve_world(data_args, handoff, model_args, cache_dir: Path) -> None:
    """Builds the world that `data_args.world` names, if any, and points model, rows and benchmark at it."""
    if data_args.world == "none":
        return
    if model_args.model_name_or_path:
        raise ValueError(
            f"model_name_or_path={model_args.model_name_or_path} contradicts world={data_args.world}, which brings its own model"
        )
    if data_args.world == "smollm2":
        from tiny.smollm2 import build_smollm2

        model_args.model_name_or_path = str(build_smollm2(cache_dir))
        return
    from tiny.build import build_tiny_world

    world = build_tiny_world(cache_dir, data_args.world_seed)
    model_args.model_name_or_path = str(world / "model")
    data_args.train_file = str(world / ("train_swapped.jsonl" if data_args.world == "tiny_swapped" else "train.jsonl"))
    if handoff.eval_benchmark is None:
        handoff.eval_benchmark = str(world / "benchmark.jsonl")


def choose_layout(args: OPSDConfig, config, pad_id: int) -> Layout:
    """Packed rows where the model allows them and nothing asked for padding. Raises ValueError when packing=true cannot be had."""
    reason = "position_gap=true" if args.position_gap else supports_packing(config)
    if args.packing == "true" and reason:
        raise ValueError(f"packing=true is not possible with {reason}; set packing=auto")
    packed = args.packing != "false" and reason is None
    logger.info("layout: %s", "packed rows" if packed else f"padded batches ({reason or 'packing=false'})")
    return Layout(packed, pad_id, args.position_gap, args.first_token_from_padding)


def build_trainer(
    args: OPSDConfig, model_args, tokenizer, examples, counts: dict, api_key: str | None = None
) -> OPSDTrainer:
    """Model, engine and trainer. Raises ValueError before loading when the sequences do not fit the model's context."""
    check_engine(args, api_key)
    name, revision = model_args.model_name_or_path, model_args.model_revision
    config = load_config(name, revision)
    longest_prompt = counts["longest_prompt_ids"]
    sampled = longest_prompt + args.max_completion_length  # tokens of the longest sequence that the engine holds
    if args.reason_first_tokens:
        sampled = max(sampled, counts["longest_analysis_prompt_ids"] + args.reason_first_tokens)
    longest = max(sampled, counts["longest_teacher_prompt_ids"] + args.max_completion_length)
    context = config.get_text_config().max_position_embeddings
    if longest > context:
        raise ValueError(
            f"max_completion_length={args.max_completion_length} and reason_first_tokens={args.reason_first_tokens} make the longest "
            f"sequence {longest} tokens, more than the model's context of {context}; lower one of them, or max_teacher_prompt_length"
        )
    eos_ids = end_token_ids(name, tokenizer, revision)
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    layout = choose_layout(args, config, pad_id)
    if layout.packed and model_args.attn_implementation:
        raise ValueError(
            f"attn_implementation={model_args.attn_implementation} has no effect on packed rows; set packing=false, or remove it"
        )
    plan, free_bytes = plan_memory(args, model_args, config, prompt_tokens=longest_prompt)
    announce(plan, free_bytes)
    args.gradient_checkpointing = plan.recompute
    model = load_student(
        model_args,
        attn_implementation=VARLEN if layout.packed else (model_args.attn_implementation or "sdpa"),
        seed=args.seed,
        device=args.device,
    )
    check_optimizer(args, model)
    if args.bf16 and model_args.use_peft:
        drop_input_casts(model)
    choose_liger(args, config.get_text_config().model_type)
    before = allocated_bytes()
    engine = build_engine(
        args,
        model_args,
        model,
        canary_ids=examples[0]["prompt_ids"],
        eos_ids=eos_ids,
        pad_id=pad_id,
        max_model_len=sampled,
        sleep=plan.sleep,
        api_key=api_key,
    )
    held = allocated_bytes() - before
    trainer = OPSDTrainer(model, args, examples, tokenizer, engine, layout, engine_bytes=held, api_key=api_key)
    whole = not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled)
    if args.bf16 and model_args.use_peft and whole and model.dtype == torch.bfloat16:
        fuse_adapters(model)
    return trainer


def check_optimizer(args: OPSDConfig, model) -> None:
    """Raises ValueError when the optimizer lives in a package that is not installed."""
    try:
        Trainer.get_optimizer_cls_and_kwargs(args, model)
    except ImportError as error:
        raise ValueError(
            f"optim={args.optim.value} needs a package that is not installed, or another optim: {error}"
        ) from error


def allocated_bytes() -> int:
    """GPU memory allocated by this process; 0 without a GPU."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def preview_prompts(tokenizer, example: dict, output_dir: Path) -> None:
    """Shows both rendered prompts of the first example once and keeps them in preview.txt."""
    parts = [
        f"=== {role} prompt of example {example['example_id']} ({len(example[column])} tokens)\n{tokenizer.decode(example[column])}\n"
        for role, column in (("student", "prompt_ids"), ("teacher", "teacher_prompt_ids"))
    ]
    write_text(output_dir / "preview.txt", "\n".join(parts))
    for part in parts:
        logger.info("%s", part)


def write_run(trainer: OPSDTrainer, record: dict, status: str, **more) -> None:
    """Writes run.json from the main process: `record` with the run's status (running, stopped or finished)."""
    if trainer.is_world_process_zero():
        write_json(Path(trainer.args.output_dir) / "run.json", record | {"status": status, **more})


def run_record(argv: list[str], groups: tuple, counts: dict) -> dict:
    """Everything run.json says about a run before it starts; infinities become strings, since JSON has none."""
    arguments = {}
    for group in groups:
        arguments[type(group).__name__] = {
            f.name: _plain(getattr(group, f.name))
            for f in dataclasses.fields(group)
            if f.init and f.name not in SECRETS
        }
    return {
        "schema": "opsd-run/1",
        "command": argv,
        **git_state(),
        "arguments": arguments,
        "versions": package_versions(),
        "hardware": hardware(),
        "data": counts,
    }


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
