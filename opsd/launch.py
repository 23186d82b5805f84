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

from opsd.recipe import (
    DERIVED_KEYS,
    Names,
    Setting,
    check_caps,
    derive_batch,
    process_environment,
    read_caps,
    read_environment,
    read_flags,
    read_recipe,
)
from opsd.runinfo import exit_on_bad_input

ROOT = Path(__file__).resolve().parent.parent
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
        return "\n".join([*shown, shlex.join(self.command)]) + "\n"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def known_names() -> Names:
    """The arguments of `opsd_train.py`, out of its own parser."""
    from opsd.args import training_fields, training_parser

    lists = [action.dest for action in training_parser()._actions if action.nargs in ("+", "*")]
    return Names(training_fields(), lists)


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


def _count(name: str, text: str, lowest: int, where: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < lowest:
        raise ValueError(f"{name}={text!r} from {where} must be a whole number >= {lowest}; correct or unset it")
    return int(text)


def visible_gpus() -> int:
    """The GPUs this process may use (CUDA_VISIBLE_DEVICES counts)."""
    import torch

    return torch.cuda.device_count()


def _host_flags(environ: Mapping[str, str]) -> tuple[int, list[str]]:
    """(number of hosts, accelerate's flags for them) from torchrun's own variables."""
    hosts = _count("NNODES", environ.get("NNODES", "1"), 1, "environment")
    flags = ["--num_machines", str(hosts)]
    if hosts > 1:
        missing = [name for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
        if missing:
            raise ValueError(f"NNODES={hosts} needs {', '.join(missing)} as well; export them on every host")
        rank = _count("NODE_RANK", environ["NODE_RANK"], 0, "environment")
        if rank >= hosts:
            raise ValueError(f"NODE_RANK={rank} must be below NNODES={hosts}; number the hosts from 0")
        flags += ["--machine_rank", str(rank), "--main_process_ip", environ["MASTER_ADDR"]]
    if environ.get("MASTER_PORT"):
        flags += ["--main_process_port", str(_count("MASTER_PORT", environ["MASTER_PORT"], 1, "environment"))]
    return hosts, flags


def _config_path(value: str) -> Path:
    """An accelerate configuration by name (`zero2`) or by path."""
    path = (
        ROOT / "accelerate_configs" / f"{value}.yaml"
        if "/" not in value and not value.endswith(".yaml")
        else Path(value)
    )
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in (ROOT / "accelerate_configs").glob("*.yaml")))
        raise FileNotFoundError(
            f"accelerate_config={value} is no file {path}; use one of {known}, or a path to a .yaml"
        )
    return path


def resolve(argv: Sequence[str], environ: Mapping[str, str], gpus: int | None = None) -> Launch:
    """Everything from the launcher's arguments to the command, or one ValueError / FileNotFoundError. `gpus` stands in for the visible ones."""
    from opsd.args import training_parser

    names = known_names()
    with_recipe = bool(argv) and not argv[0].startswith("--")
    from_flags = read_flags(argv[1:] if with_recipe else argv, names)
    from_environment = read_environment(environ, names)
    from_recipe = read_recipe(Path(argv[0]) if with_recipe else ROOT / DEFAULT_RECIPE, names)
    merged = {**from_recipe, **from_environment, **from_flags}
    given = {name: setting for name, setting in merged.items() if name in names.fields}
    if "max_steps" not in given:
        raise ValueError(
            "max_steps is not given; set OPSD_MAX_STEPS in the recipe: the budget is counted in optimizer steps"
        )

    typed = _parse_types(_arguments(given, names), given)
    check_caps(typed.max_steps, typed.rollouts_per_step, *read_caps(LAUNCHER))

    if typed.use_cpu:
        gpus = 0
    elif gpus is None:
        gpus = visible_gpus()
    launcher = {"num_processes": merged.get("num_processes", Setting((str(max(gpus, 1)),), "default"))}
    processes = _count("num_processes", launcher["num_processes"].text, 1, launcher["num_processes"].source)
    hosts, host_flags = _host_flags(environ)
    world_size = hosts * processes
    automatic = ("cpu" if gpus == 0 else "single") if world_size == 1 else ("cpu_ddp" if gpus == 0 else "ddp")
    launcher["accelerate_config"] = merged.get("accelerate_config", Setting((automatic,), "default"))
    config = _config_path(launcher["accelerate_config"].text)

    batch, accumulation = derive_batch(typed.rollouts_per_step, world_size, typed.micro_batch_size)
    derived = {
        name: Setting((str(value),), "derived") for name, value in zip(DERIVED_KEYS, (batch, accumulation), strict=True)
    }
    if gpus == 0 and not typed.use_cpu:
        derived["use_cpu"] = Setting(("true",), "derived")
    training_arguments = _arguments({**given, **derived}, names)
    training_parser().parse_args_into_dataclasses(
        training_arguments
    )  # every __post_init__, before anything slow starts

    command = [sys.executable, "-m", "opsd.accelerate_launch", "--config_file", os.path.relpath(config, ROOT)]
    command += ["--num_processes", str(world_size), *host_flags, "--dynamo_backend", "no"]
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
    launch = resolve(arguments, process_environment())
    command = launch.command + (["--debug"] if debug else [])
    sys.stdout.write(launch.report())
    sys.stdout.flush()
    if not launch.dry_run:
        Path(command_file).write_bytes(b"".join(word.encode() + b"\0" for word in command))


if __name__ == "__main__":
    exit_on_bad_input(functools.partial(main, debug="--debug" in sys.argv))
