"""On-policy self-distillation. The package re-exports nothing; this is its reading order.

Start here:     args.py method_args.py loop_args.py prompts.py
Rows:           rows.py filters.py row_filter.py answer_shape.py answer_spelling.py answer_text.py overlap.py reweight.py filter_output.py
                filter_report.py data.py
Rollouts:       rollout.py canary.py rollout_transformers.py rollout_server.py vllm_client.py server_process.py adapter.py
                adapter_export.py merged_sync.py engines.py
Model inputs:   batch.py attention.py teacher.py teacher_load.py teacher_scores.py teacher_server.py reason_first.py
                hidden_tap.py model.py full_weights.py speed.py switches.py compat.py
Steps:          steps.py
The loss:       divergence.py projection.py fused_divergence.py triton_divergence.py divergence_kernel.py sampled_token.py
                token_weights.py objective.py
Training:       memory.py checkpoint.py resume.py sharding.py schedule.py trainer.py setup_run.py handoff.py
Evaluation:     grading.py grading_worker.py benchmarks.py evaluation.py majority.py distributions.py paired_tests.py published.py
                eval_args.py eval_setup.py eval_estimate.py eval_store.py eval_worker.py eval_pool.py eval_runner.py
                eval_result.py eval_output.py eval_table.py comparison_side.py comparison_checks.py comparison.py
                comparison_text.py report.py report_html.py report_figures.py
Launcher:       recipe.py processes.py launch.py accelerate_launch.py pins.py
Sweeps:         ledger.py sweep_plan.py
Every program:  entry.py runinfo.py
"""
