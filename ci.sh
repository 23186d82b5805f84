#!/usr/bin/env bash
# The gate: lint, format, shell check, both dry runs, then every unmarked test. Run it before every push.
#
#     bash ci.sh                       sets up the environment first when needed
#     python -m pytest -q -m slow      the tests that take minutes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

python="$(bash setup.sh)"
scripts="$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')"
step() { printf '== %s\n' "$*"; }

step lint
"$python" -m ruff check .
step format
"$python" -m ruff format --check .
step shell
shopt -s nullglob
"$scripts/shellcheck" ./*.sh .ci/run slurm/*.sbatch
step dry run
OPSD_DRY_RUN=1 bash train_capped.sh recipe.env >/dev/null
OPSD_DRY_RUN=1 bash train_capped.sh recipes/paper.env >/dev/null
step tests
exec "$python" -m pytest -q
