"""Measure the strategies in turn, and report which of them are faster."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import STRATEGIES
from common.errors import one_line_errors

MODES = ("synthetic", "jpeg", "scaling")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    description = """Start all strategies, let them take turns, and report which are
        faster and which are equal within 3 %. Strategies that this machine cannot run
        are left out; the output gives the reasons."""
    parser = argparse.ArgumentParser(
        "timings", description=description, allow_abbrev=False
    )
    add = parser.add_argument
    add("--minutes", type=float, default=10.0, help="total time limit (%(default)g)")
    modes = """synthetic: images on the device; jpeg: files; scaling: the efficiency
        on 1, 2, 4 ... devices (synthetic jpeg)"""
    several = {"nargs": "+", "metavar": "NAME"}
    default = ["synthetic", "jpeg"]
    add("--modes", choices=MODES, default=default, help=modes, **several)
    names = f"some of {', '.join(STRATEGIES)} (all)"
    add("--strategies", choices=STRATEGIES, default=STRATEGIES, help=names, **several)
    data = "folder with train/ and val/ for jpeg (many links to 64 generated images)"
    add("--data", metavar="DIR", type=Path, help=data)
    output = "folder for report.md and measurements (%(default)s)"
    add("--output", metavar="DIR", type=Path, default=Path("runs/timings"), help=output)
    add("--processes", type=int, metavar="N", help="(one per GPU; 2 on a CPU)")
    add("--arch", metavar="NAME", help="model (resnet50; CPU: resnet18)")
    add("--image-size", type=int, metavar="N", help="in pixels (224; CPU: 64)")
    add("--batch-size", type=int, metavar="N", help="per process (64; CPU: 32)")
    precision = "for all strategies (GPU: fp16; CPU: bf16 where it is native)"
    add("--precision", choices=("fp32", "bf16", "fp16"), help=precision)
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        if isinstance(value, int | float) and value <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive")
    return args


def main() -> None:
    """Parse the command line and measure."""
    args = parse()
    from benchmarks.timings import session  # imports PyTorch; --help works without it

    session.run(args)


if __name__ == "__main__":
    sys.argv[0] = "timings"  # the name in error messages
    with one_line_errors():
        main()
