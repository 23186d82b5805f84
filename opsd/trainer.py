"""`OPSDTrainer`: on-policy self-distillation as a `transformers.Trainer` with few overrides (arXiv 2601.18734, section 3).

Data flow of one optimizer step: examples -> adapter saved and served -> all rollouts in one call -> micro-batches -> teacher and
student hidden states at the completion positions -> fused divergence -> gradient of one mean over all completion tokens of the step.
"""

import shutil
import time
from pathlib import Path

import torch
from accelerate.logging import get_logger
from peft import PeftModel
from torch.utils.data import Sampler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer
from transformers.integrations import is_deepspeed_zero3_enabled

from opsd.adapter_export import AdapterExport
from opsd.args import OPSDConfig
from opsd.batch import Layout, MicroBatch, build_inputs, split_micro_batches
from opsd.checkpoint import claim_folder, save_complete, staging_dir
from opsd.full_weights import FullWeights, check_saved, frozen_copy, sampling_dtype
from opsd.hidden_tap import HiddenTap
from opsd.merged_sync import MergedWeights
from opsd.model import base_hash
from opsd.objective import Objective, StepSize
from opsd.reason_first import ReasonFirst
from opsd.rollout import EngineDied, Rollout, SamplingSettings, derive_seed
from opsd.sampled_token import sampled_token_logps
from opsd.sharding import adapter_parent, reduce_in_float32, save_from_all
from opsd.steps import RolloutSampler, RunTotals, StepMetrics
from opsd.teacher import Teacher, completion_hidden, teacher_weights
from opsd.teacher_scores import TopKScores

logger = get_logger(__name__)


