"""What a training step will hold in GPU memory, item by item, before anything loads; and what follows for recomputation and sleep mode.

Used by `opsd/setup_run.py`. The multiplicities were measured on an H200 with the Qwen3-1.7B shape (LoRA r 64, bf16, packed rows) and
are held against those measurements by tests/test_memory.py; they scale with the model's linear layers.
"""

import logging
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from opsd.eval_estimate import GIB, kv_bytes_per_token, linear_shapes
from opsd.projection import default_chunk_size

logger = logging.getLogger(__name__)

# Kept for the backward pass, without and with Liger's kernels: values per token and output feature of a decoder layer's linear layers, and
# a constant part in decoder weights; measured, it does not depend on the batch.
SAVED_PER_OUTPUT = {False: 2.81, True: 1.76}
SAVED_WITH_WEIGHTS = {False: 1.4, True: 0.1}
HIDDEN_COPIES = 5.4  # values per hidden feature and completion token around the loss: both roles, gradient, final norm
SLEEPING_ENGINE = int(1.5 * GIB)  # what a sleeping vLLM keeps: CUDA graphs and workspaces
CONTEXT = 1 * GIB  # CUDA context and libraries
MARGIN = 1.15  # what the estimate has to leave free: its own error and the allocator's slack
SLEEP_SECONDS = 3.8  # measured price of sleeping and waking once, on an H200


@dataclass(frozen=True)
class StepShape:
    """One optimizer step on one device: `sequences` of a micro-batch, the longest prompts and completion, in tokens; `rollouts` in all."""

    sequences: int
    rollouts: int
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Student:
    """What is trained: bytes of one model weight, of one value that is computed, of one logit, and the adapter.

    `lora_rank` None: every weight is trained, and the engine and the frozen teacher hold theirs in what is computed.
    """

    config: PretrainedConfig
    linear: dict[str, tuple[int, int]]  # name of every linear layer -> (out, in) features
    parameters: int
    weight_bytes: int
    compute_bytes: int
    logit_bytes: int
    lora_rank: int | None
    lora_targets: tuple[str, ...]
    liger: bool = False  # whether Liger's kernels keep less for the backward pass

    @classmethod
    def of(
        cls,
        config: PretrainedConfig,
        *,
        weight_bytes: int,
        logit_bytes: int,
        lora_rank: int | None,
        lora_targets,
        compute_bytes: int | None = None,
        liger: bool = False,
    ):
        compute_bytes = compute_bytes or weight_bytes
        targets = tuple(lora_targets or ())
        return cls(config, *linear_shapes(config), weight_bytes, compute_bytes, logit_bytes, lora_rank, targets, liger)


@dataclass(frozen=True)
class Engine:
    """The colocated engine. `kind` as in rollout_engine; `reserved_bytes`: what vLLM takes in all."""

    kind: str
    reserved_bytes: int = 0
    merged: bool = False


def training_items(student: Student, step: StepShape, *, recompute: bool) -> dict[str, int]:
    """Bytes held at the peak of a training step, by item."""
    parameters = student.parameters
    text = student.config.get_text_config()
    decoder = {name: shape for name, shape in student.linear.items() if not name.endswith("lm_head")}
    inputs = step.sequences * (step.prompt_tokens + step.completion_tokens)
    completions = step.sequences * step.completion_tokens
    items = {"base weights": parameters * student.weight_bytes}
    if student.lora_rank is None:
        items["frozen copy"] = parameters * student.compute_bytes
        items["gradients and Adam"] = 3 * parameters * student.weight_bytes
        if student.compute_bytes < student.weight_bytes:
            items["weights as autocast multiplies them"] = parameters * student.compute_bytes
    else:
        items["adapter, gradients and Adam"] = 4 * adapter_parameters(decoder, student) * 4
    if recompute:
        items["layer inputs (recomputation on)"] = (
            inputs * text.num_hidden_layers * text.hidden_size * student.weight_bytes  # the residual stream's dtype
        )
    else:
        outputs = sum(out for out, _ in decoder.values())
        weights = sum(out * features for out, features in decoder.values())
        items["activations (recomputation off)"] = int(
            student.compute_bytes
            * (inputs * SAVED_PER_OUTPUT[student.liger] * outputs + SAVED_WITH_WEIGHTS[student.liger] * weights)
        )
    items["hidden states around the loss"] = int(completions * HIDDEN_COPIES * text.hidden_size * student.compute_bytes)
    rows = min(default_chunk_size(text.vocab_size, student.logit_bytes), completions)
    items["loss chunk"] = rows * text.vocab_size * (2 * student.logit_bytes + student.compute_bytes)
    return items


