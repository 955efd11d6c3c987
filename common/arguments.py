"""The command-line flags that all five scripts share."""

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from common.errors import UserError
from common.images import DECODERS, check_decoder
from common.model import PRECISIONS

IMAGENET_TRAIN_IMAGES = 1281167


class OneLineParser(argparse.ArgumentParser):
    """Reports a wrong flag in one line, without argparse's list of all flags."""

    def error(self, message: str) -> NoReturn:
        """Raise a UserError."""
        raise UserError(f"{message} (--help lists the flags)")


def at_least(minimum: float, kind: type = int) -> Callable[[str], int | float]:
    """Return an argparse type for finite numbers that are not below `minimum`."""

    def parse(text: str) -> int | float:
        value = kind(text)
        if not minimum <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a number >= {minimum}")
        return value

    parse.__name__ = kind.__name__  # argparse: "invalid int value: 'x'"
    return parse


positive, not_negative = at_least(1), at_least(0, float)


def build_parser(docstring: str) -> OneLineParser:
    """Build the parser with the shared flags; each script adds its own."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = OneLineParser(
        description=docstring, formatter_class=raw, allow_abbrev=False
    )
    add = parser.add_argument
    add("--data", help="folder with train/CLASS/*.JPEG, val/CLASS/*.JPEG, or tar files")
    add(
        "--synthetic",
        nargs="?",
        type=positive,
        const=IMAGENET_TRAIN_IMAGES,
        help="instead of --data: one random batch, for epochs of this many images",
    )
    add("--arch", default="resnet18", help="torchvision model (%(default)s)")
    add("--pretrained", action="store_true", help="start from torchvision's weights")
    add("--image-size", type=positive, default=224, help="in pixels (%(default)s)")
    add("--epochs", type=positive, default=90, help="(%(default)s)")
    add("--max-steps", type=positive, help="end every training epoch after this step")
    images = "images per optimizer step, over all processes (%(default)s)"
    add("-b", "--global-batch-size", type=positive, default=256, help=images)
    add("--accumulate", type=positive, default=1, help="micro-batches per step (1)")
    add("--lr", type=not_negative, default=0.1, help="per 256 images (%(default)s)")
    add("--warmup-epochs", type=not_negative, default=5.0, help="(%(default)s)")
    curves = "divide the learning rate by 10 every 30 epochs, or lower it to 0"
    add("--schedule", choices=("step", "cosine"), default="step", help=curves)
    add("--momentum", type=not_negative, default=0.9, help="of SGD (%(default)s)")
    add("--weight-decay", type=not_negative, default=1e-4, help="(%(default)s)")
    add("--label-smoothing", type=not_negative, default=0.0, help="(%(default)s)")
    area = "smallest share of an image in a training crop (%(default)s)"
    add("--min-crop", type=at_least(1e-6, float), default=0.08, help=area)
    add("--no-flip", action="store_true", help="do not mirror training images")
    workers, cores = (
        "loader processes per process (%(default)s)",
        os.sched_getaffinity(0),
    )
    add("-j", "--workers", type=at_least(0), default=min(4, len(cores)), help=workers)
    add(
        "--decoder", choices=tuple(DECODERS), default="torchcodec", help="(%(default)s)"
    )
    bf16 = "default: bf16 where the device computes it natively, otherwise fp32"
    add("--precision", choices=tuple(PRECISIONS), help=bf16)
    add("--compile", action="store_true", help="torch.compile the model")
    add("--seed", type=at_least(0), default=0, help="(%(default)s)")
    add("--output", type=Path, help="folder for checkpoints (runs/SCRIPT)")
    last = "a checkpoint; without PATH, the one in --output, if there is one"
    add("--resume", metavar="PATH", nargs="?", const="auto", help=last)
    add("--evaluate", action="store_true", help="validate without training")
    often = "also save within an epoch, this long after the last save (%(default)s)"
    add("--save-minutes", type=not_negative, default=10.0, help=often)
    steps = "sum and print the metrics after this many steps (%(default)s)"
    add("--print-interval", type=positive, default=10, help=steps)
    return parser


def parse_arguments(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse the command line.

    Raises UserError if a flag is wrong or the decoder is not installed.
    """
    args = parser.parse_args(argv)
    if (args.data is None) == (args.synthetic is None):
        parser.error("give either --data DIR or --synthetic")
    if args.evaluate and not (args.resume or args.pretrained):
        parser.error("--evaluate needs --resume or --pretrained")
    if args.label_smoothing > 1 or args.min_crop > 1:
        parser.error("--label-smoothing and --min-crop are at most 1")
    if args.data is not None:
        check_decoder(args.decoder)
    args.output = args.output or Path("runs", Path(sys.argv[0]).stem)
    return args
