"""Run broken training scripts in 2, 1 and 6 processes; print what each does wrong.

    python -m tutorial.labs.grade 07    # one lab
    python -m tutorial.labs.grade all   # all of them

You can also pass a file, such as a copy of 07_shuffled.py in another folder. The exit
status is 0 if all labs pass, 1 if one fails, and 2 for an unknown lab. A run without
progress for 10 seconds counts as hanging; set PATIENCE to change this limit.
"""

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy
import torch
from torch.utils._pytree import tree_map_only

from tutorial.labs import checks
from tutorial.labs.lab import FOLDER, Lab, labs
from tutorial.labs.play import CHECKPOINT, Run, Wrong

LABS = labs()
WHEN = {1: "with one process, ", 2: "", 6: "with 6 processes on two machines, "}
ONCE = "machines", "another_run", "resumes", "old_file", "uneven"  # start other runs


def lab_of(script: Path) -> Lab | None:
    """Return the lab that a script (broken or repaired) belongs to."""
    return LABS.get(script.stem.split("_")[0].zfill(2))


def check(run: Run, lab: Lab, once: bool = False) -> None:
    """Check a run; with `once`, also make the checks that start other runs."""
    left, counted = 0, Exception if lab.number == "capstone" else ()  # not described
    every = lab.checks | {"facts": lab.checks.get("facts", {})}
    every |= {} if "printed" in every else {"losses": {}}
    for name, options in every.items():
        try:
            if once or name not in ONCE:
                getattr(checks, f"check_{name}")(run, **options)
        except counted:
            left += 1
    if left:
        raise Wrong(f"mistakes left: {left}")


def grade(script: Path) -> str | None:
    """Run a script in 2, 1 and 6 processes; return what is wrong, or None."""
    lab = lab_of(script)
    try:
        for size in map(int, lab.processes.split(", ")):
            when = WHEN.get(size, f"with {size} processes, ")
            run = Run(script, size=size, when=when, machines=2 if size == 6 else 1)
            with unchanged(script.with_name("pretrained.pt")), run.started():
                check(run, lab, once=size == 2)
                when = "with files of an earlier run in the folder, "
                if size == 2 and spoil(run):
                    with Run(script, run.files, when=when).started() as again:
                        check(again, lab)
    except Wrong as wrong:
        return str(wrong)
    except Exception as error:
        return f"the script cannot be graded: {error}"
    return None


@contextlib.contextmanager
def unchanged(file: Path) -> Iterator[None]:
    """Raise Wrong if a script changes a file that belongs to the lab; restore it."""
    content = file.read_bytes() if file.exists() else None
    try:
        yield
    finally:
        if content and (not file.exists() or file.read_bytes() != content):
            file.write_bytes(content)
            raise Wrong(f"the script changes {file.name}")


def spoil(run: Run) -> bool:
    """Delete a run's checkpoint, and change its other files.

    Add a file of a further rank beside rank 1's, as if there had been more processes.
    Return whether there are other files.
    """
    (run.files / CHECKPOINT).resolve().unlink(missing_ok=True)
    (run.files / CHECKPOINT).unlink(missing_ok=True)
    for path in run.removed.iterdir():  # as if the run had been killed before
        shutil.copy(path, run.files)
    files = [x for x in run.files.rglob("*") if x.is_file()]
    # The grader itself has made copies such as 6.pt, and records: see play.py
    files = [x for x in files if not x.stem.isdecimal()]
    files = [x for x in files if not {run.records, run.removed} & {*x.parents}]
    for path in files:
        another = path.with_name(re.sub(r"1(?!.*\d)", "2", path.name))
        with contextlib.suppress(Exception):  # such as an empty file, used as a flag
            if path.suffix == ".npy":
                numpy.save(path, numpy.load(path) * 3 + 1)
                continue
            content = torch.load(path, map_location="cpu", weights_only=True)
            changed = tree_map_only(torch.Tensor, lambda one: one * 3 + 1, content)
            for file in {path, another}:
                torch.save(changed, file)
    return bool(files)


def main(words: list[str]) -> int:
    """Grade labs; return the exit status."""
    if words in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    paths = [Path(word) for word in (LABS if words in ([], ["all"]) else words)]
    for path in paths:
        if not lab_of(path) or (path.suffix and not path.is_file()):
            known = f"the labs are {', '.join(LABS)}"
            print(f"grade.py: error: no lab {path}; {known}", file=sys.stderr)
            return 2
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the labs need no GPU
    for number in (signal.SIGINT, signal.SIGTERM):  # end the processes, too
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    passed = []
    for lab, path in zip(map(lab_of, paths), paths, strict=True):
        script = path.resolve() if path.suffix else FOLDER / lab.script
        needs = "import horovod" in script.read_text()
        if needs and not importlib.util.find_spec("horovod"):
            print(f"{lab.number} is not graded, because it needs Horovod", flush=True)
            continue
        wrong = grade(script)
        print(lab.number + (f": {wrong}" if wrong else " passes"), flush=True)
        passed.append(not wrong)
    if len(passed) > 1:
        print(f"{sum(passed)} of {len(passed)} labs pass")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
