# shellcheck shell=bash
# Sourced by the launchers. Afterwards: ROOT is this project, PYTHON the interpreter, and
# check_before_launch has set NPROC, the processes of this machine.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -z "${PYTHON:-}" ]; then
    PYTHON=$ROOT/.venv/bin/python
    [ -x "$PYTHON" ] || PYTHON=python3
fi
if ! PYTHON=$(command -v "$PYTHON"); then
    echo "$(basename "$0"): error: no such Python: ${PYTHON:-}; bash scripts/quickstart.sh makes one" >&2
    exit 2
fi

# check_before_launch SCRIPT [FLAGS]: look at flags, data and checkpoint once, in one process,
# and stop with status 2 where something is wrong.
check_before_launch() {
    local script=$1
    shift
    NPROC=$(PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} "$PYTHON" -m common.check \
        "$ROOT/$script" "${NPROC:-}" -- "$@")
    [ "$NPROC" != help ] || exit 0
    # The machine's cores are shared out evenly, whatever the strategy
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) / NPROC > 0 ? $(nproc) / NPROC : 1))}
}

# run_distributed SCRIPT [FLAGS]: start it under the launcher that LAUNCHER names.
run_distributed() {
    local module
    case $LAUNCHER in
        torchrun) module=(torch.distributed.run --standalone) ;;
        launch) module=(torch.distributed.launch --master-port "$("$PYTHON" -c '
import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')") ;;
        *)
            echo "$(basename "$0"): error: LAUNCHER=$LAUNCHER; it is torchrun or launch" >&2
            exit 2
            ;;
    esac
    check_before_launch "$@"
    local script=$1
    shift
    exec "$PYTHON" -m "${module[@]}" --nproc-per-node "$NPROC" "$ROOT/$script" "$@"
}
