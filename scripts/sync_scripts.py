"""Keep the shared lines of the five scripts byte-identical.

    python scripts/sync_scripts.py            # copy distributed.py's shared lines to
    the others python scripts/sync_scripts.py --check    # exit status 1 and a diff
    where they differ

What may differ is the module docstring and what stands between `# [name]` and `#
[/name]`, for the eight names in REGIONS.
"""

import ast
import difflib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASE = "distributed.py"
SIBLINGS = (
    "dataparallel.py",
    "multiprocessing_distributed.py",
    "apex_distributed.py",
    "horovod_distributed.py",
)
# In the order of the file: main, with the end of the run, stands before its functions
REGIONS = (
    "imports",
    "1/6 launch",
    "2/6 shard",
    "3/6 wrap",
    "6/6 finish",
    "4/6 step",
    "5/6 combine",
    "start",
)
PLACE = "\0"  # begins the line that stands for a region among the shared lines
OPENING = re.compile(r"\s*# \[(?!/)([^\]]+)\]")
CLOSING = re.compile(r"\s*# \[/([^\]]+)\]$")


class LayoutError(Exception):
    """A script does not have the eight regions, each once, closed, and in order."""


def split(text: str, name: str) -> tuple[list[str], dict[str, list[str]]]:
    """Split a script into its shared lines and its regions.

    Returns:
        The lines outside the regions, with one line (PLACE and the name) where the
        docstring or a region was; and those lines by name, with their opening and
        closing comments.

    Raises:
        LayoutError: the regions are not as REGIONS says.
    """
    docstring = ast.parse(text).body[0]
    if not (
        isinstance(docstring, ast.Expr) and isinstance(docstring.value, ast.Constant)
    ):
        raise LayoutError(f"{name} has no module docstring")
    lines = text.splitlines(keepends=True)
    regions = {"docstring": lines[: docstring.end_lineno]}
    shared = [PLACE + "docstring"]
    current: str | None = None
    for number, line in enumerate(
        lines[docstring.end_lineno :], docstring.end_lineno + 1
    ):
        opening, closing = OPENING.match(line), CLOSING.match(line.rstrip("\n"))
        if opening:
            if current:
                raise LayoutError(f"{name}:{number}: [{current}] is still open")
            current = opening[1]
            if current not in REGIONS or current in regions:
                raise LayoutError(
                    f"{name}:{number}: [{current}] is no region, or opens twice"
                )
            regions[current] = [line]
            shared.append(PLACE + current)
        elif closing:
            if current is None or current.split()[-1] != closing[1]:
                raise LayoutError(
                    f"{name}:{number}: [/{closing[1]}] closes what is not open"
                )
            regions[current].append(line)
            current = None
        elif current:
            regions[current].append(line)
        else:
            shared.append(line)
    if current:
        raise LayoutError(f"{name}: [{current}] is never closed")
    if tuple(region for region in regions if region != "docstring") != REGIONS:
        raise LayoutError(f"{name}: the regions are not {', '.join(REGIONS)}")
    return shared, regions


def join(shared: list[str], regions: dict[str, list[str]]) -> str:
    """Put a script together again."""
    lines: list[str] = []
    for line in shared:
        lines.extend(regions[line[1:]] if line.startswith(PLACE) else [line])
    return "".join(lines)


def synchronised(base: str, sibling: str, name: str) -> str:
    """A sibling's text with the shared lines of the base."""
    shared, _ = split(base, BASE)
    _, regions = split(sibling, name)
    return join(shared, regions)


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Check or write the siblings below `root`; returns the exit status."""
    if arguments not in ([], ["--check"]):
        print("usage: sync_scripts.py [--check]", file=sys.stderr)
        return 2
    base = (root / BASE).read_text()
    different = 0
    for name in SIBLINGS:
        try:
            before = (root / name).read_text()
            after = synchronised(base, before, name)
        except LayoutError as error:
            print(error, file=sys.stderr)
            return 1
        if before == after:
            continue
        different += 1
        if arguments:
            diff = difflib.unified_diff(
                before.splitlines(),
                after.splitlines(),
                name,
                f"{name} from {BASE}",
                "",
                "",
                1,
                "",
            )
            print("\n".join(diff))
        else:
            (root / name).write_text(after)
            print(f"{name} brought up to date")
    return 1 if arguments and different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
