#!/usr/bin/env bash
# DistributedDataParallel, the processes started by the script itself, one per GPU.
#
#   bash scripts/multiprocessing_distributed.sh --data /path/to/imagenet [flags]
#
# Several machines (docs/multinode.md): --dist-url tcp://HOST:PORT --nnodes N --node-rank R
NPROC=${NPROC:-}                     # one per GPU, 2 on a CPU (or --nprocs)
PYTHON=${PYTHON:-}                   # .venv/bin/python, else python3
OMP_NUM_THREADS=${OMP_NUM_THREADS:-} # cores / NPROC
PREFLIGHT=${PREFLIGHT:-}             # 1: first see that all processes meet; 6 s for 2 on two cores
JOIN_SECONDS=${JOIN_SECONDS:-45}     # how long machines wait for each other
INTERFACE=${INTERFACE:-}             # the network that joins them, for example eth0
export JOIN_SECONDS
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/launcher.sh"

preflight multiprocessing_distributed.py ${NPROC:+--nprocs "$NPROC"} "$@"
exec "$PYTHON" "$ROOT/multiprocessing_distributed.py" ${NPROC:+--nprocs "$NPROC"} "$@"
