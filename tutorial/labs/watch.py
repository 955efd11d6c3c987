"""Run a script in two processes and record what they do, for grade.py.

The doctor's recorder logs printed text, errors and DDP's averages. This file adds what
only the labs need: all weights after each step, and the images of each forward pass.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import re
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import torch
import torch._dynamo  # here, not in each process at its first step
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from doctor import job
from doctor import watch as recorder

PATIENCE = float(os.environ.get("PATIENCE", "10"))  # seconds
LIFE = 60  # seconds after which a process ends, even if the grader is gone
FORK = multiprocessing.get_context("fork")
# A stuck process waits in the innermost of these functions in its stack
CALLS = r"in (barrier|all_reduce|broadcast|\w+_process_group|\w+ward|__init__)$"


class Wrong(Exception):
    """Describes what a script does wrong, in one line."""


class Pass(NamedTuple):
    """One forward pass of a network."""

    step: int  # how many steps came before it
    training: bool  # the network's mode
    images: Tensor  # (N, 8)
    outputs: Tensor  # (N, 3)


class Step(NamedTuple):
    """One step of an optimizer."""

    passes: list[Pass]  # with gradients, since the previous step
    averages: int  # in how many of these passes DDP averaged gradients
    lr: float
    weights: Tensor  # all weights after the step, as one vector
    sharded: bool  # each process has a part of each weight, as with FSDP2
    held: int  # how many elements of the optimizer's momentum this process holds
    workers: int  # how many running processes this process has started


@dataclass
class Rank:
    """What one process did."""

    steps: list[Step] = field(default_factory=list)
    validated: list[Pass] = field(default_factory=list)  # passes without gradients
    text: str = ""  # everything that it prints
    printed: list[tuple[int, str]] = field(default_factory=list)  # steps done, accuracy
    errors: list[str] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)  # before and after all steps
    collectives: list[str] = field(default_factory=list)  # the script's own calls

    def trained(self) -> Tensor:
        """Return the images of all steps, with shape (N, 8)."""
        passes = [one.images for step in self.steps for one in step.passes]
        return torch.cat([torch.empty(0, 8), *passes])


# --- in the processes that run the script ---


def flat(optimizer: Optimizer) -> tuple[Tensor, bool]:
    """Copy an optimizer's weights to a vector; also return whether they are sharded."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    shards = [hasattr(weight, "placements") for weight in weights]
    weights = [w.full_tensor() if hasattr(w, "placements") else w for w in weights]
    return nn.utils.parameters_to_vector(weights).detach().clone(), all(shards)


class Watch:
    """Sends what this process does, beyond what doctor's recorder writes."""

    def __init__(self, pipe, disturb: Callable[[int], object]):
        self.pipe, self.disturb, self.optimizer = pipe, disturb, None
        self.passes, self.steps, self.depth = [], 0, 0
        torch.nn.modules.module.register_module_forward_hook(self.forward)
        register_optimizer_step_pre_hook(self.before_step)
        register_optimizer_step_post_hook(self.after_step)
        self.record, recorder.watch.collect = recorder.watch.collect, self.collect
        recorder.torch_is_there()

    def send(self, kind: str, value: object) -> None:
        """Add a value to one of the lists of this process's Rank."""
        self.pipe.send_bytes(pickle.dumps((kind, value)))

    def collect(self, name: str, call: Callable, /, *args, **options) -> object:
        """Record a collective, in any process group."""
        if not recorder.watch.collective:  # no other collective calls this one
            self.send("collectives", name)
        return self.record(name, call, *args, **options)

    def forward(self, layer: nn.Module, inputs: tuple, output: Tensor) -> None:
        """Record the input of a network's first layer and the output of its last."""
        grad = torch.is_grad_enabled()
        if isinstance(layer, nn.Linear) and layer.in_features == 8:
            self.images = inputs[0].detach().clone()
        elif isinstance(layer, nn.Linear) and layer.out_features == 3:
            outputs = output.detach().clone()
            done = Pass(self.steps, layer.training, self.images, outputs)
            self.passes.append(done) if grad else self.send("validated", done)

    def before_step(self, optimizer: Optimizer, *_) -> None:
        """Record the first weights."""
        self.depth += 1  # ZeRO's and Horovod's steps contain another step
        if self.depth > 1:
            return
        self.disturb(self.steps)
        if not self.optimizer:
            self.send("weights", flat(optimizer)[0])
        self.optimizer = optimizer

    def after_step(self, optimizer: Optimizer, *_) -> None:
        """Record the step."""
        self.depth -= 1
        if self.depth:
            return
        lr = optimizer.param_groups[0]["lr"]
        averages = sum(recorder.watch.now["forwards"])
        self.last, self.sharded = flat(optimizer)
        inner = getattr(optimizer, "optim", optimizer)  # of ZeRO's
        momenta = [state.get("momentum_buffer") for state in inner.state.values()]
        held = sum(one.numel() for one in momenta if one is not None)
        state = self.last, self.sharded, held, len(multiprocessing.active_children())
        self.send("steps", Step(self.passes, averages, lr, *state))
        self.passes, self.steps = [], self.steps + 1

    def end(self) -> None:
        """Record the last weights; shards cannot be gathered after the last step."""
        if self.optimizer:
            self.send("weights", self.last if self.sharded else flat(self.optimizer)[0])


