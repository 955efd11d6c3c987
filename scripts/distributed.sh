#!/usr/bin/env bash
# DistributedDataParallel under torchrun, one process per GPU.
#
#   bash scripts/distributed.sh --data /path/to/imagenet [flags of distributed.py]
#   SCRIPT=my_script.py bash scripts/distributed.sh [flags of my_script.py]
SCRIPT=${SCRIPT:-}                   # your own script, made from distributed.py
NPROC=${NPROC:-auto}                 # one per GPU, 2 on a CPU
LAUNCHER=${LAUNCHER:-torchrun}       # or launch: the older python -m torch.distributed.launch
PYTHON=${PYTHON:-}                   # .venv/bin/python, or python3 without it
OMP_NUM_THREADS=${OMP_NUM_THREADS:-} # cores / NPROC
PREFLIGHT=${PREFLIGHT:-}             # 1: first check that all processes meet; takes 7 s for 2 on two cores
MAX_RESTARTS=${MAX_RESTARTS:-0}      # restarts after a process died, each from the last checkpoint
# Several machines (docs/multinode.md), the same command on each:
NNODES=${NNODES:-}                   # number of machines, together with either
RDZV_ENDPOINT=${RDZV_ENDPOINT:-}     #   HOST:PORT where they meet, or
NODE_RANK=${NODE_RANK:-}             #   this machine's number, and
MASTER_ADDR=${MASTER_ADDR:-}         #   the host of NODE_RANK=0, and
MASTER_PORT=${MASTER_PORT:-}         #   29500
JOIN_SECONDS=${JOIN_SECONDS:-45}     # how long they wait for each other
INTERFACE=${INTERFACE:-}             # the network that connects them, for example eth0
export LAUNCHER MAX_RESTARTS NNODES RDZV_ENDPOINT NODE_RANK MASTER_ADDR MASTER_PORT JOIN_SECONDS
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/launcher.sh"

SCRIPT=${SCRIPT:-$ROOT/distributed.py}
preflight "$SCRIPT" "$@"
exec "$PYTHON" -m launch.torchrun --nproc-per-node "$NPROC" "$SCRIPT" "$@"
