"""Compare how long the launchers take until the first training step.

    python -m benchmarks.start DATA [OTHER]

DATA is a dataset of small images, for example sample_data/digits. OTHER is another copy
of this project, for example an older version: its launches alternate with ours, and
the ratios are relative to it. The benchmark writes benchmarks/results/start.json.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.comparison import ROOT, compared, interleave, print_rows, write_results

ROUNDS, PROCESSES = 9, 2
LAUNCHES = {
    "python": "python dataparallel.py",
    "torchrun": f"torchrun --standalone --nproc-per-node={PROCESSES} distributed.py",
    "mp.spawn": f"python multiprocessing_distributed.py --nprocs {PROCESSES}",
    "horovodrun": f"horovodrun --gloo -np {PROCESSES} python horovod_distributed.py",
}
FLAGS = "-b 32 --image-size 32 --precision fp32 --decoder torchcodec --epochs 1"
FLAGS += " --max-steps 1 --print-interval 1 --workers"


def first_step(launch: str, data: str, folder: Path) -> Callable[[], float]:
    """Return a function that measures the seconds from a launch to its first step."""
    # In older versions, --workers counts the loader processes of all processes
    older = (folder / "launch").exists() and not launch.startswith("python data")
    words = [*launch.split(), *FLAGS.split(), str(PROCESSES if older else 1)]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {"PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def measure() -> float:
        with tempfile.TemporaryDirectory() as output:
            began = time.perf_counter()
            process = subprocess.Popen(
                [*words, "--data", data, "--output", f"{output}/run"],
                cwd=folder,
                env={**os.environ, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            lines = []
            for line in process.stdout:
                lines.append(line)
                if "step 1/" in line:
                    seconds = time.perf_counter() - began
            if process.wait():
                raise RuntimeError(f"{launch} in {folder} failed:\n{''.join(lines)}")
        return seconds

    return measure


def main() -> None:
    """Measure all LAUNCHES."""
    data, *others = sys.argv[1:]
    trees = {"other": Path(others[0])} if others else {}
    trees["this"] = ROOT
    works = {
        (launch, tree): first_step(LAUNCHES[launch], str(Path(data).resolve()), folder)
        for launch in LAUNCHES
        for tree, folder in trees.items()
    }
    found, results = interleave(works, ROUNDS), {}
    for launch in LAUNCHES:
        of_launch = {tree: found[launch, tree] for tree in trees}
        results[launch] = compared(of_launch, next(iter(trees)))
        print_rows(launch, "seconds", results[launch])
    write_results("start", {"rounds": ROUNDS, "launches": results})


if __name__ == "__main__":
    main()
