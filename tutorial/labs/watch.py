"""Run a script as one of two processes, and record what the checks need.

The doctor's recorder writes printed text, errors and waits. This file adds events of
its own: the images of each forward pass, and all weights after each step.
"""

import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch._dynamo  # here, not in each process at its first step
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from doctor import record
from doctor.event import Event
from doctor.record import recorder, wrap
from doctor.watcher import Watcher

# Methods of a tensor that wait for a GPU
READS = "item cpu tolist numpy __bool__ __float__ __int__ __format__ __repr__".split()
LIFE = 60  # seconds after which a process ends, even if the grader is gone


@dataclass(kw_only=True)
class Forward(Event):
    """A forward pass of a network."""

    training: bool  # the network's mode
    grad: bool
    images: "list | Tensor"  # (N, 8); play.py makes tensors of lists
    outputs: "list | Tensor"  # (N, 3)
    dtype: str  # of the outputs


@dataclass(kw_only=True)
class Weights(Event):
    """All weights before the first step, after a step, or at the end."""

    when: str  # "first", "step" or "last"
    weights: "list | Tensor"  # as one vector
    passes: list[Forward] = field(default_factory=list)  # with gradients, of this step
    lr: float = 0
    scale: float = 1  # of the gradient scaler
    averages: int = 0  # in how many passes of the step DDP averaged gradients
    sharded: bool = False  # each process has a part of each weight, as with FSDP2
    held: int = 0  # how many elements of the optimizer's momentum this process holds
    workers: int = 0  # how many running processes this process has started
    waits: int = 0  # how often the script reads a tensor since the last step


@dataclass(kw_only=True)
class Call(Event):
    """The script has called a collective."""

    name: str


def flat(optimizer: Optimizer) -> tuple[Tensor, bool]:
    """Copy an optimizer's weights to a vector; also return whether they are sharded."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    shards = [hasattr(weight, "placements") for weight in weights]
    weights = [w.full_tensor() if hasattr(w, "placements") else w for w in weights]
    return nn.utils.parameters_to_vector(weights).detach(), all(shards)


class Watch(Watcher):
    """Writes the events of this file."""

    def __init__(self):
        self.optimizer, self.depth, self.scale = None, 0, 1.0
        self.averages, self.waits, self.script = 0, 0, ""
        self.disturb: Callable[[int], object] = lambda steps: None

    def hooks(self) -> None:
        nn.modules.module.register_module_forward_hook(self.forward)
        register_optimizer_step_pre_hook(self.before_step)
        register_optimizer_step_post_hook(self.end_step)
        wrap(DDP, "forward", self.ddp)
        wrap(torch.amp.GradScaler, "scale", self.scaled)
        for name in READS:
            wrap(Tensor, name, self.read)
        wrap(Tensor, "to", self.moved)

    def on_collective(self, name, *_) -> None:
        recorder.write(Call(name=name))

    def ddp(self, call, model, *args, **kwargs):
        self.averages += torch.is_grad_enabled() and model.require_backward_grad_sync
        return call(model, *args, **kwargs)

    def scaled(self, call, scaler, *args, **kwargs):
        self.scale = scaler.get_scale()
        return call(scaler, *args, **kwargs)

    def read(self, call, *args, **kwargs):
        frame = sys._getframe(1)
        while frame.f_code.co_name in ("wrapped", "original", "host_read", "moved"):
            frame = frame.f_back  # other wrappers of the same function
        self.waits += frame.f_code.co_filename == self.script
        return call(*args, **kwargs)

    def moved(self, call, *args, **kwargs):
        if "cpu" in map(str, (*args[1:], *kwargs.values())):
            return self.read(call, *args, **kwargs)
        return call(*args, **kwargs)

    def forward(self, layer: nn.Module, inputs: tuple, output: Tensor) -> None:
        """Record the input of a network's first layer and the output of its last."""
        if isinstance(layer, nn.Linear) and layer.in_features == 8:
            self.images = inputs[0].detach().tolist()
        elif isinstance(layer, nn.Linear) and layer.out_features == 3:
            one = Forward(
                training=layer.training,
                grad=torch.is_grad_enabled(),
                images=self.images,
                outputs=output.detach().float().tolist(),
                dtype=str(output.dtype),
            )
            recorder.write(one)

    def before_step(self, optimizer: Optimizer, *_) -> None:
        """Record the first weights."""
        self.depth += 1  # ZeRO's and Horovod's steps contain another step
        if self.depth == 1:
            self.disturb(recorder.step)
            if not self.optimizer:
                values = flat(optimizer)[0].tolist()
                recorder.write(Weights(when="first", weights=values))
            self.optimizer = optimizer

    def end_step(self, optimizer: Optimizer, *_) -> None:
        """Record the step."""
        self.depth -= 1
        if self.depth:
            return
        self.last, sharded = flat(optimizer)
        self.sharded = sharded
        inner = getattr(optimizer, "optim", optimizer)  # of ZeRO's
        momenta = [state.get("momentum_buffer") for state in inner.state.values()]
        one = Weights(
            when="step",
            weights=self.last.tolist(),
            lr=optimizer.param_groups[0]["lr"],
            scale=self.scale,
            averages=self.averages,
            sharded=sharded,
            held=sum(one.numel() for one in momenta if one is not None),
            workers=len(multiprocessing.active_children()),
            waits=self.waits,
        )
        recorder.write(one)
        self.averages, self.waits = 0, 0

    def end(self) -> None:
        """Record the last weights; shards cannot be gathered after the last step."""
        if self.optimizer:
            last = self.last if self.sharded else flat(self.optimizer)[0]
            recorder.write(Weights(when="last", weights=last.tolist()))


def be_rank(script: Path, files: Path, text: Path, variables: dict, disturb) -> None:
    """Run the script as one of two processes, in the folder `files`.

    Its text goes to the file `text`. `disturb` is called before each step, with the
    number of completed steps. Only rank 0 can sleep: to sleep is not to wait for it.
    """
    os.setsid()  # so that the processes that it starts are killed with it
    signal.alarm(LIFE)
    torch.set_num_threads(1)  # before any thread of the fork does so
    for number, file in ((1, text), (2, os.devnull)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(variables)
    os.chdir(files)
    sys.argv = [str(script)]
    Watch.here.disturb, Watch.here.script = disturb, str(script)
    record.torch_is_there()
    sleep, main = time.sleep, threading.current_thread()
    if variables["RANK"] != "0":
        time.sleep = lambda s: threading.current_thread() is main or sleep(s)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception:
        record.excepthook(None, *sys.exc_info())
        sys.exit(1)
    Watch.here.end()
    record.leave()
