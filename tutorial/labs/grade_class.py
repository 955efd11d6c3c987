"""Grade the labs that a class has handed in; print the results as a table (CSV).

    python -m tutorial.labs.grade_class FOLDER > grades.csv

tutorial/TEACHING.md says what FOLDER contains, and what the sandbox hides.
Exit status: 0, or 2 if the labs cannot be graded.
"""

import csv
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tutorial.labs.lab import FOLDER, labs

LIMIT = 900  # seconds for all of a student's labs
HANDED_IN, COURSE = "/tmp/handed_in", "/tmp/course"  # in the sandbox
SANDBOX = "bwrap --unshare-all --die-with-parent --new-session --clearenv --setenv "
SANDBOX += "OMP_NUM_THREADS 1 --dev /dev --proc /proc --tmpfs /tmp"
SYSTEM = "/usr", "/bin", "/lib", "/lib64", "/etc", sys.prefix, sys.base_prefix
NAMES = {lab.script: lab.number for lab in labs().values()}


def grade(student: Path) -> dict[str, str]:
    """Return what the grader prints about each lab of a student, by number."""
    paths = [x for x in student.glob("*.py") if x.is_file() and not x.is_symlink()]
    scripts = {NAMES[path.name]: path for path in paths if path.name in NAMES}
    unknown = [path for path in paths if not (FOLDER / path.name).is_file()]
    for path in sorted(unknown):
        print(f"{student.name}/{path.name} is not named like a lab", file=sys.stderr)
    command = ["timeout", "-s", "KILL", str(LIMIT), *SANDBOX.split()]
    for folder in SYSTEM:
        command += ["--ro-bind-try", folder, folder]
    for name in ("doctor", "tutorial/labs"):
        command += ["--ro-bind", FOLDER.parents[1] / name, f"{COURSE}/{name}"]
    for path in (FOLDER / "pretrained.pt", *scripts.values()):
        command += ["--ro-bind", path, f"{HANDED_IN}/{path.name}"]
    command += ["--tmpfs", f"{COURSE}/tutorial/labs/solutions", "--chdir", COURSE]
    command += [sys.executable, "-m", "tutorial.labs.grade"]
    command += [f"{HANDED_IN}/{path.name}" for path in scripts.values()]
    done = scripts and subprocess.run(command, stdout=subprocess.PIPE, text=True)
    lines = re.findall(r"^(\w+)(?:: | )(.*)$", done.stdout if done else "", re.M)
    missing = dict.fromkeys(scripts, f"no result after {LIMIT} s, or the grader ended")
    return missing | {number: how for number, how in lines if number in scripts}


def main(words: list[str]) -> int:
    """Grade all students; return the exit status."""
    folder = Path(words[0]).resolve() if len(words) == 1 else None
    error = "" if folder and folder.is_dir() else "pass the folder of the class"
    if not shutil.which("bwrap"):
        error = "bubblewrap is not installed; on Debian: apt-get install bubblewrap"
    if error:
        print(f"grade_class.py: error: {error}", file=sys.stderr)
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
