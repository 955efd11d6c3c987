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
                ended = [part for part in case if part.tag in STATUSES]
                text = [part.get("message", "").partition("\n")[0] for part in ended]
                for one in case.iter("property"):
                    text.append(f"{one.get('name')} {one.get('value')}")
                found[case.get("name")] = (
                    STATUSES[ended[0].tag] if ended else "passed",
                    float(case.get("time")),
                    "; ".join(text),
                    commit.get("value") if commit is not None else "",
                )
    return found


def table(found):
    text = "| row | status | s | what came out | commit |\n| --- | --- | --- | --- | --- |\n"
    for name, (status, seconds, out, commit) in found.items():
        out = out.replace("|", "/")
        text += f"| {name} | {status} | {seconds:.0f} | {out} | {commit[:12]} |\n"
    return text


def summary(folder):
    """The page."""
    found = rows(folder)
    statuses = [status for status, *_ in found.values()]
    names = ("passed", *STATUSES.values())
    counts = ", ".join(f"{statuses.count(name)} {name}" for name in names)
    path, timed = folder / "timings.json", {"rows": [], "device": "", "versions": {}}
    if path.exists():
        timed = json.loads(path.read_text())
    versions = ", ".join(f"{name} {value}" for name, value in timed["versions"].items())
    parts = ("status", "seconds", "line", "commit")
    timings = {one["name"]: [one[part] for part in parts] for one in timed["rows"]}
    text = f"# {timed['device']}\n\nRows: {counts}. {versions}\n\n"
    return f"{text}{table(found)}\n## Timings\n\n{table(timings)}"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    text = summary(folder)
    (folder / "summary.md").write_text(text)
    print(text.partition("\n| row")[0], f"All rows: {folder / 'summary.md'}", sep="\n")
