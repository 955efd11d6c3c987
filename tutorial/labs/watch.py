"""Run a script as one of two processes, and record events for the checks.

The doctor's recorder writes printed text, errors and waits. This file adds events for
forward passes, and for the weights before and after each step and at the end.
"""

import functools
import gc
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._dynamo  # otherwise, each process imports it in its first step
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from doctor import record, results  # noqa: F401  its watcher records what is printed
from doctor.event import Event
from doctor.moments import weights, whole
from doctor.record import recorder, wrap
from doctor.watcher import Watcher, watchers

# Functions that wait for a GPU; "to" waits if it copies to the CPU
READS = "item cpu tolist numpy to nonzero equal storage untyped_storage __bool__ "
READS += "__float__ __int__ __index__ __array__ __format__ __repr__ __reduce_ex__"
LIFE = 60  # seconds after which a process ends, even if the grader has ended


@dataclass(kw_only=True)
class Forward(Event):
    """A forward pass of a network."""

    training: bool  # the network's mode
    grad: bool
    images: Tensor  # (N, 8)
    outputs: Tensor  # (N, 3)


@dataclass(kw_only=True)
class Step(Event):
    """An optimizer has taken a step."""

    before: Tensor  # all weights as one vector
    after: Tensor
    passes: list[Forward]  # passes with gradients since the last step
    lr: float
    scaled: bool  # a gradient scaler multiplies the loss
    averages: int  # number of the step's passes in which DDP averaged gradients
    sharded: bool  # this process has only a part of the optimizer's state
    dtype: str  # data type of the network's last outputs
    workers: int  # number of running processes that this process has started


@dataclass(kw_only=True)
class Last(Event):
    """The script has ended."""

    weights: Tensor
    waits: int  # number of steps after which the script has read a tensor
    collectives: int  # number of collectives that the script has called


def flat(optimizer: Optimizer) -> Tensor:
    """Copy an optimizer's weights to a float32 vector."""
    own = weights(optimizer)
    own = [one.full_tensor() if hasattr(one, "placements") else one for one in own]
    return nn.utils.parameters_to_vector(own).detach().float()


class Watch(Watcher):
    """Writes the events that this file defines."""

    def __init__(self):
        self.optimizer, self.depth, self.scale, self.passes = None, 0, 1.0, []
        self.averages, self.waits, self.collectives = 0, set(), 0
        self.disturb: Callable[[int], object] = lambda steps: None

    def hooks(self) -> None:
        nn.modules.module.register_module_forward_hook(self.forward)
        optimizers.register_optimizer_step_pre_hook(self.before_step)
        optimizers.register_optimizer_step_post_hook(self.end_step)
        wrap(DDP, "forward", self.ddp)
        wrap(torch.amp.GradScaler, "scale", self.scaled)
        reads = [(Tensor, name) for name in READS.split()]
        for owner, name in (*reads, (torch, "equal"), (torch, "allclose")):
            wrap(owner, name, functools.partial(self.read, name))

    def on_collective(self, *_) -> None:
        self.collectives += 1

    def ddp(self, call, model, *args, **kwargs):
        self.averages += torch.is_grad_enabled() and model.require_backward_grad_sync
        return call(model, *args, **kwargs)

    def scaled(self, call, scaler, *args, **kwargs):
        self.scale = scaler.get_scale()
        return call(scaler, *args, **kwargs)

    def read(self, name, call, *args, **kwargs):
        if name != "to" or "cpu" in map(str, (*args[1:], *kwargs.values())):
            caller = sys._getframe(2).f_code.co_filename  # wrap()'s caller
            if not caller.startswith(record.not_the_users()):
                self.waits.add(recorder.step)
        return call(*args, **kwargs)

    def forward(self, layer: nn.Module, inputs: tuple, output: Tensor) -> None:
        """Record the input of a network's first layer and the output of its last."""
        if isinstance(layer, nn.Linear) and layer.in_features == 8:
            self.images = inputs[0].detach()
        elif isinstance(layer, nn.Linear) and layer.out_features == 3:
            one = Forward(
                training=layer.training,
                grad=torch.is_grad_enabled(),
                images=self.images,
                outputs=output.detach().float(),
            )
            self.dtype = str(output.dtype).removeprefix("torch.")
            if one.grad:
                self.passes.append(one)
            else:
                recorder.write(one)

    def before_step(self, optimizer: Optimizer, *_) -> None:
        self.depth += 1  # ZeRO's and Horovod's steps contain another step
        if self.depth == 1:
            self.disturb(recorder.step)
            self.before = flat(optimizer)

    def end_step(self, optimizer: Optimizer, *_) -> None:
        """Record the step."""
        self.depth -= 1
        if self.depth:
            return
        self.optimizer, self.after = optimizer, flat(optimizer)
        inner = getattr(optimizer, "optim", optimizer)  # ZeRO's has only some weights
        one = Step(
            before=self.before,
            after=self.after,
            passes=self.passes,
            lr=optimizer.param_groups[0]["lr"],
            scaled=self.scale > 1,
            averages=self.averages,
            sharded=len(whole(weights(inner))) < len(weights(optimizer)),
            dtype=self.dtype,
            workers=len(multiprocessing.active_children()),
        )
        recorder.write(one)
        self.passes, self.averages = [], 0

    def on_exit(self) -> None:
        """Record the last weights; shards cannot be gathered after the last step."""
        if self.optimizer:
            shards = len(whole(own := weights(self.optimizer))) < len(own)
            last = self.after if shards else flat(self.optimizer)
            calls = {"waits": len(self.waits), "collectives": self.collectives}
            recorder.write(Last(weights=last, **calls))


def be_rank(script: Path, files: Path, text: Path, variables: dict, disturb) -> None:
    """Run the script as one of two processes, in the folder `files`.

    Its output goes to the file `text`. Before each step, it calls `disturb` with the
    number of completed steps. In rank 1, sleep() does nothing, so it hides no race.
    """
    gc.freeze()  # so that garbage collection skips PyTorch's objects
    os.setsid()  # a session, so that its child processes are killed, too
    signal.alarm(LIFE)
    torch.set_num_threads(1)  # before the fork starts a thread
    for number, file in ((1, text), (2, os.devnull)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(variables)
    os.chdir(files)
    sys.argv = [str(script)]
    Watch.here.disturb = disturb
    for watcher in watchers:  # without the doctor's laws, which take time
        watcher.hooks()
    threading.Thread(target=record.monitor, daemon=True).start()
    sleep, main = time.sleep, threading.current_thread()
    if variables["RANK"] != "0":
        time.sleep = lambda s: threading.current_thread() is main or sleep(s)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception:
        record.excepthook(None, *sys.exc_info())
        sys.exit(1)
    record.leave()
