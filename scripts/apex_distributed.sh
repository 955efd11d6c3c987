#!/usr/bin/env bash
# NVIDIA Apex (amp and its DistributedDataParallel) under torchrun, one process per GPU.
#
#   bash scripts/apex_distributed.sh --data /path/to/imagenet [apex_distributed.py flags]
#
# The variables NPROC, PYTHON and OMP_NUM_THREADS work as in distributed.sh.
set -euo pipefail
ROOT=$(dirname "$(dirname "$(realpath "$0")")")
source "$ROOT/scripts/launcher.sh"

exec torchrun --standalone --nproc-per-node "$NPROC" "$ROOT/apex_distributed.py" "$@"
