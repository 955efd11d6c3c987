#!/usr/bin/env bash
# Test all strategies on a real GPU (tests/gpu), then time them (benchmarks/gpu.py).
#
#   bash scripts/gpu_check.sh [pytest arguments]
#   bash scripts/gpu_check.sh --last-failed      # only tests that failed or did not run, and missing timings
#   bash scripts/gpu_check.sh --rehearse-gpu     # only what can run on a CPU, at small sizes
#
# The check installs nothing, keeps existing timings, writes OUTPUT/summary.json (by default, OUTPUT is runs/gpu_check)
# and takes at most MINUTES (9). GPU_TIMINGS=no runs only the tests. Exit status: 1 if anything failed or did not run.
set -euo pipefail
began=$(date +%s)
NPROC=1
ROOT=$(dirname "$(dirname "$(realpath "$0")")")
source "$ROOT/scripts/launcher.sh"

rehearse=
case " $* " in *" --rehearse-gpu "*) rehearse=--rehearse ;; esac
if [ -z "$rehearse" ] && ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    fail "PyTorch sees no CUDA GPU (--rehearse-gpu runs on the CPU)"
fi
folder=${rehearse:+runs/gpu_rehearsal}
OUTPUT=$(realpath -m "${OUTPUT:-$ROOT/${folder:-runs/gpu_check}}")
cd "$ROOT"

export GPU_CHECK_UNTIL=$((began + 60 * ${MINUTES:-9} - 20))
status=0 none=all # the first run
[ ! -e "$OUTPUT/.cache/v/cache/nodeids" ] || none=none
"$PYTHON" -m pytest tests/gpu -m gpu --last-failed-no-failures "$none" -o cache_dir="$OUTPUT/.cache" \
    -o junit_family=xunit1 --junitxml "$OUTPUT/rows-$(date +%s).xml" "$@" || status=$?
[ "$status" != 5 ] || status=0 # pytest: there were no tests left to run
if [ "${GPU_TIMINGS:-yes}" != no ]; then
    "$PYTHON" -m benchmarks.gpu "$OUTPUT/timings.json" $rehearse || status=$?
fi
"$PYTHON" -m benchmarks.gpu --summary "$OUTPUT"
exit "$status"
