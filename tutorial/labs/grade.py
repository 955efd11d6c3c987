"""Run broken training scripts in two processes, and print what each run does wrong.

    python tutorial/labs/grade.py 07    # one lab
    python tutorial/labs/grade.py all   # all of them

You can also pass a file, such as a copy of 07_shuffled.py in another folder. The exit
status is 0 if all labs pass, 1 if one fails, and 2 for an unknown lab. A run without
progress for 10 seconds counts as hanging; set PATIENCE to change this limit.
"""

import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import checks
import torch
from lab import FOLDER, Lab, labs
from play import FORK, PATIENCE, Run, Wrong, started

TWO = "uses", "blocks"  # checks that need two processes, or more steps
HOROVOD = importlib.util.find_spec("horovod")
LABS = labs()


def lab_of(script: Path) -> Lab | None:
    """Return the lab that a script (broken or repaired) belongs to."""
    return LABS.get(script.stem.split("_")[0].zfill(2))


def check(run: Run, chosen: dict[str, dict]) -> None:
    """Run the checks common to all labs, and the chosen checks with their options."""
    for name, options in ({"files": {}, "limits": {}} | chosen).items():
        getattr(checks, f"check_{name}")(run, **options)


def play(script: Path, chosen: dict | None = None, when="", **options) -> Run:
    """Run a script and its lab's or the chosen checks; messages begin with `when`."""
    try:
        with started(script, **options) as run:
            run.end()
            check(run, chosen or lab_of(script).checks)
    except Wrong as wrong:
        raise Wrong(f"{when}{wrong}") from None
    return run


def play_once(script: Path) -> Run:
    """Run a script in two processes, and then in one; return the first run."""
    run = play(script)
    play_alone(script)
    return run


def play_alone(script: Path) -> None:
    """Run a script in one process; a repair that needs two processes is wrong."""
    some = {x: y for x, y in lab_of(script).checks.items() if x not in TWO}
    play(script, some, when="with one process, ", size=1)


def play_on_machines(script: Path) -> None:
    """Run a script on two machines with one process each, and then on one machine."""
    play(script, when="on two machines with one process each, ", machines=2)
    play_once(script)


def play_twice(script: Path) -> None:
    """Run a script alone, and while another run of the same script is in progress."""
    play_once(script)
    ready = FORK.Barrier(3)
    hold = lambda _: (ready.wait(), signal.pause())  # noqa: E731
    with started(script, disturb=hold):
        ready.wait(PATIENCE)
        play(script, when="if another run is in progress, ")


def play_killed(script: Path, whole: Run | None = None) -> None:
    """Run a script without interruption; then run it again, kill it, and resume it."""
    whole = whole or play_once(script)
    kill = lambda steps: steps == 12 and os._exit(1)  # noqa: E731
    with started(script, disturb=kill) as killed:
        killed.end(may_fail=True)
        killed.kill()
        again = play(script, {"weights": {}}, files=killed.files).ranks[0]
    if len(again.steps) != 6:
        text = "after a run that was killed in epoch 2, the next run takes"
        raise Wrong(f"{text} {len(again.steps)} steps instead of the last 6")
    if checks.differ(again.weights[-1], whole.ranks[0].weights[-1]):
        text = "a run that is killed in epoch 2 and then resumed"
        raise Wrong(f"{text} ends with different weights than an uninterrupted run")


def play_while_saving(script: Path) -> None:
    """Run a script, and check what each save does to the previous checkpoint."""

    def removes(event: str, arguments: tuple) -> None:
        moves = event in ("os.remove", "os.rename")  # os.replace is a rename, too
        if moves and Path(str(arguments[0])).name == checks.CHECKPOINT:
            raise RuntimeError("for a moment, this leaves no checkpoint")

    def link(steps: int) -> None:  # the checkpoint gets a second name
        if steps in (6, 12) and os.environ["RANK"] == "0":
            if os.path.exists(checks.CHECKPOINT):
                os.link(checks.CHECKPOINT, f"{steps}.pt")
            sys.addaudithook(removes)

    with started(script, disturb=link) as run:
        run.end()
        check(run, lab_of(script).checks)
        for epoch, steps in (("first", 6), ("second", 12)):
            old = run.files / f"{steps}.pt"
            if not old.exists():
                raise Wrong(f"there is no {checks.CHECKPOINT} after the {epoch} epoch")
            _, weights = checks.saved(old, part="model")
            if checks.differ(weights, run.ranks[0].weights[steps]):
                text = f"the next save writes into the {epoch} epoch's checkpoint"
                raise Wrong(f"{text}; if it is killed meanwhile, neither can be read")
    play_alone(script)


def play_capstone(script: Path) -> None:
    """Run the capstone; run it again, kill it, and resume it; count its mistakes."""
    run = play(script, {"weights": {}, "limits": {"at_once": 4}})
    each = [{name: options} for name, options in lab_of(script).checks.items()]
    found = [problem(play_killed, script, run), *(problem(check, run, x) for x in each)]
    if left := len(found) - found.count(None):
        raise Wrong(f"{left} of 6 mistakes are left")
    play_alone(script)


def problem(play: Callable, *given: object) -> str | None:
    """Call a play_... function or check(); return what is wrong, or None."""
    try:
        play(*given)
    except Wrong as wrong:
        return str(wrong)
    except Exception as error:
        return f"the script cannot be graded: {error}"


def grade(script: Path) -> str | None:
    """Return what is wrong with a script, or None."""
    return problem(globals()[f"play_{lab_of(script).runs}"], script)


def main(words: list[str]) -> int:
    """Grade labs; return the exit status."""
    scripts = {}
    for word in LABS if words in ([], ["all"]) else words:
        lab, path = lab_of(Path(word)), Path(word)
        if lab is None or (path.suffix and not path.is_file()):
            known = f"the labs are {', '.join(LABS)}"
            print(f"grade.py: error: no lab {word}; {known}", file=sys.stderr)
            return 2
        scripts[lab.number] = path.resolve() if path.suffix else FOLDER / lab.script
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the labs need no GPU
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and end the processes
    passed = 0
    try:
        for number, script in [*scripts.items()]:
            if "import horovod" in script.read_text() and not HOROVOD:
                print(f"{number} is not graded, because it needs Horovod", flush=True)
                del scripts[number]
                continue
            wrong = grade(script)
            print(f"{number}: {wrong}" if wrong else f"{number} passes", flush=True)
            passed += not wrong
    except KeyboardInterrupt:
        return 130
    if len(scripts) > 1:
        print(f"{passed} of {len(scripts)} labs pass")
    return 0 if passed == len(scripts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
