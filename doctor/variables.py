"""Which of several things a line of the script uses: the values of its loops."""

import ast
import functools
import inspect
import linecache
import sys
from types import FrameType

from .record import LIBRARY, not_the_users

FRAMES = 3  # of the script, in which loops are looked for


@functools.lru_cache(4)
def parsed(file: str) -> list[ast.AST]:
    """Return all parts of a program, the outer ones first."""
    return [*ast.walk(ast.parse("".join(linecache.getlines(file))))]


@functools.lru_cache(256)
def of_loops(file: str, line: int) -> tuple[str, ...]:
    """Return the variables of the loops around a line, if it uses one of them.

    For `for name, part in parts.items(): all_reduce(part)`, that is name and part.
    """
    inside = [one for one in parsed(file) if isinstance(one, ast.stmt)]
    inside = [one for one in inside if one.lineno <= line <= one.end_lineno]
    functions = ast.FunctionDef, ast.AsyncFunctionDef
    start = [n for n, one in enumerate(inside) if isinstance(one, functions)]
    inside = inside[start[-1] if start else 0 :]  # the innermost function's
    if not inside:
        return ()
    parts = [x for x in ast.walk(inside[-1]) if isinstance(x, ast.comprehension)]
    used, found = variables(inside[-1]), {y for x in parts for y in variables(x.target)}
    made = [x for x in parsed(file) if isinstance(x, ast.Assign) and x.lineno < line]
    for loop in reversed([one for one in inside if isinstance(one, ast.For)]):
        for one in reversed([x for x in made if x.lineno > loop.lineno]):
            if used.intersection(*map(variables, one.targets)):
                used |= variables(one.value)
        if used & (own := variables(loop.target)):
            found, used = found | own, used | variables(loop.iter)
    return tuple(sorted(found))


def variables(tree: ast.AST) -> set[str]:
    """Return the names of variables in a part of a program."""
    return {one.id for one in ast.walk(tree) if isinstance(one, ast.Name)}


def chosen(frame: FrameType | None) -> dict[str, str]:
    """Return the values of the loops' variables that are names, numbers or tuples."""
    found, count = {}, 0
    while frame and count < FRAMES:
        code = frame.f_code
        if not code.co_filename.startswith((*not_the_users(), LIBRARY)):
            count += 1
            if names := of_loops(code.co_filename, frame.f_lineno):
                values = frame.f_locals
                few = {name: values.get(name) for name in names}
                # Before Python 3.13, the frame would keep these references
                own = type(values) is dict and code.co_flags & inspect.CO_OPTIMIZED
                if own and sys.getrefcount(values) < 4:
                    values.clear()
                small = {k: repr(x)[:60] for k, x in few.items() if is_small(x)}
                found = small | found
        frame = frame.f_back
    return found


def is_small(value: object) -> bool:
    """Return whether a value is a name, a number, or a tuple of them."""
    if type(value) is tuple:
        return 0 < len(value) < 5 and all(map(is_small, value))
    return type(value) in (str, int)
