"""Measure the strategies in turn, and report which of them are faster."""

import sys

from benchmarks.timings import options
from common.errors import one_line_errors


def main() -> None:
    """Parse the command line and measure."""
    args = options.parse()
    from benchmarks.timings import (
        session,
    )  # imports PyTorch, which --help does not need

    session.run(args)


if __name__ == "__main__":
    sys.argv[0] = "timings"  # the name in error messages
    with one_line_errors():
        main()
