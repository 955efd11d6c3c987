"""Grade the labs that a class has handed in; print the results as a table (CSV).

    python tutorial/labs/grade_class.py FOLDER > grades.csv

tutorial/TEACHING.md says what FOLDER contains, and what the sandbox hides.
Exit status: 0, or 2 if the labs cannot be graded.
"""

import csv
import re
import shutil
import subprocess
import sys
from pathlib import Path

from lab import FOLDER, labs

LIMIT = 900  # seconds for all of a student's labs
HANDED_IN, COURSE = "/tmp/handed_in", "/tmp/course"  # in the sandbox
SYSTEM = "/usr", "/bin", "/lib", "/lib64", "/etc", sys.prefix, sys.base_prefix
NAMES = {lab.script: lab.number for lab in labs().values()}


def handed_in(student: Path) -> dict[str, Path]:
    """Return a student's labs by number; print the names of other scripts to stderr."""
    found = {}
    for path in sorted(student.iterdir()):
        if path.name in NAMES and path.is_file() and not path.is_symlink():
            found[NAMES[path.name]] = path
        elif path.suffix == ".py" and not (FOLDER / path.name).is_file():
            print(
                f"{student.name}/{path.name} is not named like a lab", file=sys.stderr
            )
    return found


def grade(student: Path) -> dict[str, str]:
    """Return what the grader prints about each lab of a student."""
    scripts = handed_in(student)
    if not scripts:
        return {}
    command = ["timeout", "-s", "KILL", str(LIMIT)]
    command += ["bwrap", "--unshare-all", "--die-with-parent", "--new-session"]
    command += ["--clearenv", "--setenv", "OMP_NUM_THREADS", "1"]
    command += ["--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
    for shown in SYSTEM:
        command += ["--ro-bind-try", shown, shown]
    labs_there = f"{COURSE}/tutorial/labs"
    command += ["--ro-bind", FOLDER, labs_there, "--tmpfs", f"{labs_there}/solutions"]
    command += ["--ro-bind", FOLDER.parents[1] / "doctor", f"{COURSE}/doctor"]
    for path in (FOLDER / "pretrained.pt", *scripts.values()):
        command += ["--ro-bind", path, f"{HANDED_IN}/{path.name}"]
    command += ["--chdir", "/tmp", sys.executable, f"{labs_there}/grade.py"]
    command += [f"{HANDED_IN}/{path.name}" for path in scripts.values()]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = re.findall(r"^(\w+)(?:: | )(.*)$", done.stdout, re.M)
    missing = dict.fromkeys(scripts, f"no result after {LIMIT} s, or the grader ended")
    return missing | {number: how for number, how in lines if number in scripts}


def main(words: list[str]) -> int:
    """Grade all students; return the exit status."""
    folder = Path(words[0]).resolve() if len(words) == 1 else None
    if folder is None or not folder.is_dir():
        print("grade_class.py: error: pass the folder of the class", file=sys.stderr)
        return 2
    if not shutil.which("bwrap"):
        text = "bubblewrap is not installed; on Debian: apt-get install bubblewrap"
        print(f"grade_class.py: error: {text}", file=sys.stderr)
        return 2
    table = csv.DictWriter(sys.stdout, ["student", *NAMES.values()], restval="")
    table.writeheader()
    for student in sorted(folder.iterdir()):
        if student.is_dir() and not student.is_symlink():
            table.writerow({"student": student.name, **grade(student)})
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
