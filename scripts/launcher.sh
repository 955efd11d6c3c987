# shellcheck shell=bash
# Sourced by the launch scripts: sets ROOT to this project and PYTHON to the interpreter.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -z "${PYTHON:-}" ]; then
    PYTHON=$ROOT/.venv/bin/python
    [ -x "$PYTHON" ] || PYTHON=python3
fi
if ! found=$(command -v "$PYTHON"); then
    echo "$(basename "$0"): error: PYTHON=$PYTHON is not an interpreter" >&2
    exit 2
fi
case $found in /*) PYTHON=$found ;; *) PYTHON=$PWD/$found ;; esac
missing=$("$PYTHON" -c 'from importlib.util import find_spec
print(*(name for name in ("torch", "torchvision", "tqdm", "numpy", "PIL") if not find_spec(name)))')
if [ -n "$missing" ]; then
    echo "$(basename "$0"): error: $PYTHON lacks $missing; set PYTHON to an interpreter that has them, or let \
scripts/quickstart.sh create .venv" >&2
    exit 2
fi
[ -n "${OMP_NUM_THREADS:-}" ] || unset OMP_NUM_THREADS
if [ -n "${INTERFACE:-}" ]; then # the network interface that connects the machines (see: ip -brief addr)
    export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME="=$INTERFACE" # "=" requires an exact match
fi

PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
if [ -n "${SCRIPT:-}" ]; then # search its folder first: it may contain its own common/
    SCRIPT=$(realpath -m "$SCRIPT")
    PYTHONPATH=$(dirname "$SCRIPT"):$PYTHONPATH
fi
export PYTHONPATH PYTHONSAFEPATH=1 # do not search the current folder, which may also contain a common/

# preflight SCRIPT [FLAGS]: with PREFLIGHT=1, check that the processes can reach each other, and exit
# if they cannot.
preflight() {
    case ${PREFLIGHT:-0} in 0) ;; *) "$PYTHON" -m launch.preflight --nprocs "${NPROC:-auto}" "$@" </dev/null ;; esac
}

# hand_on SIGNAL COMMAND...: run COMMAND and exit with its status. When a signal asks this script to
# stop, send SIGNAL to COMMAND, which has its own process group: Ctrl-C reaches only this script.
hand_on() {
    signal=$1 stopped=0 status=0
    shift
    if command -v setpriv >/dev/null; then set -- setpriv "--pdeathsig=$signal" "$@"; fi
    set -m
    "$@" </dev/null &
    job=$!
    trap 'stopped=1; kill "-$signal" "$job" 2>/dev/null || :' INT TERM USR1
    while kill -0 "$job" 2>/dev/null; do wait -f "$job" || :; done # signals interrupt `wait`
    wait "$job" || status=$?
    exit $((status ? status : stopped)) # horovodrun may exit with 0 after a stop
}
