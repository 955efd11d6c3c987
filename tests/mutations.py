"""Make the mistakes of mutations.txt, and see whether tests notice them.

    bash scripts/test.sh --mutations            # all of them, 35 minutes on two cores
    bash scripts/test.sh --mutations smoothing  # those with this word in their name

Each mistake is made in a copy of the project, where only the tests named beside it run: one
of them has to fail. Before that, the same tests have to pass in a copy without a mistake.
Writes results/mutations.json, or brings it up to date. Exit status 1 where a mistake survived or a test broke.
"""

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FIVE = (
    "dataparallel.py",
    "distributed.py",
    "multiprocessing_distributed.py",
    "apex_distributed.py",
    "horovod_distributed.py",
)
NO_TEST_FAILED, A_TEST_FAILED = 0, 1  # pytest's exit statuses; others are no verdict


class Mutation(NamedTuple):
    """A mistake: `old` becomes `new`, once in `file`, or once in each of the scripts."""

    name: str
    file: str  # "scripts": all five
    tests: list[str]  # of pytest, below tests/
    old: str
    new: str


def read_mutations(text: str) -> list[Mutation]:
    """Read the blocks of mutations.txt, whose first lines say what they are made of."""
    mutations = []
    for block in re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).strip().split("\n\n"):
        name, where, *lines = block.strip("\n").split("\n")
        file, _, tests = where.partition(": ")
        old = [line[2:] for line in lines if line[0] == "-"]
        new = [line[2:] for line in lines if line[0] == "+"]
        end = "" if new else "\n"
        mutation = Mutation(
            name, file, shlex.split(tests), "\n".join(old) + end, "\n".join(new)
        )
        mutations.append(mutation)
    return mutations


MUTATIONS = read_mutations(Path(__file__).with_suffix(".txt").read_text())


def files_of(mutation: Mutation, root: Path) -> list[Path]:
    """The files that a mistake is made in."""
    names = FIVE if mutation.file == "scripts" else (mutation.file,)
    return [root / name for name in names]


def problem(mutation: Mutation) -> str | None:
    """Say why a mistake cannot be made in the project as it is; None where it can."""
    for path in files_of(mutation, ROOT):
        found = path.read_text().count(mutation.old)
        if found != 1:
            return f"{mutation.name}: {found} times in {path.name}: {mutation.old!r}"
    for test in mutation.tests:
        file, *name = re.split(r"::|\[", test)
        text = (ROOT / "tests" / file).read_text()
        if name and f"def {name[0]}(" not in text:
            return f"{mutation.name}: there is no test {test}"
    return None if mutation.tests else f"{mutation.name}: no test is named"


def copy_project(folder: Path) -> Path:
    """Copy what git knows of the project, as the files are now."""
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in names:
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def run_tests(root: Path, tests: Iterable[str]) -> tuple[int, str]:
    """Run tests of a copy until one fails; pytest's exit status and its last lines."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, *(f"tests/{test}" for test in tests)],
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    return ended.returncode, ended.stdout[-2000:]


def attempt(mutation: Mutation) -> dict:
    """Make one mistake in a copy, and run the tests that have to see it."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        root = copy_project(Path(folder))
        for path in files_of(mutation, root):
            path.write_text(path.read_text().replace(mutation.old, mutation.new))
        status, text = run_tests(root, mutation.tests)
    seen = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", text, re.MULTILINE)
    verdict = {NO_TEST_FAILED: "SURVIVED", A_TEST_FAILED: "seen"}.get(status, "BROKEN")
    print(
        f"{verdict:9}{mutation.name} ({time.monotonic() - began:.0f} s)"
        + (f"  by {seen[1]}" if seen and verdict == "seen" else ""),
        flush=True,
    )
    if verdict == "BROKEN":
        print(text, flush=True)
    return {
        "name": mutation.name,
        "file": mutation.file,
        "tests": list(mutation.tests),
        "survived": verdict != "seen",
    }


def write(results: list[dict]) -> None:
    """Write results/mutations.json; mistakes that were not tried keep their results."""
    git = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout
    path = ROOT / "results" / "mutations.json"
    old = json.loads(path.read_text()) if path.exists() else {"mutations": []}
    found = {result["name"]: result for result in old["mutations"]}
    found |= {
        result["name"]: {**result, "commit": commit.strip()} for result in results
    }
    listed = [found[one.name] for one in MUTATIONS if one.name in found]
    report = {
        "mistakes": len(listed),
        "survived": sum(result["survived"] for result in listed),
        "cpu_cores": os.cpu_count(),
        "python": platform.python_version(),
        "mutations": listed,
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


def main(words: list[str]) -> int:
    """Try the mistakes whose names have one of `words`, or all; the exit status."""
    chosen = [m for m in MUTATIONS if not words or any(w in m.name for w in words)]
    problems = list(filter(None, map(problem, chosen)))
    if problems or not chosen:
        print("\n".join(problems or [f"no mistake has {words} in its name"]))
        return 2
    tests = sorted({test for mutation in chosen for test in mutation.tests})
    print(f"{len(chosen)} mistakes; first, {len(tests)} tests without one", flush=True)
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        status, text = run_tests(copy_project(Path(folder)), tests)
    if status != NO_TEST_FAILED or " skipped" in text:
        print(f"the tests have to pass without a mistake, none skipped:\n{text}")
        return 1
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1))) as pool:
        results = list(pool.map(attempt, chosen))
    survived = [result["name"] for result in results if result["survived"]]
    print(f"{len(results)} mistakes, {len(survived)} survived: {', '.join(survived)}")
    write(results)
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
