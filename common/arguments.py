"""The command line, the same in all five scripts."""

import argparse
import sys
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from common.device import PRECISIONS
from common.errors import complain, speaks_for_machine
from common.images import DECODERS
from common.model import architectures, pretrained_image_size

IMAGENET_TRAIN_IMAGES = 1281167


class OneLineParser(argparse.ArgumentParser):
    """Reports a mistake in one line, once per machine instead of once per process."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2."""
        if speaks_for_machine():
            complain(f"{message} (--help lists the flags)")
        sys.exit(2)


def positive(text: str) -> int:
    """Parse an int above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def seconds(text: str) -> timedelta:
    """Parse a whole number of seconds above 0."""
    return timedelta(seconds=positive(text))


def not_negative(text: str) -> float:
    """Parse a float of at least 0."""
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not 0 or above")
    return number


def fraction(text: str) -> float:
    """Parse a float in (0, 1]."""
    number = float(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return number


def architecture(text: str) -> str:
    """Parse the name of a torchvision model."""
    if text not in architectures():
        import difflib

        close = difflib.get_close_matches(text, architectures(), 3)
        hint = (
            f"did you mean {', '.join(close)}?"
            if close
            else "it is none of torchvision's"
        )
        raise argparse.ArgumentTypeError(f"{text}: {hint}")
    return text


def build_parser(docstring: str) -> OneLineParser:
    """Make the parser with the flags that all scripts share; each adds its own."""
    parser = OneLineParser(
        description=docstring,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--data",
        metavar="DIR",
        help="folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG",
    )
    add(
        "--synthetic",
        metavar="IMAGES",
        nargs="?",
        type=positive,
        const=IMAGENET_TRAIN_IMAGES,
        help="random images already on the device, in place of --data; "
        "how many make an epoch (%(const)s)",
    )
    add(
        "--arch",
        metavar="NAME",
        type=architecture,
        default="resnet18",
        help="torchvision model",
    )
    add("--pretrained", action="store_true", help="start from torchvision's weights")
    add("--epochs", metavar="N", type=positive, default=90, help="%(default)s")
    add("--max-steps", metavar="N", type=positive, help="end every epoch after N steps")
    add(
        "-b",
        "--global-batch-size",
        metavar="N",
        type=positive,
        default=256,
        help="images per optimizer step, over all processes (%(default)s)",
    )
    add(
        "--lr",
        metavar="X",
        type=not_negative,
        default=0.1,
        help="learning rate per 256 images, scaled with the global batch (%(default)s)",
    )
    add(
        "--warmup-epochs",
        metavar="X",
        type=not_negative,
        default=5.0,
        help="epochs in which the learning rate rises to --lr (%(default)s); a run of "
        "up to 5 epochs never leaves the default warm-up",
    )
    add(
        "--schedule",
        choices=("step", "cosine"),
        default="step",
        help="step: a tenth of the learning rate at epoch 30 and again at epoch 60, "
        "whatever --epochs is; cosine: down to 0 at the last epoch (%(default)s)",
    )
    add("--momentum", metavar="X", type=not_negative, default=0.9, help="%(default)s")
    add(
        "--weight-decay",
        metavar="X",
        type=not_negative,
        default=1e-4,
        help="%(default)s",
    )
    add(
        "--label-smoothing",
        metavar="X",
        type=not_negative,
        default=0.0,
        help="%(default)s",
    )
    add(
        "--image-size",
        metavar="N",
        type=positive,
        help="224; with --pretrained the size on which the weights were validated",
    )
    add(
        "--min-crop",
        metavar="X",
        type=fraction,
        default=0.08,
        help="smallest share of the image's area in a training crop (%(default)s)",
    )
    add("--no-flip", action="store_true", help="do not mirror training images")
    add(
        "-j",
        "--workers",
        metavar="N",
        type=int,
        help="loader processes per machine, shared out over its training processes "
        "(one per core, at most 16 per training process)",
    )
    add(
        "--decoder",
        choices=("auto", *DECODERS),
        default="auto",
        help="of images; auto is nvimgcodec where it is installed, else torchvision",
    )
    add(
        "--precision",
        choices=tuple(PRECISIONS),
        help="bf16 where the device has it, else fp32",
    )
    add("--no-channels-last", action="store_true", help="keep NCHW memory format")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--seed", metavar="N", type=int, default=0, help="%(default)s")
    add(
        "--resume",
        metavar="auto|PATH",
        help="go on from the output folder's checkpoint, or PATH",
    )
    add("--evaluate", action="store_true", help="only validate")
    add(
        "--checkpoint-steps",
        metavar="N",
        type=positive,
        default=sys.maxsize,  # at an epoch's end only
        help="also save every N steps of an epoch",
    )
    add("--output", metavar="DIR", help="runs/STRATEGY")
    add(
        "--print-interval",
        metavar="N",
        type=positive,
        default=10,
        help="steps between two moments at which processes add up their figures, show "
        "them and notice a signal (%(default)s)",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add(
        "--timeout-seconds",
        metavar="N",
        dest="timeout",
        type=seconds,
        default=timedelta(seconds=600),
        help="longest wait for another process (600)",
    )
    return parser


def add_launcher_flags(parser: argparse.ArgumentParser) -> None:
    """Add what scripts under torchrun or torch.distributed.launch have besides."""
    parser.add_argument("--backend", choices=("nccl", "gloo"), help="by the device")
    parser.add_argument(
        "--local-rank", "--local_rank", help="accepted for older launchers"
    )


def parse_arguments(
    parser: argparse.ArgumentParser, strategy: str, argv: list[str] | None
) -> argparse.Namespace:
    """Parse the command line and fill in defaults that depend on others.

    Mistakes end the process with status 2 and one line.
    """
    args = parser.parse_args(argv)
    if (args.data is None) == (args.synthetic is None):
        parser.error("give one of --data DIR and --synthetic")
    if args.workers is not None and args.workers < 0:
        parser.error(f"argument -j/--workers: {args.workers} is not 0 or above")
    if args.seed < 0:
        parser.error(f"argument --seed: {args.seed} is not 0 or above")
    if args.label_smoothing > 1:
        parser.error(f"argument --label-smoothing: {args.label_smoothing} is above 1")
    if args.image_size is None:
        args.image_size = pretrained_image_size(args.arch) if args.pretrained else 224
    if args.evaluate and not (args.resume or args.pretrained):
        parser.error("--evaluate needs --resume auto|PATH or --pretrained")
    args.strategy = strategy
    args.output = Path(args.output or Path("runs", strategy))
    return args
