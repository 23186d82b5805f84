"""Trains a model with on-policy self-distillation (arXiv 2601.18734): parse, load, train once, save.

Usually started by `bash train_capped.sh [recipe] [flags]`, which resolves the recipe and the caps. By hand:

    python opsd_train.py --model_name_or_path Qwen/Qwen3-1.7B --dataset_name siyanzhao/Openthoughts_math_30k_opsd \\
        --max_steps 100 --use_peft true --lora_target_modules q_proj v_proj --output_dir runs/mine

Writes the adapter (or the model), checkpoints, metrics.jsonl, rollouts.jsonl and run.json into `--output_dir`; hands off to `eval_aime.py`.
"""

import logging
import os
import sys
from pathlib import Path

from opsd.entry import exit_on_bad_input, library_environment

for key, value in library_environment(os.cpu_count()).items():
    os.environ.setdefault(key, value)

ROOT = Path(__file__).resolve().parent


def main(argv: list[str]) -> None:
    from opsd.args import eval_regime, parse_training_args
    from opsd.full_weights import check_full
    from opsd.loop_args import check_batch
    from opsd.recipe import check_caps, read_caps
    from opsd.sharding import check_sharding, mode_of_environment

    data_args, args, handoff, model_args = parse_training_args(argv)
    regime = eval_regime(handoff)
    check_caps(args.max_steps, args.rollouts_per_step, *read_caps(ROOT / "train_capped.sh"))
    check_batch(args)
    mode = mode_of_environment(os.environ)
    check_sharding(mode, args, model_args)
    check_full(args, model_args, mode)

    from opsd.handoff import Handoff
    from opsd.resume import claim_output_dir, find_resume
    from opsd.setup_run import configure_logging, resolve_world

    configure_logging()
    claim_output_dir(Path(args.output_dir), lock=args.process_index == 0)
    checkpoint = find_resume(Path(args.output_dir), args.resume_from_checkpoint, args.max_steps)
    with args.main_process_first(desc="building the world"):
        cache = Path(os.environ.get("OPSD_CACHE") or Path.home() / ".cache" / "opsd")
        resolve_world(data_args, handoff, model_args, cache)
    evaluator = Handoff(ROOT / "eval_aime.py", model_args, handoff, regime, Path(args.output_dir) / "eval", args.bf16)
    if args.process_index == 0:
        if data_args.evaluate_before:
            evaluator.run("before")
        elif data_args.evaluate_after:
            evaluator.check()

    trained = train(data_args, args, handoff, model_args, checkpoint)
    if trained is None:
        return
    if data_args.evaluate_after and args.process_index == 0:
        evaluator.run("after", trained)
        if data_args.evaluate_before:
            evaluator.compare("before", "after")


def train(data_args, args, handoff, model_args, checkpoint: Path | None) -> Path | None:
    """One training run, from `checkpoint` if there is one; returns the folder of the final adapter or model, None after a signal to stop.

    Everything it held on a GPU is released when it returns.
    """
    from callbacks.guards import TrainingStopped
    from callbacks.weight_average import ADAPTER
    from opsd.checkpoint import save_complete, staging_dir
    from opsd.data import load_training_examples
    from opsd.model import check_model_args, load_tokenizer
    from opsd.resume import TRAINED, compare_runs
    from opsd.schedule import learning_rates, plot_learning_rates
    from opsd.setup_run import build_trainer, preview_prompts, run_record, write_run
    from opsd.teacher_load import check_teacher

    check_model_args(model_args)
    tokenizer = load_tokenizer(model_args.model_name_or_path, model_args.model_revision)
    check_teacher(args, tokenizer)
    examples, counts = load_training_examples(
        data_args,
        tokenizer,
        student_thinking=args.student_thinking,
        teacher_thinking=args.teacher_thinking,
        teacher_prefix=args.teacher_prefix,
        teacher_sees_problem=args.teacher_sees_problem,
        wrong_reference_seed=args.wrong_reference_seed if args.token_weight == "contrastive" else None,
        reason_first=args.reason_first_tokens > 0,
    )
    rates = learning_rates(args)
    record = run_record(sys.argv, (data_args, args, handoff, model_args), counts) | {"summed_learning_rate": sum(rates)}
    trainer = build_trainer(args, model_args, tokenizer, examples, counts, api_key=os.environ.get("OPSD_VLLM_API_KEY"))
    preemption, average = attach_callbacks(trainer, tokenizer)
    output_dir = Path(args.output_dir)
    if trainer.is_world_process_zero():
        preview_prompts(tokenizer, examples[0], output_dir)
        if args.plot_lr:
            plot_learning_rates(rates, output_dir / "learning_rate.png")
    try:
        record["base_sha256_before"] = trainer.fixed_hash()
        if checkpoint is not None:
            changed = compare_runs(checkpoint.parent / "run.json", record)
            record["resumed_from"] = {"checkpoint": str(checkpoint), "changed_arguments": changed}
        write_run(trainer, record, "running")
        trainer.totals.start()
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        if preemption.requested:
            write_run(trainer, record, "stopped", steps=trainer.state.global_step)
            logging.getLogger("opsd").warning("to go on: the same command with --resume_from_checkpoint latest")
            return None
        name = TRAINED[model_args.use_peft]
        trained = save_complete(trainer, name, lambda: trainer.save_model(str(staging_dir(output_dir) / name)))
        if average is not None:
            save_complete(trainer, ADAPTER, lambda: average.write_adapter(trainer, staging_dir(output_dir) / ADAPTER))
        record |= trainer.run_totals()
        record["base_sha256_after"] = trainer.fixed_hash()
        write_run(trainer, record, "finished")
        if record["base_sha256_after"] != record["base_sha256_before"]:
            raise RuntimeError(
                f"the base weights changed during training (sha256 {record['base_sha256_before'][:12]} -> "
                f"{record['base_sha256_after'][:12]}), so the teacher was not fixed; discard this run"
            )
        return trained
    except TrainingStopped as stop:
        write_run(trainer, record, "stopped", reason=str(stop), steps=trainer.state.global_step)
        raise SystemExit(f"error: {stop}" if trainer.is_world_process_zero() else 1) from None
    finally:
        trainer.close()


def attach_callbacks(trainer, tokenizer):
    """Attaches every callback; returns the one that says whether a signal has stopped the run, and the weight average, if any."""
    from transformers import PrinterCallback, ProgressCallback

    from callbacks.guards import Guards
    from callbacks.metrics_jsonl import MetricsJsonl
    from callbacks.preemption import Preemption
    from callbacks.progress_bar import ProgressBar
    from callbacks.rollout_log import RolloutLog
    from callbacks.weight_average import WeightAverage

    output_dir = Path(trainer.args.output_dir)
    rank = "" if trainer.args.process_index == 0 else f".rank{trainer.args.process_index}"
    for own in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(own)
    trainer.add_callback(MetricsJsonl(output_dir / "metrics.jsonl"))
    trainer.add_callback(ProgressBar())
    trainer.add_callback(
        RolloutLog(trainer, output_dir / f"rollouts{rank}.jsonl", tokenizer, write=trainer.args.log_rollouts)
    )
    preemption = Preemption(trainer.accelerator)
    trainer.add_callback(preemption)
    average = WeightAverage(trainer.args.wavg_last) if trainer.args.wavg_last else None
    guards = Guards(trainer)
    for stateful in (average, guards) if average else (guards,):
        trainer.add_callback(stateful)
        trainer.stateful.append(stateful)
    return preemption, average


if __name__ == "__main__":
    exit_on_bad_input(main)
