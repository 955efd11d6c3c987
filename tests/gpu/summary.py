"""Write FOLDER/summary.md from what pytest and benchmarks/gpu.py left there.

python -m tests.gpu.summary FOLDER
"""

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

STATUSES = {"failure": "failed", "error": "not run", "skipped": "skipped"}


def rows(folder):
    """{name: (status, seconds, what came out, commit)} of the last time each row was run."""
    found = {}
    for file in sorted(folder.glob("rows-*.xml")):
        for suite in ElementTree.parse(file).iter("testsuite"):
            commit = suite.find("properties/property[@name='commit']")
            for case in suite.iter("testcase"):
                ended = next(
                    (case.find(tag) for tag in STATUSES if case.find(tag) is not None),
                    None,
                )
                status, text = "passed", []
                for one in case.iter("property"):
                    text.append(f"{one.get('name')} {shortened(one.get('value'))}")
                if ended is not None:
                    status = STATUSES[ended.tag]
                    text = [ended.get("message", "").partition("\n")[0], *text]
                found[case.get("name")] = (
                    status,
                    float(case.get("time")),
                    "; ".join(text),
                    commit.get("value") if commit is not None else "",
                )
    return found


def shortened(text):
    """Numbers, or a list of them, with three digits."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    values = value if isinstance(value, list) else [value]
    return ", ".join(
        f"{one:.3g}" if isinstance(one, float) else str(one) for one in values
    )


def table(found):
    lines = [
        "| row | status | s | what came out | commit |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, (status, seconds, text, commit) in found.items():
        text = text.replace("|", "/")
        lines.append(f"| {name} | {status} | {seconds:.0f} | {text} | {commit[:12]} |")
    return "\n".join(lines)


def summary(folder):
    """The page."""
    found = rows(folder)
    counts = [
        f"{sum(one[0] == status for one in found.values())} {status}"
        for status in ("passed", *STATUSES.values())
    ]
    path = folder / "timings.json"
    timed = (
        json.loads(path.read_text())
        if path.exists()
        else {"rows": [], "device": "", "versions": {}}
    )
    versions = ", ".join(f"{name} {value}" for name, value in timed["versions"].items())
    names = ("status", "seconds", "line", "commit")
    timings = {one["name"]: [one[name] for name in names] for one in timed["rows"]}
    text = f"# {timed['device']}\n\nRows: {', '.join(counts)}. {versions}\n\n"
    return f"{text}{table(found)}\n\n## Timings\n\n{table(timings)}\n"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    text = summary(folder)
    (folder / "summary.md").write_text(text)
    print(text.partition("\n| row")[0], f"All rows: {folder / 'summary.md'}", sep="\n")
