"""Keep the shared lines of the five scripts byte-identical.

    python -m scripts.sync_scripts            # copy them from distributed.py
    python -m scripts.sync_scripts --check    # list scripts that differ; status 1

Only the module docstring and the eight REGIONS (the lines between `# [name]` and
`# [/name]`) may differ.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASE = "distributed.py"
SIBLINGS = sorted(path.name for path in ROOT.glob("*.py") if path.name != BASE)
# In file order; main(), which contains 6/6, comes before the other functions
REGIONS = ("imports", "1/6 launch", "2/6 shard", "3/6 wrap", "6/6 finish")
REGIONS += ("4/6 step", "5/6 combine", "start")
PLACE = "\0"  # starts a line that replaces a region
OPENING = re.compile(r"\s*# \[(?!/)([^\]]+)\]")
CLOSING = re.compile(r"\s*# \[/([^\]]+)\]$")
DOCSTRING = re.compile(r'""".*?"""\n', re.DOTALL)


def split(text: str, name: str) -> tuple[list[str], dict[str, list[str]]]:
    """Split a script into its shared lines and its regions.

    Returns:
        The shared lines, with one line (PLACE and a name) in place of the docstring and
        of each region; and a dictionary of each region's lines, including its opening
        and closing comments.

    Raises:
        ValueError: the regions differ from REGIONS, or one is not closed.
    """
    docstring = DOCSTRING.match(text)
    if not docstring:
        raise ValueError(f"{name} has no module docstring")
    shared, regions = [PLACE + "docstring"], {"docstring": [docstring[0]]}
    found, current = [], None
    for line in text[docstring.end() :].splitlines(keepends=True):
        opening, closing = OPENING.match(line), CLOSING.match(line.rstrip("\n"))
        if opening:
            if current:
                raise ValueError(f"{name}: [{current}] is not closed before {line}")
            current = opening[1]
            found.append(current)
            regions[current] = []
            shared.append(PLACE + current)
        (regions[current] if current else shared).append(line)
        if closing:
            if not current or current.split()[-1] != closing[1]:
                raise ValueError(f"{name}: [/{closing[1]}] has no matching opening")
            current = None
    if current or tuple(found) != REGIONS:
        raise ValueError(f"{name}: needs these regions, closed: {', '.join(REGIONS)}")
    return shared, regions


def synchronised(base: str, sibling: str, name: str) -> str:
    """Return a sibling's text with the base's shared lines."""
    shared, regions = split(base, BASE)[0], split(sibling, name)[1]
    lines = (regions[s[1:]] if s.startswith(PLACE) else [s] for s in shared)
    return "".join(line for part in lines for line in part)


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Check or write the siblings in `root`; return the exit status."""
    if arguments not in ([], ["--check"]):
        print("usage: python -m scripts.sync_scripts [--check]", file=sys.stderr)
        return 2
    base, status = (root / BASE).read_text(), 0
    for name in SIBLINGS:
        before = (root / name).read_text()
        try:
            after = synchronised(base, before, name)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 1
        if before != after and arguments:
            print(f"{name} differs from {BASE}")
            status = 1
        elif before != after:
            (root / name).write_text(after)
            print(f"{name} updated")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
