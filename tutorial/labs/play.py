"""Start a script in its processes, wait for them, and read what they recorded."""

import contextlib
import multiprocessing
import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

import torch
from torch.distributed.elastic.utils.distributed import get_free_port

from doctor import job
from doctor.event import Failed
from doctor.results import Printed
from tutorial.labs.watch import Forward, Last, Step, be_rank

EPOCHS = 3  # of all scripts
torch.set_num_threads(1)  # a process with other threads cannot fork safely
PATIENCE = float(os.environ.get("PATIENCE", "10"))  # seconds
FORK = multiprocessing.get_context("fork")


class Wrong(Exception):
    """Describes what a script does wrong, in one line."""


class Rank:
    """What one process did."""

    def __init__(self, process: job.Process):
        self.process, self.printed = process, process.of(Printed)
        self.steps, self.last = process.of(Step), process.of(Last)
        self.validated = process.of(Forward)  # passes without gradients
        # Before the first step, after each step, and at the end
        self.weights = [one.before for one in self.steps[:1]]
        self.weights += [one.after for one in self.steps]
        self.weights += [one.weights for one in self.last]

    def ending(self, code: int | None) -> str:
        """Return how the process ended or, if its exit code is None, where it waits."""
        how = "does not end" if code is None else f"ends with exit code {code}"
        if waits := job.waiting(self.process):
            how = f"is still waiting in {waits.what}()"
        for one in self.process.of(Failed):
            sentence = re.split(r"\. |\n", one.text)[0]
            how = "fails with " + re.sub(r"\[/\S+\] ", "", sentence)
        count = len(self.steps)
        when = f"after step {count}" if count else "before the first step"
        return f"{when}, rank {self.process.rank} {how}"


@dataclass
class Run:
    """The processes that run a script."""

    script: Path
    files: Path  # their working directory
    records: Path  # the folder of their events
    processes: list = field(default_factory=list)
    ranks: list[Rank] = field(default_factory=list)

    def end(self) -> None:
        """Wait until all processes have ended; raise Wrong if one fails or hangs."""
        while alive := [x.sentinel for x in self.processes if x.exitcode is None]:
            failed = any(process.exitcode for process in self.processes)
            wait(alive, 2 if failed else 0.5)  # then the other soon fails too
            last = [one.events[-1] for one in job.read(self.records).processes]
            waits = [getattr(one, "seconds", None) for one in last]  # of doctor's Waits
            hangs = any(waits) and all(x is None or x > PATIENCE for x in waits)
            if failed or hangs:
                break
        codes = [process.exitcode for process in self.processes]
        found = job.read(self.records).processes
        known = {process.rank: process for process in found}
        none = [job.Process(rank, len(codes), []) for rank in range(len(codes))]
        self.ranks = [Rank(known.get(one.rank, one)) for one in none]
        if any(code != 0 for code in codes):
            lines = [x.ending(y) for x, y in zip(self.ranks, codes, strict=True)]
            # A lost connection means only that the other process ended earlier
            pairs, lost = zip(lines, codes, strict=True), "onnection|roken pipe"
            own = [line for line, code in pairs if code and not re.search(lost, line)]
            when = "" if any(codes) else f"nothing happens for {PATIENCE:g} s: "
            raise Wrong(own[0] if own else when + " and ".join(lines))

    def kill(self) -> None:
        """Kill the processes, and those that they started."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()


def horovod(size: int, stack: contextlib.ExitStack) -> list[dict[str, str]]:
    """Start Horovod's rendezvous server; return each rank's environment variables."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    common = create_run_env_vars("127.0.0.1", ["lo"], str(server.start()))
    stack.callback(server.stop)
    slots = get_host_assignments(parse_hosts(f"localhost:{size}"), size)
    server.init(slots)
    return [common | create_slot_env_vars(slot) for slot in slots]


@contextlib.contextmanager
def started(
    script: Path,
    files: Path | None = None,
    size: int = 2,
    when: str = "",
    disturb: Callable[[int], object] = lambda steps: None,
    **more: str,
) -> Iterator[Run]:
    """Start a script in `size` processes; kill them when the `with` block ends.

    They run in the folder `files`, or in a new folder that is deleted after the block,
    and have `more` environment variables. The block's messages begin with `when`. The
    processes call `disturb` before each step, with the number of completed steps.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lab-")))
        run = Run(script, files or folder, Path(tempfile.mkdtemp(dir=folder)))
        needs = "import horovod" in script.read_text()
        places = horovod(size, stack) if needs else [{}] * size
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
        common |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        common |= {"DOCTOR_FOLDER": str(run.records)}
        stack.callback(run.kill)
        for rank, place in enumerate(places):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **place, **more}
            task = script, run.files, common | own, disturb
            run.processes.append(FORK.Process(target=be_rank, args=task))
            run.processes[rank].start()
        try:
            yield run
        except Wrong as wrong:
            raise Wrong(f"{when}{wrong}") from None
