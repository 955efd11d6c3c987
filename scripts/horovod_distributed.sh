#!/usr/bin/env bash
# Horovod under horovodrun or mpirun, one process per GPU.
#
#   bash scripts/horovod_distributed.sh --data /path/to/imagenet [flags of horovod_distributed.py]
NPROC=${NPROC:-auto}                 # processes; auto: one per GPU, or 2 on a CPU
CONTROLLER=${CONTROLLER:-gloo}       # gloo: horovodrun; mpi: Open MPI's mpirun
PYTHON=${PYTHON:-}                   # default: .venv/bin/python, or python3 if it does not exist
OMP_NUM_THREADS=${OMP_NUM_THREADS:-} # default: cores / NPROC
PREFLIGHT=${PREFLIGHT:-}             # 1: first check that all processes can connect (7 s for 2 processes on 2 cores)
# For several machines (docs/multinode.md), run this on a machine that can log in to the others by
# SSH. The project, environment and data must have the same paths on all machines:
HOSTS=${HOSTS:-}                     # machines, each with its number of processes: a:4,b:4
SSH_PORT=${SSH_PORT:-}               # default: 22
SSH_IDENTITY=${SSH_IDENTITY:-}       # private key file
INTERFACE=${INTERFACE:-}             # the network interface that connects them, for example eth0
export HOSTS
[ -z "$HOSTS" ] || export MASTER_ADDR=${HOSTS%%:*} # rank 0's machine, for the preflight
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/launcher.sh"

case " $* " in *" --help "* | *" -h "*) exec "$PYTHON" "$ROOT/horovod_distributed.py" --help ;; esac
found=$("$PYTHON" -m launch.check --nproc-per-node "$NPROC" "$ROOT/horovod_distributed.py" "$@")
read -r NPROC OMP_NUM_THREADS <<<"$found"
export OMP_NUM_THREADS
# horovodrun looks for the environment's other programs on PATH
PATH=$(dirname "$PYTHON"):$PATH
where=(-np "$NPROC" -H "${HOSTS:-localhost:$NPROC}")
case $CONTROLLER in
    gloo)
        launch=(horovodrun "${where[@]}" --gloo --disable-cache) stop=TERM
        [ -z "$SSH_PORT" ] || launch+=(--ssh-port "$SSH_PORT")
        [ -z "$SSH_IDENTITY" ] || launch+=(--ssh-identity-file "$SSH_IDENTITY")
        [ -z "$INTERFACE" ] || launch+=(--network-interfaces "$INTERFACE")
        ;;
    mpi)
        if ! command -v mpirun >/dev/null; then
            echo "$(basename "$0"): error: CONTROLLER=mpi needs Open MPI's mpirun" >&2
            exit 2
        fi
        # Not horovodrun --mpi, which runs mpirun in a shell that does not forward signals.
        # mpirun forwards SIGUSR1 and keeps waiting; other signals make it kill the processes soon.
        launch=(mpirun --allow-run-as-root "${where[@]}" --bind-to none) stop=USR1
        if [ -n "$HOSTS" ]; then
            launch+=(--mca plm_rsh_args
                "-o BatchMode=yes -o ConnectTimeout=15 ${SSH_PORT:+-p $SSH_PORT} ${SSH_IDENTITY:+-i $SSH_IDENTITY}")
            [ -z "$INTERFACE" ] ||
                launch+=(--mca oob_tcp_if_include "$INTERFACE" --mca btl_tcp_if_include "$INTERFACE")
            # Environment variables to pass to the other machines
            for name in $(compgen -e | grep -E '^(PATH|PYTHONPATH|LD_LIBRARY_PATH|OMP_NUM_THREADS|MASTER_ADDR|MASTER_PORT|(HOROVOD|NCCL|GLOO)_.*)$'); do
                launch+=(-x "$name")
            done
        else # one machine: use shared memory, and listen only on loopback
            launch+=(--mca oob_tcp_if_include lo --mca btl "self,vader")
            export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-=lo}"
        fi
        ;;
    *)
        echo "$(basename "$0"): error: CONTROLLER=$CONTROLLER is unknown; choose gloo or mpi" >&2
        exit 2
        ;;
esac

case ${PREFLIGHT:-0} in 0) ;; *)
    "${launch[@]}" "$PYTHON" -m launch.preflight --backend horovod "$ROOT/horovod_distributed.py" "$@" </dev/null
    ;;
esac
hand_on "$stop" "${launch[@]}" "$PYTHON" "$ROOT/horovod_distributed.py" "$@"
