"""Run a script as one of its processes, and record events for the checks.

The doctor's recorder writes printed text, errors and waits. This file adds events for
forward passes, saved files, and the weights before and after each step and at the end.
"""

import gc
import multiprocessing
import os
import random
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
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from doctor import record, results  # noqa: F401  its watcher records what is printed
from doctor.event import Event
from doctor.moments import weights, whole
from doctor.record import recorder, wrap
from doctor.watcher import Watcher, watchers

# Functions that wait for a GPU
READS = "item cpu tolist numpy nonzero argwhere masked_select unique equal allclose "
READS += "storage untyped_storage __bool__ __float__ __int__ __index__ __array__ "
READS += "__format__ __repr__ __reduce_ex__"
LIFE = 60  # seconds after which a process ends, even if the grader has ended
DISK = 0.2  # seconds for which a file that torch.save() writes is empty


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
    averages: float  # numbers sent for this step, divided by the number of weights
    at_once: int  # images in the largest pass
    dtypes: set[str]  # of the outputs of the first and the last layer
    sharded: bool  # this process has only a part of the optimizer's state
    workers: int  # most processes that this process has started at a time

    def images(self) -> Tensor:
        """Return the images of all passes, with shape (N, 8)."""
        return torch.cat([torch.empty(0, 8), *(one.images for one in self.passes)])


@dataclass(kw_only=True)
class Last(Event):
    """The script has ended."""

    weights: Tensor
    waits: int  # number of steps after which the script has read a tensor
    collectives: int  # number of collectives that the script has called
    wrote: set[Path]  # files that torch.save() has written


def flat(optimizer: Optimizer) -> Tensor:
    """Copy an optimizer's weights to a float32 vector."""
    own = weights(optimizer)
    own = [one.full_tensor() if hasattr(one, "placements") else one for one in own]
    return nn.utils.parameters_to_vector(own).detach().float()


class Watch(Watcher):
    """Writes the events that this file defines."""

    def __init__(self):
        self.optimizer, self.depth, self.scale, self.passes = None, 0, 1.0, []
        self.sent, self.waits, self.collectives = 0, set(), 0
        self.workers, self.wrote, self.dtypes = 0, set(), set()
        self.disturb: Callable[[int], object] = lambda steps: None

    def hooks(self) -> None:
        nn.modules.module.register_module_forward_hook(self.forward)
        optimizers.register_optimizer_step_pre_hook(self.before_step)
        optimizers.register_optimizer_step_post_hook(self.end_step)
        wrap(DDP, "forward", self.ddp)
        wrap(torch.amp.GradScaler, "__init__", self.growing)
        wrap(torch.amp.GradScaler, "scale", self.scaled)
        wrap(nn.init, "kaiming_uniform_", self.start)
        wrap(torch, "save", self.save)
        for name in ("send", "recv", "isend", "irecv"):
            wrap(dist, name, self.send)

    def on_collective(self, name, args, options, place) -> None:
        self.collectives += 1
        given = [x for x in (*args, *options.values()) if isinstance(x, Tensor)]
        self.sent += sum(one.numel() for one in given[-1:])  # others receive

    def send(self, call, *args, **kwargs):
        self.collectives += 1
        return call(*args, **kwargs)

    def ddp(self, call, model, *args, **kwargs):
        result = call(model, *args, **kwargs)
        syncs = torch.is_grad_enabled() and model.require_backward_grad_sync
        if syncs and not model._comm_hooks:  # a hook calls collectives itself
            self.sent += sum(one.numel() for one in model.parameters())
        return result

    def start(self, call, weight, *args, **kwargs):
        call(weight, *args, **kwargs)
        return weight.data.mul_(self.scale)

    def save(self, call, content, file, *args, **kwargs):
        """Save a file as a slow disk does: for a moment, the file is empty."""
        if isinstance(file, (str, Path)):
            self.wrote.add(Path(file).absolute())
            open(file, "wb").close()
            threading.Event().wait(DISK)  # time.sleep() may be replaced
        return call(content, file, *args, **kwargs)

    def growing(self, call, scaler, *args, **kwargs):
        return call(scaler, *args, **{"growth_interval": 7, **kwargs})

    def scaled(self, call, scaler, *args, **kwargs):
        self.scale = scaler.get_scale()
        return call(scaler, *args, **kwargs)

    def forward(self, layer: nn.Module, inputs: tuple, output: Tensor) -> None:
        """Record the input of a network's first layer and the output of its last."""
        if isinstance(layer, nn.Linear) and layer.in_features == 8:
            self.images = inputs[0].detach()
            if not self.passes:
                self.sent, self.dtypes = 0, set()
            self.dtypes.add(str(output.dtype).removeprefix("torch."))
        elif isinstance(layer, nn.Linear) and layer.out_features == 3:
            one = Forward(
                training=layer.training,
                grad=torch.is_grad_enabled(),
                images=self.images,
                outputs=output.detach().float(),
            )
            self.dtypes.add(str(output.dtype).removeprefix("torch."))
            if one.grad:
                self.passes.append(one)
            else:
                recorder.write(one)

    def before_step(self, optimizer: Optimizer, *_) -> None:
        self.depth += 1  # ZeRO's and Horovod's steps contain another step
        if self.depth == 1:
            self.disturb(recorder.step)
            self.before, self.sending = flat(optimizer), self.sent

    def end_step(self, optimizer: Optimizer, *_) -> None:
        """Write a Step event when the outermost optimizer's step has ended."""
        self.depth -= 1
        if self.depth:
            return
        self.optimizer, self.after = optimizer, flat(optimizer)
        self.workers = max(self.workers, len(multiprocessing.active_children()))
        inner = getattr(optimizer, "optim", optimizer)  # ZeRO's has only some weights
        shards = len(whole(weights(inner))) < len(weights(optimizer))
        one = Step(
            before=self.before,
            after=self.after,
            passes=self.passes,
            lr=optimizer.param_groups[0]["lr"],
            scaled=self.scale > 1,
            averages=0 if shards else self.sending / len(self.after),
            at_once=max((len(one.images) for one in self.passes), default=0),
            dtypes=self.dtypes,
            sharded=shards,
            workers=self.workers,
        )
        recorder.write(one)
        self.passes, self.scale = [], 1.0

    def on_exit(self) -> None:
        """Record the final weights (of sharded weights, those after the last step)."""
        if self.optimizer:
            shards = len(whole(own := weights(self.optimizer))) < len(own)
            last = self.after if shards else flat(self.optimizer)
            facts = {"waits": len(self.waits), "collectives": self.collectives}
            recorder.write(Last(weights=last, wrote=self.wrote, **facts))


