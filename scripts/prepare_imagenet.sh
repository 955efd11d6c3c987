#!/usr/bin/env bash
# Unpack the official ILSVRC2012 archives into the folders that the scripts read.
#
#   bash scripts/prepare_imagenet.sh ARCHIVES TARGET
#
# ARCHIVES holds ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and
# ILSVRC2012_devkit_t12.tar.gz. The script writes train/CLASS/*.JPEG and val/CLASS/*.JPEG to
# TARGET (150 GB) and deletes nothing. If it is interrupted, run it again to continue.
PYTHON=${PYTHON:-} # default: .venv/bin/python, or python3 if it does not exist
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/launcher.sh"

exec "$PYTHON" -m scripts.prepare_imagenet "$@"
