#!/usr/bin/env bash
# Train a ResNet-18 on real images with every strategy that this machine can run, print a table
# and draw the curves. The script installs packages into .venv, needs no GPU and downloads no data.
#
#   bash scripts/quickstart.sh
#   PYTHON=/path/to/python bash scripts/quickstart.sh     # your own environment with PyTorch
#
# To continue after an interruption, run the same command again.
set -euo pipefail
ROOT=$(dirname "$(dirname "$(realpath "$0")")")
source "$ROOT/scripts/setup.sh"
[ $# = 0 ] || fail "it takes no arguments, but got $*"

set_up requirements.txt requirements/sample.txt
set_up_horovod
cd "$ROOT"
"$PYTHON" -m scripts.sample_data sample_data/digits
exec "$PYTHON" -m scripts.quickstart sample_data/digits runs/quickstart
