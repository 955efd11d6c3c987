#!/usr/bin/env bash
# DistributedDataParallel without a launcher: the script itself starts one process per GPU.
#
#   bash scripts/multiprocessing_distributed.sh --data /path/to/imagenet [flags]
#
# The variables NPROC, PYTHON and OMP_NUM_THREADS work as in distributed.sh.
set -euo pipefail
ROOT=$(dirname "$(dirname "$(realpath "$0")")")
source "$ROOT/scripts/launcher.sh"

exec "$PYTHON" "$ROOT/multiprocessing_distributed.py" --nprocs "$NPROC" "$@"
