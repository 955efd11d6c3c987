#!/usr/bin/env bash
# NVIDIA Apex (amp and its DistributedDataParallel) under torchrun, one process per GPU of this machine.
#
#   bash scripts/apex_distributed.sh --data /path/to/imagenet [flags of apex_distributed.py]
NPROC=${NPROC:-}                     # one per GPU, 2 on a CPU
LAUNCHER=${LAUNCHER:-torchrun}       # or launch: the older python -m torch.distributed.launch
PYTHON=${PYTHON:-}                   # .venv/bin/python, else python3
OMP_NUM_THREADS=${OMP_NUM_THREADS:-} # cores / NPROC
PREFLIGHT=${PREFLIGHT:-}             # 1: first see that all processes meet; 6 s for 2 on two cores
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/launcher.sh"

run_distributed apex_distributed.py "$@"
