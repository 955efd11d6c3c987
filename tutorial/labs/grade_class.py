"""Grade the labs that a class has handed in; print a table (CSV) of who passed which.

    python tutorial/labs/grade_class.py FOLDER > grades.csv

FOLDER has a subfolder for each student with the labs that the student has changed,
under their original names (07_shuffled.py). Each student's scripts run in a bubblewrap
sandbox (https://github.com/containers/bubblewrap): they cannot see this project's
folder, your home folder or other students' files; they have no network; everything that
they write is discarded; and they are stopped after LIMIT seconds. A script that attacks
the grader itself can still print anything: look at a lab that passes too easily.
Exit status: 0, or 2 if grading is impossible.
"""

import csv
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

LABS = Path(__file__).resolve().parent
ROOT = LABS.parents[1]
LIMIT = 900  # seconds for all of a student's labs
COPY = "/tmp/course"  # in the sandbox


def grade(student: Path, others: Path) -> dict[str, str]:
    """Return what the grader prints about each lab of a student."""
    handed_in = {p.stem.split("_")[0]: p for p in sorted(student.glob("*.py"))}
    with tempfile.TemporaryDirectory() as folder:
        labs = Path(folder, "tutorial", "labs")
        shutil.copytree(
            LABS, labs, ignore=shutil.ignore_patterns("solutions", "*_*.py")
        )
        shutil.copytree(ROOT / "doctor", Path(folder, "doctor"))
        for path in handed_in.values():
            shutil.copyfile(path, labs / path.name)
        hidden = [
            word for one in (ROOT, others, Path.home()) for word in ("--tmpfs", one)
        ]
        shown = [word for one in (sys.prefix, sys.base_prefix) for word in (one, one)]
        command = [
            *("bwrap", "--unshare-all", "--die-with-parent", "--new-session"),
            *("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"),
            *("--tmpfs", "/tmp", *hidden, "--ro-bind", *shown[:2]),
            *("--ro-bind", *shown[2:], "--ro-bind", folder, COPY, "--chdir", "/tmp"),
            *(sys.executable, f"{COPY}/tutorial/labs/grade.py", *handed_in),
        ]
        try:
            ended = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, timeout=LIMIT, check=False
            )
            text = ended.stdout
        except subprocess.TimeoutExpired as late:
            text = (late.stdout or b"").decode()
    lines = re.findall(r"^(\w+)(?:: | )(.*)$", text, re.M)
    missing = dict.fromkeys(
        handed_in, f"no result after {LIMIT} s, or the grader ended"
    )
    return missing | {number: how for number, how in lines if number in handed_in}


def main(words: list[str]) -> int:
    """Grade all students; return the exit status."""
    folder = Path(words[0]).resolve() if len(words) == 1 else None
    if folder is None or not folder.is_dir():
        print("grade_class.py: error: give one folder, of the class", file=sys.stderr)
        return 2
    if not shutil.which("bwrap"):
        text = "bubblewrap is not installed; on Debian: apt-get install bubblewrap"
        print(f"grade_class.py: error: {text}", file=sys.stderr)
        return 2
    numbers = [p.stem.split("_")[0] for p in sorted(LABS.glob("[0-9][0-9]_*.py"))]
    numbers.append("capstone")
    table = csv.DictWriter(sys.stdout, ["student", *numbers], restval="")
    table.writeheader()
    for student in sorted(path for path in folder.iterdir() if path.is_dir()):
        found = grade(student, folder)
        known = {number: found[number] for number in numbers if number in found}
        table.writerow({"student": student.name, **known})
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
