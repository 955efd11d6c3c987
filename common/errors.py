"""Reports errors that the user can fix, in one line and with exit status 2."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(Exception):
    """A problem that the user can fix; the message names it, its place and its fix."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print a UserError as one line and exit with status 2.

    Under torchrun, one process writes its line to a file; torchrun prints it last.

    Source: https://docs.pytorch.org/docs/stable/elastic/errors.html
    """
    try:
        yield
    except UserError as error:
        # DataLoader adds its loader process's traceback before the message
        message = " ".join(str(error).rpartition("UserError: ")[2].split())
        line = f"{Path(sys.argv[0]).name}: error: {message}"
        if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            # When the first process ends, torchrun kills the others during their sleep
            time.sleep(2 * int(os.environ["LOCAL_RANK"]))
            extra = {"timestamp": str(int(time.time()))}
            content = {"message": {"message": line, "extraInfo": extra}}
            Path(file).write_text(json.dumps(content))
        else:
            print(line, file=sys.stderr, flush=True)
        sys.exit(2)
