#!/usr/bin/env bash
# DistributedDataParallel under torchrun, one process per GPU.
#
#   bash scripts/distributed.sh --data /path/to/imagenet [flags of distributed.py]
#   SCRIPT=my_script.py bash scripts/distributed.sh [flags of my_script.py]
SCRIPT=${SCRIPT:-}                   # your own script, based on distributed.py
NPROC=${NPROC:-auto}                 # processes; auto: one per GPU, or 2 on a CPU
LAUNCHER=${LAUNCHER:-torchrun}       # launch: use the older python -m torch.distributed.launch
PYTHON=${PYTHON:-}                   # default: .venv/bin/python, or python3 if it does not exist
OMP_NUM_THREADS=${OMP_NUM_THREADS:-} # default: cores / NPROC
PREFLIGHT=${PREFLIGHT:-}             # 1: first check that all processes can connect (7 s for 2 processes on 2 cores)
MAX_RESTARTS=${MAX_RESTARTS:-0}      # how often to restart from the last checkpoint after a process dies
# For several machines (docs/multinode.md), run the same command on each of them:
NNODES=${NNODES:-}                   # number of machines, or LEAST:MOST; then set either
RDZV_ENDPOINT=${RDZV_ENDPOINT:-}     #   the rendezvous endpoint (HOST:PORT), or
NODE_RANK=${NODE_RANK:-}             #   this machine's rank, and
MASTER_ADDR=${MASTER_ADDR:-}         #   the host with NODE_RANK=0, and
MASTER_PORT=${MASTER_PORT:-}         #   a free port there (29500)
JOIN_SECONDS=${JOIN_SECONDS:-45}     # how long the machines wait for each other
INTERFACE=${INTERFACE:-}             # the network interface that connects them, for example eth0
export LAUNCHER MAX_RESTARTS NNODES RDZV_ENDPOINT NODE_RANK MASTER_ADDR MASTER_PORT JOIN_SECONDS
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/launcher.sh"

SCRIPT=${SCRIPT:-$ROOT/distributed.py}
preflight "$SCRIPT" "$@"
exec "$PYTHON" -m launch.torchrun --nproc-per-node "$NPROC" "$SCRIPT" "$@"
