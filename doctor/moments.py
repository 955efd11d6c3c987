"""Track a process's networks, passes and steps, and call the laws' watchers.

Each moment (see watcher.py) is detected once, so that all laws see the same steps.
"""

import functools
import weakref
from threading import get_ident, main_thread
from time import perf_counter as clock
from time import time

from .event import Event
from .loaders import Loaders, leaves
from .record import builtins, place, plain, quiet, recorder, torch, traced, waits, wrap
from .sample import digest, numbers
from .watcher import Watcher, tell

COLLECTIVES = """all_reduce broadcast all_gather reduce barrier all_gather_into_tensor
    all_gather_single reduce_scatter reduce_scatter_tensor all_to_all all_to_all_single
    gather scatter all_gather_object broadcast_object_list gather_object
    monitored_barrier""".split()
HOROVOD = """allreduce allreduce_ allgather broadcast broadcast_ broadcast_parameters
    broadcast_optimizer_state broadcast_object allgather_object barrier join""".split()


class Step(Event):
    """An optimizer has taken a step."""

    optimizer: int  # the number of the optimizer's first step
    which: int  # a hash of the weights that the optimizer updates
    rates: list[float]  # learning rates
    loader: int | None  # the loader of the last batch, and its pass
    epoch: int | None
    place: str
    by_hand: bool = False  # the script has changed the weights without an optimizer
    watched: bool = True  # the laws' watchers saw the step; later ones are only timed
    network: int = 0  # the first step of its first weight


class Wraps(Event, limit=20):
    """The script has wrapped a network in DistributedDataParallel."""

    weights: list[str]  # names and shapes
    frozen: list[str]  # weights that need no gradient, so DDP does not average them
    place: str


