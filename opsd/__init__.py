"""On-policy self-distillation. Read the files in this order; the package re-exports nothing.

    args.py prompts.py data.py rollout.py batch.py teacher.py
    divergence.py fused_divergence.py trainer.py grading.py evaluation.py recipe.py runinfo.py
"""
