#!/usr/bin/env bash
# nn.DataParallel: one process, all GPUs of this machine (CUDA_VISIBLE_DEVICES chooses).
#
#   bash scripts/dataparallel.sh --data /path/to/imagenet [flags of dataparallel.py]
PYTHON=${PYTHON:-}                   # .venv/bin/python, or python3 without it
OMP_NUM_THREADS=${OMP_NUM_THREADS:-} # cores
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/launcher.sh"

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)}
exec "$PYTHON" "$ROOT/dataparallel.py" "$@"