def adapter_parameters(shapes: dict[str, tuple[int, int]], student: Student) -> int:
    """Weights of the LoRA adapter: rank x (in + out) for every targeted layer."""
    targets = student.lora_targets
    targeted = [s for name, s in shapes.items() if "all-linear" in targets or name.rsplit(".", 1)[-1] in targets]
    return sum(student.lora_rank * (out + features) for out, features in targeted)


def engine_items(engine: Engine, student: Student, step: StepShape, *, sleep: bool) -> dict[str, int]:
    """Bytes that the engine holds while the student trains, by item."""
    copy = student.parameters * student.compute_bytes
    if engine.kind == "vllm":
        if sleep:
            return {"engine, asleep": SLEEPING_ENGINE}
        return {
            "engine's own copy of the base weights": copy,
            "engine's KV cache and workspace": max(0, engine.reserved_bytes - copy),
        }
    return {"engine's own copy of the weights": copy} if engine.merged else {}


def rollout_items(engine: Engine, student: Student, step: StepShape) -> dict[str, int]:
    """Bytes of the transformers engine's cache, which lives only while it samples."""
    if engine.kind != "transformers":
        return {}
    tokens = step.rollouts * (step.prompt_tokens + step.completion_tokens)
    return {"KV cache while sampling": tokens * kv_bytes_per_token(student.config, student.compute_bytes)}


@dataclass(frozen=True)
class Plan:
    """Whether to recompute and to sleep, and the items that this leads to, in bytes. `fits` is None without a GPU."""

    recompute: bool
    sleep: bool
    training: dict[str, int]
    engine: dict[str, int]
    fits: bool | None

    @property
    def training_bytes(self) -> int:
        return sum(self.training.values())

    def text(self, free_bytes: int | None) -> str:
        """The table that is logged before a run starts."""
        rows = [*self.training.items(), ("training, estimated peak", self.training_bytes), *self.engine.items()]
        total = self.training_bytes + sum(self.engine.values())
        rows.append(("in all" if free_bytes is None else f"in all, of {free_bytes / GIB:.1f} GiB free", total))
        lines = [f"{value / GIB:9.2f} GiB  {name}" for name, value in rows]
        return "memory estimate for the longest prompts and full completions\n" + "\n".join(lines)


def make_plan(
    student: Student,
    step: StepShape,
    engine: Engine,
    *,
    recompute: str,
    sleep: str,
    free_bytes: int | None,
    teacher_items: dict[str, int] | None = None,
) -> Plan:
    """The first way that fits: keep everything; recompute; sleep; both. `recompute` and `sleep`: auto, true or false.

    Recomputing costs less than sleeping (a student forward pass against SLEEP_SECONDS a step), so it is tried first. Without a GPU
    (`free_bytes` None) auto means neither.
    """
    may_sleep = {"auto": (False, True), "true": (True,), "false": (False,)}[sleep if engine.kind == "vllm" else "false"]
    may_recompute = {"auto": (False, True), "true": (True,), "false": (False,)}[recompute]
    plan = None
    for asleep in may_sleep:
        for again in may_recompute:
            training = training_items(student, step, recompute=again) | (teacher_items or {})
            held = engine_items(engine, student, step, sleep=asleep)
            cache = rollout_items(engine, student, step)
            needed = MARGIN * max(sum(training.values()), sum(cache.values())) + sum(held.values()) + CONTEXT
            plan = Plan(again, asleep, training, held | cache, None if free_bytes is None else needed <= free_bytes)
            if plan.fits is not False:
                return plan
    return plan


def free_gpu_bytes() -> int | None:
    """Memory that is free on this process's GPU now; None without one."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None


def announce(plan: Plan, free_bytes: int | None) -> None:
    """Logs the table and the two decisions, and warns where the estimate is above what is free."""
    logger.info("%s", plan.text(free_bytes))
    logger.info(
        "activations are %s; the engine %s while training",
        "recomputed" if plan.recompute else "kept",
        f"sleeps (about {SLEEP_SECONDS} s a step)" if plan.sleep else "keeps its memory",
    )
    if plan.fits is False:
        logger.warning(
            "this may not fit into %.1f GiB; lower micro_batch_size, max_completion_length, max_teacher_prompt_length or "
            "vllm_gpu_memory_utilization",
            free_bytes / GIB,
        )
