"""The learning rate of every step before a run starts: its sum for run.json, and its figure for `plot_lr`.

Two schedules over 100 steps are comparable when they sum to the same: 5e-6 constant and 1e-5 annealed to 0 both give 5e-4 (a linear
decay that is evaluated at whole steps gives 1% more, 5.05e-4).
"""

from pathlib import Path

import torch
from transformers import TrainingArguments, get_scheduler


def learning_rates(args: TrainingArguments) -> list[float]:
    """The rate that each of `max_steps` optimizer steps will use; schedules that follow an evaluation are refused by transformers."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=args.learning_rate)
    scheduler = get_scheduler(
        args.lr_scheduler_type,
        optimizer,
        num_warmup_steps=args.get_warmup_steps(args.max_steps),
        num_training_steps=args.max_steps,
        scheduler_specific_kwargs=dict(args.lr_scheduler_kwargs or {}),
    )
    rates = []
    for _ in range(args.max_steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


def plot_learning_rates(rates: list[float], path: Path) -> None:
    """A PNG of the schedule with its sum in the title."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot()
    axes.step(range(1, len(rates) + 1), rates, where="mid")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("learning rate")
    axes.set_ylim(bottom=0)
    axes.set_title(f"sum over {len(rates)} steps: {sum(rates):.3g}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
