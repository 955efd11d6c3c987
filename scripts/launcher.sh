# shellcheck shell=bash
# Sourced by the launchers. Afterwards ROOT is this project and PYTHON the interpreter.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -z "${PYTHON:-}" ]; then
    PYTHON=$ROOT/.venv/bin/python
    [ -x "$PYTHON" ] || PYTHON=python3
fi
if ! found=$(command -v "$PYTHON"); then
    echo "$(basename "$0"): error: PYTHON=$PYTHON names no interpreter" >&2
    exit 2
fi
case $found in /*) PYTHON=$found ;; *) PYTHON=$PWD/$found ;; esac
missing=$("$PYTHON" -c 'from importlib.util import find_spec
print(*(name for name in ("torch", "torchvision", "tqdm", "numpy", "PIL") if not find_spec(name)))')
if [ -n "$missing" ]; then
    echo "$(basename "$0"): error: $PYTHON lacks $missing; name an interpreter that has them in PYTHON, or let \
scripts/quickstart.sh make .venv" >&2
    exit 2
fi
[ -n "${OMP_NUM_THREADS:-}" ] || unset OMP_NUM_THREADS
if [ -n "${INTERFACE:-}" ]; then # the network that joins several machines (ip -brief addr)
    export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME="=$INTERFACE" # =: no other that begins so
fi

# check SCRIPT [MODULE [OPTIONS]] -- [FLAGS]: look at flags, data and checkpoint once, in one
# process; then print the number of processes, or go on as the launcher MODULE.
check() {
    local script=$ROOT/$1
    shift
    PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} exec "$PYTHON" -m launch.check "$script" "${NPROC:-}" "$@"
}

# preflight SCRIPT [FLAGS]: with PREFLIGHT=1, start what sees whether its processes reach one
# another, by the words in the array `launch`; exit where they do not. (check does it itself.)
launch=()
preflight() {
    case ${PREFLIGHT:-0} in 0) return ;; esac
    "${launch[@]}" "$PYTHON" "$ROOT/launch/preflight.py" "$ROOT/$1" "${@:2}" </dev/null
}

# run_distributed SCRIPT [FLAGS]: start it under the launcher of PyTorch that LAUNCHER names.
run_distributed() {
    local script=$1
    shift
    case $LAUNCHER in
        torchrun | launch) check "$script" launch.torchrun "$LAUNCHER" -- "$@" ;;
        *)
            echo "$(basename "$0"): error: LAUNCHER=$LAUNCHER; it is torchrun or launch" >&2
            exit 2
            ;;
    esac
}
