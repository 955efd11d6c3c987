#!/usr/bin/env bash
# Time every strategy that this machine can run, under equal rules, and print a table.
#
#   bash scripts/timings.sh                      # generates JPEGs; needs no dataset
#   bash scripts/timings.sh --data /path/to/imagenet [--full] [flags of scripts/timings.py]
#   PYTHON=/path/to/python bash scripts/timings.sh
#
# Without PYTHON, the script sets up .venv. After an interruption, run the same command to continue.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source-path=SCRIPTDIR
source "$ROOT/scripts/setup.sh"

set_up requirements.txt requirements-nvimgcodec.txt requirements-report.txt
set_up_horovod
export PYTHON PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m scripts.timings "$@"
