#!/usr/bin/env bash
# Horovod under horovodrun or mpirun, one process per GPU of this machine.
#
#   bash scripts/horovod_distributed.sh --data /path/to/imagenet [flags of horovod_distributed.py]
NPROC=${NPROC:-}                     # one per GPU, 2 on a CPU
CONTROLLER=${CONTROLLER:-gloo}       # gloo: horovodrun; mpi: Open MPI's mpirun
PYTHON=${PYTHON:-}                   # .venv/bin/python, else python3
OMP_NUM_THREADS=${OMP_NUM_THREADS:-} # cores / NPROC
PREFLIGHT=${PREFLIGHT:-}             # 1: first see that all processes meet; 6 s for 2 on two cores
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
    gloo) launch=(horovodrun -np "$NPROC" -H "localhost:$NPROC" --gloo) stop=TERM ;;
    mpi)
        if ! command -v mpirun >/dev/null; then
            echo "$(basename "$0"): error: CONTROLLER=mpi needs Open MPI's mpirun" >&2
            exit 2
        fi
        # Not horovodrun --mpi: a shell of its stands before mpirun and keeps signals from it.
        # mpirun hands SIGUSR1 on and waits; at other signals it soon kills.
        launch=(mpirun --allow-run-as-root -np "$NPROC" -H "localhost:$NPROC" --bind-to none)
        stop=USR1
        ;;
    *)
        echo "$(basename "$0"): error: CONTROLLER=$CONTROLLER; it is gloo or mpi" >&2
        exit 2
        ;;
esac
if command -v setpriv >/dev/null; then launch=(setpriv "--pdeathsig=$stop" "${launch[@]}"); fi

preflight horovod_distributed.py "$@"

set -m # a process group for the launcher: Ctrl-C reaches this script alone, which hands it on
"${launch[@]}" "$PYTHON" "$ROOT/horovod_distributed.py" "$@" </dev/null &
launcher=$! stopped=0
trap 'stopped=1; kill "-$stop" "$launcher" 2>/dev/null || :' INT TERM USR1
while kill -0 "$launcher" 2>/dev/null; do wait -f "$launcher" || :; done # signals end `wait`
status=0
wait "$launcher" || status=$?
exit $((status ? status : stopped)) # horovodrun may end a stopped run with 0
