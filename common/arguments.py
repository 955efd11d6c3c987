"""The command-line flags that all five scripts share."""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from common.errors import UserError
from common.images import DECODERS
from common.model import PRECISIONS

IMAGENET_TRAIN_IMAGES = 1281167
AUTO = Path("auto")  # --resume without a path
MAY_BE_0 = ("workers", "seed", "node_rank")  # other whole numbers are at least 1


class OneLineParser(argparse.ArgumentParser):
    """Reports a wrong flag in one line, without argparse's list of all flags."""

    def error(self, message: str) -> NoReturn:
        """Raise a UserError."""
        raise UserError(f"{message} (--help lists the flags)")


def build_parser(docstring: str) -> OneLineParser:
    """Build the parser with the shared flags; each script adds its own."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = OneLineParser(
        description=docstring, formatter_class=raw, allow_abbrev=False
    )
    add = parser.add_argument
    add("--data", help="folder with train/CLASS/*.JPEG, val/CLASS/*.JPEG, or tar files")
    length = "instead of --data: one random batch, for epochs of this many images"
    default = IMAGENET_TRAIN_IMAGES
    add("--synthetic", nargs="?", type=int, const=default, metavar="N", help=length)
    add("--arch", default="resnet18", help="torchvision model (%(default)s)")
    add("--pretrained", action="store_true", help="start from torchvision's weights")
    add("--image-size", type=int, default=224, help="in pixels (%(default)s)")
    add("--epochs", type=int, default=90, help="to train (%(default)s)")
    add("--max-steps", type=int, help="end every training epoch after this step")
    images = "images per optimizer step, over all processes (%(default)s)"
    add("-b", "--global-batch-size", type=int, default=256, help=images)
    add("--accumulate", type=int, default=1, help="micro-batches per step (1)")
    add("--lr", type=float, default=0.1, help="for 256 images (%(default)s)")
    add("--warmup-epochs", type=float, default=5.0, help="of rising --lr (5)")
    curves = "step: divide by 10 every 30 epochs (default); cosine: lower it to 0"
    add("--schedule", choices=("step", "cosine"), default="step", help=curves)
    add("--momentum", type=float, default=0.9, help="of SGD (%(default)s)")
    add("--weight-decay", type=float, default=1e-4, help="of SGD (%(default)s)")
    add("--label-smoothing", type=float, default=0.0, help="(0)")
    area = "smallest share of an image's area in a crop (%(default)s)"
    add("--min-crop", type=float, default=0.08, help=area)
    add("--no-flip", action="store_true", help="do not mirror training images")
    workers = min(4, len(os.sched_getaffinity(0)))
    loaders = (
        "loader processes for training, and for validation, per process (%(default)s)"
    )
    add("-j", "--workers", type=int, default=workers, help=loaders)
    add("--decoder", choices=tuple(DECODERS), default="torchcodec", help="(torchcodec)")
    bf16 = "default: bf16 where the device computes it natively, otherwise fp32"
    add("--precision", choices=tuple(PRECISIONS), help=bf16)
    add("--compile", action="store_true", help="torch.compile the model")
    add("--seed", type=int, default=0, help="of all random numbers (0)")
    add("--output", type=Path, help="folder for checkpoints (runs/SCRIPT)")
    last = "a checkpoint; without PATH, the one in --output, if there is one"
    add("--resume", metavar="PATH", type=Path, nargs="?", const=AUTO, help=last)
    add("--evaluate", action="store_true", help="validate without training")
    often = "also save within an epoch, this long after the last save (%(default)s)"
    add("--save-minutes", type=float, default=10.0, help=often)
    steps = "sum and print the metrics after this many steps (%(default)s)"
    add("--print-interval", type=int, default=10, help=steps)
    return parser


def parse_arguments(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse the command line. Raises UserError if a flag is wrong."""
    args = parser.parse_args(argv)
    if (args.data is None) == (args.synthetic is None):
        parser.error("give either --data DIR or --synthetic")
    if args.evaluate and not (args.resume or args.pretrained):
        parser.error("--evaluate needs --resume or --pretrained")
    for name, value in vars(args).items():
        least = 1 if type(value) is int and name not in MAY_BE_0 else 0
        if type(value) in (int, float) and not least <= value < math.inf:
            flag = name.replace("_", "-")
            parser.error(f"--{flag} must be a number >= {least}, but is {value}")
    args.output = args.output or Path("runs", Path(sys.argv[0]).stem)
    return args
