# Sourced by the launch scripts, which set ROOT: checks the environment, sets PYTHON and NPROC.

fail() {
    echo "$(basename "$0"): error: $*" >&2
    exit 2
}

if [ -z "${PYTHON:-}" ]; then
    PYTHON=$ROOT/.venv/bin/python
    [ -x "$PYTHON" ] || PYTHON=python3
fi
found=$(command -v "$PYTHON") || fail "PYTHON=$PYTHON is not an interpreter"
case $found in /*) PYTHON=$found ;; *) PYTHON=$PWD/$found ;; esac
PATH=$(dirname "$PYTHON"):$PATH # torchrun and horovodrun are beside the interpreter
missing=$("$PYTHON" -c 'from importlib.util import find_spec
print(*(name for name in ("torch", "torchvision", "numpy", "PIL") if not find_spec(name)))')
[ -z "$missing" ] || fail "$PYTHON lacks $missing; set PYTHON to an interpreter that has them, or let" \
    "scripts/quickstart.sh create .venv"

# --help prints the launch script's first comment and the flags
case " $* " in *" --help "* | *" -h "*)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    script=$ROOT/$(basename "$(realpath "$0")" .sh).py
    [ ! -e "$script" ] || exec "$PYTHON" "$script" --help
    exit 0
    ;;
esac

# One process per GPU that CUDA_VISIBLE_DEVICES leaves, or 2 on a CPU
NPROC=${NPROC:-$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() or 2)')}
# A single process uses all cores, like a script without a launcher
[ "$NPROC" = 1 ] || export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
