"""Where the seconds between the launch and the first training step go.

    python -m benchmarks.startup [ROUNDS]

Launches distributed.py on the sample data in two CPU processes, as
scripts/distributed.sh does, and writes down when each part of its way to the end of the
first step was done. Prints medians and writes results/startup.json.
"""

import importlib
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
PARTS = (
    ("build_datasets", "open the data set"),
    ("build_loader", "start the loader processes"),
    ("build_model", "build the model"),
    ("DDP", "wrap it"),
    ("resume", "look for a checkpoint"),
    ("train_step", "first batch and first step"),
)
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
    mark("launcher: start Python, import torch, check, start the processes")
    for name in ("torch", "torchvision"):
        importlib.import_module(name)
        mark(f"import {name}")
    import torch.distributed as dist

    import distributed

    mark("import the rest")
    dist.init_process_group = watched("meet the other process", dist.init_process_group)
    for name, what in PARTS:
        setattr(distributed, name, watched(what, getattr(distributed, name)))
    train = distributed.train

    def train_and_leave(args, rank, *others) -> None:
        train(args, rank, *others)
        if rank == 0:
            Path(args.output, "marks.json").write_text(json.dumps(marks))
        dist.barrier()
        os._exit(0)

    distributed.train = train_and_leave
    distributed.main(distributed.arguments())


def arguments(argv: list[str] | None = None):
    """Parse the command line, for launch.check."""
    import distributed

    return distributed.arguments(argv)


def launch(data: Path) -> dict[str, float]:
    """Seconds that each part took."""
    with tempfile.TemporaryDirectory() as output:
        flags = ["--data", data, "--image-size", 64, "-b", 64, "--max-steps", 1]
        flags += ["--print-interval", 1, "--device", "cpu", "--output", output]
        launcher = [__file__, 2, "launch.torchrun", "torchrun", "--"]
        command = [sys.executable, "-m", "launch.check", *launcher, *flags]
        subprocess.run(
            list(map(str, command)),
            check=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), LAUNCHED: str(time.time())},
            stdout=subprocess.DEVNULL,
        )
        done = json.loads(Path(output, "marks.json").read_text())
    moments = [0.0, *done.values()]
    return {name: moments[i + 1] - moments[i] for i, name in enumerate(done)}


def main() -> None:
    """Launch it some times."""
    from benchmarks.comparison import write_results
    from scripts.sample_data import write_digits

    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "digits")
        write_digits(data)
        launches = [launch(data) for _ in range(rounds)]
    parts = {
        name: statistics.median(one[name] for one in launches) for name in launches[0]
    }
    total = statistics.median(sum(one.values()) for one in launches)
    parts["in all"] = total
    for name, seconds in parts.items():
        print(f"{name:68}{seconds:7.2f} s")
    rows = {name: {"seconds": seconds} for name, seconds in parts.items()}
    write_results("startup", {"rounds": rounds, "parts": rows})


if __name__ == "__main__":
    if LAUNCHED in os.environ:
        watch()
    else:
        main()
