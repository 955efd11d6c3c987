#!/usr/bin/env bash
# Horovod under horovodrun or mpirun, one process per GPU of this machine.
#
#   bash scripts/horovod_distributed.sh --data /path/to/imagenet [flags of horovod_distributed.py]
NPROC=${NPROC:-}                     # one per GPU, 2 on a CPU
CONTROLLER=${CONTROLLER:-gloo}       # gloo: horovodrun; mpi: Open MPI's mpirun
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
case $CONTROLLER in
    gloo) launch=(horovodrun -np "$NPROC" -H "localhost:$NPROC" --gloo) ;;
    mpi)
        if ! command -v mpirun >/dev/null; then
            echo "$(basename "$0"): error: CONTROLLER=mpi needs Open MPI's mpirun" >&2
            exit 2
        fi
        # Not horovodrun --mpi: a shell of its stands before mpirun and keeps signals from it.
        # Half a minute to save after SIGTERM, where mpirun would leave a second.
        launch=(mpirun --allow-run-as-root -np "$NPROC" -H "localhost:$NPROC" --bind-to none
            --mca odls_base_sigkill_timeout 30)
        ;;
    *)
        echo "$(basename "$0"): error: CONTROLLER=$CONTROLLER; it is gloo or mpi" >&2
        exit 2
        ;;
esac
exec "${launch[@]}" "$PYTHON" "$ROOT/horovod_distributed.py" "$@"
