#!/usr/bin/env bash
# Try every strategy on a real GPU (tests/gpu), then time them (benchmarks/gpu.py).
#
#   bash scripts/gpu_check.sh [arguments of pytest]
#   bash scripts/gpu_check.sh --last-failed      # only what failed or was not run, then further timings
#   bash scripts/gpu_check.sh --rehearse-gpu     # what a CPU can run, at small sizes
#
# The results are in OUTPUT/summary.md; existing timings are kept. It needs PyTorch with CUDA, torchvision, tqdm
# and pytest, but no network: it uses pure Python wheels in the folder that contains this project (tqdm or
# pytest-timeout, for example). If Horovod is missing, it is built from a horovod-*.tar.gz in the same place.
# The exit status is 1 if something failed or was not run.
case " $* " in *" --help "* | *" -h "*)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac
MINUTES=${MINUTES:-9} # for all of it
OUTPUT=${OUTPUT:-}    # results/gpu; for a rehearsal runs/gpu_check/rehearsal
GPU_TIMINGS=${GPU_TIMINGS:-yes} # no: only the tests
PYTHON=${PYTHON:-}    # .venv/bin/python, or python3 without it
began=$(date +%s)
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
horovod=$here/runs/gpu_check/horovod
path=$horovod
for wheel in "$here"/../*-none-any.whl; do
    case $wheel in *"*"* | */setuptools-*) ;; *) path+=:$wheel ;; esac
done
export PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH} PATH=$horovod/bin:$PATH
# shellcheck source-path=SCRIPTDIR
source "$here/scripts/launcher.sh"

rehearse=
case " $* " in *" --rehearse-gpu "*) rehearse=--rehearse ;; esac
if [ -z "$rehearse" ] && ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu_check.sh: error: PyTorch sees no CUDA GPU (--rehearse-gpu runs on the CPU)" >&2
    exit 2
fi
folder=results/gpu
[ -z "$rehearse" ] || folder=runs/gpu_check/rehearsal
OUTPUT=$(realpath -m "${OUTPUT:-$ROOT/$folder}")
cd "$ROOT"

archive=$(compgen -G "$ROOT/../horovod-*.tar.gz" | head -n 1 || :)
if [ -n "$archive" ] && [ -z "$rehearse" ] && ! "$PYTHON" -c 'import horovod.torch' 2>/dev/null; then
    version=${archive##*/horovod-}
    capabilities=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | tr -d . | sort -u | paste -sd, -)
    HOROVOD_SOURCE=$archive HOROVOD_VERSION=${version%.tar.gz} HOROVOD_TARGET=$horovod \
        HOROVOD_CAPABILITIES=$capabilities timeout $((30 * MINUTES)) bash scripts/install_horovod.sh || :
fi

export GPU_CHECK_UNTIL=$((began + 60 * MINUTES - 20))
status=0
"$PYTHON" -m pytest tests/gpu -m gpu --last-failed-no-failures none -o cache_dir="$OUTPUT/.cache" \
    -o junit_family=xunit1 --junitxml "$OUTPUT/rows-$(date +%s).xml" "$@" || status=$?
[ "$status" != 5 ] || status=0 # no test is left
timings=0
[ "$GPU_TIMINGS" = no ] || "$PYTHON" -m benchmarks.gpu "$OUTPUT/timings.json" $rehearse || timings=$?
"$PYTHON" -m tests.gpu.summary "$OUTPUT"
exit $((status ? status : timings))
