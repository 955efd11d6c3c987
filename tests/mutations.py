"""Make each of the mistakes in mutations.txt, and check that a test catches it.

    bash scripts/test.sh --mutations            # all of them, 30 minutes on two cores
    bash scripts/test.sh --mutations smoothing  # mistakes with this word in their names

Each mistake is made in a copy of the project, where only the tests that its block lists run; one of
them must fail, but all must pass without the mistake. A run of all mistakes updates
benchmarks/results/mutations.json. If a mistake survives or a test breaks, the exit status is 1.
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
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Mutation(NamedTuple):
    """A mistake: `old` becomes `new`, once in `file`, or once in each of the scripts."""

    name: str
    file: str  # "scripts": all five
    tests: list[str]  # names of tests, relative to tests/
    old: str
    new: str

    def files(self, root: Path) -> list[Path]:
        scripts = self.file == "scripts"
        return sorted(root.glob("*.py")) if scripts else [root / self.file]


def read_mutations(text: str) -> list[Mutation]:
    """Read the blocks of mutations.txt; its first lines describe the format."""
    mutations = []
    for block in re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).strip().split("\n\n"):
        name, where, *lines = block.strip("\n").split("\n")
        file, _, tests = where.partition(": ")
        old, new = ([x[2:] for x in lines if x[0] == sign] for sign in "-+")
        text = "\n".join(old) + ("" if new else "\n")
        mutation = Mutation(name, file, shlex.split(tests), text, "\n".join(new))
        mutations.append(mutation)
    return mutations


MUTATIONS = read_mutations(Path(__file__).with_suffix(".txt").read_text())


def problem(mutation: Mutation) -> str | None:
    """Return why a mistake cannot be made in the current project, or None if it can."""
    for path in mutation.files(ROOT):
        found = path.read_text().count(mutation.old)
        if found != 1:
            return f"{mutation.name}: {found} times in {path.name}: {mutation.old!r}"
    for test in mutation.tests:
        file, *name = re.split(r"::|\[", test)
        text = (ROOT / "tests" / file).read_text()
        if name and f"def {name[0]}(" not in text:
            return f"{mutation.name}: there is no test {test}"
    return None if mutation.tests else f"{mutation.name}: no test is named"


def run_tests(tests: Iterable[str], mistake: Mutation | None = None) -> tuple[int, str]:
    """Run pytest in a copy of the files that git tracks; return its exit status and last lines."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        for name in listed.stdout.decode().split("\0")[:-1]:
            if (ROOT / name).exists():
                copy = Path(folder, name)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, copy)
        for path in mistake.files(Path(folder)) if mistake else ():
            path.write_text(path.read_text().replace(mistake.old, mistake.new))
        ended = subprocess.run(
            [*command, *(f"tests/{test}" for test in tests)],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=900,
        )
    return ended.returncode, ended.stdout[-2000:]


def attempt(mutation: Mutation) -> dict:
    """Make one mistake in a copy of the project, and run the tests that must catch it."""
    status, text = run_tests(mutation.tests, mutation)
    # pytest's other exit statuses do not count as a result
    verdict = {0: "SURVIVED", 1: "seen"}.get(status, f"BROKEN\n{text}\n")
    print(f"{verdict:9}{mutation.name}", flush=True)
    what = {"name": mutation.name, "file": mutation.file, "tests": mutation.tests}
    return {**what, "survived": verdict != "seen"}


def write(survived: int) -> None:
    """Write benchmarks/results/mutations.json."""
    git = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    report = {
        "mistakes": len(MUTATIONS),
        "survived": survived,
        "commit": subprocess.check_output(git, cwd=ROOT, text=True).strip(),
        "cpu_cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    path = ROOT / "benchmarks" / "results" / "mutations.json"
    path.write_text(json.dumps(report, indent=1) + "\n")


def main(words: list[str]) -> int:
    """Try the mistakes whose names contain one of `words`, or all; return the exit status."""
    chosen = [m for m in MUTATIONS if not words or any(w in m.name for w in words)]
    problems = list(filter(None, map(problem, chosen)))
    if problems or not chosen:
        print("\n".join(problems or [f"no mistake has {words} in its name"]))
        return 2
    tests = sorted({test for mutation in chosen for test in mutation.tests})
    print(f"{len(chosen)} mistakes; first, {len(tests)} tests without one", flush=True)
    status, text = run_tests(tests)
    if status or " skipped" in text:
        print(f"the tests have to pass without a mistake, none skipped:\n{text}")
        return 1
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        results = list(pool.map(attempt, chosen))
    survived = [result["name"] for result in results if result["survived"]]
    print(f"{len(results)} mistakes, {len(survived)} survived: {', '.join(survived)}")
    if not words:
        write(len(survived))
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
