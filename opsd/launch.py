"""The launcher's second stage: checks the resolved arguments with the real parser and makes the `accelerate launch` command.

    python -m opsd.launch COMMAND_FILE [RECIPE] [--name value]...

Called by `train_capped.sh`. Prints one line `name = value  (source)` for each of our own arguments, each one that is set and each derived
one, then the command shell-quoted, and writes the command NUL-separated to COMMAND_FILE, which stays empty when OPSD_DRY_RUN=1.
"""

import functools
import os
import shlex
import sys
from argparse import ArgumentError
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

from opsd import recipe
from opsd.entry import exit_on_bad_input
from opsd.processes import ROOT, config_path, count, host_flags, visible_gpus
from opsd.recipe import Names, Setting

LAUNCHER = ROOT / "train_capped.sh"
DEFAULT_RECIPE = "recipe.env"


@dataclass(frozen=True)
class Launch:
    """What the launcher is about to run: every shown setting in order, the arguments of `opsd_train.py`, and the whole command."""

    settings: dict[str, Setting]
    training_arguments: list[str]
    command: list[str]
    dry_run: bool

    def report(self) -> str:
        shown = [f"{name} = {_printable(setting.text)}  ({setting.source})" for name, setting in self.settings.items()]
        return "\n".join([*shown, " ".join(map(_quote, self.command))]) + "\n"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _quote(word: str) -> str:
    """Shell quoting that holds no control characters: they become bash's $'...' escapes."""
    if word.isprintable():
        return shlex.quote(word)
    escaped = "".join(c if c.isprintable() and c not in "'\\" else f"\\U{ord(c):08x}" for c in word)
    return f"$'{escaped}'"


def known_names() -> Names:
    """The arguments of `opsd_train.py`, out of its own parser."""
    from opsd.args import training_fields, training_parser

    lists = [action.dest for action in training_parser()._actions if action.nargs in ("+", "*")]
    return Names(training_fields(), lists)


RESUME = "--resume_from_checkpoint=latest"  # what the launcher's flag --resume stands for


