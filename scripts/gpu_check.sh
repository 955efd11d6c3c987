#!/usr/bin/env bash
# Test all strategies on a real GPU (tests/gpu), then time them (benchmarks/gpu.py).
#
#   bash scripts/gpu_check.sh [arguments of pytest]
#   bash scripts/gpu_check.sh --last-failed      # only tests that failed or did not run, and missing timings
#   bash scripts/gpu_check.sh --rehearse-gpu     # only what can run on a CPU, at small sizes
#
# The script writes OUTPUT/summary.md and keeps existing timings. It needs PyTorch with CUDA, torchvision, tqdm and
# pytest, but no network: it can use wheels for any Python version (of tqdm, pytest-timeout or nvImageCodec, for
# example) in this project's parent folder. If Horovod is missing, the script builds it from a horovod-*.tar.gz there.
# The exit status is 1 if a test or a timing failed or did not run.
case " $* " in *" --help "* | *" -h "*)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac
MINUTES=${MINUTES:-9} # time limit in minutes
OUTPUT=${OUTPUT:-}    # default: benchmarks/results/gpu, or runs/gpu_check/rehearsal for a rehearsal
GPU_TIMINGS=${GPU_TIMINGS:-yes} # no: run only the tests
PYTHON=${PYTHON:-}    # default: .venv/bin/python, or python3 if it does not exist
began=$(date +%s)
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
horovod=$here/runs/gpu_check/horovod wheels=$here/runs/gpu_check/wheels
export PYTHONPATH=$horovod:$wheels${PYTHONPATH:+:$PYTHONPATH} PATH=$horovod/bin:$PATH
rm -rf "$wheels"
for wheel in "$here"/../*py3-none-{any,*"$(uname -m)"}.whl; do
    case $wheel in *"*"* | */setuptools-*) ;; *) "${PYTHON:-python3}" -m zipfile -e "$wheel" "$wheels" ;; esac
done
# shellcheck source-path=SCRIPTDIR
source "$here/scripts/launcher.sh"

rehearse=
case " $* " in *" --rehearse-gpu "*) rehearse=--rehearse ;; esac
if [ -z "$rehearse" ] && ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu_check.sh: error: PyTorch sees no CUDA GPU (--rehearse-gpu runs on the CPU)" >&2
    exit 2
fi
folder=benchmarks/results/gpu
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
status=0 none=$([ -e "$OUTPUT/.cache/v/cache/nodeids" ] && echo none || echo all) # all: this is the first run
"$PYTHON" -m pytest tests/gpu -m gpu --last-failed-no-failures "$none" -o cache_dir="$OUTPUT/.cache" \
    -o junit_family=xunit1 --junitxml "$OUTPUT/rows-$(date +%s).xml" "$@" || status=$?
[ "$status" != 5 ] || status=0 # pytest: there were no tests left to run
timings=0
[ "$GPU_TIMINGS" = no ] || "$PYTHON" -m benchmarks.gpu "$OUTPUT/timings.json" $rehearse || timings=$?
"$PYTHON" -m tests.gpu.summary "$OUTPUT"
exit $((status ? status : timings))
