"""Reports errors that the user can fix, in one line and with exit status 2."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(Exception):
    """A problem that the user can fix; says what is wrong, where, and what to do."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print a UserError as one line and exit with status 2.

    Every process prints its own line. Under torchrun, only one process does: it writes
    a file that torchrun prints last. All other exceptions keep their traceback.

    Source: https://docs.pytorch.org/docs/stable/elastic/errors.html
    """
    try:
        yield
    except UserError as error:
        # DataLoader puts the traceback of its loader process before the message
        message = " ".join(str(error).rpartition("UserError: ")[2].split())
        line = f"{Path(sys.argv[0]).name}: error: {message}"
        if {"TORCHELASTIC_ERROR_FILE", "LOCAL_RANK"} <= os.environ.keys():
            write_error_file(Path(os.environ["TORCHELASTIC_ERROR_FILE"]), line)
        else:
            print(line, file=sys.stderr, flush=True)
        sys.exit(2)


def write_error_file(file: Path, line: str) -> None:
    """Write a line that torchrun prints last, unless another process does it."""
    local_rank = int(os.environ["LOCAL_RANK"])
    time.sleep(local_rank and 4 + local_rank)  # most errors are also those of rank 0
    if any(file.parents[1].glob(f"*/{file.name}")):
        time.sleep(60)  # torchrun ends this process
    extra = {"timestamp": str(int(time.time()))}
    content = {"message": {"message": line, "extraInfo": extra}}
    file.write_text(json.dumps(content))
