"""Keep the shared lines of the five scripts byte-identical.

    python -m scripts.sync_scripts    # copies them from distributed.py

Only the module docstring and the eight REGIONS (the lines between `# [name]` and
`# [/name]`) may differ.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASE = "distributed.py"
SIBLINGS = sorted(path.name for path in ROOT.glob("*.py") if path.name != BASE)
# In the files' order; main(), which contains 6/6, precedes the other functions
REGIONS = ("imports", "1/6 launch", "2/6 shard", "3/6 wrap", "6/6 finish")
REGIONS += ("4/6 step", "5/6 combine", "start")
PLACE = "\0"  # replaces the docstring or a region
PART = re.compile(
    r'\A""".*?"""\n|^ *# \[((?:\d/6 )?(\w+))\].*?^ *# \[/\2\]\n',
    re.DOTALL | re.MULTILINE,
)


def split(text: str, name: str) -> tuple[list[str], dict[str, list[str]]]:
    """Return a script's shared lines, and its other parts by name.

    The other parts are the docstring and the regions; in the shared lines, PLACE marks
    their places. Raises ValueError if a part is missing, not closed or out of order.
    """
    found = {m[1] or "docstring": m[0].splitlines(True) for m in PART.finditer(text)}
    shared = PART.sub(PLACE + "\n", text)
    if tuple(found) != ("docstring", *REGIONS) or "# [" in shared:
        raise ValueError(f"{name}: needs a docstring and the closed regions {REGIONS}")
    return shared.splitlines(True), found


def synchronised(base: str, sibling: str, name: str) -> str:
    """Return a script's text after copying the base script's shared lines to it."""
    regions = iter(split(sibling, name)[1].values())
    lines = split(base, BASE)[0]
    return "".join("".join(next(regions)) if PLACE in x else x for x in lines)


def main(root: Path = ROOT) -> None:
    """Rewrite the scripts in `root` that are out of date; print their names."""
    base = (root / BASE).read_text()
    for name in SIBLINGS:
        before = (root / name).read_text()
        after = synchronised(base, before, name)
        if before != after:
            (root / name).write_text(after)
            print(f"{name} updated")


if __name__ == "__main__":
    main()
