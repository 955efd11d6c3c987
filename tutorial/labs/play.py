"""Run a script in its processes; record what they do, and read it for the checks.

The doctor's recorder writes printed text, errors and waits. This file adds events for
forward passes, steps and the end of the script.
"""

import contextlib
import errno
import gc
import multiprocessing
import os
import random
import re
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import ClassVar
from uuid import uuid4

import torch
import torch._dynamo  # otherwise, each process imports it in its first step
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import optimizer as optimizers
from torch.overrides import TorchFunctionMode

from doctor import job, record
from doctor.event import Event, Failed
from doctor.moments import HOROVOD, Moments, weights
from doctor.record import recorder, wrap
from doctor.results import Printed
from doctor.watcher import Watcher, watchers

EPOCHS = 3  # of all scripts
torch.set_num_threads(1)  # a process with other threads cannot fork safely
PATIENCE = float(os.environ.get("PATIENCE", "10"))  # seconds
FORK = multiprocessing.get_context("fork")

# Functions that wait for a GPU
READS = "item cpu tolist numpy nonzero argwhere masked_select unique equal allclose "
READS += "storage untyped_storage __bool__ __float__ __int__ __index__ __array__ "
READS += "__format__ __repr__ __reduce_ex__ bincount"
CHECKPOINT = Path("checkpoint.pt")


class Forward(Event):
    """A forward pass of a network."""

    training: bool  # the network's mode; also if batch norm uses the batch's statistics
    images: Tensor  # (N, 8)
    outputs: Tensor  # (N, 3)
    buffers: float = 0.0  # the sum of the network's buffers, such as statistics


class Step(Event):
    """An optimizer has taken a step."""

    before: Tensor | None = None  # all weights as one vector
    after: Tensor | None = None
    passes: list[Forward]  # passes with gradients since the last step
    images: Tensor | None = None  # of all passes
    images_at_once: int = 0  # forward before a backward(), times the world size
    dtypes: set[str]  # of the outputs of the linear layers
    lr: float = 0.0
    scaled: bool = False  # a gradient scaler multiplies the loss and takes the step
    all_reduces_per_step: int = 0  # numbers sent for it, divided by that of weights
    sharded: bool = False  # this process has only a part of the optimizer's state
    workers: int = 0  # most processes that this process has started at a time


class Last(Event):
    """The script has ended."""

    weights: Tensor | None = None
    waits: dict[int, str]  # step -> function in which the script would wait for a GPU
    collectives: int = 0  # by the script, except averages of all weights or gradients
    lost_checkpoints: int = 0  # also those lost for a moment
    varies: bool = False  # in evaluation mode, the network gives different results
    wrote: set[Path]  # files that torch.save() has written


def flat(optimizer: torch.optim.Optimizer) -> Tensor:
    """Copy an optimizer's weights to a float32 vector."""
    own = weights(optimizer)
    own = [one.full_tensor() if hasattr(one, "placements") else one for one in own]
    return nn.utils.parameters_to_vector(own).detach().float()


