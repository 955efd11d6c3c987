#!/usr/bin/env bash
# DistributedDataParallel; the script itself starts the processes, one per GPU.
#
#   bash scripts/multiprocessing_distributed.sh --data /path/to/imagenet [flags]
#
# Several machines (docs/multinode.md): --dist-url tcp://HOST:PORT --nnodes N --node-rank R
NPROC=${NPROC:-}                     # one per GPU, 2 on a CPU (or --nprocs)
PYTHON=${PYTHON:-}                   # .venv/bin/python, or python3 without it
OMP_NUM_THREADS=${OMP_NUM_THREADS:-} # cores / NPROC
PREFLIGHT=${PREFLIGHT:-}             # 1: first check that all processes meet; takes 7 s for 2 on two cores
INTERFACE=${INTERFACE:-}             # the network that connects machines, for example eth0
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/launcher.sh"

[ "${NPROC:-auto}" != auto ] || NPROC=
preflight "$ROOT/multiprocessing_distributed.py" "$@"
exec "$PYTHON" "$ROOT/multiprocessing_distributed.py" ${NPROC:+--nprocs "$NPROC"} "$@"
