"""Where the seconds between the launch and the first training step go.

    python -m benchmarks.startup [ROUNDS]

Launches distributed.py on small images in two CPU processes through
scripts/distributed.sh, and writes down when each part of its way to the end of the
first step was done. Prints medians and writes results/startup.json.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LAUNCHED = "BENCHMARK_LAUNCHED_AT"  # set for the processes that are watched
ROOT = Path(__file__).resolve().parent.parent
PARTS = {
    "build_datasets": "open the data set",
    "build_loader": "start the loader processes",
    "build_model": "build the model",
    "DDP": "wrap it",
    "train_step": "look for a checkpoint, first batch and first step",
}
marks: dict[str, float] = {}  # seconds since the launch, in order


def mark(name: str) -> None:
    """Note that something is done."""
    marks[name] = time.time() - float(os.environ[LAUNCHED])


def watched(name: str, function):
    """The function, marked whenever it returns."""

    def call(*args, **kwargs):
        result = function(*args, **kwargs)
        mark(name)
        return result

    return call


def watch() -> None:
    """One of the two processes: train one step, marking what is done."""
    for name, what in PARTS.items():
        setattr(script, name, watched(what, getattr(script, name)))
    train = script.train

    def train_and_leave(args, rank, *others) -> None:
        train(args, rank, *others)
        if rank == 0:
            Path(args.output, "marks.json").write_text(json.dumps(marks))
        script.dist.barrier()
        os._exit(0)

    script.train = train_and_leave
    script.main(arguments())


def launch(data: Path) -> dict[str, float]:
    """Seconds that each part took."""
    with tempfile.TemporaryDirectory() as output:
        flags = ["--data", data, "--image-size", 64, "-b", 64, "--max-steps", 1]
        flags += ["--print-interval", 1, "--device", "cpu", "--output", output]
        variables = {"SCRIPT": __file__, "NPROC": 2, "PYTHON": sys.executable}
        variables[LAUNCHED] = time.time()
        subprocess.run(
            ["bash", "scripts/distributed.sh", *map(str, flags)],
            check=True,
            cwd=ROOT,
            env=os.environ | {name: str(value) for name, value in variables.items()},
            stdout=subprocess.DEVNULL,
        )
        done = json.loads(Path(output, "marks.json").read_text())
    moments = [0.0, *done.values()]
    return {name: moments[i + 1] - moments[i] for i, name in enumerate(done)}


def main() -> None:
    """Launch it some times."""
    from benchmarks.comparison import write_results
    from benchmarks.photographs import write_photographs

    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as folder:
        write_photographs(Path(folder), 128, 16)
        launches = [launch(Path(folder)) for _ in range(rounds)]
    parts = {
        name: statistics.median(one[name] for one in launches) for name in launches[0]
    }
    parts["in all"] = statistics.median(sum(one.values()) for one in launches)
    for name, seconds in parts.items():
        print(f"{name:68}{seconds:7.2f} s")
    rows = {name: {"seconds": seconds} for name, seconds in parts.items()}
    write_results("startup", {"rounds": rounds, "parts": rows})


if LAUNCHED in os.environ:  # in the place of distributed.py, which it imports in parts
    mark("launcher: start Python, import torch, check, start the processes")
    import torch  # noqa: F401

    mark("import torch")
    import torchvision  # noqa: F401

    mark("import torchvision")
    import distributed as script
    from distributed import arguments, build_datasets, build_model  # noqa: F401

    mark("import the rest")
    if __name__ == "__main__":
        watch()
elif __name__ == "__main__":
    main()
