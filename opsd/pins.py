"""Does an interpreter hold exactly the packages that the requirements files pin? Run by `setup.sh`, standard library only.

    python opsd/pins.py [--absent NAME]... requirements-cpu.txt requirements-cpu-nodeps.txt

Prints one line per unmet pin and exits 1, or prints nothing and exits 0.
"""

import argparse
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

OLDEST_PYTHON = (3, 11)
_PIN = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[a-z,]+\])?==([^\s;#]+)(?:\s*;\s*platform_machine == '(\w+)')?\s*(?:#.*)?")


def read_pins(path: Path) -> dict[str, str]:
    """Package -> exact version of one requirements file and the files it includes with `-r`."""
    pins: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("-r "):
            pins.update(read_pins(path.parent / line[3:].strip()))
            continue
        match = _PIN.fullmatch(line)
        if match is None:
            raise ValueError(f"{path}:{number}: {line!r} is not `name==version`; every requirement is pinned exactly")
        if match[3] is None or match[3] == _machine():
            pins[match[1]] = match[2]
    return pins


def _machine() -> str:
    import platform

    return platform.machine()


def unmet(pins: dict[str, str], absent: list[str]) -> list[str]:
    """One line per package that is missing, of another version, or present although it must not be."""
    problems = []
    for name, wanted in pins.items():
        found = _installed(name)
        # a pin without a local part (2.13.0) accepts any build of that version (2.13.0+cu130), as pip does
        comparable = found if found is None or "+" in wanted else found.split("+")[0]
        if comparable != wanted:
            problems.append(f"{name}: {wanted} needed, {found or 'nothing'} installed")
    problems += [f"{name}: {_installed(name)} installed, must be absent" for name in absent if _installed(name)]
    return problems


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--absent", action="append", default=[], help="Package that must not be installed.")
    parser.add_argument("requirements", nargs="+", type=Path, help="Requirements files with exact pins.")
    arguments = parser.parse_args(argv)
    problems = []
    if sys.version_info < OLDEST_PYTHON:
        problems.append(f"Python {'.'.join(map(str, OLDEST_PYTHON))} or newer needed, {sys.version.split()[0]} found")
    pins: dict[str, str] = {}
    for path in arguments.requirements:
        pins.update(read_pins(path))
    problems += unmet(pins, arguments.absent)
    sys.stdout.write("".join(line + "\n" for line in problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