class Moments(Watcher):
    """Wraps the functions that all laws need, and tracks the current step and batch."""

    def __init__(self):
        self.known = {}  # a weight's id -> its number and a weak reference
        self.names = {}  # a weight's id -> its name
        self.networks = weakref.WeakKeyDictionary()  # outermost ones, in order
        self.handles, self.optimizers, self.digests = [], {}, {}
        self.inner, self.depth, self.collective = None, 0, False
        self.ended = False
        self.optimized = False  # an optimizer has been made
        self.passed, self.before = False, []  # see begin_by_hand()
        self.meets = self.met = 0  # number of collectives that have begun
        self.exchanged = 0.0  # the time when the last one began
        self.backing = False  # a backward pass is running
        self.computes = False  # autograd.grad() is running in it, as in a checkpoint
        self.last_gradient = 0.0  # the time of a backward pass's last gradient
        self.where = ""  # the line of the network's call or, later, of backward()
        self.tells = True  # report all collectives, even after the watched steps
        self.thread = main_thread().ident

    def hooks(self) -> None:
        dist = torch.distributed
        from torch.optim import optimizer as optimizers
        from torch.utils.weak import WeakIdKeyDictionary

        self.sets = WeakIdKeyDictionary()  # first weight of several -> its first step
        optimizers.register_optimizer_step_pre_hook(quiet(self.before_step))
        optimizers.register_optimizer_step_post_hook(quiet(self.end_step))
        module = torch.nn.modules.module
        plain.extend((self.enter, self.leave))
        module.register_module_forward_pre_hook(self.enter)
        module.register_module_forward_hook(self.leave, always_call=True)
        wrap(torch.optim.Optimizer, "add_param_group", self.add_param_group)
        wrap(torch.optim.Optimizer, "zero_grad", self.zero_grad)
        wrap(torch.nn.Module, "zero_grad", self.zero_grad)
        wrap(torch.autograd, "backward", self.backward)
        builtins.append((torch.autograd, "grad", torch.autograd.grad))  # see compiles()
        wrap(torch.autograd, "grad", self.compute)
        wrap(torch.nn.parallel.DistributedDataParallel, "__init__", self.ddp)
        wrap(dist.device_mesh, "init_process_group", self.join)
        for owner in (dist, dist.distributed_c10d):
            wrap(owner, "init_process_group", self.join)
            for name in (*COLLECTIVES, "destroy_process_group"):
                wrap(owner, name, functools.partial(self.collect, name))
        waits.update(COLLECTIVES)

    def horovod_hooks(self, hvd) -> None:
        def init(call, *args, **kwargs):
            call(*args, **kwargs)
            recorder.joined(hvd.rank(), hvd.size())

        wrap(hvd, "init", init)
        for name in HOROVOD:
            wrap(hvd, name, functools.partial(self.collect, name))
        own = hvd.optimizer._DistributedOptimizer
        wrap(own, "synchronize", functools.partial(self.collect, "synchronize"))
        waits.update(HOROVOD)

    def name(self, weight) -> str:
        """Return a weight's name in the outermost network, or its number and shape."""
        if id(weight) not in self.names:
            for network in [*self.networks]:
                self.learn(network)
        number, _ = self.known.get(id(weight), (len(self.known), None))
        other = f"weight {number + 1} of shape {tuple(weight.shape)}"
        return self.names.get(id(weight), other)

    def learn(self, network) -> None:
        """Store the names of a network's weights."""
        self.networks[network] = True
        for name, weight in network.named_parameters():
            name = name.removeprefix("_orig_mod.").removeprefix("module.")
            self.names[id(weight)] = name.removeprefix("_orig_mod.")

    def add_param_group(self, call, optimizer, group) -> None:
        call(optimizer, group)
        if not self.optimized:
            self.optimized = True
            self.known.clear()  # trained() finds weights itself
        for weight in whole(group["params"]):
            _, known = self.known.get(id(weight), (0, lambda: None))
            if weight.requires_grad and weight.is_leaf and known() is not weight:
                reference = weakref.ref(weight)
                self.known[id(weight)] = len(self.known), reference
                hook = functools.partial(self.gradient, reference)
                self.handles.append(weight.register_hook(quiet(hook)))

    def gradient(self, reference, gradient) -> None:
        self.last_gradient, recorder.ticks = clock(), recorder.ticks + 1
        weight = None if self.computes else reference()
        if recorder.watching and weight is not None and not traced():
            tell("on_gradient", weight, gradient)

    def before_step(self, optimizer, args: tuple, kwargs: dict):
        """Begin a step; with a closure, begin it after the closure's backward pass."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            return self.begin_step(optimizer)

        def recorded():
            result = closure()
            quiet(self.begin_step)(optimizer)
            return result

        return args[:1], {**kwargs, "closure": recorded}

    def begin_step(self, optimizer) -> None:
        # Horovod's step() averages, and then calls step() of the same optimizer
        averages = hasattr(optimizer, "_should_synchronize")
        averages = averages and self.inner is not optimizer
        found = getattr(optimizer, "found_inf", None)  # by a GradScaler
        if recorder.timing and isinstance(found, torch.Tensor) and found.any():
            self.inner = None
            return  # a fused optimizer skips infinite gradients
        self.optimized = True  # also if it was created before a fork
        self.inner = optimizer  # a wrapped optimizer's step contains another step
        if recorder.timing and not averages:
            own, gradients = whole(weights(optimizer)), []
            if recorder.watching:
                gradients = numbers([weight.grad for weight in own])
            tell("on_step", optimizer, own, gradients)

    def end_step(self, optimizer, *_) -> None:
        if self.inner is not optimizer:
            return  # the outer step of a wrapped optimizer
        if recorder.timing:
            tell("after_step", optimizer, whole(weights(optimizer)))
        self.count_step(optimizer)
        self.inner, self.depth = None, 0
        recorder.ticks += 1
        if not recorder.timing:
            while self.handles:
                self.handles.pop().remove()

    def count_step(self, optimizer) -> None:
        current = Loaders.here.current
        if recorder.timing:
            own = weights(optimizer) if optimizer else []
            key = tuple(map(id, own))
            if key not in self.digests:
                self.digests[key] = digest([self.name(one) for one in own])
            groups = optimizer.param_groups if optimizer else []
            step = Step(
                optimizer=self.optimizers.setdefault(id(optimizer), recorder.step),
                which=self.digests[key],
                network=self.sets.setdefault(own[0], recorder.step) if own else 0,
                rates=[float(one["lr"]) for one in groups],
                loader=current and current.loader,
                epoch=current and current.epoch,
                place=place(),
                by_hand=optimizer is None,
                watched=recorder.watching,
            )
            recorder.write(step)
        if current:
            current.steps += 1
        recorder.step += 1

    def trained(self) -> list:
        """Return all networks' weights, for a script without an optimizer."""
        found = [one for network in [*self.networks] for one in network.parameters()]
        found = {id(one): one for one in whole(found) if one.requires_grad}
        for key, one in found.items():
            self.known.setdefault(key, (len(self.known), weakref.ref(one)))
        return [*found.values()]

    def begin_by_hand(self) -> None:
        """Store the weights before a backward pass, if the script has no optimizer."""
        self.passed = True
        if recorder.watching:
            self.before, self.met = numbers(self.trained()), self.meets

    def end_by_hand(self) -> None:
        """Count a step if the weights have changed since the last backward pass."""
        self.passed, found = False, self.trained() if recorder.watching else []
        same = len(found) != len(self.before) or numbers(found) == self.before
        if self.optimized or (recorder.watching and same):
            return
        if recorder.watching:
            tell("on_step_by_hand", found, self.before, self.met)
        self.count_step(None)

    def zero_grad(self, call, owner, *args, **kwargs):
        call(owner, *args, **kwargs)
        if recorder.watching:
            has_groups = hasattr(owner, "param_groups")  # an optimizer
            tell("on_clear", weights(owner) if has_groups else [*owner.parameters()])

    def backward(self, call, tensors, *args, **kwargs):
        recorder.ticks += 1
        if not (self.optimized or self.passed or self.backing):
            quiet(self.begin_by_hand)()
        if not recorder.timing or self.backing:  # inside: a reentrant checkpoint
            return call(tensors, *args, **kwargs)
        self.backing, self.where = True, place() if recorder.watching else ""
        recorder.passes += 1
        tell("on_backward", tensors)
        self.depth += 1  # checkpoints run parts of a network again in here
        try:
            return call(tensors, *args, **kwargs)
        finally:
            self.backing, self.depth = False, max(0, self.depth - 1)
            recorder.ticks += 1
            tell("after_backward")

    def compute(self, call, *args, **kwargs):
        self.computes, before = self.backing, self.computes
        recorder.passes += recorder.timing and not self.backing
        try:
            return call(*args, **kwargs)
        finally:
            self.computes = before

    def ddp(self, call, model, *args, **kwargs):
        call(model, *args, **kwargs)
        self.learn(model)
        own = [*model.module.named_parameters()]
        names = [f"{name} {tuple(one.shape)}" for name, one in own]
        frozen = [name for name, one in own if not one.requires_grad]
        recorder.write(Wraps(weights=names, frozen=frozen, place=place()))

    def enter(self, module, inputs) -> None:
        """Detect a network's call. All layers call this, so it must be fast.

        Changes of PyTorch's hooks during a job would make its compiler start again.
        """
        if torch.compiler.is_compiling() or get_ident() != self.thread:
            return
        if self.depth:
            self.depth += 1
        else:
            self.before_forward(module, inputs)

    def leave(self, module, inputs, outputs) -> None:
        """Detect that a network or one of its layers returns."""
        if torch.compiler.is_compiling() or get_ident() != self.thread:
            return
        inside, self.depth = self.depth, max(0, self.depth - 1)
        if inside == 1:
            self.after_forward(module, outputs)

    @quiet
    def before_forward(self, module, inputs) -> None:
        if traced():
            return
        self.depth = 1
        if self.passed:
            quiet(self.end_by_hand)()
        if recorder.timing:
            if module not in self.networks:
                self.learn(module)
            self.where = place() if recorder.watching else ""
            tell("on_input", module, leaves(inputs))

    @quiet
    def after_forward(self, module, outputs) -> None:
        if isinstance(module, torch.nn.modules.loss._Loss):
            return
        recorder.ticks += 1
        tell("on_output", module, outputs, Loaders.here.next_read())

    def collect(self, name: str, call, /, *args, **kwargs):
        if self.collective:  # another collective calls this one
            return call(*args, **kwargs)
        self.collective, recorder.waiting = True, name
        self.meets, self.exchanged = self.meets + 1, time()
        recorder.ticks += 1
        if name == "destroy_process_group":
            self.on_exit()
        if told := recorder.timing or self.tells:
            where, began = place(), clock()
            tensors = [one for one in args if isinstance(one, torch.Tensor)]
            tell("on_collective", name, args, kwargs, where)
        try:
            return call(*args, **kwargs)
        finally:
            self.collective, recorder.waiting = False, ""
            recorder.ticks += 1
            if told:
                tell("after_collective", name, tensors, where, clock() - began)

    def on_exit(self) -> None:
        if not self.ended:
            self.ended = True
            if self.passed:
                quiet(self.end_by_hand)()
            tell("on_end")

    def join(self, call, *args, **kwargs):
        dist = torch.distributed
        call(*args, **kwargs)
        recorder.joined(dist.get_rank(), dist.get_world_size())


def weights(optimizer) -> list:
    """Return an optimizer's weights, in its order."""
    return [one for group in optimizer.param_groups for one in group["params"]]


def whole(tensors) -> list:
    """Return the tensors that a process holds in full, unlike FSDP2's shards."""
    return [one for one in tensors if not hasattr(one, "placements")]