class OPSDTrainer(Trainer):
    """Trains a student, a LoRA adapter or a whole model, against the model that it started as, which sees the reference solution.

    `train_dataset` rows have `example_id` (str), `prompt_ids` and `teacher_prompt_ids` (lists of token ids). `engine` is one of
    opsd/rollout.py's. `layout` says how sequences are batched. Raises RuntimeError when an invariant of the method breaks.
    """

    def __init__(
        self,
        model: PeftModel | PreTrainedModel,
        args: OPSDConfig,
        train_dataset,
        processing_class: PreTrainedTokenizerBase,
        engine,
        layout: Layout,
        engine_bytes: int = 0,
        api_key: str | None = None,
        **kwargs,
    ):
        adapted = isinstance(model, PeftModel)
        dtype = sampling_dtype(model, args.bf16)
        self._frozen = None if adapted else frozen_copy(model, dtype)
        self._tap = HiddenTap(model.get_base_model(), None) if adapted else HiddenTap(model, dtype)
        if not adapted and args.ddp_find_unused_parameters is None:
            # looking for unused weights, DDP would miss the output projection's gradient, which comes from the loss
            args.ddp_find_unused_parameters = False
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            processing_class=processing_class,
            data_collator=list,
            **kwargs,
        )
        if self.is_fsdp_enabled:
            reduce_in_float32(self.accelerator)
        self.model_accepts_loss_kwargs = True  # the loss is already one mean over the whole optimizer step
        self.engine = engine
        self.layout = layout
        self.engine_bytes = engine_bytes  # GPU memory that the colocated engine keeps while training
        self.sampling = SamplingSettings(
            args.temperature, args.top_p, args.top_k, args.max_completion_length, args.ignore_eos
        )
        sharded = self.is_fsdp_enabled or is_deepspeed_zero3_enabled()
        self.teacher = Teacher(
            args, model, self._tap, frozen=self._frozen, sharded=sharded, tokenizer=processing_class, api_key=api_key
        )
        self.objective = Objective(args, self._tap, self.teacher.tap)
        # saved into every checkpoint and restored from it: save(folder, step), load(folder)
        self.totals = RunTotals()
        self.stateful = [self.teacher, self.totals]
        if args.reason_first_tokens:
            context = model.config.get_text_config().max_position_embeddings
            self.reason_first = ReasonFirst(args, processing_class, context - args.max_completion_length)
        self.micro_batches: list[MicroBatch] = []
        self._metrics = StepMetrics()
        self._step_sequences = torch.tensor(args.rollouts_per_step)
        self._export = AdapterExport(model, dtype)
        self._adapter_root, self._adapter_lock = claim_folder(adapter_parent(args))
        self._step_ended_at = time.perf_counter()

    # data

    def _get_train_sampler(self, train_dataset=None) -> Sampler[int]:
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return RolloutSampler(len(self.train_dataset), self.args.max_steps * self.args.rollouts_per_step, seed)

    def get_batch_samples(self, epoch_iterator, num_batches, device) -> tuple[list[MicroBatch], torch.Tensor]:
        """Samples all rollouts of one optimizer step with the current adapter and groups them by token count.

        Returns the micro-batches of this process and the number of counted completion tokens over all processes.
        """
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        examples = [example for batch in batches for example in batch]
        self.teacher.advance(self.state.global_step)
        rollouts, scores, died = [], None, None
        try:
            if self.args.reason_first_tokens:
                examples = self._with_analyses(examples)
            started = time.perf_counter()
            self._sync_engine()
            self._metrics.seconds["sync"] = time.perf_counter() - started
            rollouts = self._generate(examples)
            scores = self.teacher.ask(examples, rollouts)
            self.engine.rest()
        except EngineDied as error:
            died = error
        self._stop_if_an_engine_died(died)
        generated = time.perf_counter()
        self._metrics.seconds["rollout"] = generated - started - self._metrics.seconds["sync"]
        self.micro_batches = split_micro_batches(examples, rollouts, num_batches, scores)
        tokens = [sum(m.completion_tokens for m in self.micro_batches), sum(m.input_tokens for m in self.micro_batches)]
        counts = torch.tensor([*self.objective.counts(self.micro_batches), *tokens], device=device)
        total, self._step_sequences, generated_tokens, trained_tokens = self.accelerator.reduce(
            counts, reduction="sum"
        ).unbind()
        if total == 0:
            raise RuntimeError(
                f"step {self.state.global_step + 1}: no completion is longer than skip_first_tokens={self.args.skip_first_tokens}, so "
                "there is nothing to train on; lower it"
            )
        self.totals.tokens_generated += int(generated_tokens)
        self.totals.tokens_trained += int(trained_tokens)
        self._train_started_at = generated
        return self.micro_batches, total

    def _stop_if_an_engine_died(self, died: EngineDied | None) -> None:
        """Saves a checkpoint of the last finished step on every process, then raises, when one process lost its engine."""
        count = torch.tensor(float(died is not None), device=self.accelerator.device)
        if self.accelerator.reduce(count, reduction="sum") == 0:
            return
        if self.state.global_step > 0:
            self._save_checkpoint(self.model, trial=None)
        raise died or EngineDied("another process lost its rollout engine; its message says why")

    def _with_analyses(self, examples: list[dict]) -> list[dict]:
        """The examples after the teacher, the base model in the engine, has written its analyses."""
        self.engine.sync(None, self.state.global_step)
        with teacher_weights(self.model, "base"):  # a live engine samples from this very model
            examples, empty = self.reason_first.with_analyses(examples, self.engine, self.state.global_step)
        self._metrics.add({"empty_analyses": torch.tensor(empty)})
        return examples

    def _sync_engine(self) -> None:
        """Has the engine serve this step's student: its adapter, saved to memory-backed disk, or its merged weights."""
        step = self.state.global_step
        if self.args.rollout_sync == "merged":
            weights = MergedWeights(self.model) if self._frozen is None else FullWeights(self.model, self._frozen)
            self.engine.load_weights(weights, step)
            self._metrics.keep_largest("sync_rel_err", torch.tensor(weights.relative_error))
            return
        adapter_dir, started = self._adapter_root / f"step-{step}", time.perf_counter()
        self._export.write(adapter_dir)
        self._metrics.seconds["save"] = time.perf_counter() - started
        self.engine.sync(adapter_dir, step)
        shutil.rmtree(adapter_dir)

    def _generate(self, examples: list[dict]) -> list[Rollout]:
        step = self.state.global_step
        prompts = [example["prompt_ids"] for example in examples]
        seeds = [derive_seed(self.args.seed, step, example["example_id"]) for example in examples]
        rollouts = self.engine.generate(prompts, self.sampling, seeds)
        for example, rollout in zip(examples, rollouts, strict=True):
            if list(rollout.prompt_ids) != list(example["prompt_ids"]):
                raise RuntimeError(
                    f"example {example['example_id']}: the engine answered other prompt ids than it was given"
                )
            if not rollout.completion_ids:
                raise RuntimeError(f"example {example['example_id']}: the engine returned an empty completion")
        lengths = [len(r.completion_ids) for r in rollouts]
        self._metrics.add(
            {
                "rollouts": torch.tensor(len(rollouts)),
                "rollout_tokens": torch.tensor(sum(lengths)),
                "truncated": torch.tensor(sum(r.truncated for r in rollouts)),
            }
        )
        return rollouts

    def _prepare_inputs(self, inputs: MicroBatch) -> MicroBatch:
        return inputs  # tensors are built on the device in compute_loss

    # loss

    def compute_loss(self, model, inputs: MicroBatch, return_outputs=False, num_items_in_batch=None):
        """This process's share of the mean divergence over the step's completion tokens, times the number of processes.

        Gradients are averaged over processes afterwards, so the factor makes the step's gradient that of one global token mean.
        """
        device, processes = self.accelerator.device, self.accelerator.num_processes
        if inputs.teacher_scores:
            teacher_hidden = TopKScores.joined(inputs.teacher_scores, device)
        else:
            teacher_inputs = build_inputs(inputs.teacher_prompts, inputs.completions, self.layout, device)
            teacher_hidden = self.teacher.hidden(teacher_inputs)
        wrong_hidden = None
        if self.objective.needs_wrong_reference:
            wrong_inputs = build_inputs(inputs.wrong_teacher_prompts, inputs.completions, self.layout, device)
            wrong_hidden = self.teacher.hidden(wrong_inputs)
        student_inputs = build_inputs(inputs.student_prompts, inputs.completions, self.layout, device)
        student_hidden = completion_hidden(model, self._tap, student_inputs)
        size = StepSize(num_items_in_batch, self._step_sequences)
        loss, sums = self.objective.loss(student_hidden, teacher_hidden, wrong_hidden, inputs, size, processes)
        self._metrics.add(sums)
        self._record_logp_gap(student_hidden.detach(), inputs)
        self._metrics.add({"trained_tokens": torch.tensor(inputs.input_tokens)})
        return (loss, None) if return_outputs else loss

    def _record_logp_gap(self, student_hidden: torch.Tensor, inputs: MicroBatch) -> None:
        """|trainer - sampler| log-probability of each sampled token: what "on-policy" means, measured."""
        device = student_hidden.device
        token_ids = torch.tensor([t for c in inputs.completions for t in c], device=device)
        sampler = torch.tensor([lp for r in inputs.rollouts for lp in r.per_token_logps], device=device)
        trainer = sampled_token_logps(
            student_hidden,
            self._tap.weight.detach(),
            token_ids,
            lm_head_bias=self._tap.bias,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
        )
        gap = (trainer - sampler).abs()
        self._metrics.add({"logp_gap": gap.sum()})
        self._metrics.keep_largest("logp_gap_max", gap.max())

    # records

    def _step_row(self) -> dict[str, float]:
        """The scalars of one optimizer step, named area/name; times in seconds, entropies and divergences in nats per token."""
        now = time.perf_counter()
        seconds = self._metrics.seconds
        totals = self._metrics.reduce(self.accelerator)
        train_seconds = now - self._train_started_at
        row = self.objective.row(totals) | {
            "rollout/mean_length": totals["rollout_tokens"] / totals["rollouts"],
            "rollout/truncated_fraction": totals["truncated"] / totals["rollouts"],
            "rollout/logp_gap": totals["logp_gap"] / totals["rollout_tokens"],
            "rollout/logp_gap_max": totals["logp_gap_max"],
            "time/sync_s": seconds["sync"],
            "time/rollout_s": seconds["rollout"],
            "time/train_s": train_seconds,
            "time/step_s": now - self._step_ended_at,
            "throughput/rollout_tokens_per_s": totals["rollout_tokens"] / seconds["rollout"],
            "throughput/train_tokens_per_s": totals["trained_tokens"] / train_seconds,
        }
        if "save" in seconds:
            row["time/adapter_save_s"] = seconds["save"]  # of time/sync_s
        if "empty_analyses" in totals:
            row["teacher/empty_analyses"] = totals["empty_analyses"]
        if torch.cuda.is_available():
            row["memory/peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            row["memory/engine_gib"] = self.engine_bytes / 2**30
        if "sync_rel_err" in totals:
            row["rollout/sync_rel_err"] = totals["sync_rel_err"]
        self._metrics = StepMetrics()
        self._step_ended_at = now
        return row

    @property
    def step_loss(self) -> torch.Tensor:
        """Summed loss of this process's micro-batches since the last log line; not finite once one of them is not."""
        return self._metrics.sums["loss_sum"]

    def _get_grad_norm(self, model, grad_norm=None):
        self.grad_norm = super()._get_grad_norm(model, grad_norm)  # before clipping; read by callbacks/guards.py
        return self.grad_norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Renames the loop's own scalars to area/name and adds the step's."""
        names = {"loss": "loss/step_mean", "grad_norm": "optim/grad_norm", "learning_rate": "optim/learning_rate"}
        row = {names.get(k, f"run/{k}"): v for k, v in logs.items()}
        if "loss/step_mean" in row and self._metrics.sums:
            row |= self._step_row()
        super().log(row, start_time)

    def floating_point_ops(self, inputs: MicroBatch) -> int:
        """Operations of one micro-batch: 2 per weight and token forward, 2 backward, and 2 more where the base has gradients."""
        weights = self.model.num_parameters() - self.model.get_input_embeddings().weight.numel()
        completions = inputs.completion_tokens
        student = sum(map(len, inputs.student_prompts)) + completions
        teacher = sum(map(len, inputs.teacher_prompts)) + completions
        student_passes = 4 if self._frozen is None else 6
        return weights * (2 * teacher + student_passes * student) + 6 * completions * self._tap.head.weight.numel()

    def _get_output_dir(self, trial) -> str:
        """Where the loop writes a checkpoint: under a hidden name that `_save_checkpoint` replaces once it is complete."""
        return str(staging_dir(self.args.output_dir))

    def _save_checkpoint(self, model, trial) -> None:
        write = super()._save_checkpoint
        save_complete(self, f"checkpoint-{self.state.global_step}", lambda: write(model, trial))

    def _save_optimizer_and_scheduler(self, output_dir) -> None:
        """Everything of a checkpoint besides the adapter: also what the teacher has accumulated."""
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            for part in self.stateful:
                part.save(Path(output_dir), self.state.global_step)

    def _load_optimizer_and_scheduler(self, checkpoint) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            for part in self.stateful:
                part.load(Path(checkpoint))

    def save_model(self, output_dir=None, _internal_call=False) -> None:
        if self._frozen is None:
            save_from_all(self, output_dir)
        elif self.args.should_save:
            self._save(output_dir)

    def _save(self, output_dir=None, state_dict=None) -> None:
        """Saves adapter or model and the tokenizer, then reopens the weights and proves that they are complete."""
        super()._save(output_dir, state_dict)
        check_saved(Path(output_dir or self.args.output_dir))

    def fixed_hash(self) -> str:
        """Of the weights that must not move: the adapter's base, or the frozen copy of a model that is trained as a whole."""
        return base_hash(self.model if self._frozen is None else self._frozen)

    def run_totals(self) -> dict[str, float | int]:
        """Totals over all processes and parts of the run for run.json."""
        seconds = self.totals.seconds
        gpus = self.args.world_size if self.accelerator.device.type == "cuda" else 0
        tokens = {"tokens_generated": self.totals.tokens_generated, "tokens_trained": self.totals.tokens_trained}
        return {"steps": self.state.global_step, **tokens, "wall_seconds": seconds, "gpu_seconds": seconds * gpus}

    def close(self) -> None:
        """Stops the engine and removes the adapters it was given."""
        self.engine.close()
        shutil.rmtree(self._adapter_root, ignore_errors=True)
        self._adapter_lock.close()
