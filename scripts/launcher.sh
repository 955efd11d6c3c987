# Sourced by the launch scripts, which set ROOT. Checks the environment, and sets PYTHON and NPROC.

if [ -z "${PYTHON:-}" ]; then
    PYTHON=$ROOT/.venv/bin/python
    [ -x "$PYTHON" ] || PYTHON=python3
fi
missing=$("$PYTHON" 2>/dev/null -c 'from importlib.util import find_spec
print(*(name for name in ("torch", "torchvision", "numpy", "PIL", "tqdm") if not find_spec(name)))') || missing=Python
script=$ROOT/$(basename "$(realpath "$0")" .sh).py
[ -n "$missing" ] || [ ! -e "$script" ] || PROGRAM=("$PYTHON" "$script")
source "$ROOT/scripts/setup.sh"

find_python
PATH=$(dirname "$PYTHON"):$PATH # torchrun and horovodrun are in the interpreter's folder
[ -z "$missing" ] || fail "$PYTHON lacks $missing; set PYTHON to an interpreter that has them, or let" \
    "scripts/quickstart.sh create .venv"

# One process per GPU in CUDA_VISIBLE_DEVICES, or 2 on a CPU
listed=$(nvidia-smi -L 2>/dev/null) || listed=
[[ $listed == "GPU "* && ! ${CUDA_VISIBLE_DEVICES-0} =~ ^(-1|NoDevFiles)?$ ]] || listed=
if [ -n "$listed" ] || [ -z "${NPROC:-}" ]; then
    # With a driver that is too old, only device_count() still counts the GPUs
    gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.is_available() and torch.cuda.device_count() or 0)') ||
        fail "$PYTHON cannot import torch; see above"
    [ -z "$listed" ] || [ "$gpus" != 0 ] || fail "nvidia-smi lists GPUs that PyTorch cannot use; install PyTorch for" \
        "the driver's CUDA version (README.md), or set CUDA_VISIBLE_DEVICES= to use the CPU"
    [ "$gpus" != 0 ] || gpus=2
    NPROC=${NPROC:-$gpus}
fi
[[ $NPROC =~ ^[1-9][0-9]*$ ]] || fail "NPROC=$NPROC: set it to the number of processes, for example 2"
# A single process uses all cores, like a script without a launcher
[ "$NPROC" = 1 ] || export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
