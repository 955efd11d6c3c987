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
    gloo) program=horovodrun launch=("$PYTHON" "$ROOT/scripts/horovodrun.py" --gloo) ;;
    mpi)
        program=mpirun launch=(mpirun --allow-run-as-root --bind-to none)
        # mpirun passes only the variables that are named
        for name in PATH ${!OMP_NUM_THREADS*} ${!LD_LIBRARY_PATH*} ${!NCCL_*}; do launch+=(-x "$name"); done
        ;;
    *) fail "CONTROLLER=$CONTROLLER is unknown; choose gloo or mpi" ;;
esac
command -v "$program" >/dev/null ||
    fail "$program is missing (scripts/install_horovod.sh builds Horovod, with MPI if Open MPI is installed)"
exec "${launch[@]}" -np "$NPROC" -H "$HOSTS" "$PYTHON" "$ROOT/horovod_distributed.py" "$@"
