"""Start a script in two processes, wait for them, and read what they recorded."""

import contextlib
import multiprocessing
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

import torch
from torch import Tensor
from watch import LIFE, Call, Forward, Weights, be_rank

from doctor import job
from doctor.event import Failed
from doctor.laws.printed import Printed

PATIENCE = float(os.environ.get("PATIENCE", "10"))  # seconds
FORK = multiprocessing.get_context("fork")


class Wrong(Exception):
    """Describes what a script does wrong, in one line."""


@dataclass
class Rank:
    """What one process did."""

    steps: list[Weights] = field(default_factory=list)
    validated: list[Forward] = field(default_factory=list)  # passes without gradients
    text: str = ""  # everything that it prints
    printed: list[Printed] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)  # before and after all steps
    collectives: list[str] = field(default_factory=list)  # the script's own calls

    def trained(self) -> Tensor:
        """Return the images of all steps, with shape (N, 8)."""
        passes = [one.images for step in self.steps for one in step.passes]
        return torch.cat([torch.empty(0, 8), *passes])


def read_rank(process: job.Process, text: str) -> Rank:
    """Return what a process did, from its events."""
    rank, passes = Rank(text=text, printed=process.of(Printed)), []
    rank.errors = [one.text for one in process.of(Failed)]
    rank.collectives = [one.name for one in process.of(Call)]
    for one in process.events:
        if isinstance(one, Forward):
            one.images, one.outputs = map(torch.tensor, (one.images, one.outputs))
            (passes if one.grad else rank.validated).append(one)
        elif isinstance(one, Weights):
            one.weights = torch.tensor(one.weights)
            if one.when == "step":
                rank.steps.append(one)
                one.passes, passes = passes, []
            else:
                rank.weights.append(one.weights)
    return rank


@dataclass
class Run:
    """Two processes that run a script."""

    files: Path  # their working directory
    records: Path  # the folder of their events
    texts: list[Path] = field(default_factory=list)
    processes: list = field(default_factory=list)
    ranks: list[Rank] = field(default_factory=list)

    def end(self, may_fail: bool = False) -> None:
        """Wait until both have ended; raise Wrong if one fails or hangs."""
        ends = time.monotonic() + LIFE
        while None in (codes := [process.exitcode for process in self.processes]):
            alive = [x.sentinel for x in self.processes if x.exitcode is None]
            if any(codes):  # then the other soon fails too
                wait(alive, 2)
                codes = [process.exitcode for process in self.processes]
                break
            wait(alive, 0.5)
            if self.hangs() or time.monotonic() > ends:
                break
        self.ranks = [Rank(), Rank()]
        found = job.read(self.records).processes
        for process in found:
            text = self.texts[process.rank].read_text()
            self.ranks[process.rank] = read_rank(process, text)
        if may_fail or codes == [0, 0]:
            return
        waits = {process.rank: job.waiting(process) for process in found}
        lines = [self.ending(n, code, waits.get(n)) for n, code in enumerate(codes)]
        if not any(codes):
            raise Wrong(f"nothing happens for {PATIENCE:g} s: {' and '.join(lines)}")
        # A lost connection means only that the other process ended earlier
        lost = "onnection|roken pipe"
        own = [r for r in (0, 1) if codes[r] and not re.search(lost, lines[r])]
        raise Wrong(lines[own[0]] if own else " and ".join(lines))

    def hangs(self) -> bool:
        """Return whether nothing has happened for a long time."""
        if not (self.records / "waits").exists():
            return False
        last = [one.events[-1] for one in job.read(self.records).processes]
        waits = [getattr(one, "seconds", None) for one in last]  # of doctor's Waits
        return any(waits) and all(x is None or x > PATIENCE for x in waits)

    def kill(self) -> None:
        """Kill both processes, and the processes that they started."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()

    def ending(self, rank: int, code: int | None, waits) -> str:
        """Return how a process ended or, if its code is None, where it waits."""
        steps, how = len(self.ranks[rank].steps), "ends"
        if code is None:
            how = f"is still waiting in {waits.what}()" if waits else "does not end"
        elif code == -signal.SIGALRM:
            how = f"does not end within {LIFE} s"
        elif code:
            error = *self.ranks[rank].errors, f"exit status {code}"
            first = re.split(r"\. |\n", error[0])[0]  # its first sentence
            how = "fails with " + re.sub(r"\[/\S+\] ", "", first)
        when = f"after step {steps}" if steps else "before the first step"
        return f"{when} rank {rank} {how}"


@contextlib.contextmanager
def horovod() -> Iterator[list[dict[str, str]]]:
    """Start Horovod's rendezvous server; yield each rank's environment variables."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    common = {"GLOO_RENDEZVOUS_PORT": server.start(), "GLOO_IFACE": "lo", "SIZE": 2}
    common |= {"GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOSTNAME": "localhost"}
    common |= {"CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo", "LOCAL_SIZE": 2}
    common |= {"CROSS_RANK": 0, "CROSS_SIZE": 1, "CYCLE_TIME": 150}  # ms between rounds
    server.init(get_host_assignments(parse_hosts("localhost:2"), 2))
    ranks = [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in (0, 1)]
    try:
        yield [{f"HOROVOD_{k}": str(v) for k, v in one.items()} for one in ranks]
    finally:
        server.stop()


@contextlib.contextmanager
def started(
    script: Path,
    files: Path,
    machines: int = 1,
    disturb: Callable[[int], object] = lambda steps: None,
) -> Iterator[Run]:
    """Start a script in two processes in the folder `files`; kill them after the block.

    With `machines=2`, two machines have one process each. The processes call `disturb`
    before each step, with the number of completed steps.
    """
    files.mkdir(exist_ok=True)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    variables |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": str(2 // machines)}
    run = Run(files, files.parent / f"records{port}")
    run.records.mkdir()
    variables["DOCTOR_FOLDER"] = str(run.records)
    with contextlib.ExitStack() as stack:
        stack.callback(run.kill)
        needs = "import horovod" in script.read_text()
        places = stack.enter_context(horovod()) if needs else [{}, {}]
        for rank, place in enumerate(places):
            place |= {"RANK": str(rank), "LOCAL_RANK": str(rank % (2 // machines))}
            run.texts.append(files.parent / f"{port}-{rank}.text")
            task = script, files, run.texts[rank], variables | place, disturb
            run.processes.append(FORK.Process(target=be_rank, args=task))
            run.processes[rank].start()
        yield run
