#!/usr/bin/env bash
# Sort ImageNet's images into the folders that the scripts read (150 GB):
#   bash scripts/prepare_imagenet.sh ARCHIVES TARGET     # writes TARGET/{train,val}/CLASS/*.JPEG
#
# ARCHIVES contains ILSVRC2012_img_{train,val}.tar and ILSVRC2012_devkit_t12.tar.gz (image-net.org/download), or
# Hugging Face's ILSVRC/imagenet-1k: {train,validation}-*.parquet (needs pyarrow).
# To continue after an interruption, run the same command again.
set -euo pipefail
ROOT=$(dirname "$(dirname "$(realpath "$0")")")
source "$ROOT/scripts/setup.sh"
[ $# = 2 ] || fail "usage: bash scripts/prepare_imagenet.sh ARCHIVES TARGET"
set_up requirements.txt requirements/report.txt
PYTHONPATH=$ROOT exec "$PYTHON" -m scripts.prepare_imagenet "$@"