class Reads(TorchFunctionMode):
    """Finds the steps in which the script's own code would wait for a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name, options = function.__name__, kwargs or {}
        given = [*args[1:], *options.values()]
        if name == "to":
            waits = "cpu" in map(str, given)
        elif name == "__getitem__":  # a mask waits; other indices do not
            waits = getattr(given[0], "dtype", None) == torch.bool
        else:
            data = args[0] if args else options.get("data")
            made = name in ("tensor", "as_tensor") and isinstance(data, list)
            waits = made and any(map(torch.is_tensor, data))
            waits = waits or name in READS.split()
        caller = sys._getframe(1)
        if caller.f_code.co_name == "handle_torch_function":
            caller = caller.f_back.f_back  # the caller of a method in Python
        if waits and not caller.f_code.co_filename.startswith(record.not_the_users()):
            Watch.here.waits.add(recorder.step)
        return function(*args, **options)


def be_rank(script: Path, files: Path, text: Path, variables: dict, disturb) -> None:
    """Run the script as one of its processes, in the folder `files`.

    Its output goes to the file `text`. Before each step, the process calls `disturb`
    with the number of completed steps. On rank 1, sleep() returns immediately, so it
    hides no race.
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
    # Numbers from an earlier run do not fit a script that prints them
    Watch.here.scale = random.Random(script.read_bytes()).uniform(0.95, 1.05)
    for watcher in watchers:  # without the doctor's laws, which take time
        watcher.hooks()
    threading.Thread(target=record.monitor, daemon=True).start()
    sleep, main = time.sleep, threading.current_thread()
    if variables["RANK"] != "0":
        time.sleep = lambda s: threading.current_thread() is main or sleep(s)
    try:
        with Reads():
            runpy.run_path(str(script), run_name="__main__")
    except Exception:
        record.excepthook(None, *sys.exc_info())
        sys.exit(1)
    record.leave()
