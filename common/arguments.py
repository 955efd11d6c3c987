"""The command-line flags that all five scripts share."""

import argparse
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from common.device import PRECISIONS, machine_cores, require_gpu, usable_gpus
from common.errors import complain, speaks_for_machine
from common.images import DECODERS, choose_decoder
from common.model import architectures, pretrained_image_size

IMAGENET_TRAIN_IMAGES = 1281167
WORKERS_PER_GPU = 16  # limits the default number of loader processes


class OneLineParser(argparse.ArgumentParser):
    """Reports a bad flag in one line, once per machine instead of once per process."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2."""
        if speaks_for_machine():
            complain(f"{message} (--help lists the flags)")
        sys.exit(2)


def number(kind: type, least: float, most: float = float("inf")) -> Callable:
    """Return an argparse type for finite numbers from `least` to `most`."""

    def parse(text: str) -> int | float:
        value = kind(text)
        if not least <= value <= most or value == float("inf"):
            limit = "" if most == float("inf") else f" and <= {most:g}"
            raise argparse.ArgumentTypeError(f"{text} is not >= {least:g}{limit}")
        return value

    parse.__name__ = kind.__name__  # argparse: "invalid int value: 'x'"
    return parse


positive = number(int, 1, 2**40)
not_negative = number(float, 0)


def seconds(text: str) -> timedelta:
    """Parse a positive whole number of seconds."""
    return timedelta(seconds=number(int, 1, 2**31)(text))


def architecture(text: str) -> str:
    """Return the name of a torchvision model, or raise an ArgumentTypeError."""
    if text not in architectures():
        raise argparse.ArgumentTypeError(f"torchvision has no model {text}")
    return text


def build_parser(docstring: str) -> OneLineParser:
    """Build the parser with the shared flags; each script adds its own."""
    parser = OneLineParser(
        description=docstring,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def add(*names: str, **options) -> None:
        if "type" in options:
            options.setdefault("metavar", "N" if options["type"] in ints else "X")
        parser.add_argument(*names, **options)

    ints = (positive, seconds, not_less_than_0 := number(int, 0, 2**63 - 1))
    folder = "folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG"
    add("--data", metavar="DIR", help=f"{folder}, or with train.tar and val.tar")
    add(
        "--synthetic",
        nargs="?",
        type=positive,
        const=IMAGENET_TRAIN_IMAGES,
        help="instead of --data, train on N random images per epoch (%(const)s), which "
        "are already on the device",
    )
    name = "torchvision model (%(default)s)"
    add("--arch", metavar="NAME", type=architecture, default="resnet18", help=name)
    add("--pretrained", action="store_true", help="use torchvision's weights")
    add("--epochs", type=positive, default=90, help="number of epochs (%(default)s)")
    add("--max-steps", type=positive, help="end every epoch after N steps")
    add(
        *("-b", "--global-batch-size"),
        type=positive,
        default=256,
        help="images per optimizer step, across all processes (%(default)s)",
    )
    add(
        "--accumulate",
        type=positive,
        default=1,
        help="micro-batches per step; processes average gradients once per step and "
        "need memory for only one micro-batch (%(default)s)",
    )
    one = "compute batch norm's statistics over all processes (GPUs only)"
    add("--sync-bn", action="store_true", help=one)
    add(
        "--lr",
        type=not_negative,
        default=0.1,
        help="learning rate at global batch size 256; scaled linearly (%(default)s)",
    )
    add(
        "--warmup-epochs",
        type=not_negative,
        default=5.0,
        help="epochs in which the learning rate rises to --lr (%(default)s); by "
        "default, a run of up to 5 epochs is all warm-up",
    )
    add(
        "--schedule",
        choices=("step", "cosine"),
        default="step",
        help="step: divide the learning rate by 10 every 30 epochs, regardless of "
        "--epochs; cosine: lower it to 0 by the end of the run (%(default)s)",
    )
    add("--momentum", type=not_negative, default=0.9, help="for SGD (%(default)s)")
    add("--weight-decay", type=not_negative, default=1e-4, help="for SGD (%(default)s)")
    add("--label-smoothing", type=number(float, 0, 1), default=0.0, help="%(default)s")
    size = "default: 224; with --pretrained, torchvision's validation size"
    add("--image-size", type=positive, help=size)
    add(
        "--min-crop",
        type=number(float, 1e-6, 1),
        default=0.08,
        help="smallest fraction of the image's area in a training crop (%(default)s)",
    )
    add("--no-flip", action="store_true", help="no random horizontal flips")
    add(
        *("-j", "--workers"),
        type=not_less_than_0,
        help="loader processes per machine, divided among its training processes (one "
        f"per core, at most {WORKERS_PER_GPU} per GPU)",
    )
    add(
        "--decoder",
        choices=("auto", *DECODERS),
        default="auto",
        help="auto is the first that is installed: nvimgcodec, torchcodec, then pil",
    )
    bf16 = "default: bf16 if the device supports it, otherwise fp32"
    add("--precision", choices=tuple(PRECISIONS), help=bf16)
    add("--no-channels-last", action="store_true", help="keep the NCHW memory format")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--seed", type=not_less_than_0, default=0, help="random seed (%(default)s)")
    last = "resume from the output folder's checkpoint (auto) or from PATH"
    add("--resume", metavar="auto|PATH", help=last)
    add("--evaluate", action="store_true", help="validate without training")
    also = "also save every N steps within an epoch"
    add("--checkpoint-steps", type=positive, default=sys.maxsize, help=also)
    add("--output", metavar="DIR", type=Path, help="output folder (runs/STRATEGY)")
    add(
        "--print-interval",
        type=positive,
        default=10,
        help="every N steps, sum the metrics over all processes, print them and check "
        "for stop signals (%(default)s)",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add(
        "--timeout-seconds",
        dest="timeout",
        type=seconds,
        default=timedelta(seconds=600),
        help="how long a process waits for another process (600)",
    )
    return parser


def parse_arguments(
    parser: argparse.ArgumentParser, strategy: str, argv: list[str] | None
) -> argparse.Namespace:
    """Parse the command line and fill in defaults that depend on other flags.

    Invalid flags end the process with one line and exit status 2. Raises UserError if
    the decoder is not installed, or if --sync-bn has no GPU.
    """
    args = parser.parse_args(argv)
    if (args.data is None) == (args.synthetic is None):
        parser.error("give either --data DIR or --synthetic")
    if args.evaluate and not (args.resume or args.pretrained):
        parser.error("--evaluate needs --resume auto|PATH or --pretrained")
    if args.sync_bn and not args.evaluate:
        require_gpu(args.device, "--sync-bn")
    if args.image_size is None:
        args.image_size = pretrained_image_size(args.arch) if args.pretrained else 224
    if args.workers is None:
        limit = WORKERS_PER_GPU * max(1, usable_gpus())
        args.workers = min(machine_cores(), limit)
    args.decoder = choose_decoder(args.decoder)
    args.strategy = strategy
    args.output = args.output or Path("runs", strategy)
    return args
