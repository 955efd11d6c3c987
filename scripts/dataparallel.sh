#!/usr/bin/env bash
# nn.DataParallel: one process, all GPUs of this machine (CUDA_VISIBLE_DEVICES selects them).
#
#   bash scripts/dataparallel.sh --data /path/to/imagenet [dataparallel.py flags]
#
# PYTHON is the interpreter; OMP_NUM_THREADS is the number of compute threads (default: all cores).
set -euo pipefail
NPROC=1
ROOT=$(dirname "$(dirname "$(realpath "$0")")")
source "$ROOT/scripts/launcher.sh"

exec "$PYTHON" "$ROOT/dataparallel.py" "$@"
