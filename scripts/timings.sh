#!/usr/bin/env bash
# Time the strategies that this machine can run: which are faster, and which are equal to within 3 %?
#
#   bash scripts/timings.sh                         # takes ten minutes; --minutes 40 decides more comparisons
#   bash scripts/timings.sh --data /path/to/imagenet
#   bash scripts/timings.sh --modes scaling --output runs/scaling    # on 1, 2, 4 ... devices
#
# The script sets up .venv, or uses the environment of PYTHON=/path/to/python, prints which strategies are left out
# and why, and writes runs/timings/report.md. To continue after an interruption, run the same command again.
set -euo pipefail
ROOT=$(dirname "$(dirname "$(realpath "$0")")")
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
PROGRAM=("${PYTHON:-python3}" -m benchmarks.timings) # prints its flags without PyTorch
source "$ROOT/scripts/setup.sh"

set_up requirements.txt requirements/report.txt
set_up_horovod
exec "$PYTHON" -m benchmarks.timings "$@"
