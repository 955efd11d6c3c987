#!/usr/bin/env bash
# Time the strategies that this machine can run: which are faster, and which are equal within 3 %?
#
#   bash scripts/timings.sh                      # takes ten minutes; --minutes 40 decides more
#   bash scripts/timings.sh --data /path/to/imagenet [flags of python -m benchmarks.timings]
#
# It sets up .venv, or uses the environment of PYTHON=/path/to/python. If interrupted, run it again to continue.
set -euo pipefail
ROOT=$(dirname "$(dirname "$(realpath "$0")")")
source "$ROOT/scripts/setup.sh"

set_up requirements.txt requirements/report.txt
set_up_horovod
export PYTHON PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m benchmarks.timings "$@"
