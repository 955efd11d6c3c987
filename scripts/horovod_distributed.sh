#!/usr/bin/env bash
# Horovod under horovodrun, one process per GPU of this machine.
#
#   bash scripts/horovod_distributed.sh --data /path/to/imagenet [flags of horovod_distributed.py]
NPROC=${NPROC:-}                     # one per GPU, 2 on a CPU
CONTROLLER=${CONTROLLER:-gloo}       # or mpi, where Horovod was built with it
PYTHON=${PYTHON:-}                   # .venv/bin/python, else python3
OMP_NUM_THREADS=${OMP_NUM_THREADS:-} # cores / NPROC
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/launcher.sh"

NPROC=$(check horovod_distributed.py -- "$@")
case $NPROC in *[!0-9]*) # --help
    printf '%s\n' "$NPROC"
    exit 0
    ;;
esac
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NPROC ? cores / NPROC : 1))}
# horovodrun starts further programs of the environment by their names
PATH=$(dirname "$PYTHON"):$PATH
exec horovodrun -np "$NPROC" -H "localhost:$NPROC" "--$CONTROLLER" \
    "$PYTHON" "$ROOT/horovod_distributed.py" "$@"
