"""Fill in what README.md and README.zh-CN.md show of results/ and of the scripts.

    python scripts/readme.py

What stands between `<!-- NAME -->` and `<!-- /NAME -->` is made anew.
"""

import difflib
import json
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import quickstart
import report
import sync_scripts
from quickstart import ROOT

from benchmarks.page import fill

FILES = ("README.md", "README.zh-CN.md")
TIMINGS = Path("results", "timings")
# The one line of each script that makes it what it is, by its beginning
LINES = {
    "distributed": "model = DDP(",
    "multiprocessing_distributed": "wait_for(mp.spawn(",
    "horovod_distributed": "optimizer = hvd.DistributedOptimizer(",
    "apex_distributed": "with amp.scale_loss(",
    "dataparallel": "model = nn.DataParallel(",
}


def block(language: str, text: str) -> str:
    """A fenced block."""
    return f"```{language}\n{textwrap.dedent(text).rstrip()}\n```\n"


def matters(script: str) -> str:
    """The line that matters, to its closing bracket or with the line that it begins."""
    lines = (ROOT / f"{script}.py").read_text().splitlines()
    start = next(
        number
        for number, line in enumerate(lines)
        if line.strip().startswith(LINES[script])
    )
    end = start
    while "".join(lines[start : end + 1]).count("(") > "".join(
        lines[start : end + 1]
    ).count(")"):
        end += 1
    end += lines[end].endswith(":")  # and what it begins
    return block("python", "\n".join(lines[start : end + 1]))


def regions(script: str) -> dict[str, str]:
    """What a script has between its marks, by the name of the region."""
    text = (ROOT / f"{script}.py").read_text()
    return {
        f"{script} {name}": block("python", "".join(lines))
        for name, lines in sync_scripts.split(text, script)[1].items()
    }


def diff(one: str, other: str) -> str:
    """What `diff -u` says of two scripts from their docstrings on, without context."""
    texts = [
        (ROOT / f"{script}.py").read_text().partition('"""\n\nfrom')[2].splitlines()
        for script in (one, other)
    ]
    lines = difflib.unified_diff(*texts, f"{one}.py", f"{other}.py", n=0, lineterm="")
    return block("diff", "\n".join(line for line in lines if line[:2] != "@@"))


def parts() -> dict[str, str]:
    """All that can be filled in, by name."""
    timings = report.Timings(ROOT / TIMINGS)
    runs = json.loads((ROOT / "results" / "quickstart.json").read_text())
    found = {
        "timings": report.readme_table(timings, TIMINGS),
        "timings in words": report.readme_words(timings, TIMINGS),
        "quickstart": quickstart.render(runs),
        "diff": diff("distributed", "horovod_distributed"),
    }
    for script in LINES:
        found[f"{script} line"] = matters(script)
        found |= regions(script)
    return found


def filled(page: str) -> str:
    """The page with what stands between its markers made anew."""
    here = {name: text for name, text in parts().items() if f"<!-- {name} -->" in page}
    return fill(page, here)


if __name__ == "__main__":
    for name in FILES:
        file = ROOT / name
        file.write_text(filled(file.read_text()))
