"""Reports errors that the user can fix, in one line and with exit status 2."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(Exception):
    """A problem that the user can fix; says what is wrong, where, and what to do."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print a UserError as one line and exit with status 2.

    Every process prints its own line. All other exceptions keep their traceback.
    """
    try:
        yield
    except UserError as error:
        # DataLoader puts the traceback of its loader process before the message
        message = " ".join(str(error).rpartition("UserError: ")[2].split())
        script = Path(sys.argv[0]).name
        print(f"{script}: error: {message}", file=sys.stderr, flush=True)
        sys.exit(2)
