"""Which runs a sweep consists of, and the command of each. Used by `sweep.py`; the record of what they gave is ledger.py's."""

import sys
from pathlib import Path

import yaml

from opsd.launch import resolve
from opsd.ledger import Run, baseline_digest, recipe_digest
from opsd.recipe import process_environment

ROOT = Path(__file__).resolve().parent.parent


def plan(arguments, extra: list[str]) -> list[Run]:
    """Every run of the sweep, recipes outermost. Raises ValueError for a recipe that does not resolve, before anything runs."""
    runs = []
    for recipe in arguments.recipes:
        name = Path(recipe).stem
        if recipe.endswith((".yaml", ".yml")):
            baseline_script(recipe)
            digest = baseline_digest(yaml.safe_load(Path(recipe).read_text(encoding="utf-8")), extra)
        else:
            flags = [*extra, *base_flags(recipe, arguments.base_recipe)]
            digest = recipe_digest(resolve([recipe, *flags], process_environment()).training_arguments)
        for seed in arguments.seeds:
            runs.append(Run(name, recipe, digest, seed, arguments.output_dir / f"{name}-{digest}-seed{seed}"))
    return runs


def base_flags(recipe: str, base_recipe: str | None) -> list[str]:
    """The flag that puts a recipe on the sweep's base; none for a recipe that names no base of its own."""
    extends = base_recipe is not None and "OPSD_BASE_RECIPE" in Path(recipe).read_text(encoding="utf-8")
    return [f"--base_recipe={base_recipe}"] if extends else []


def baseline_script(recipe: str) -> Path:
    """The script that a baseline's YAML file is for. Raises ValueError when its name says none."""
    script = ROOT / "baselines" / f"{Path(recipe).stem.split('_')[0]}_train.py"
    if not Path(recipe).is_file() or not script.is_file():
        raise ValueError(
            f"recipe={recipe} must be an existing file named sft_….yaml or grpo_….yaml, or a recipe (.env)"
        )
    return script


def command_of(run: Run, arguments, extra: list[str], *, before: bool) -> list[str]:
    if run.is_baseline:
        command = [sys.executable, str(baseline_script(run.recipe_path)), "--config", run.recipe_path, *extra]
    else:
        flags = base_flags(run.recipe_path, arguments.base_recipe)
        command = ["bash", str(ROOT / "train_capped.sh"), run.recipe_path, *extra, *flags]
    command += [f"--seed={run.seed}", f"--world_seed={run.seed}", f"--output_dir={run.folder}"]
    return [*command, f"--evaluate_before={str(before).lower()}", "--evaluate_after=true"]
