"""From arguments to the rollout engine, and the memory plan beside it. Between setup_run.py and the engines."""

import torch

from opsd.adapter import plain_names
from opsd.args import OPSDConfig
from opsd.eval_estimate import linear_shapes
from opsd.full_weights import samples_in_bfloat16, sampling_dtype
from opsd.memory import Engine, Plan, StepShape, Student, free_gpu_bytes, make_plan
from opsd.method_args import is_address
from opsd.model import load_config
from opsd.rollout import VLLMEngine
from opsd.rollout_server import ServerEngine
from opsd.rollout_transformers import TransformersEngine

CANARY_TOKENS = 64
# Decoding a step's rollouts on a GPU: sequences times key-value heads are more pieces of work than it has multiprocessors, so cutting a
# sequence's attention only costs a kernel that joins the pieces; the norms of query and key and the rotary embedding become one kernel.
TUNING = {
    "attention_config": {"flash_attn_max_num_splits_for_cuda_graph": 1},
    "compilation_config": {"pass_config": {"enable_qk_norm_rope_fusion": True}},
}


def check_engine(args: OPSDConfig, api_key: str | None) -> None:
    """Refuses, before anything loads, an engine that this machine cannot run. Raises ValueError."""
    if args.rollout_engine == "vllm_server" and not api_key:
        raise ValueError(
            "OPSD_VLLM_API_KEY is not set, and rollout_engine=vllm_server needs it; export the key that the servers were started with"
        )
    if args.rollout_sync == "merged" and args.rollout_engine == "vllm" and args.device.type != "cuda":
        raise ValueError(
            "rollout_sync=merged is not possible with rollout_engine=vllm on a CPU, whose layers repack their weights; set "
            "rollout_engine=transformers"
        )


def build_engine(
    args: OPSDConfig,
    model_args,
    model,
    *,
    canary_ids: list[int],
    eos_ids: set[int],
    pad_id: int,
    max_model_len: int,
    sleep: bool,
    api_key: str | None,
):
    """The engine that `args.rollout_engine` and `args.rollout_sync` name; `model` is the student."""
    name, merged = model_args.model_name_or_path, args.rollout_sync == "merged"
    dtype = str(sampling_dtype(model, args.bf16)).removeprefix("torch.")
    canary = {"canary_ids": canary_ids[:CANARY_TOKENS], "eos_ids": eos_ids, "max_model_len": max_model_len}
    if args.rollout_engine == "vllm":
        return VLLMEngine(
            name,
            **canary,
            dtype=dtype,
            max_num_seqs=args.rollouts_per_step // args.world_size,
            gpu_memory_utilization=args.vllm_gpu_memory_utilization,
            max_lora_rank=None if merged else model_args.lora_r,
            lora_targets=None if merged else plain_names(model_args.lora_target_modules),
            enforce_eager=args.vllm_enforce_eager or not torch.cuda.is_available(),
            sleep=sleep,
            load_format=args.vllm_load_format,
            tuning=TUNING if torch.cuda.is_available() else None,
            seed=args.seed,
        )
    if args.rollout_engine == "vllm_server":
        return ServerEngine(args.vllm_server_urls, api_key=api_key, **canary)
    batch = {"eos_ids": eos_ids, "pad_id": pad_id, "batch_size": args.rollouts_per_step}
    if merged:
        return TransformersEngine.from_pretrained(name, dtype=dtype, device=str(args.device), **batch)
    return TransformersEngine(model, **batch, live=True)


def plan_memory(args: OPSDConfig, model_args, config, *, prompt_tokens: int) -> tuple[Plan, int | None]:
    """What the run will hold, and whether to recompute and to sleep. `prompt_tokens`: the longest student prompt."""
    free = free_gpu_bytes() if args.device.type == "cuda" else None
    weight_bytes = torch.empty(0, dtype=weights_dtype(model_args, config)).element_size()
    student = Student.of(
        config,
        weight_bytes=weight_bytes,
        compute_bytes=2 if samples_in_bfloat16(model_args.use_peft, args.bf16) else weight_bytes,
        logit_bytes=getattr(torch, args.logits_dtype).itemsize,
        lora_rank=model_args.lora_r if model_args.use_peft else None,
        lora_targets=model_args.lora_target_modules,
        liger=args.use_liger_kernel,
    )
    teacher = {}
    if args.teacher_kind == "ema":
        adapted = [s for n, s in student.linear.items() if n.rsplit(".", 1)[-1] in student.lora_targets]
        teacher["teacher's moving average"] = sum(4 * out * features for out, features in adapted)
    elif args.teacher_kind == "model" and not is_address(args.teacher_model):
        teacher["teacher model"] = linear_shapes(load_config(args.teacher_model))[1] * student.compute_bytes
    total = torch.cuda.get_device_properties(args.device).total_memory if free is not None else 0
    plan = make_plan(
        student,
        StepShape(
            args.per_device_train_batch_size,
            args.rollouts_per_step // args.world_size,
            prompt_tokens,
            args.max_completion_length,
        ),
        Engine(
            args.rollout_engine,
            reserved_bytes=int(args.vllm_gpu_memory_utilization * total),
            merged=args.rollout_sync == "merged",
        ),
        recompute="true" if args.gradient_checkpointing else args.recompute,
        sleep=args.vllm_sleep,
        free_bytes=free,
        teacher_items=teacher,
    )
    return plan, free


def weights_dtype(model_args, config) -> torch.dtype:
    """The dtype that the base model will be loaded in."""
    if model_args.dtype not in ("auto", None):
        return getattr(torch, model_args.dtype)
    return config.dtype or torch.float32