def be_rank(script: Path, files: Path, stack: Path, variables, pipe, disturb) -> None:
    """Run the script as one of two processes."""
    os.setsid()  # so that the processes that it starts are killed with it
    signal.alarm(LIFE)
    torch.set_num_threads(1)  # before any thread of the fork does so
    for number, file in ((1, stack.with_suffix(".text")), (2, os.devnull)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    faulthandler.register(signal.SIGUSR1, stack.open("wb"))
    os.environ.update(variables)
    os.chdir(files)
    sys.argv = [str(script)]
    watch = Watch(pipe, disturb)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception:
        recorder.watch.excepthook(None, *sys.exc_info())
        sys.exit(1)
    recorder.watch.exit()
    watch.end()


# --- in the grader ---


@dataclass
class Run:
    """Two processes that run a script."""

    files: Path  # their working directory
    records: Path  # the folder of the doctor's recorder
    stacks: list[Path] = field(default_factory=list)
    pipes: list = field(default_factory=list)
    processes: list = field(default_factory=list)
    ranks: tuple[Rank, Rank] = field(default_factory=lambda: (Rank(), Rank()))

    def receive(self) -> list[int | None]:
        """Receive what the processes have sent; return their exit codes."""
        codes = [process.exitcode for process in self.processes]
        for (pipe, _), rank in zip(self.pipes, self.ranks, strict=True):
            while pipe.poll():
                kind, value = pickle.loads(pipe.recv_bytes())
                getattr(rank, kind).append(value)
        return codes

    def end(self, may_fail: bool = False) -> None:
        """Wait until both have ended; raise Wrong if one fails or hangs."""
        while None in (codes := self.receive()):
            both = zip(self.processes, codes, strict=True)
            ends = [process.sentinel for process, code in both if code is None]
            # If one process has failed, the other soon fails too
            patience = 2 if any(codes) else PATIENCE
            if not wait([*ends, *(pipe for pipe, _ in self.pipes)], patience):
                break
        for process in job.read(self.records).processes:
            rank = self.ranks[process.rank]
            rank.text = self.stacks[process.rank].with_suffix(".text").read_text()
            rank.errors = [one["text"] for one in process.of("error")]
            rank.printed = [(x["step"], x["text"]) for x in process.of("printed")]
        if may_fail or codes == [0, 0]:
            return
        lines = [self.ending(rank, code) for rank, code in enumerate(codes)]
        if not any(codes):
            raise Wrong(f"nothing happens for {PATIENCE:g} s: {' and '.join(lines)}")
        # A lost connection means only that the other process ended earlier
        lost = "onnection|roken pipe"
        own = [r for r in (0, 1) if codes[r] and not re.search(lost, lines[r])]
        raise Wrong(lines[own[0]] if own else " and ".join(lines))

    def kill(self) -> None:
        """Kill both processes, and the processes that they started."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()

    def ending(self, rank: int, code: int | None) -> str:
        """Return how a process ended or, if its code is None, where it waits."""
        steps, how = len(self.ranks[rank].steps), "ends"
        if code is None:
            os.kill(self.processes[rank].pid, signal.SIGUSR1)
            time.sleep(0.3)
            found = re.search(CALLS, self.stacks[rank].read_text(), re.M)
            how = f"is still waiting in {found[1]}()" if found else "does not end"
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
            run.stacks.append(files.parent / f"{port}-{rank}.stack")
            run.pipes.append(FORK.Pipe(duplex=False))
            task = script, files, run.stacks[rank], variables | place
            task += run.pipes[rank][1], disturb
            run.processes.append(FORK.Process(target=be_rank, args=task))
            run.processes[rank].start()
        yield run
