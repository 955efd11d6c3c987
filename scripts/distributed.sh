#!/usr/bin/env bash
# DistributedDataParallel under torchrun, one process per GPU of this machine.
#
#   bash scripts/distributed.sh --data /path/to/imagenet [flags of distributed.py]
NPROC=${NPROC:-}                     # one per GPU, 2 on a CPU
LAUNCHER=${LAUNCHER:-torchrun}       # or launch: the older python -m torch.distributed.launch
PYTHON=${PYTHON:-}                   # .venv/bin/python, else python3
OMP_NUM_THREADS=${OMP_NUM_THREADS:-} # cores / NPROC
PREFLIGHT=${PREFLIGHT:-}             # 1: first see that all processes meet; 6 s for 2 on two cores
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/launcher.sh"

run_distributed distributed.py "$@"
