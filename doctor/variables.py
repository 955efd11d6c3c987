"""Read the strings in the script's variables, such as a loop's keys."""

import inspect
import sys
from types import FrameType

from .record import LIBRARY, not_the_users

FRAMES, LONGEST = 3, 60  # functions of the script; characters of a string


def strings(frame: FrameType | None) -> dict[str, str]:
    """Return the strings in the variables of a frame and of the script's callers."""
    found, count = {}, 0
    while frame and count < FRAMES:
        code = frame.f_code
        old = sys.version_info < (3, 13)  # f_locals is what locals() has returned
        named = old and {"locals", "vars", "dir"} & {*code.co_names}
        if not code.co_filename.startswith((*not_the_users(), LIBRARY)):
            values = {} if named else frame.f_locals
            few = {k: x for k, x in values.items() if type(x) is str}
            few = {k: x for k, x in few.items() if k[:2] != "__" and len(x) <= LONGEST}
            found, count = few | found, count + 1
            # Before Python 3.13, the frame would keep references to all values
            own = type(values) is dict and code.co_flags & inspect.CO_OPTIMIZED
            if own and sys.getrefcount(values) < 4:
                values.clear()
        frame = frame.f_back
    return found
