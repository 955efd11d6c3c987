#!/usr/bin/env bash
# DistributedDataParallel without a launcher: the script itself starts one process per GPU.
#
#   bash scripts/multiprocessing_distributed.sh --data /path/to/imagenet [flags]
#
# For several machines (docs/multinode.md), add --dist-url tcp://HOST:PORT --nnodes N --node-rank R
NPROC=${NPROC:-}                     # processes (or --nprocs); default: one per GPU, or 2 on a CPU
PYTHON=${PYTHON:-}                   # default: .venv/bin/python, or python3 if it does not exist
OMP_NUM_THREADS=${OMP_NUM_THREADS:-} # default: cores / NPROC
PREFLIGHT=${PREFLIGHT:-}             # 1: first check that all processes can connect (7 s for 2 processes on 2 cores)
INTERFACE=${INTERFACE:-}             # the network interface that connects them, for example eth0
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/launcher.sh"

[ "${NPROC:-auto}" != auto ] || NPROC=
preflight "$ROOT/multiprocessing_distributed.py" "$@"
exec "$PYTHON" "$ROOT/multiprocessing_distributed.py" ${NPROC:+--nprocs "$NPROC"} "$@"
