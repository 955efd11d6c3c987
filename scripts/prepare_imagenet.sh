#!/usr/bin/env bash
# Unpack the official ILSVRC2012 archives into the folders that the scripts read:
#   bash scripts/prepare_imagenet.sh ARCHIVES TARGET
#
# ARCHIVES contains ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz
# from https://image-net.org/download. TARGET gets train/CLASS/*.JPEG and val/CLASS/*.JPEG (150 GB). If
# you interrupt the script, run it again: it repeats only the part (train or val) that it was unpacking.
set -euo pipefail
ROOT=$(dirname "$(dirname "$(realpath "$0")")")
source "$ROOT/scripts/setup.sh"
[ $# = 2 ] || fail "usage: bash scripts/prepare_imagenet.sh ARCHIVES TARGET"
set_up requirements.txt requirements/report.txt
PYTHONPATH=$ROOT exec "$PYTHON" -m scripts.prepare_imagenet "$@"
