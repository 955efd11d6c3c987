"""Kill training runs at random moments, resume them, and compare the final results.

    python -m benchmarks.kills [KILLS]

Each run has two processes (dataparallel.py has one). The benchmark interrupts each run
three times, while loader processes start or during a step, validation or saving, and
resumes it. It sends SIGKILL to the launcher, a training process or a loader process, or
SIGTERM or Ctrl-C to the launcher. All processes must end within 60 seconds, and the
final results must equal those of an uninterrupted run. 60 KILLS take half an hour.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from random import Random

import torch
from torch.utils._pytree import tree_leaves

from benchmarks.comparison import ROOT, parse_number, write_results

LAUNCHERS = {
    "torchrun": "torchrun --standalone --nproc-per-node 2 distributed.py",
    "mp.spawn": "python multiprocessing_distributed.py --nprocs 2",
    "horovodrun": "horovodrun --gloo -np 2 python horovod_distributed.py",
    "python": "python dataparallel.py",
}
FLAGS = "--arch squeezenet1_1 --image-size 32 -b 8 --precision fp32 --lr 0.2 -j 1 "
FLAGS += "--warmup-epochs 1 --schedule cosine --epochs 6 --max-steps 10 "
FLAGS += "--print-interval 2 --save-minutes 0"
MOMENTS = ("loader start", "step", "validation", "save")
VICTIMS = ("launcher", "training process", "loader process")
STOPS = [("SIGTERM", "launcher", "step"), ("SIGINT", "launcher", "step")]
TIMES = {"seconds", "images_per_second", "data_wait", "peak_memory_mib"}


class Run:
    """A training run; all its processes inherit the environment variable KILLS_RUN."""

    def __init__(self, launcher: str, data: Path, output: Path, *flags: str):
        """Start the run as a shell would, with the common FLAGS and these `flags`."""
        self.output, self.log = output, output.with_suffix(".log")
        self.mark = f"KILLS_RUN={output}"
        for name in self.half_written():
            (output / name).unlink()  # left by the previous run
        path = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
        words = [
            "env",
            "--default-signal=INT",
            path,
            self.mark,
            "OMP_NUM_THREADS=1",
            "CUDA_VISIBLE_DEVICES=",
        ]
        command = f"{LAUNCHERS[launcher]} {FLAGS} --data {data} --output {output}"
        words += [*command.split(), *flags]
        options = {"stderr": subprocess.STDOUT, "start_new_session": True, "cwd": ROOT}
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(words, stdout=log, **options)

    def alive(self) -> dict[int, tuple[int, str]]:
        """Return {PID: (parent's PID, name)} of the run's processes."""
        self.process.poll()  # reaps the launcher, if it has ended
        command = ["ps", "axeww", "-o", "pid=,ppid=,comm=,args="]  # e: with variables
        printed = subprocess.check_output(command, text=True, errors="replace")
        lines = [line.split() for line in printed.split("\n") if self.mark in line]
        return {int(pid): (int(parent), name) for pid, parent, name, *_ in lines}

    def victims(self, kind: str) -> list[int]:
        """Return the PIDs of a `kind` of process; [] before loader processes start."""
        found = self.alive()
        loaders = [pid for pid in found if found[pid][1] == "pt_data_worker"]
        if kind == "launcher" and loaders:
            return [self.process.pid]
        trainers = found.keys() & {found[pid][0] for pid in loaders}
        return loaders if kind == "loader process" else sorted(trainers)

    def half_written(self) -> list[str]:
        """Return the names of the files that the run has not written completely."""
        return [file.name for file in self.output.glob("*.tmp")]

    def interrupt(self, name: str, victim: str, moment: str, draw: Random) -> dict:
        """Send signal `name` to one `victim` at a `moment`; return what happened."""
        moments = {"loader start": ("", 0), "validation": (", step 10/10", 1)}
        line, count = moments.get(moment, (", step ", draw.randint(1, 4)))
        victims = []
        while not victims:
            assert self.process.poll() is None, f"no {moment}: {self.log.read_text()}"
            time.sleep(0.02)
            if self.log.read_text(errors="replace").count(line) >= count:
                victims = self.victims(victim)
        # The script starts to save right after it has printed a line
        time.sleep(0 if moment == "save" else draw.uniform(0, 0.3))
        send = os.killpg if name == "SIGINT" else os.kill  # Ctrl-C reaches the group
        send(draw.choice(victims), signal.Signals[name])
        began = time.monotonic()
        while (left := self.alive()) and time.monotonic() < began + 60:
            time.sleep(0.1)
        row = {"signal": name, "victim": victim, "moment": moment}
        row["seconds until no process was left"] = time.monotonic() - began
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return {**row, "left": list(left.values()), "half written": self.half_written()}

    def result(self) -> list:
        """Wait for the run to end; return its state and metrics (tensors as bytes)."""
        assert self.process.wait() == 0, self.log.read_text()
        content = torch.load(self.output / "checkpoint.pt", weights_only=True)
        lines = (self.output / "epochs.jsonl").read_text().splitlines()
        assert content.pop("records") == (records := list(map(json.loads, lines)))
        del content["recipe"]  # contains flags that differ between launchers
        metrics = [r[name] for r in records for name in sorted(r.keys() - TIMES)]
        leaves = tree_leaves([content, metrics])
        return [x.numpy().tobytes() if torch.is_tensor(x) else x for x in leaves]


def measure(launcher: str, kills: int, data: Path, folder: Path, whole: list) -> dict:
    """Interrupt a launcher's runs, and compare the results with the correct ones."""
    draw, rows, equal = Random(launcher), [], []
    pairs = list(product(VICTIMS[launcher == "python" :], MOMENTS))
    pairs *= 1 + kills // len(pairs)
    events = [("SIGKILL", *pair) for pair in draw.sample(pairs, kills)] + STOPS
    for first in range(0, len(events), 3):
        run = launcher, data, folder / f"{launcher}{first}", "--resume"
        for event in events[first : first + 3]:
            rows.append(Run(*run).interrupt(*event, draw))
            print(equal, *rows[-1].values(), flush=True)
        equal.append(Run(*run).result() == whole)
    seconds = [row["seconds until no process was left"] for row in rows]
    return {
        "interruptions": len(rows),
        "most seconds until all processes had ended": max(seconds),
        "with processes left after 60 seconds": sum(bool(row["left"]) for row in rows),
        "runs": len(equal),
        "equal to the bit": sum(equal),
        "rows": rows,
    }


def main() -> None:
    """Interrupt runs of all LAUNCHERS, and write the results."""
    kills = parse_number(__doc__, "KILLS", 60)
    with tempfile.TemporaryDirectory() as name:
        folder, data = Path(name), Path(name, "digits")
        sample = [sys.executable, "-m", "scripts.sample_data", data]
        subprocess.run(sample, cwd=ROOT, check=True)
        whole = dict.fromkeys(LAUNCHERS, Run("torchrun", data, folder / "2").result())
        whole["python"] = Run("python", data, folder / "1").result()
        for one in LAUNCHERS:
            whole[one] = measure(one, kills // 4, data, folder, whole[one])
    rows = {one: whole[one].pop("rows") for one in LAUNCHERS}
    write_results("kills", {"flags": FLAGS, "launchers": whole, "rows": rows})


if __name__ == "__main__":
    main()
