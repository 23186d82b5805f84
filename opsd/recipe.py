"""From a recipe file, the environment and flags to one resolved set of arguments. First stage of the launcher;
`launch.py` makes the command of it.

Precedence, highest first: flags, `OPSD_*` environment, the recipe file, its base recipe, dataclass defaults. `OPSD_NAME` is the field
`name` of `args.py`; there is no second list of keys. A recipe is data: it is parsed line by line and never executed, although it is
valid shell.
"""

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PREFIX = "OPSD_"
# Keys of the launcher itself, beside the fields of args.py; the second group is read before a recipe is.
LAUNCHER_KEYS = ("num_processes", "accelerate_config", "base_recipe")
ENVIRONMENT_ONLY_KEYS = ("dry_run", "python", "cache", "vllm_api_key")
DERIVED_KEYS = ("per_device_train_batch_size", "gradient_accumulation_steps")

_ASSIGNMENT = re.compile(r"export ([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_VALUE = re.compile(
    r"""(?:'(?P<single>[^'\0]*)'                # literal in a shell, whatever it holds
         |  "(?P<double>[^"$`\\!\0]*)"          # no expansion and no escape, so literal as well
         |  (?P<bare>[A-Za-z0-9_./:,+=@%^-]*)   # characters that no shell treats specially
        )(?:[ \t]+\#.*|[ \t]*)""",
    re.VERBOSE,
)
_CAP = re.compile(r"(?:readonly )?(STEP_CAP|ROLLOUT_CAP)=([0-9]+)(?:[ \t]+#.*)?")


@dataclass(frozen=True)
class Setting:
    """One value as given, and where it came from: `flag`, `environment`, a recipe's file name, `derived` or `default`."""

    values: tuple[str, ...]
    source: str

    @property
    def text(self) -> str:
        return " ".join(self.values)


class Names:
    """The known argument names, and the one-line refusals of everything else."""

    def __init__(self, fields: Iterable[str], list_fields: Iterable[str]):
        self.fields = frozenset(fields)
        self.list_fields = frozenset(list_fields)

    def check(self, name: str, written: str, where: str, spell) -> None:
        """Refuses an unknown or derived `name`. `written` is the user's spelling, `spell` turns a name into it."""
        if name in DERIVED_KEYS:
            raise ValueError(
                f"{where}: {written} is derived from rollouts_per_step and the number of processes; "
                f"remove it, and bound the batch with {spell('micro_batch_size')}"
            )
        if name in self.fields or name in LAUNCHER_KEYS:
            return
        if name in ENVIRONMENT_ONLY_KEYS:
            raise ValueError(
                f"{where}: {written} is read from the environment only; export {PREFIX}{name.upper()} instead"
            )
        nearest = difflib.get_close_matches(name, sorted(self.fields.union(LAUNCHER_KEYS)), n=1, cutoff=0)
        raise ValueError(f"{where}: {written} is unknown; the nearest known name is {spell(nearest[0])}")

    def split(self, name: str, text: str) -> tuple[str, ...]:
        """One written value as command-line words: lists are space-separated."""
        return tuple(text.split()) if name in self.list_fields else (text,)


def _env_name(name: str) -> str:
    return PREFIX + name.upper()


def _flag_name(name: str) -> str:
    return "--" + name


def read_recipe(path: Path, names: Names) -> dict[str, Setting]:
    """The settings of a recipe file. Allowed lines: blank, `# comment`, `export OPSD_NAME=value  # reason`.

    In a file that names a base recipe, an empty value ('') puts a name back to its default: a setting without values.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"recipe={path} is not a file; give one of recipe.env, recipes/*.env, or flags that start with --"
        )
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not UTF-8; save the recipe as UTF-8 text") from None
    settings: dict[str, Setting] = {}
    first_line: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip(" \t") or line.startswith("#"):
            continue
        where = f"{path}:{number}"
        assignment = _ASSIGNMENT.fullmatch(line)
        if assignment is None:
            raise ValueError(
                f"{where}: {line[:80]!r} is not `export {PREFIX}NAME=value  # reason`; write one setting a line"
            )
        written, rest = assignment.groups()
        value = _VALUE.fullmatch(rest)
        if value is None:
            raise ValueError(
                f"{where}: the value {rest[:80]!r} is not plain text; quote it with '...' (a recipe is never executed, "
                "so $, backquotes and ; have no meaning in it)"
            )
        name = written.removeprefix(PREFIX).lower()
        if written != _env_name(name):
            raise ValueError(f"{where}: {written} must be written {_env_name(name)}")
        names.check(name, written, where, _env_name)
        if name in settings:
            raise ValueError(f"{where}: {written} is set twice, first on line {first_line[name]}; remove one")
        text = next(group for group in value.groups() if group is not None)
        values = names.split(name, text) if text.strip() else ()
        settings[name], first_line[name] = Setting(values, path.name), number
    for name, setting in settings.items():
        if not setting.values and (name in LAUNCHER_KEYS or "base_recipe" not in settings):
            raise ValueError(
                f"{path}:{first_line[name]}: {_env_name(name)} is empty; remove the line to use the default"
            )
    return settings


def read_base_recipe(given: Mapping[str, Setting], root: Path, names: Names) -> dict[str, Setting]:
    """The settings of the recipe that `base_recipe` names, a path relative to `root`; empty without one. One level: a base has no base."""
    if "base_recipe" not in given:
        return {}
    path, source = root / given["base_recipe"].text, given["base_recipe"].source
    if not path.is_file():
        raise FileNotFoundError(
            f"base_recipe={given['base_recipe'].text} from {source} is not a file; give a recipe under {root}"
        )
    settings = read_recipe(path, names)
    if "base_recipe" in settings:
        raise ValueError(
            f"{path}: {_env_name('base_recipe')} in a base recipe is refused; name {settings['base_recipe'].text} as the base directly"
        )
    return settings


def process_environment() -> dict[str, str]:
    """A copy of this process's environment. No other library file reads it."""
    return dict(os.environ)


