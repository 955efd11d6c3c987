"""The command-line flags that all five scripts share."""

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

import torch

from common.errors import UserError
from common.images import DECODERS, NO_TORCHCODEC
from common.model import PRECISIONS, best_precision

AUTO = Path("auto")  # the value of --resume without a path
SHARES = ("momentum", "label_smoothing", "min_crop")  # at most 1
MAY_BE_0 = ("workers", "seed", "node_rank")  # other whole numbers are at least 1


class Parser(argparse.ArgumentParser):
    """A parser that raises UserError, so that the launcher prints the error last."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError with the parser's message."""
        raise UserError(f"{message} (--help lists the flags)")


def build_parser(docstring: str) -> Parser:
    """Build the parser with the shared flags; each script adds its own."""
    if sys.platform != "linux" or torch.__version__ < "2.4":
        raise UserError("this needs Linux (on Windows: WSL2) and PyTorch 2.4 or newer")
    parser = Parser(
        description=docstring,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--data", help="folder: train/CLASS/*.JPEG and val/CLASS/*.JPEG, or tar files")
    images = "repeat one random batch instead of --data; images per epoch (1281167)"
    add("--synthetic", nargs="?", type=int, const=1281167, metavar="N", help=images)
    add("--arch", default="resnet18", help="torchvision model (%(default)s)")
    add("--pretrained", action="store_true", help="start from torchvision's weights")
    add("--image-size", type=int, default=224, help="in pixels (%(default)s)")
    add("--epochs", type=int, default=90, help="number of epochs (%(default)s)")
    add("--max-steps", type=int, help="end every training epoch after this step")
    images = "images per step, over all processes (%(default)s)"
    add("-b", "--global-batch-size", type=int, default=256, help=images)
    add("--accumulate", type=int, default=1, help="micro-batches per step (1)")
    add("--lr", type=float, default=0.1, help="rate for 256 images (%(default)s)")
    add("--warmup-epochs", type=float, default=5.0, help="epochs of rising --lr (5)")
    curves = "step: divide by 10 every 30 epochs (default); cosine: fall to 0"
    add("--schedule", choices=("step", "cosine"), default="step", help=curves)
    add("--momentum", type=float, default=0.9, help="of SGD (%(default)s)")
    add("--weight-decay", type=float, default=1e-4, help="of SGD (%(default)s)")
    add("--label-smoothing", type=float, default=0.0, help="(0)")
    add("--min-crop", type=float, default=0.08, help="minimum crop area (%(default)s)")
    add("--no-flip", action="store_true", help="do not mirror training images")
    loaders = "loader processes for training; as many for validation (one per core)"
    add("-j", "--workers", type=int, help=loaders)
    decoder = "pil" if NO_TORCHCODEC else "torchcodec"
    add("--decoder", choices=DECODERS, default=decoder, help="(%(default)s)")
    add("--precision", choices=tuple(PRECISIONS), help="(bf16 where native, else fp32)")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--seed", type=int, default=0, help="for all random numbers (0)")
    add("--output", type=Path, help="folder for checkpoints (runs/SCRIPT)")
    last = "continue from PATH, or from a checkpoint in --output"
    add("--resume", metavar="PATH", type=Path, nargs="?", const=AUTO, help=last)
    add("--evaluate", action="store_true", help="validate without training")
    add("--save-minutes", type=float, default=10.0, help="between saves (%(default)s)")
    add("--print-interval", type=int, default=10, help="in steps (%(default)s)")
    return parser


def parse_arguments(parser: Parser) -> argparse.Namespace:
    """Parse the command line; raise UserError if a flag is wrong."""
    args = parser.parse_args()
    if (args.data is None) == (args.synthetic is None):
        parser.error("give either --data DIR or --synthetic")
    if args.evaluate and not (args.resume or args.pretrained):
        parser.error("--evaluate needs --resume or --pretrained")
    for name, value in vars(args).items():
        least = 1 if type(value) is int and name not in MAY_BE_0 else 0
        most = 1 if name in SHARES else 1e18
        if type(value) in (int, float) and not least <= value <= most:
            flag = name.replace("_", "-")
            parser.error(f"--{flag} must be from {least} to {most}, but is {value}")
    args.output = args.output or Path("runs", Path(sys.argv[0]).stem)
    return args


def divide(images: int, parts: int, name: str) -> int:
    """Divide a batch into equal parts; raise UserError if there is a remainder."""
    if images % parts:
        raise UserError(f"-b: {images} images cannot be divided by {parts} {name}")
    return images // parts


def choose_defaults(
    args: argparse.Namespace, device: torch.device, local_world_size: int
) -> None:
    """Set the defaults that depend on the device and on the cores per process."""
    args.precision = args.precision or best_precision(device)
    if args.workers is None:
        cores = len(os.sched_getaffinity(0))
        args.workers = max(1, min(16, cores // local_world_size))
