"""Kill runs at random moments, resume them, and compare them with uninterrupted runs.

    python -m benchmarks.kills [KILLS]

A run of two processes, or of one under python, is interrupted and resumed three times.
The launcher, a training process or a loader process gets SIGKILL while loader processes
start, in a step, in a validation or in a save; or the launcher gets SIGTERM or Ctrl-C.
All processes have to end within 60 seconds. The run has to end with the weights, momenta,
learning rates and metrics of an uninterrupted run, bit by bit. The benchmark writes
benchmarks/results/kills.json in about an hour.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from random import Random

import torch
from torch.utils._pytree import tree_leaves

from benchmarks.comparison import parse_number, write_results
from scripts.sample_data import write_digits

ROOT = Path(__file__).resolve().parent.parent
LAUNCHERS = {
    "torchrun": "torchrun --standalone --nproc-per-node 2 distributed.py",
    "mp.spawn": "python multiprocessing_distributed.py --nprocs 2",
    "horovodrun": "horovodrun --gloo -np 2 python horovod_distributed.py",
    "python": "python dataparallel.py",
}
FLAGS = "--arch squeezenet1_1 --image-size 32 -b 8 --precision fp32 --lr 0.2 -j 1 "
FLAGS += "--warmup-epochs 1 --schedule cosine --epochs 5 --max-steps 10 "
FLAGS += "--print-interval 2 --save-minutes 0"
MOMENTS = ("loader start", "step", "validation", "save")
VICTIMS = ("training process", "loader process", "launcher")
TIMES = {"seconds", "images_per_second", "data_wait", "peak_memory_mib"}


class Run:
    """A training run; its processes are those that inherited KILLS_RUN."""

    def __init__(self, launcher: str, data: Path, output: Path, *flags: str):
        """Start the run, as a shell does, with FLAGS and other `flags`."""
        self.output, self.log = output, output.with_suffix(".log")
        self.mark, self.began = f"KILLS_RUN={output}", time.time()
        words = f"{LAUNCHERS[launcher]} {FLAGS} --data {data} --output {output}".split()
        path = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
        env = ["env", path, self.mark, "OMP_NUM_THREADS=1", "CUDA_VISIBLE_DEVICES="]
        options = {"stderr": subprocess.STDOUT, "start_new_session": True}
        with open(self.log, "wb") as log:
            command = [*env, *words, *flags]
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, **options)

    def alive(self) -> dict[int, list[str]]:
        """Return each process's parent, name, and command with its environment."""
        self.process.poll()  # waits for it, if it has ended
        command = ["ps", "axeww", "-o", "pid=,ppid=,comm=,args="]
        lines = subprocess.check_output(command, text=True, errors="replace").split(
            "\n"
        )
        found = [line.split(maxsplit=3) for line in lines if self.mark in line]
        return {int(pid): others for pid, *others in found}

    def victims(self, kind: str) -> list[int]:
        """Return the ids of one of VICTIMS."""
        if kind == "launcher":
            return [self.process.pid]
        found = self.alive()
        loaders = [pid for pid in found if found[pid][1] == "pt_data_worker"]
        if kind == "loader process":
            return loaders
        parents = {int(found[pid][0]) for pid in loaders} & found.keys()
        return [int(found[p][0]) if "forkserver" in found[p][2] else p for p in parents]

    def half_written(self) -> list[str]:
        """Return the names of the files that this run has not written completely."""
        with suppress(FileNotFoundError):  # complete by now
            files = self.output.glob("*.tmp")
            return [file.name for file in files if file.stat().st_mtime > self.began]
        return []

    def has_come_to(self, moment: str, count: int) -> bool:
        """Whether the run is at one of MOMENTS, and has printed `count` intervals."""
        if moment == "loader start":
            return bool(self.victims("loader process"))
        text = self.log.read_text(errors="replace")
        if moment == "validation":
            return ", step 10/10" in text
        ready = text.count(", step ") >= count
        return ready and (moment == "step" or bool(self.half_written()))

    def interrupt(self, name: str, victim: str, moment: str, draw: Random) -> dict:
        """Send a signal to one of VICTIMS at one of MOMENTS; return what happened."""
        count = draw.randint(1, 4)
        while not self.has_come_to(moment, count):
            assert self.process.poll() is None, f"no {moment}: {self.log.read_text()}"
            time.sleep(0.001)
        time.sleep(0 if moment == "save" else draw.uniform(0, 0.2))
        send = os.killpg if name == "SIGINT" else os.kill  # Ctrl-C: to the whole group
        send(draw.choice(self.victims(victim)), signal.Signals[name])
        began = time.monotonic()
        while (left := self.alive()) and time.monotonic() < began + 60:
            time.sleep(0.05)
        seconds = time.monotonic() - began
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        row = {"signal": name, "victim": victim, "moment": moment, "seconds": seconds}
        row["left"] = [name for _, name, _ in left.values()]
        return {**row, "half written": self.half_written()}

    def result(self) -> list:
        """Wait for the end; return all that the run computed, of tensors the bytes."""
        assert self.process.wait() == 0, self.log.read_text()
        content = torch.load(self.output / "checkpoint.pt", weights_only=True)
        lines = (self.output / "epochs.jsonl").read_text().splitlines()
        assert content.pop("records") == (records := [json.loads(x) for x in lines])
        del content["recipe"]  # has the flags of this launcher
        leaves = tree_leaves(content)
        leaves += [r[name] for r in records for name in sorted(r.keys() - TIMES)]
        return [x.numpy().tobytes() if torch.is_tensor(x) else x for x in leaves]


def measure(launcher: str, kills: int, data: Path, folder: Path, whole: list) -> dict:
    """Interrupt runs under a launcher; compare their results with `whole`."""
    draw, events, rows, equal = Random(launcher), [], [], []
    victims = VICTIMS[: 2 if launcher == "python" else 3]
    pairs = [("SIGKILL", victim, moment) for victim in victims for moment in MOMENTS]
    while len(events) < kills:
        events += draw.sample(pairs, len(pairs))
    events = events[:kills]
    events += [("SIGTERM", "launcher", "step"), ("SIGINT", "launcher", "step")]
    for first in range(0, len(events), 3):
        run = launcher, data, folder / f"{launcher}{first}", "--resume"
        for event in events[first : first + 3]:
            rows.append(Run(*run).interrupt(*event, draw))
            print(launcher, *rows[-1].values(), flush=True)
        equal.append(Run(*run).result() == whole)
        print(launcher, "equal:", equal[-1], flush=True)
    found = {"runs": len(equal), "runs equal to the bit": sum(equal)}
    found["most seconds until no process was left"] = max(r["seconds"] for r in rows)
    found["interruptions that left a process"] = sum(bool(r["left"]) for r in rows)
    found["interruptions of a write"] = sum(bool(r["half written"]) for r in rows)
    return {**found, "interruptions": rows}


def main() -> None:
    """Measure all LAUNCHERS and write the results."""
    kills = parse_number(__doc__, "KILLS", 60)
    with tempfile.TemporaryDirectory() as name:
        folder, data = Path(name), Path(name, "digits")
        write_digits(data)
        one, two = (
            Run("python", data, folder / "1"),
            Run("torchrun", data, folder / "2"),
        )
        whole = dict.fromkeys(LAUNCHERS, two.result()) | {"python": one.result()}
        found = {}
        for name in LAUNCHERS:
            found[name] = measure(name, kills // 4, data, folder, whole[name])
    write_results("kills", {"flags": FLAGS, "launchers": found})


if __name__ == "__main__":
    main()
