#!/usr/bin/env bash
# NVIDIA Apex (amp and its DistributedDataParallel) under torchrun, one process per GPU.
#
#   bash scripts/apex_distributed.sh --data /path/to/imagenet [flags of apex_distributed.py]
#
# The variables of distributed.sh work here too, for example NPROC=2 or NNODES=2 RDZV_ENDPOINT=a:29400.
unset SCRIPT
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/launcher.sh"

preflight "$ROOT/apex_distributed.py" "$@"
exec "$PYTHON" -m launch.torchrun --nproc-per-node "${NPROC:-auto}" "$ROOT/apex_distributed.py" "$@"
