#!/usr/bin/env bash
# Trains one recipe. "Capped" limits the budget: at most STEP_CAP optimizer steps of at most ROLLOUT_CAP rollouts.
#
#     bash train_capped.sh [RECIPE] [--name value]...      RECIPE defaults to recipe.env; paths are relative to this folder
#     bash train_capped.sh [RECIPE] --resume               goes on from the last complete checkpoint of the output folder
#
# Precedence, highest first: flags, OPSD_NAME environment variables, the recipe, its base recipe (OPSD_BASE_RECIPE, --base_recipe), the
# defaults of opsd/args.py.
# OPSD_DRY_RUN=1 prints every value with its source and the command, and stops. Further variables: OPSD_NUM_PROCESSES (per host; default:
# the visible GPUs, or 1), OPSD_ACCELERATE_CONFIG (a name or path), OPSD_PYTHON, OPSD_CACHE, OPSD_VLLM_API_KEY; NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT.
set -euo pipefail

# The caps. They are changed here and nowhere else: opsd/recipe.py reads these two lines, for this launcher and for opsd_train.py.
# shellcheck disable=SC2034
readonly STEP_CAP=100
# shellcheck disable=SC2034
readonly ROLLOUT_CAP=32

cd "$(dirname "${BASH_SOURCE[0]}")"
if [[ "${1:-}" == --help || "${1:-}" == -h ]]; then
    sed -n '2,10s/^# \{0,1\}//p' train_capped.sh
    printf '\nEvery argument with its help text: python opsd_train.py --help\n'
    exit 0
fi

python="$(bash setup.sh)"

command_file="$(mktemp)"
trap 'rm -f "$command_file"' EXIT
"$python" -m opsd.launch "$command_file" "$@"
[[ -s "$command_file" ]] || exit 0
mapfile -d '' command <"$command_file"
rm -f "$command_file"
exec "${command[@]}"
