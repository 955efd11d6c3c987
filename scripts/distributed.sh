#!/usr/bin/env bash
# DistributedDataParallel under torchrun, one process per GPU of this machine.
#
#   bash scripts/distributed.sh --data /path/to/imagenet [distributed.py flags]
#
# These variables change the launch; for several machines, call torchrun yourself (docs/multinode.md):
#   NPROC=2               number of processes (default: one per GPU, or 2 on a CPU)
#   LAUNCHER=launch       use the older python -m torch.distributed.launch
#   PYTHON=/path/python   interpreter (default: .venv/bin/python, or python3 if it does not exist)
#   OMP_NUM_THREADS=4     compute threads per process (default: 1)
set -euo pipefail
ROOT=$(dirname "$(dirname "$(realpath "$0")")")
source "$ROOT/scripts/launcher.sh"

case ${LAUNCHER:-torchrun} in
    torchrun) exec torchrun --standalone --nproc-per-node "$NPROC" "$ROOT/distributed.py" "$@" ;;
    launch) exec "$PYTHON" -m torch.distributed.launch --nproc-per-node "$NPROC" "$ROOT/distributed.py" "$@" ;;
    *) fail "LAUNCHER=$LAUNCHER is unknown; choose torchrun or launch" ;;
esac
