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
from torch import Tensor
from torch.distributed.elastic.utils.distributed import get_free_port
from watch import Forward, Last, Step, be_rank

from doctor import job
from doctor.event import Failed
from doctor.results import Printed

EPOCHS = 3  # of all scripts
PATIENCE = float(os.environ.get("PATIENCE", "10"))  # seconds
FORK = multiprocessing.get_context("fork")


class Wrong(Exception):
    """Describes what a script does wrong, in one line."""


class Rank:
    """What one process did: its events, and the text that it printed."""

    def __init__(self, process: job.Process, text: str):
        self.process, self.text = process, text
        self.steps, self.last = process.of(Step), process.of(Last)
        self.validated = process.of(Forward)  # passes without gradients
        self.printed = process.of(Printed)
        # Before the first step, after each step, and at the end
        self.weights = [one.before for one in self.steps[:1]]
        self.weights += [one.after for one in self.steps]
        self.weights += [one.weights for one in self.last]

    def trained(self) -> Tensor:
        """Return the images of all steps, with shape (N, 8)."""
        return torch.cat([torch.empty(0, 8), *(x.images() for x in self.steps)])

    def epochs(self) -> list[list[Step]]:
        """Return this process's steps, one list per epoch."""
        size = -(-len(self.steps) // EPOCHS)
        return [self.steps[size * i :][:size] for i in range(EPOCHS)]

    def ending(self, code: int | None) -> str:
        """Return how the process ended or, if its exit code is None, where it waits."""
        how, steps = "ends" if code == 0 else "does not end", len(self.steps)
        if code is None and (waits := job.waiting(self.process)):
            how = f"is still waiting in {waits.what}()"
        elif code and code != -signal.SIGALRM:  # its limit is LIFE
            errors = [one.text for one in self.process.of(Failed)]
            error = [*errors, f"exit status {code}"][0]
            first = re.split(r"\. |\n", error)[0]  # its first sentence
            how = "fails with " + re.sub(r"\[/\S+\] ", "", first)
        when = f"after step {steps}" if steps else "before the first step"
        return f"{when}, rank {self.process.rank} {how}"


@dataclass
class Run:
    """The processes that run a script."""

    files: Path  # their working directory
    records: Path  # the folder of their events and texts
    processes: list = field(default_factory=list)
    ranks: list[Rank] = field(default_factory=list)

    def end(self, may_fail: bool = False) -> None:
        """Wait until all processes have ended; raise Wrong if one fails or hangs."""
        while alive := [x.sentinel for x in self.processes if x.exitcode is None]:
            failed = any(process.exitcode for process in self.processes)
            wait(alive, 2 if failed else 0.5)  # then the other soon fails too
            if failed or self.hangs():
                break
        codes = [process.exitcode for process in self.processes]
        found = {process.rank: process for process in job.read(self.records).processes}
        for rank in range(len(codes)):
            text = (self.records / f"{rank}.text").read_text()
            process = found.get(rank, job.Process(rank, len(codes), []))
            self.ranks.append(Rank(process, text))
        if may_fail or codes == [0] * len(codes):
            return
        lines = [x.ending(code) for x, code in zip(self.ranks, codes, strict=True)]
        if not any(codes):
            raise Wrong(f"nothing happens for {PATIENCE:g} s: {' and '.join(lines)}")
        # A lost connection means only that the other process ended earlier
        lost = "onnection|roken pipe"
        pairs = zip(lines, codes, strict=True)
        own = [line for line, code in pairs if code and not re.search(lost, line)]
        raise Wrong(own[0] if own else " and ".join(lines))

    def hangs(self) -> bool:
        """Return whether no process has made progress for PATIENCE seconds."""
        last = [one.events[-1] for one in job.read(self.records).processes]
        waits = [getattr(one, "seconds", None) for one in last]  # of doctor's Waits
        return any(waits) and all(x is None or x > PATIENCE for x in waits)

    def kill(self) -> None:
        """Kill the processes, and those that they started."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()


@contextlib.contextmanager
def horovod(size: int) -> Iterator[list[dict[str, str]]]:
    """Start Horovod's rendezvous server; yield each rank's environment variables."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    common = create_run_env_vars("127.0.0.1", ["lo"], str(server.start()))
    slots = get_host_assignments(parse_hosts(f"localhost:{size}"), size)
    server.init(slots)
    try:
        yield [common | create_slot_env_vars(slot) for slot in slots]
    finally:
        server.stop()


@contextlib.contextmanager
def started(
    script: Path,
    files: Path | None = None,
    size: int = 2,
    machines: int = 1,
    disturb: Callable[[int], object] = lambda steps: None,
) -> Iterator[Run]:
    """Start a script in `size` processes; kill them when the `with` block ends.

    They run in the folder `files`, or in a new folder that is deleted after the block.
    With `machines=2`, they seem to be on two machines. The processes call `disturb`
    before each step, with the number of completed steps.
    """
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
    variables |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size // machines)}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lab-")))
        run = Run(files or folder / "files", folder / "records")
        run.files.mkdir(exist_ok=True)
        run.records.mkdir()
        variables["DOCTOR_FOLDER"] = str(run.records)
        stack.callback(run.kill)
        needs = "import horovod" in script.read_text()
        places = stack.enter_context(horovod(size)) if needs else [{}] * size
        for rank, place in enumerate(places):
            local = {"RANK": str(rank), "LOCAL_RANK": str(rank % (size // machines))}
            text = run.records / f"{rank}.text"
            task = script, run.files, text, variables | place | local, disturb
            run.processes.append(FORK.Process(target=be_rank, args=task))
            run.processes[rank].start()
        yield run