class Watch(Watcher):
    """Writes the events that this file defines; `now` and `last` are the next ones."""

    def __init__(self):
        self.now, self.last = Step(passes=[], dtypes=set()), Last(waits={}, wrote=set())
        self.done, self.depth, self.sent, self.scales = None, 0, 0, False
        self.of_batch, self.waiting = False, 0  # images without a backward pass
        self.shapes = []  # of what the collectives since the last step sent

    def hooks(self) -> None:
        nn.modules.module.register_module_forward_hook(self.forward)
        optimizers.register_optimizer_step_pre_hook(self.before_step)
        optimizers.register_optimizer_step_post_hook(self.end_step)
        wrap(torch.amp.GradScaler, "scale", self.scale)
        wrap(torch.amp.GradScaler, "step", self.scaler_step)
        wrap(nn.init, "kaiming_uniform_", self.start)
        wrap(torch, "save", self.save)
        wrap(nn.functional, "batch_norm", self.batch_norm)
        for name in ("backward", "grad"):
            wrap(torch.autograd, name, self.backward)
        sys.addaudithook(self.audit)
        names = [(dist, name) for name in ("send", "recv", "isend", "irecv")]
        names += [(dist.Store, "get"), (dist.Store, "multi_get")]
        for owner, name in names:
            wrap(owner, name, partial(Moments.here.collect, name))

    def on_input(self, network, inputs) -> None:
        self.network = getattr(network, "module", network)  # without DDP

    def on_collective(self, name, args, options, place) -> None:
        if name != "destroy_process_group":
            given = [x for x in (*args, *options.values()) if isinstance(x, Tensor)]
            sent = [x for x in given[-1:] if x.is_floating_point()]  # others receive
            self.sent += sum(one.numel() for one in sent)
            self.shapes.append(given[-1].shape if given else None)

    def count(self, own: list) -> None:
        """Count the step's collectives, except those that average all its weights."""
        found, shapes = Counter(self.shapes), [one.shape for one in own]
        sets = min((found[x] // shapes.count(x) for x in shapes), default=0)
        size = sum(one.numel() for one in own)
        sent = [shape.numel() if shape else 0 for shape in self.shapes]
        # Of one tensor with all gradients, and perhaps with a few more numbers
        flat = sum(size <= one <= size + 16 for one in sent)
        self.last.collectives += len(sent) - sets * len(shapes) - flat
        self.shapes = []

    def start(self, call, weight, *args, **kwargs):
        call(weight, *args, **kwargs)
        return weight.data.mul_(self.factor)

    def save(self, call, content, file, *args, **kwargs):
        """Save a file as a slow disk does: for a moment, the file is empty."""
        if isinstance(file, (str, Path)):
            self.last.wrote.add(Path(file).absolute())
            open(file, "wb").close()
            threading.Event().wait(0.2)  # time.sleep() may be replaced
        return call(content, file, *args, **kwargs)

    def audit(self, event: str, arguments: tuple) -> None:
        """Count when a checkpoint gets lost, even for a moment; delay deletions.

        As on many machines, the folder for temporary files is another file system.
        """
        if event == "os.remove" and str(arguments[0]).endswith(".pt"):
            threading.Event().wait(0.2)  # as a slow disk does
        whole = event == "os.remove" and arguments[1] == -1  # not relative to a folder
        path = Path(str(arguments[0])) if whole else CHECKPOINT
        if path.stem != CHECKPOINT.stem and path.resolve().parent == Path.cwd():
            with contextlib.suppress(OSError):
                shutil.copy(path, self.run.removed)  # see spoil()
        if event == "os.rename":
            old, new = (Path(os.fsdecode(one)).resolve() for one in arguments[:2])
            apart = not old.is_relative_to(Path.cwd())
            if apart and new.name == CHECKPOINT.name:
                text = os.strerror(errno.EXDEV)
                raise OSError(errno.EXDEV, text, str(old), None, str(new))
        if event in ("open", "os.remove", "os.rename") and CHECKPOINT.exists():
            path = Path(str(arguments[0]))
            if event == "open" and arguments[2] & os.O_ACCMODE and path.exists():
                self.last.lost_checkpoints += path.samefile(CHECKPOINT)
            moved = event != "open" and path.name == CHECKPOINT.name
            self.last.lost_checkpoints += moved

    def batch_norm(self, call, *args, **kwargs):
        self.of_batch = bool(kwargs.get("training", any(args[5:6])))
        return call(*args, **kwargs)

    def backward(self, call, *args, **kwargs):
        self.waiting = 0
        return call(*args, **kwargs)

    def scale(self, call, scaler, *args, **kwargs):
        scaler.set_growth_interval(7)  # the scale changes during the run
        self.scales = scaler.get_scale() > 1
        return call(scaler, *args, **kwargs)

    def scaler_step(self, call, scaler, *args, **kwargs):
        self.now.scaled, self.scales = self.scales, False
        return call(scaler, *args, **kwargs)

    def forward(self, layer: nn.Module, inputs: tuple, output: Tensor) -> None:
        """Record the input of a network's first layer and the output of its last."""
        if self.last.weights is not None:
            return  # on_exit() calls the network
        grad = torch.is_grad_enabled()
        if isinstance(layer, DDP) and grad and layer.require_backward_grad_sync:
            hooks = layer._comm_hooks  # they call collectives themselves
            self.sent += sum(one.numel() for one in layer.parameters() if not hooks)
        if isinstance(layer, nn.Linear):
            self.now.dtypes.add(str(output.dtype))
            if layer.in_features == 8:
                self.images = inputs[0].detach().float()
            if layer.out_features == 3:
                facts = {"images": self.images, "outputs": output.detach().float()}
                one = Forward(training=layer.training or self.of_batch, **facts)
                self.of_batch = False
                buffers = [] if grad else self.network.buffers()
                one.buffers = sum(x.double().sum().item() for x in buffers)
                self.now.passes.append(one) if grad else recorder.write(one)
                self.waiting += len(one.images) if grad else 0
                most = self.waiting * int(os.environ["WORLD_SIZE"])
                self.now.images_at_once = max(self.now.images_at_once, most)

    def before_step(self, optimizer: torch.optim.Optimizer, *_) -> None:
        self.depth += 1  # ZeRO's and Horovod's steps contain another step
        if self.depth == 1:
            if recorder.step == self.run.pause:
                self.run.paused.wait()
                signal.pause()
            if CHECKPOINT.exists() and os.environ["RANK"] == "0":
                shutil.copy(CHECKPOINT, f"{recorder.step}.pt")
            # Before the first step, the processes may send their first weights
            self.now.before = flat(optimizer)
            self.now.all_reduces_per_step = self.sent * bool(recorder.step)

    def end_step(self, optimizer: torch.optim.Optimizer, *_) -> None:
        """Write a Step event when the outermost optimizer's step has ended."""
        self.depth -= 1
        if self.depth:
            return
        if not (self.now.passes or self.done):  # hvd.broadcast_optimizer_state()
            recorder.step = 0
            return
        now, own = self.now, weights(optimizer)
        now.after, now.lr = flat(optimizer), optimizer.param_groups[0]["lr"]
        images = [torch.empty(0, 8), *(one.images for one in now.passes)]
        now.images = torch.cat(images)
        shards = [x for x in own if hasattr(x, "placements")]
        parts = [x.to_local().numel() < x.numel() for x in shards]
        alone = bool(parts) and os.environ["WORLD_SIZE"] == "1"
        now.sharded = hasattr(optimizer, "optim") or any(parts) or alone  # ZeRO or FSDP
        sent = 0 if now.sharded else now.all_reduces_per_step / len(now.after)
        now.all_reduces_per_step = round(sent)
        now.workers = max(now.workers, len(multiprocessing.active_children()))
        recorder.write(now)
        self.count(own)
        self.optimizer, self.done, self.sent = optimizer, now, 0
        self.now = Step(passes=[], dtypes=set(), workers=now.workers)

    def on_exit(self) -> None:
        """Record the final weights (of sharded weights, those after the last step)."""
        if done := self.done:
            self.count(weights(self.optimizer))
            self.last.weights = done.after if done.sharded else flat(self.optimizer)
            with contextlib.suppress(Exception), torch.no_grad():  # of unusual networks
                found = [self.network.eval()(done.images) for _ in range(9)]
                self.last.varies = any(not torch.equal(x, found[0]) for x in found)
            recorder.write(self.last)


class Reads(TorchFunctionMode):
    """Finds the steps in which the script's own code would wait for a GPU.

    Tensors count as tensors on the GPU, except those of device="cpu" and of NumPy.
    """

    on_cpu: ClassVar[list[Tensor]] = []

    def is_on_cpu(self, tensor: Tensor) -> bool:
        """Return whether the script put this tensor's memory on the CPU."""
        memory = tensor.untyped_storage()
        same = any(one.untyped_storage()._cdata == memory._cdata for one in self.on_cpu)
        return same or not memory.resizable()  # NumPy uses it, too

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name, given = function.__name__, [*args, *(kwargs or {}).values()]
        caller = sys._getframe(1)
        if caller.f_code.co_name == "handle_torch_function":
            caller = caller.f_back.f_back  # the caller of a method in Python
        if caller.f_code.co_filename.startswith(record.not_the_users()):
            return function(*args, **(kwargs or {}))
        cpu = name == "cpu" or "cpu" in [x for x in given if isinstance(x, str)]
        waits = name in READS.split() or name == "to" and cpu
        if name == "__getitem__":  # a mask waits; other indices do not
            waits = getattr(given[1], "dtype", None) == torch.bool
        elif name in ("copy_", "fill_", "__setitem__") and self.is_on_cpu(args[0]):
            tensors = filter(torch.is_tensor, given[1:])
            waits = not all(map(self.is_on_cpu, tensors))
        elif name in ("tensor", "as_tensor") and isinstance(given[0], list):
            waits = any(map(torch.is_tensor, given[0]))
        if waits:
            Watch.here.last.waits.setdefault(recorder.step, name)
        if cpu or "force" in (kwargs or {}):  # from a GPU, the result is a copy
            args = [one.clone() if torch.is_tensor(one) else one for one in args]
        result = function(*args, **(kwargs or {}))
        self.on_cpu.extend(filter(torch.is_tensor, [result] * cpu))
        return result


def be_rank(run: "Run", variables: dict[str, str]) -> None:
    """Run a script as one of its processes, with these environment variables.

    On all ranks but 0, sleep() returns immediately, so it hides no race, and, as on
    another machine, time() is 1000 seconds ahead and getppid() returns another number.
    """
    gc.freeze()  # garbage collections then ignore the modules: this halves the time
    os.setsid()  # a session, so that its child processes are killed, too
    signal.alarm(60)  # the process ends, even if the grader has already ended
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    # Otherwise, two of autograd's threads may both replace the forked pool of threads,
    # and PyTorch aborts ("Invalid thread pool!")
    torch.set_num_threads(1)
    os.environ.update(variables)
    tempfile.tempdir = f"{run.apart}/{variables['GROUP_RANK']}"  # of this machine
    os.makedirs(tempfile.tempdir, exist_ok=True)
    os.chdir(run.files)
    sys.argv = [str(run.script)]
    Watch.here.run = run
    # Numbers from an earlier run do not fit a script that prints them
    Watch.here.factor = random.Random(run.script.read_bytes()).uniform(0.95, 1.05)
    for watcher in watchers:  # without the doctor's laws, which take time
        watcher.hooks()
    if "HOROVOD_RANK" in variables:
        import horovod.torch as hvd

        for name in HOROVOD:
            wrap(hvd, name, partial(Moments.here.collect, name))
    threading.Thread(target=record.monitor, daemon=True).start()
    sleep, main, clock = time.sleep, threading.current_thread(), time.time
    if variables["RANK"] != "0":
        time.sleep = lambda s: threading.current_thread() is main or sleep(s)
        time.time = lambda: clock() + 1000
        time.time_ns = lambda: int(1e9 * time.time())
        os.getppid = os.getpid
    try:
        with Reads():
            runpy.run_path(str(run.script), run_name="__main__")
    except Exception:
        record.excepthook(None, *sys.exc_info())
        sys.exit(1)
    record.leave()


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
        how = f"ends with exit code {code}"
        if code in (None, -signal.SIGALRM):  # see be_rank()
            how = "does not end"
        if waits := job.waiting(self.process):
            how = f"is still waiting in {waits.what}()"
        for one in self.process.of(Failed):
            sentence = re.split(r"\. |\n", one.text)[0]
            how = "fails with " + re.sub(r"\[/\S+\] ", "", sentence)
        count = len(self.steps)
        when = f"after step {count}" if count else "before the first step"
        return f"{when}, rank {self.process.rank} {how}"


def horovod(run: "Run", stack: contextlib.ExitStack) -> list[dict[str, str]]:
    """Start Horovod's rendezvous server; return each rank's environment variables."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    common = create_run_env_vars("127.0.0.1", ["lo"], str(server.start()))
    stack.callback(server.stop)
    hosts = [f"127.0.0.{n + 1}:{count}" for n, count in enumerate(run.counts)]
    slots = get_host_assignments(parse_hosts(",".join(hosts)), run.size)
    server.init(slots)
    return [common | create_slot_env_vars(slot) for slot in slots]


def serve(ours: Connection, theirs: Connection) -> None:
    """Send the port of a store for all ranks, as torchrun's agent serves it.

    The grader itself must have no threads, because it forks the ranks. As on a shared
    machine, the next port is in use.
    """
    ours.close()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other = socket.socket()
    with contextlib.suppress(OSError):  # it is in use already
        other.bind(("127.0.0.1", store.port + 1))
    theirs.send(store.port)
    with contextlib.suppress(EOFError):  # the grader has ended
        theirs.recv()


@dataclass
class Run:
    """The processes that run a script; `started` starts them for a `with` block."""

    script: Path
    files: Path | None = None  # working directory; None: a new one, deleted at the end
    size: int = 2
    when: str = ""  # the block's messages begin with it
    machines: int = 1  # among which the processes are divided, as by torchrun
    pause: int | None = None  # after this many steps, the processes wait to be killed
    processes: list = field(default_factory=list)
    ranks: list[Rank] = field(default_factory=list)

    @property
    def counts(self) -> list[int]:
        """The number of processes on each machine; the first one may have one more."""
        each, more = divmod(self.size, self.machines)
        return [each + (n < more) for n in range(self.machines)]

    @contextlib.contextmanager
    def started(self) -> Iterator["Run"]:
        """Start the processes, wait for their end or pause, and at last kill them."""
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            used, self.files = bool(self.files), self.files or Path(folder)
            self.records = Path(tempfile.mkdtemp(dir=folder))
            self.removed = Path(tempfile.mkdtemp(dir=folder))
            self.apart = stack.enter_context(tempfile.TemporaryDirectory())
            self.paused = FORK.Barrier(self.size + 1)
            needs = "import horovod" in self.script.read_text()
            places = horovod(self, stack) if needs else [{}] * self.size
            ours, theirs = FORK.Pipe()
            server = FORK.Process(target=serve, args=(ours, theirs))
            server.start()
            stack.callback(server.join)
            stack.callback(server.kill)
            theirs.close()
            common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ours.recv())}
            common |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
            common |= {"TORCHELASTIC_RESTART_COUNT": "0"}
            common |= {"TORCHELASTIC_RUN_ID": str(uuid4())}
            common |= {"DOCTOR_FOLDER": str(self.records)}
            common |= {"WORLD_SIZE": str(self.size)}
            common |= {"GROUP_WORLD_SIZE": str(self.machines)}
            owners = [(x, n, m) for m, x in enumerate(self.counts) for n in range(x)]
            stack.callback(self.kill)
            # In a used folder, the others see files of an earlier run before rank 0
            for rank, place in reversed([*enumerate(places)]):
                time.sleep(0.5 * (used and rank == 0))
                names = "LOCAL_WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "RANK"
                own = map(str, (*owners[rank], rank))
                task = self, common | dict(zip(names, own, strict=True)) | place
                self.processes.insert(0, FORK.Process(target=be_rank, args=task))
                self.processes[0].start()
            try:
                if self.pause is None:
                    self.end()
                else:
                    self.paused.wait(60)
                yield self
            except threading.BrokenBarrierError:
                ranks = map(Rank, job.read(self.records).processes)
                where = " and ".join(rank.ending(None) for rank in ranks)
                late = f"{self.when}the script does not reach step {self.pause + 1}"
                raise Wrong(f"{late}: {where}") from None
            except Wrong as wrong:
                raise Wrong(f"{self.when}{wrong}") from None

    def end(self) -> None:
        """Wait until all processes have ended; raise Wrong if one fails or hangs."""
        while alive := [x.sentinel for x in self.processes if x.exitcode is None]:
            failed = any(process.exitcode for process in self.processes)
            wait(alive, 2 if failed else 0.5)  # then the other soon fails too
            waits = []
            if (self.records / "waits").exists():  # the doctor has written a Waits
                last = [one.events[-1] for one in job.read(self.records).processes]
                waits = [getattr(one, "seconds", None) for one in last]
            hangs = any(waits) and all(x is None or x > PATIENCE for x in waits)
            if failed or hangs:
                break
        codes = [process.exitcode for process in self.processes]
        found = {process.rank: process for process in job.read(self.records).processes}
        for rank in range(self.size):
            self.ranks.append(Rank(found.get(rank, job.Process(rank, self.size, []))))
        if any(code != 0 for code in codes):
            lines = [x.ending(y) for x, y in zip(self.ranks, codes, strict=True)]
            # A lost connection means only that the other process ended earlier
            failed = [line for line, code in zip(lines, codes, strict=True) if code]
            own = [x for x in failed if not re.search("onnection|roken pipe", x)]
            when = "" if failed else f"nothing happens for {PATIENCE:g} s: "
            raise Wrong(own[0] if own else when + " and ".join(lines))

    def kill(self) -> None:
        """Kill the processes, and those that they started."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
