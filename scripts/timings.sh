#!/usr/bin/env bash
# Time every strategy that this machine can run, under equal rules, and print a table.
#
#   bash scripts/timings.sh                      # JPEGs of its own; no data set needed
#   bash scripts/timings.sh --data /path/to/imagenet [--full] [flags of scripts/timings.py]
#   PYTHON=/path/to/python bash scripts/timings.sh
#
# Sets up .venv where PYTHON names no environment. Interrupted, the same command goes on.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source-path=SCRIPTDIR
source "$ROOT/scripts/setup.sh"

set_up requirements.txt requirements-nvimgcodec.txt requirements-report.txt
set_up_horovod
export PYTHON PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m scripts.timings "$@"
