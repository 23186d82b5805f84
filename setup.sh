#!/usr/bin/env bash
# Finds or makes the Python environment, and prints its interpreter as the only line on standard output:
#
#     python="$(bash setup.sh)"
#
# In this order: OPSD_PYTHON as it is (nothing is installed; unmet pins are warnings); the active environment if it
# meets every pin; `.venv` beside this file, made and filled when needed. A machine where `nvidia-smi -L` works gets
# requirements.txt (CUDA), any other requirements-cpu.txt. A call that finds everything in place takes a quarter of a second.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
here="$PWD"

say() { printf 'setup: %s\n' "$*" >&2; }
die() { printf 'setup: error: %s\n' "$*" >&2; exit 2; }

if nvidia-smi -L >/dev/null 2>&1; then
    kind=CUDA
    requirements=(requirements.txt)
    absent=()
else
    kind=CPU
    requirements=(requirements-cpu.txt requirements-cpu-nodeps.txt)
    absent=(--absent torchvision --absent torchaudio --absent torchcodec)
fi

unmet_pins() { "$1" -P opsd/pins.py ${absent[@]+"${absent[@]}"} "${requirements[@]}"; }
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

if [[ -n "${OPSD_PYTHON:-}" ]]; then
    python="$(command -v "$OPSD_PYTHON")" || die "OPSD_PYTHON=$OPSD_PYTHON is not an executable; give a Python 3.11 or newer"
    new_enough "$python" || die "OPSD_PYTHON=$OPSD_PYTHON is not a working Python 3.11 or newer"
    unmet="$(unmet_pins "$python")" || say "warning: OPSD_PYTHON=$OPSD_PYTHON differs from the pins:"$'\n'"$unmet"
    printf '%s\n' "$python"
    exit 0
fi

# The active environment: python first (a virtual environment always has it), then python3.
for name in python python3; do
    active="$(command -v "$name")" || continue
    [[ "$active" == "$here/.venv/"* ]] && continue
    if unmet_pins "$active" >/dev/null 2>&1; then
        printf '%s\n' "$active"
        exit 0
    fi
done

ready() { [[ -x .venv/bin/python ]] && unmet_pins .venv/bin/python >/dev/null 2>&1; }
if ready; then
    printf '%s\n' "$here/.venv/bin/python"
    exit 0
fi

# One set-up at a time; a second one waits here and then finds the work done.
exec 9>.venv.lock
flock -n 9 || { say "another set-up is running, waiting for it"; flock 9; }
if ready; then
    printf '%s\n' "$here/.venv/bin/python"
    exit 0
fi

if [[ ! -x .venv/bin/python ]] || ! new_enough .venv/bin/python; then
    base=
    for name in python3.11 python3.12 python3.13 python3.14 python3; do
        if command -v "$name" >/dev/null && new_enough "$name"; then base="$name"; break; fi
    done
    [[ -n "$base" ]] || die "no Python 3.11 or newer found on PATH (python3 is $(python3 --version 2>&1)); install one, or name it in OPSD_PYTHON"
    say "making .venv with $("$base" --version)"
    rm -rf .venv
    "$base" -m venv .venv || die "$base cannot make a virtual environment; install its venv module (Debian: apt-get install python3-venv)"
fi

say "installing the $kind requirements into .venv (minutes on the first run)"
install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@" >&2; }
if [[ "$kind" == CPU ]]; then
    .venv/bin/python -m pip uninstall --quiet --quiet --yes torchvision torchaudio torchcodec >&2
    torch="$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements-cpu.txt)"
    install "$torch" || die "$torch cannot be installed; see pip's message above"
fi
# deepspeed: DS_BUILD_OPS=0 installs it without compiling kernels, so no CUDA toolkit is needed
DS_BUILD_OPS=0 install -r "${requirements[0]}" || die "pip cannot install ${requirements[0]}; see its message above"
if [[ "$kind" == CPU ]]; then
    install --no-deps -r requirements-cpu-nodeps.txt || die "pip cannot install requirements-cpu-nodeps.txt; see its message above"
fi
unmet="$(unmet_pins .venv/bin/python)" || die "the installation differs from the pins:"$'\n'"$unmet"
say "ready: .venv ($kind)"
printf '%s\n' "$here/.venv/bin/python"
