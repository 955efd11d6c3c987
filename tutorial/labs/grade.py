"""Run broken training scripts in two processes, and print what each run does wrong.

    python tutorial/labs/grade.py 07    # one lab
    python tutorial/labs/grade.py all   # all of them

The grader watches the processes from outside: the images that go through the network,
the weights before and after each step, the printed text, and the saved files.
Exit status: 0 if the labs pass, 1 if one does not, 2 for an unknown lab. A run without
progress for 10 seconds counts as hanging; the variable PATIENCE sets this limit.
"""

import contextlib
import importlib.util
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import checks
import torch
from lab import FOLDER, Lab, labs
from play import FORK, PATIENCE, Run, Wrong, started

HOROVOD = importlib.util.find_spec("horovod")
ORIGINALS = FOLDER / "originals"  # where the scripts may have other headers
LABS = labs(ORIGINALS if ORIGINALS.is_dir() else FOLDER)


def play_once(script: Path, files: Path, chosen: dict | None = None, **options) -> Run:
    """Run a script to its end, then run its lab's checks or the chosen ones."""
    with started(script, files, **options) as run:
        run.end()
    check(run, script, chosen)
    return run


def lab_of(script: Path) -> Lab:
    """Return the lab that a script is, or repairs."""
    return LABS[script.stem.split("_")[0]]


def check(run: Run, script: Path, chosen: dict | None = None) -> None:
    """Run the checks of a script's lab, or the chosen ones."""
    for name, options in (chosen or lab_of(script).checks).items():
        getattr(checks, f"check_{name}")(run, **options)


@contextlib.contextmanager
def under(condition: str) -> Iterator[None]:
    """Put the condition under which a Wrong occurs before its message."""
    try:
        yield
    except Wrong as wrong:
        raise Wrong(f"{condition}, {wrong}") from None


def play_on_machines(script: Path, files: Path) -> None:
    """Run a script on two machines with one process each."""
    with under("on two machines with one process each"):
        play_once(script, files, machines=2)
    play_once(script, files)


def play_twice(script: Path, files: Path) -> None:
    """Run a script twice at the same time."""
    ready, go = FORK.Semaphore(0), FORK.Event()

    def hold(_) -> None:
        ready.release()
        go.wait()

    with started(script, files, disturb=hold) as first:
        all(ready.acquire(timeout=PATIENCE) for _ in range(2))
        with under("if another run is in progress"):
            play_once(script, files)
        go.set()
        first.end()
        check(first, script)


def play_killed(script: Path, files: Path) -> None:
    """Run a script once uninterrupted, and once killed and resumed."""
    compare_killed(play_once(script, files), script, files)


def compare_killed(whole: Run, script: Path, files: Path) -> None:
    """A run that is killed and resumed ends with an uninterrupted run's weights."""
    files = files.with_name("again")
    kill = lambda steps: steps == 12 and os._exit(1)  # noqa: E731
    with started(script, files, disturb=kill) as run:
        run.end(may_fail=True)
    again = play_once(script, files, {"weights": {}}).ranks[0]
    if len(again.steps) != 6:
        text = "after a run that was killed in epoch 2, the next run takes"
        raise Wrong(f"{text} {len(again.steps)} steps instead of the last 6")
    if checks.differ(again.weights[-1], whole.ranks[0].weights[-1]):
        text = "a run that is killed in epoch 2 and then resumed"
        raise Wrong(f"{text} ends with different weights than an uninterrupted run")


def play_killed_while_saving(script: Path, files: Path) -> None:
    """Run a script once uninterrupted, and once killed during its second save."""

    def removes(event: str, arguments: tuple) -> None:
        moves = event in ("os.remove", "os.rename")  # os.replace is a rename, too
        if moves and Path(str(arguments[0])).name == checks.CHECKPOINT:
            Path("removed").touch()

    def link(steps: int) -> None:  # the first checkpoint gets a second name
        exists = Path(checks.CHECKPOINT).exists()
        if steps == 6 and os.environ["RANK"] == "0" and exists:
            os.link(checks.CHECKPOINT, "first.pt")
            sys.addaudithook(removes)

    steps = play_once(script, files, disturb=link).ranks[0].steps

    def check_checkpoint(file: Path) -> int:
        _, weights = checks.saved(file, part="model")
        if all(checks.differ(weights, step.weights) for step in steps[5::6]):
            raise Wrong(f"{file.name} does not hold the weights after an epoch")
        return file.stat().st_size

    size, first = check_checkpoint(files / checks.CHECKPOINT), files / "first.pt"

    def limit(steps: int) -> None:  # the kernel kills a process that writes more
        if steps == 6:
            del os.environ["DOCTOR_FOLDER"]  # the recorder must not hit the limit
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, size - 1))

    files = files.with_name("again")
    with started(script, files, disturb=limit) as run:
        run.end(may_fail=True)
    with under("if the run is killed during its second save"):
        check_checkpoint(files / checks.CHECKPOINT)
    if first.exists() and checks.differ(
        checks.saved(first, part="model")[1], steps[5].weights
    ):
        raise Wrong("the second save writes into the file of the first")
    if first.with_name("removed").exists():
        raise Wrong("for a moment, the second save leaves no checkpoint")


def play_capstone(script: Path, files: Path) -> None:
    """Run uninterrupted, and killed and resumed; count the mistakes that are left."""
    run = play_once(script, files, {"weights": {}, "averages": {}})
    left = 0
    for name, options in lab_of(script).checks.items():
        try:
            check(run, script, {name: options})
        except Wrong:
            left += 1
    try:
        compare_killed(run, script, files)
    except Wrong:
        left += 1
    if left:
        raise Wrong(f"{left} of 6 mistakes are left")


def grade(script: Path) -> str | None:
    """Return what is wrong with a script, or None."""
    with tempfile.TemporaryDirectory(prefix="lab-") as folder:
        try:
            play = globals()[f"play_{lab_of(script).runs}"]
            play(script, Path(folder, "files"))
        except Wrong as wrong:
            return str(wrong)
        except Exception as error:
            return f"the script cannot be graded: {error}"
    return None


def main(words: list[str]) -> int:
    """Grade labs; return the exit status."""
    scripts = {number: FOLDER / lab.script for number, lab in LABS.items()}
    chosen = list(scripts) if words in ([], ["all"]) else [w.zfill(2) for w in words]
    if unknown := [number for number in chosen if number not in scripts]:
        known = f"the labs are {', '.join(scripts)}"
        print(f"grade.py: error: no lab {unknown[0]}; {known}", file=sys.stderr)
        return 2
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the labs need no GPU
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and end the processes
    passed = 0
    try:
        for number in [*chosen]:
            if "import horovod" in scripts[number].read_text() and not HOROVOD:
                print(f"{number} is not graded, because it needs Horovod", flush=True)
                chosen.remove(number)
                continue
            problem = grade(scripts[number])
            print(f"{number}: {problem}" if problem else f"{number} passes", flush=True)
            passed += not problem
    except KeyboardInterrupt:
        return 130
    if len(chosen) > 1:
        print(f"{passed} of {len(chosen)} labs pass")
    return 0 if passed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
