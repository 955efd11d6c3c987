#!/usr/bin/env bash
# Train a ResNet-18 on real images with every strategy that this machine can run, and print
# a table. It installs what it needs into .venv. It needs no GPU and downloads no data.
#
#   bash scripts/quickstart.sh
#   PYTHON=/path/to/python bash scripts/quickstart.sh     # your own environment with PyTorch
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source-path=SCRIPTDIR
source "$ROOT/scripts/setup.sh"

set_up requirements.txt requirements/nvimgcodec.txt requirements/sample.txt
set_up_horovod
cd "$ROOT"
"$PYTHON" -m scripts.sample_data sample_data/digits
export PYTHON
exec "$PYTHON" scripts/quickstart.py sample_data/digits runs/quickstart
