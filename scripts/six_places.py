"""Put the regions of the five scripts into docs/six_places.md.

    python scripts/six_places.py

The page's sentences are written by hand, its code is not: what stands between
`<!-- SCRIPT PLACE -->` and `<!-- /SCRIPT PLACE -->` is made anew.
"""

import re
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import sync_scripts
from sync_scripts import ROOT

from benchmarks.page import fill

PAGE = ROOT / "docs" / "six_places.md"
# In the order of README.md
SCRIPTS = (
    "distributed",
    "multiprocessing_distributed",
    "horovod_distributed",
    "apex_distributed",
    "dataparallel",
)


def shown(place: str, script: str, regions: dict[str, dict[str, list[str]]]) -> str:
    """A script's lines in a place, or the first script that has the same."""
    lines = regions[script][place]
    first = next(name for name in SCRIPTS if regions[name][place] == lines)
    if first != script:
        anchor = re.sub(r"[^\w -]", "", f"{place} in {first}.py").replace(" ", "-")
        return f"The same lines as in [{first}.py](#{anchor}).\n"
    return f"```python\n{textwrap.dedent(''.join(lines)).rstrip()}\n```\n"


def parts(root: Path = ROOT) -> dict[str, str]:
    """All places of the scripts below `root`, by script and place.

    Raises:
        sync_scripts.LayoutError: a script's regions are not as they should be.
    """
    regions = {
        script: sync_scripts.split((root / f"{script}.py").read_text(), script)[1]
        for script in SCRIPTS
    }
    return {
        f"{script} {place}": shown(place, script, regions)
        for script in SCRIPTS
        for place in sync_scripts.REGIONS
    }


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(), parts()))
