#!/usr/bin/env bash
# Run every strategy on a real GPU, compare what comes out, and time it: results/GPU_DATE/summary.md.
#
#   bash scripts/gpu_check.sh [flags of scripts/gpu_check.py]
#   PYTHON=/path/to/python bash scripts/gpu_check.sh
#
# For a machine with a CUDA GPU and an environment with PyTorch and torchvision; needs no network and
# installs nothing there. Horovod is built from horovod-*.tar.gz beside this folder where it is missing.
# Takes at most 9 minutes; what did not fit in comes with the next call of it. Exit status: 1 where a row failed, else 0.
GPU_CHECK_BEGAN=$(date +%s)
PYTHON=${PYTHON:-} # .venv/bin/python, else python3
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/launcher.sh"

cd "$ROOT"
export PYTHON GPU_CHECK_BEGAN
exec "$PYTHON" scripts/gpu_check.py "$@"