def default_text(value: object) -> str:
    """A default as it would be written on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return " ".join(str(item) for item in value)
    return str(value)


def _defaults() -> dict[str, str]:
    """Our own arguments in reading order -> the text of their defaults."""
    from opsd.args import own_fields, training_fields

    owners = training_fields()
    texts = {}
    for name in own_fields():
        (declared,) = (f for f in fields(owners[name]) if f.name == name)
        value = declared.default_factory() if declared.default is MISSING else declared.default
        texts[name] = default_text(value)
    return texts


def _arguments(settings: Mapping[str, Setting], names: Names) -> list[str]:
    """Settings as words for argparse: `--name=value`, so that a value may start with `-`, or `--name a b` for lists."""
    words = []
    for name, setting in settings.items():
        if name in names.list_fields:
            words += ["--" + name, *setting.values]
        else:
            words.append(f"--{name}={setting.text}")
    return words


def _parse_types(words: list[str], settings: Mapping[str, Setting]):
    """The namespace of the real parser: types and choices are checked, no dataclass is made yet."""
    from opsd.args import training_parser

    parser = training_parser()
    parser.exit_on_error = False
    try:
        return parser.parse_args(words)
    except ArgumentError as error:
        name = (error.argument_name or "").split("/")[0].removeprefix("--")
        setting = settings[name]
        raise ValueError(f"{name}={setting.text!r} from {setting.source}: {error.message}") from None


def resolve(argv: Sequence[str], environ: Mapping[str, str], gpus: int | None = None) -> Launch:
    """From the launcher's arguments to the command, or ValueError / FileNotFoundError. `gpus`: instead of the visible ones."""
    from opsd.args import eval_regime, training_parser
    from opsd.sharding import check_sharding, mode_of_config

    names = known_names()
    argv = [RESUME if word == "--resume" else word for word in argv]
    with_recipe = bool(argv) and not argv[0].startswith("--")
    from_flags = recipe.read_flags(argv[1:] if with_recipe else argv, names)
    from_environment = recipe.read_environment(environ, names)
    from_recipe = recipe.read_recipe(Path(argv[0]) if with_recipe else ROOT / DEFAULT_RECIPE, names)
    merged = {**from_recipe, **from_environment, **from_flags}
    merged = {**recipe.read_base_recipe(merged, ROOT, names), **merged}
    merged = {name: setting for name, setting in merged.items() if setting.values}
    given = {name: setting for name, setting in merged.items() if name in names.fields}
    if "max_steps" not in given:
        raise ValueError(
            "max_steps is not given; set OPSD_MAX_STEPS in the recipe: the budget is counted in optimizer steps"
        )

    typed = _parse_types(_arguments(given, names), given)
    recipe.check_caps(typed.max_steps, typed.rollouts_per_step, *recipe.read_caps(LAUNCHER))

    if typed.use_cpu:
        gpus = 0
    elif gpus is None:
        gpus = visible_gpus()
    launcher = {name: merged[name] for name in ("base_recipe",) if name in merged}
    launcher |= {"num_processes": merged.get("num_processes", Setting((str(max(gpus, 1)),), "default"))}
    processes = count("num_processes", launcher["num_processes"].text, 1, launcher["num_processes"].source)
    hosts, flags_of_hosts = host_flags(environ)
    world_size = hosts * processes
    automatic = ("cpu" if gpus == 0 else "single") if world_size == 1 else ("cpu_ddp" if gpus == 0 else "ddp")
    launcher["accelerate_config"] = merged.get("accelerate_config", Setting((automatic,), "default"))
    config = config_path(launcher["accelerate_config"].text)

    batch, accumulation = recipe.derive_batch(typed.rollouts_per_step, world_size, typed.micro_batch_size)
    derived = {
        name: Setting((str(value),), "derived")
        for name, value in zip(recipe.DERIVED_KEYS, (batch, accumulation), strict=True)
    }
    if gpus == 0 and not typed.use_cpu:
        derived["use_cpu"] = Setting(("true",), "derived")
    training_arguments = _arguments({**given, **derived}, names)
    # every __post_init__, before anything slow starts
    _, args, handoff, model_args = training_parser().parse_args_into_dataclasses(training_arguments)
    check_sharding(mode_of_config(config), args, model_args)
    eval_regime(handoff)

    command = [sys.executable, "-m", "opsd.accelerate_launch", "--config_file", os.path.relpath(config, ROOT)]
    command += ["--num_processes", str(world_size), *flags_of_hosts, "--dynamo_backend", "no"]
    if gpus == 0:
        threads = environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // processes))
        command += ["--num_cpu_threads_per_process", threads]
    command += ["opsd_train.py", *training_arguments]

    defaults = {name: Setting((text,), "default") for name, text in _defaults().items()}
    world = {"world_size": Setting((str(world_size),), "derived")}
    shown = {**defaults, **given, **derived, **launcher, **world}
    dry_run = environ.get("OPSD_DRY_RUN", "0")
    if dry_run not in ("0", "1"):
        raise ValueError(f"OPSD_DRY_RUN={dry_run!r} must be 1 or 0; use 1 to print and stop")
    return Launch(shown, training_arguments, command, dry_run == "1")


def main(argv: list[str], debug: bool = False) -> None:
    command_file, *arguments = argv
    launch = resolve(arguments, recipe.process_environment())
    command = launch.command + (["--debug"] if debug else [])
    sys.stdout.write(launch.report())
    sys.stdout.flush()
    if not launch.dry_run:
        Path(command_file).write_bytes(b"".join(word.encode() + b"\0" for word in command))


if __name__ == "__main__":
    exit_on_bad_input(functools.partial(main, debug="--debug" in sys.argv))