def read_environment(environ: Mapping[str, str], names: Names) -> dict[str, Setting]:
    """The `OPSD_*` variables, `ENVIRONMENT_ONLY_KEYS` included."""
    settings = {}
    for written in sorted(environ):
        if not written.startswith(PREFIX):
            continue
        name = written.removeprefix(PREFIX).lower()
        if written != _env_name(name):
            raise ValueError(f"environment: {written} must be written {_env_name(name)}; unset it")
        if name not in ENVIRONMENT_ONLY_KEYS:
            names.check(name, written, "environment", _env_name)
        if not environ[written].strip():
            raise ValueError(f"environment: {written} is empty; unset it to use the default")
        settings[name] = Setting(names.split(name, environ[written]), "environment")
    return settings


def read_flags(argv: Sequence[str], names: Names) -> dict[str, Setting]:
    """`--name value`, `--name=value`, `--name a b c` for lists; `-` may stand for `_`. No abbreviations, no bare booleans."""
    settings: dict[str, Setting] = {}
    position = 0
    while position < len(argv):
        word = argv[position]
        if not word.startswith("--") or len(word) == 2:
            raise ValueError(
                f"flags: {word!r} stands alone; write --name value, with a recipe file before the first flag"
            )
        head, equals, inline = word[2:].partition("=")
        position += 1
        given = [inline] if equals else []
        while not equals and position < len(argv) and not argv[position].startswith("--"):
            given.append(argv[position])
            position += 1
        name = head.replace("-", "_")
        names.check(name, "--" + head, "flags", _flag_name)
        if name in settings:
            raise ValueError(f"flags: --{head} is given twice; remove one")
        if not given or not all(value.strip() for value in given):
            raise ValueError(f"flags: --{head} has an empty value; write --{name} value (booleans are true or false)")
        if len(given) > 1 and name not in names.list_fields:
            raise ValueError(f"flags: --{head} takes one value, {len(given)} are given: {' '.join(given)!r}; quote it")
        settings[name] = Setting(tuple(word for value in given for word in names.split(name, value)), "flag")
    return settings


def read_caps(launcher: Path) -> tuple[int, int]:
    """(STEP_CAP, ROLLOUT_CAP) from the header of `train_capped.sh`, the one place where they are set."""
    caps: dict[str, int] = {}
    for line in Path(launcher).read_text(encoding="utf-8").splitlines():
        match = _CAP.fullmatch(line)
        if match is not None:
            if match[1] in caps:
                raise RuntimeError(f"{launcher}: {match[1]} is set twice; keep one")
            caps[match[1]] = int(match[2])
    if set(caps) != {"STEP_CAP", "ROLLOUT_CAP"}:
        raise RuntimeError(f"{launcher}: its header must set STEP_CAP and ROLLOUT_CAP, found {sorted(caps)}")
    return caps["STEP_CAP"], caps["ROLLOUT_CAP"]


def check_caps(max_steps: int, rollouts_per_step: int, step_cap: int, rollout_cap: int) -> None:
    """Refuses a budget above the caps (optimizer steps, rollouts per step). Called by the launcher and again by `opsd_train.py`."""
    for name, value, cap in (("max_steps", max_steps, step_cap), ("rollouts_per_step", rollouts_per_step, rollout_cap)):
        if not 0 < value <= cap:
            raise ValueError(f"{name}={value} must be 1 to {cap}, the cap in the header of train_capped.sh; lower it")


def derive_batch(rollouts_per_step: int, world_size: int, micro_batch_size: int) -> tuple[int, int]:
    """(per_device_train_batch_size, gradient_accumulation_steps) so that world x batch x accumulation = rollouts_per_step.

    The batch is the largest divisor of one process's share that is not above `micro_batch_size`.
    """
    if micro_batch_size < 1:
        raise ValueError(f"micro_batch_size={micro_batch_size} must be > 0 sequences; use 1 for the smallest memory")
    if rollouts_per_step % world_size:
        divisors = [n for n in range(1, rollouts_per_step + 1) if rollouts_per_step % n == 0]
        below = max(n for n in divisors if n < world_size)
        above = [n for n in divisors if n > world_size][:1]
        nearest = " or ".join(str(n) for n in [below, *above])
        raise ValueError(
            f"world_size={world_size} processes do not divide rollouts_per_step={rollouts_per_step}; "
            f"use {nearest} processes (OPSD_NUM_PROCESSES a host)"
        )
    share = rollouts_per_step // world_size
    batch = max(n for n in range(1, min(share, micro_batch_size) + 1) if share % n == 0)
    return batch, share // batch
