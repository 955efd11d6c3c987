#!/usr/bin/env bash
# Horovod under horovodrun or mpirun, one process per GPU.
#
#   bash scripts/horovod_distributed.sh --data /path/to/imagenet [horovod_distributed.py flags]
#   HOSTS=a:4,b:4 NPROC=8 bash scripts/horovod_distributed.sh --data /path/to/imagenet
#
# HOSTS lists machines that you can log in to by SSH, each with its number of processes. CONTROLLER=mpi
# uses Open MPI's mpirun. NPROC, PYTHON and OMP_NUM_THREADS work as in distributed.sh.
set -euo pipefail
ROOT=$(dirname "$(dirname "$(realpath "$0")")")
source "$ROOT/scripts/launcher.sh"

HOSTS=${HOSTS:-localhost:$NPROC}
case ${CONTROLLER:-gloo} in
    gloo) launch=(horovodrun --gloo -np "$NPROC" -H "$HOSTS") ;;
    mpi) launch=(mpirun --allow-run-as-root -np "$NPROC" -H "$HOSTS" --bind-to none -x PATH -x OMP_NUM_THREADS) ;;
    *) fail "CONTROLLER=$CONTROLLER is unknown; choose gloo or mpi" ;;
esac
command -v "${launch[0]}" >/dev/null ||
    fail "${launch[0]} is missing (scripts/install_horovod.sh builds Horovod, with MPI if Open MPI is installed)"
exec "${launch[@]}" "$PYTHON" "$ROOT/horovod_distributed.py" "$@"
