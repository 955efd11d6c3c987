#!/usr/bin/env bash
# nn.DataParallel: one process, all GPUs of this machine (CUDA_VISIBLE_DEVICES selects them).
#
#   bash scripts/dataparallel.sh --data /path/to/imagenet [flags of dataparallel.py]
PYTHON=${PYTHON:-}                   # default: .venv/bin/python, or python3 if it does not exist
OMP_NUM_THREADS=${OMP_NUM_THREADS:-} # default: number of cores
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/launcher.sh"

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)}
exec "$PYTHON" "$ROOT/dataparallel.py" "$@"
