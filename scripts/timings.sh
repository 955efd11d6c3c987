#!/usr/bin/env bash
# Compare the strategies that this machine can run: which is faster, which are equal within 3 %?
#
#   bash scripts/timings.sh                      # ten minutes; --minutes 40 decides more
#   bash scripts/timings.sh --data /path/to/imagenet [flags of python -m timings]
#   PYTHON=/path/to/python bash scripts/timings.sh
#
# Sets up .venv where PYTHON names no environment. Interrupted, the same command continues.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source-path=SCRIPTDIR
source "$ROOT/scripts/setup.sh"

set_up requirements.txt requirements-nvimgcodec.txt requirements-report.txt
set_up_horovod
export PYTHON PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m timings "$@"
