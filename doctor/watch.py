"""Record what each process of a job does, by wrapping PyTorch's functions.

hook/sitecustomize.py imports this file into processes that have imported PyTorch.
The wrappers do not change any result, draw random numbers or communicate. Each process
appends pickled dictionaries to its own file, which job.py reads.
"""

import atexit
import builtins
import contextlib
import functools
import gc
import hashlib
import io
import multiprocessing
import os
import pickle
import random
import sys
import sysconfig
import threading
import time
import traceback
import warnings
import weakref
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator
from time import perf_counter as clock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Subset, get_worker_info
from torch.utils.data import dataloader as loaders
from torch.utils.data._utils import fetch

STEPS = int(os.environ.get("DOCTOR_STEPS", "40"))  # steps to record
TIMED = 20  # later steps that are only timed
SHORT = int(os.environ.get("DOCTOR_SHORT", "0"))  # batches per epoch; 0: all
NUMBERS = 1024  # numbers of weights, or of gradients, in one record
LIMITS = {"batch": 100_000, "fetch": 30, "collective": 3000, "evaluation": 2000}
LIMITS |= {"printed": 2000, "loss": 2000}
LIMITS |= dict.fromkeys(("save", "opened", "warning"), 200)  # per kind and process
LOSSES = "cross_entropy nll_loss mse_loss binary_cross_entropy_with_logits".split()
COLLECTIVES = """all_reduce broadcast all_gather reduce barrier all_gather_into_tensor
    all_gather_single reduce_scatter reduce_scatter_tensor all_to_all all_to_all_single
    gather scatter all_gather_object broadcast_object_list gather_object
    monitored_barrier""".split()
HOROVOD = """allreduce allreduce_ allgather broadcast broadcast_ broadcast_parameters
    broadcast_optimizer_state broadcast_object allgather_object barrier join""".split()
# Other functions in which a process waits for others
WAITS = """backward synchronize rendezvous init_process_group destroy_process_group
    _sync_buffers _sync_module_states _verify_param_shape_across_processes
    connect_to_new_process""".split()
GIVEN = "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"
SPAWNED = "spawn_main" in str(sys.orig_argv)  # its parent may have chosen the port
PORT = not SPAWNED and os.environ.get("MASTER_PORT")
OWN = os.path.dirname(os.path.abspath(__file__))
NOT_THE_USERS = (OWN, os.path.dirname(torch.__file__), "<")
LIBRARY = sysconfig.get_path("stdlib")


def place(frame=None) -> str:
    """Return the innermost line of the user's code (or a library's) as file:line."""
    frame, other = frame or sys._getframe(1), ""
    while frame:
        file = frame.f_code.co_filename
        if not file.startswith(NOT_THE_USERS):
            where = f"{os.path.relpath(file)}:{frame.f_lineno}"
            if "site-packages" not in file and not file.startswith(LIBRARY):
                return where
            other = other or where
        frame = frame.f_back
    return other


def digest(value) -> int:
    """Return a hash of a value that, unlike hash(), is the same in every process."""
    data = value if isinstance(value, bytes) else str(value).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "big")


def sample(tensors: list, each: int = 0) -> array:
    """Return a few numbers of each tensor, at fixed positions; zeros for None."""
    each = each or min(8, max(1, NUMBERS // max(1, len(tensors))))
    parts = []
    for one in tensors:
        part = torch.zeros(each, dtype=torch.float64)
        if one is not None and one.layout == torch.strided:
            flat = one.detach().reshape(-1)
            chosen = flat[:: max(1, flat.numel() // each)][:each]
            part[: len(chosen)] = chosen
        parts.append(part)
    return array("d", torch.cat(parts).tolist() if parts else [])


def whole(weights) -> list[Tensor]:
    """Return the weights that each process holds in full, unlike FSDP2's."""
    return [one for one in weights if not hasattr(one, "placements")]


def is_state(one: dict) -> bool:
    """Return whether a dictionary holds weights, such as one from state_dict()."""
    floats = [v for v in one.values() if torch.is_tensor(v) and v.is_floating_point()]
    return bool(floats) and 2 * len(floats) >= len(one)


def signature(value, depth: int = 0) -> object:
    """Return what tells data sets apart: parts of their tensors, arrays and lists."""
    if isinstance(value, Subset):
        return "Subset", [*map(int, value.indices)]
    if type(value).__module__.startswith("datasets.") and hasattr(value, "_indices"):
        count, chosen = len(value), value._indices
        chosen = chosen.column(0).to_pylist() if chosen else range(count)
        rows = [chosen[i] for i in range(0, count, max(1, count // 16))]
        return count, [value._data.slice(one, 1).to_pylist() for one in rows]
    if type(value).__name__ == "ndarray" and value.dtype.kind in "biuf":
        value = torch.as_tensor(value)
    if isinstance(value, Tensor):
        part = value.detach().reshape(-1)[:: max(1, value.numel() // 64)]
        return tuple(value.shape), part.tolist()
    if isinstance(value, (int, float, str)):
        return value
    found, inner = [type(value).__name__], []
    if isinstance(value, (list, tuple)):
        found.append(len(value))
        inner = value[:: max(1, len(value) // 16)]
    elif depth < 4:  # but ranks or paths may differ
        fields = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        fields = sorted(fields.items(), key=str)
        inner = [one for _, one in fields if not isinstance(one, (int, float, str))]
    return found + [signature(one, depth + 1) for one in inner if depth < 4]


def own_buffers(module: nn.Module) -> list[Tensor]:
    """Return a network's floating-point buffers, except batch norm's."""
    norms = nn.modules.batchnorm._BatchNorm
    parts = [one for one in module.modules() if not isinstance(one, norms)]
    found = [x for one in parts for x in one.buffers(recurse=False)]
    return [one for one in found if one.is_floating_point()]


def size(value) -> int | None:
    """Return the length of a value, or None if it has none."""
    with contextlib.suppress(TypeError, NotImplementedError, AttributeError):
        return len(value)


def dictionaries(value, depth: int = 0) -> Iterator[dict]:
    """Yield all dictionaries in nested dictionaries, lists and tuples."""
    if isinstance(value, dict):
        yield value
        value = [*value.values()]
    if isinstance(value, (list, tuple)) and depth < 5:
        for one in value:
            yield from dictionaries(one, depth + 1)


def factors(root: Tensor) -> tuple[float, str]:
    """Return the factor of a loss after its mean or sum, and "mean", "sum" or ""."""
    found, node = 1.0, root.grad_fn
    while name := type(node).__name__:
        if name.startswith(("Mean", "Sum", "Nll", "Mse", "Binary", "Smooth", "L1")):
            kind = getattr(node, "_saved_reduction", 1 + name.startswith("Sum"))
            return found, {1: "mean", 2: "sum"}.get(kind, "")
        if name in ("DivBackward0", "MulBackward0"):
            other = node._saved_other
            if other is None or other.numel() != 1:
                return found, ""
            found *= 1 / other.item() if name[0] == "D" else other.item()
        if name.startswith(("Add", "Sub")) or not getattr(node, "next_functions", ()):
            return found, ""
        node = node.next_functions[0][0]
    return found, ""


def states(dataset: object) -> dict[str, int]:
    """Return the states of the global generators and of the data set's own ones."""
    state = torch.random.default_generator.get_state()
    found = {"torch": digest(bytes(state.numpy())), "random": digest(random.getstate())}
    if numpy := sys.modules.get("numpy"):
        name, keys, *rest = numpy.random.get_state()
        found["numpy"] = digest((keys.tobytes(), *rest))
    for name, own in getattr(dataset, "__dict__", {}).items():
        numpys = getattr(own, "bit_generator", getattr(own, "_bit_generator", None))
        if isinstance(own, torch.Generator):
            found[f"its {name}"] = digest(bytes(own.get_state().numpy()))
        elif isinstance(own, random.Random):
            found[f"its {name}"] = digest(own.getstate())
        elif numpys:
            found[f"its {name}"] = digest(numpys.state)
    return found


def length(scheduler) -> int | None:
    """Return a schedule's number of steps: LambdaLR's falls slowly until there."""
    for factor in getattr(scheduler, "lr_lambdas", [])[:1]:
        with contextlib.suppress(Exception):  # the user's function
            rates = [max(0, factor(n)) for n in range(9 * scheduler.last_epoch)]
            top = rates.index(max(rates))
            end = top + rates[top:].index(least := min(rates[top:]))
            falls = rates[end - 2] > rates[end - 1] > least  # not in one large step
            return end if falls and end < len(rates) - 1 else None
    return getattr(scheduler, "T_max", getattr(scheduler, "total_steps", None))


def traced() -> bool:
    """Return whether PyTorch compiles, traces or transforms the current code."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    if torch._C._functorch.peek_interpreter_stack() is not None:  # vmap(), grad()
        return True
    if torch._C._len_torch_dispatch_stack():  # fake tensors
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def inside() -> bool:
    """Return whether a network runs normally: in the main thread, and not traced."""
    return not traced() and threading.current_thread() is threading.main_thread()


def quiet(method: Callable) -> Callable:
    """Return a hook whose own errors do not end the job."""

    def hook(*args, **kwargs):
        with contextlib.suppress(Exception):
            return method(*args, **kwargs)

    return hook


class Watch:
    """The recorder of one process. Methods that take `call` wrap that function."""

    def __init__(self):
        self.reset()
        os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        """Forget everything, like a new process that has recorded nothing."""
        self.file, self.written = None, Counter()
        self.rank, self.ticks, self.steps, self.began = None, 0, 0, None
        self.hooked, self.handles, self.validated = {}, [], set()
        self.local, self.loaders, self.schedules = {}, {}, []
        self.stepped, self.stale = set(), set()  # weights; with gradients of old steps
        self.optimizers, self.inner, self.scaler, self.scale = {}, None, None, None
        self.depth, self.line, self.collective, self.epoch = 0, "", None, None
        self.step_loader, self.undecided, self.predicted = None, None, None
        self.optimizer, self.batch, self.count = None, (None, None), None
        self.stateful, self.reduced = weakref.WeakKeyDictionary(), {}
        self.last_gradient, self.network_began, self.syncs = 0.0, 0.0, Counter()
        self.new_step()

    def new_step(self) -> None:
        """Start to collect the next step's record."""
        lists = "passes", "forwards", "clipped", "inputs"
        self.now = {"training": None, **{name: [] for name in lists}}
        self.parts, self.synced = Counter(), set()  # seconds; host syncs
        self.gathered = []  # results without a gradient, and the places of their calls

    def write(self, kind: str, **fields) -> None:
        """Append a record to this process's file."""
        if self.written[kind] >= LIMITS.get(kind, 10**9):
            return
        if self.file is None:
            host = os.uname().nodename  # hosts may share the folder
            path = f"{os.environ['DOCTOR_FOLDER']}/{host}-{os.getpid()}.records"
            self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            parent = multiprocessing.parent_process()  # also under a fork server
            parent = parent.pid if parent else os.getppid()
            given = {name: os.environ.get(name) for name in GIVEN}
            self.write("start", parent=f"{host}-{parent}", environment=given)
        self.written[kind] += 1
        record = {"kind": kind, "time": time.time(), "step": self.steps, **fields}
        os.write(self.file, pickle.dumps(record))

    # --- steps ---

    def add_param_group(self, call, optimizer, param_group) -> None:
        call(optimizer, param_group)
        for weight in whole(param_group["params"]):
            known = id(weight) in self.hooked
            if weight.requires_grad and weight.is_leaf and not known:
                self.hooked[id(weight)] = len(self.hooked), weight
                hook = functools.partial(self.gradient, weight)
                self.handles.append(weight.register_hook(quiet(hook)))

    def gradient(self, weight: nn.Parameter, gradient: Tensor) -> None:
        """Keep the gradient of one backward pass, before it is accumulated."""
        self.last_gradient, self.ticks = clock(), self.ticks + 1
        if self.steps < STEPS and not traced():  # on GPUs, in a thread of autograd
            if id(weight) in self.stepped:
                old = weight.grad is not None and any(sample([weight.grad], 8))
                (self.stale.add if old else self.stale.discard)(id(weight))
                self.stepped.discard(id(weight))
            new, old = sample([gradient], 8), self.local.get(id(weight))
            if old is not None and weight.grad is not None:
                new = array("d", map(float.__add__, new, old))
            self.local[id(weight)] = new

    def before_step(self, optimizer: Optimizer, args: tuple, kwargs: dict):
        """Record a step before it begins, or after its closure made the gradients."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            return self.begin_step(optimizer)

        def recorded():
            result = closure()
            quiet(self.begin_step)(optimizer)
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": recorded}
        return (args[0], recorded, *args[2:]), kwargs

    def begin_step(self, optimizer: Optimizer) -> None:
        """Keep the gradients and weights of the innermost wrapped optimizer."""
        if self.rank is None and dist.is_initialized():  # by init_device_mesh()
            self.joined(dist.get_rank(), dist.get_world_size())
        now = clock()
        if self.inner is not None and self.inner is not optimizer:
            self.parts["communication"] += now - self.step_began
        self.inner, self.optimizer, self.step_began = optimizer, optimizer, now
        weights = [w for group in optimizer.param_groups for w in group["params"]]
        self.now["gpu"] = weights[0].device.index if weights else None  # None: a CPU
        if self.steps >= STEPS or len(whole(weights)) < len(weights):
            return
        before, gradients = sample(weights), sample([w.grad for w in weights])
        each, local = len(before) // max(1, len(weights)), array("d")
        for weight in weights:
            local.extend(self.local.get(id(weight), [0.0] * 8)[:each])
        self.now |= {"before": before, "gradients": gradients, "local": local}
        self.now |= {"each": each, "stale": sum(id(w) in self.stale for w in weights)}
        known = [self.hooked.get(id(weight), (None,))[0] for weight in weights]
        self.now["which"] = digest(known)  # ZeRO's ranks update different weights
        self.now["missing"] = sum(w.grad is None for w in weights)

    def after_step(self, optimizer: Optimizer, *_) -> None:
        """Write the step's record."""
        if self.inner is not optimizer:
            return  # the outer step of a wrapped optimizer
        now = clock()
        self.parts["optimizer"] += now - self.step_began
        if self.steps < STEPS:
            own = {id(w) for group in optimizer.param_groups for w in group["params"]}
            self.stepped, self.stale = self.stepped | own, self.stale - own
        if self.steps < STEPS + TIMED:
            first = self.optimizers.setdefault(id(optimizer), self.steps)
            self.now["optimizer"] = first
            self.now["rates"] = [float(one["lr"]) for one in optimizer.param_groups]
            self.now["wall"] = now - self.began if self.began else 0
            loader = self.epoch and self.epoch["loader"]
            self.now |= {"place": place(), "loader": loader, "parts": {**self.parts}}
            self.write("step", **self.now, threads=torch.get_num_threads())
        self.new_step()
        self.step_loader = self.epoch and self.epoch["loader"]
        self.inner, self.depth, self.steps = None, 0, self.steps + 1
        if self.steps == STEPS + TIMED:
            for handle in self.handles:
                handle.remove()
        self.ticks, self.began = self.ticks + 1, clock()

    def backward(self, call, tensors, *args, **kwargs):
        self.ticks, self.undecided = self.ticks + 1, None
        if self.steps >= STEPS + TIMED:
            return call(tensors, *args, **kwargs)
        entry, root = {"place": place()}, tensors
        if isinstance(root, Tensor) and root.numel() == 1 and self.steps < STEPS:
            entry["factor"], entry["reduction"] = factors(root)
            entry["scale"], self.scale = self.scale, None
            entry["count"], self.count = self.count, None
        for results, where in self.gathered:
            if not any(one.requires_grad for one in tree_leaves(results)):
                self.now["gathered"] = where
        began = self.last_gradient = clock()
        try:
            return call(tensors, *args, **kwargs)
        finally:
            now = clock()
            last = self.last_gradient if self.last_gradient > began else now
            self.parts["backward"] += last - began
            self.parts["communication"] += now - last
            self.now["passes"].append(entry)
            self.ticks += 1

    def zero_grad(self, call, optimizer, *args, **kwargs):
        call(optimizer, *args, **kwargs)
        if self.steps >= STEPS:
            return
        own = {id(w) for group in optimizer.param_groups for w in group["params"]}
        self.stepped, self.stale = self.stepped - own, self.stale - own
        lost = [key for key in own if self.local.pop(key, None) is not None]
        if lost and self.now["passes"]:  # a skipped step, or cleared gradients
            self.now["passes"] = []

    def forward(self, call, model, *args, **kwargs):  # of DDP
        if torch.is_grad_enabled():
            self.now["forwards"].append(bool(model.require_backward_grad_sync))
        return call(model, *args, **kwargs)

    def scaled(self, call, scaler, *args, **kwargs):
        result = call(scaler, *args, **kwargs)
        if scaler.is_enabled() and self.steps < STEPS:
            self.scaler, self.scale = scaler, scaler.get_scale()
        return result

    def clip(self, norm: bool, call, parameters, *args, **kwargs):
        weights = [parameters] if isinstance(parameters, Tensor) else [*parameters]
        if self.steps < STEPS:
            done = self.scaler._per_optimizer_states.values() if self.scaler else ()
            scaled = bool(self.scaler) and not any(one["stage"].value for one in done)
            # In the optimizer's order, which may differ from the network's
            own = sorted(whole(weights), key=lambda w: self.hooked.get(id(w), (0,))[0])
            before = sample([one.grad for one in own])
            entry = {"scaled": scaled, "before": before, "place": place()}
            known = [self.hooked.get(id(one), (None,))[0] for one in own]
            entry |= {"which": digest(known), "passes": len(self.now["passes"])}
            self.now["clipped"].append({**entry, "norm": norm})
        return call(weights, *args, **kwargs)

    # --- networks ---

    def before_forward(self, module: nn.Module, inputs) -> None:
        """Record when the outermost network starts, and its input."""
        if inside():
            self.depth += 1
            if self.depth == 1:
                tensors = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
                if tensors and self.steps < STEPS and torch.is_grad_enabled():
                    self.now["inputs"].append(digest(sample(tensors[:1], 32)))
                self.network_began = clock()

    def after_forward(self, module: nn.Module, _, outputs) -> None:
        """Record the time and the output of the outermost network."""
        if not inside():
            return
        self.depth -= 1
        if self.depth or isinstance(module, nn.modules.loss._Loss):
            return
        trains = torch.is_grad_enabled()
        reads = self.epoch["reads"] if self.epoch else ()
        while len(reads) > 1 and reads[0][0]:
            reads.popleft()
        self.batch = (None, None)
        if reads and reads[0][0] and self.epoch["ended"]:
            self.epoch = None  # the input comes from elsewhere
        elif reads:  # the oldest unused batch: a prefetcher reads ahead
            reads[0][0], self.batch = True, reads[0][1:]
        training = any(one.training for one in self.modes(module) or [module])
        part = "forward" if training else "validation"
        self.parts[part] += clock() - self.network_began
        self.ticks += 1
        if trains:
            self.now["training"] = training
            if self.steps < STEPS and "buffers" not in self.now:
                self.now["buffers"] = sample(own_buffers(module), 8)
        loader = self.epoch and self.epoch["loader"]
        if not trains or not training:
            self.evaluation(module, outputs)
        elif self.steps and loader not in (None, self.step_loader):
            self.undecided = module, outputs  # evaluation if no backward() follows

    def modes(self, module: nn.Module) -> list[nn.Module]:
        """Return the parts of a network for which training mode matters."""
        if module not in self.stateful:
            kinds = nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd
            parts = [one for one in module.modules() if isinstance(one, kinds)]
            self.stateful[module] = parts
        return self.stateful[module]

    def which(self) -> dict[str, int | None]:
        """Return the number of the loader that gave the last batch, and its epoch."""
        return {key: self.epoch and self.epoch[key] for key in ("loader", "epoch")}

    def evaluation(self, module: nn.Module, outputs) -> None:
        """Record for which samples of a validation batch the output is correct."""
        logits = getattr(outputs, "logits", outputs)
        tensors = [x for x in tree_leaves(logits) if isinstance(x, Tensor)]
        logits = next((x for x in tensors if x.dim() == 2 and x.size(1) > 1), None)
        if self.written["evaluation"] >= LIMITS["evaluation"]:
            return
        modes = self.modes(module)
        fields = {"stateful": bool(modes), "network": type(module).__name__}
        fields["training"] = any(one.training for one in modes or [module])
        fields |= self.which()
        fields |= {"grad": torch.is_grad_enabled(), "place": place()}
        (labels, indices), self.predicted = self.batch, None
        if logits is not None:
            classes = logits.detach().argmax(1).cpu()
            if labels is not None and len(labels) == len(classes):
                hits = bytes((classes == labels.cpu()).tolist())
                fields |= {"hits": hits, "indices": indices}
            else:  # wait until the script compares the classes with its labels
                self.predicted = classes.tolist(), {**fields}
        tensors = [*whole(module.parameters()), *module.buffers()]
        version = id(module), sum(one._version for one in tensors)
        version += fields["loader"], fields["epoch"]
        if version not in self.validated:
            self.validated.add(version)
            fields["state"] = sample([x for x in tensors if x.is_floating_point()])
        self.write("evaluation", **fields)

    def equal(self, call, *args, **kwargs):
        result = call(*args, **kwargs)
        if self.predicted and isinstance(result, Tensor) and result.dim() == 1:
            classes, fields = self.predicted
            if classes in [x.tolist() for x in args if isinstance(x, Tensor)]:
                self.predicted, hits = None, bytes(result.tolist())
                self.write("evaluation", hits=hits, indices=None, **fields)
        return result

    def loss(self, call, /, *args, **kwargs):
        result = call(*args, **kwargs)
        if not inside() or not isinstance(result, Tensor) or result.numel() != 1:
            return result
        if kwargs.get("weight") is not None:
            return result
        validates = not torch.is_grad_enabled()
        few = self.written["loss"] < LIMITS["loss"] if validates else self.steps < STEPS
        if few:
            target = kwargs["target"] if "target" in kwargs else args[1]
            self.count = len(target) if target.dim() else 1  # the loss is their mean
            if not target.is_floating_point():
                self.count = int((target != kwargs.get("ignore_index", -100)).sum())
        if few and validates:
            value, count = float(result), self.count
            value /= count if kwargs.get("reduction") == "sum" and count else 1
            fields = self.which() | {"indices": self.batch[1]}
            self.write("loss", value=value, count=count, **fields)
        return result

    def wrapped(self, call, model, module, *args, **kwargs):  # DDP's constructor
        call(model, module, *args, **kwargs)
        size = sum(one.numel() * one.element_size() for one in module.parameters())
        search, bucket = model.find_unused_parameters, model.bucket_bytes_cap
        self.write("ddp", search=search, bucket=bucket, size=size, place=place())

    # --- data ---

    def iterate(self, call, loader):
        if getattr(loader, "_iterator", None) is not None:  # persistent workers
            loader._iterator.__dict__["_doctor_indices"] = deque()
        known = self.loaders.setdefault(id(loader), [len(self.loaders), -1, loader])
        known[1] += 1
        base, subsets = loader.dataset, []
        while isinstance(base, Subset):
            subsets.append(base.indices)
            base = base.dataset
        iterator, sampler = call(loader), loader.sampler
        which = {"loader": known[0], "epoch": known[1]}
        epoch = {**which, "subsets": subsets, "count": 0, "ended": False}
        epoch["reads"] = deque(maxlen=8)  # the last batches, and whether they were used
        iterator.__dict__["_doctor_epoch"] = epoch
        found = {"type": type(base).__name__, "sampler": type(sampler).__name__}
        found |= {"length": size(loader), "samples": size(loader.dataset)}
        found |= {"batch": loader.batch_size, "data": digest(signature(base))}
        found["subset"] = digest(signature(loader.dataset))
        found["shuffle"] = getattr(sampler, "shuffle", "Random" in found["sampler"])
        found["replacement"] = getattr(sampler, "replacement", False)
        kinds = {found["sampler"], type(loader.batch_sampler).__name__}
        found["divided"] = bool(kinds & {"DistributedSampler", "BatchSamplerShard"})
        self.write("loader", **which, **found, place=place())
        return iterator

    def next_index(self, call, iterator):
        index = call(iterator)
        iterator.__dict__.setdefault("_doctor_indices", deque()).append(index)
        return index

    def next_batch(self, call, iterator):
        epoch = iterator.__dict__.get("_doctor_epoch")
        if epoch is None:
            return call(iterator)
        if self.undecided:
            self.evaluation(*self.undecided)
            self.undecided = None
        short = SHORT and epoch["count"] >= SHORT
        part, began = "data" if torch.is_grad_enabled() else "validation", clock()
        try:
            if short:
                raise StopIteration
            batch = call(iterator)
        except StopIteration:
            epoch["ended"] = True
            fields = {"epoch": epoch["epoch"], "whole": not short}
            self.write("end", loader=epoch["loader"], **fields)
            raise
        finally:
            self.parts[part] += clock() - began
        self.epoch, self.ticks, self.gathered = epoch, self.ticks + 1, []
        epoch["count"] += 1
        waiting = iterator.__dict__.get("_doctor_indices")
        self.read(epoch, waiting.popleft() if waiting else None, batch)
        return batch

    def read(self, epoch: dict, index, batch) -> None:
        """Record which samples a batch contains."""
        leaves = [x for x in tree_leaves(batch) if isinstance(x, Tensor) and x.dim()]
        leaves = [one for one in leaves if len(one) == len(leaves[0])]
        labels = [x for x in leaves if x.dim() == 1 and not x.is_floating_point()]
        labels, indices = labels[0] if len(labels) == 1 else None, None
        fields = {"loader": epoch["loader"], "epoch": epoch["epoch"]}
        numbers = index if isinstance(index, (list, tuple)) else [None]
        if all(hasattr(one, "__index__") for one in numbers):
            for subset in epoch["subsets"]:
                index = [subset[i] for i in index]
            fields["indices"] = indices = array("q", map(int, index))
        elif labels is not None:
            fields["labels"] = array("q", labels.tolist())
        epoch["reads"].append([False, labels, indices])
        if leaves and self.steps < STEPS:
            parts = [one.detach().reshape(len(one), -1) for one in leaves]
            parts = [one[:, :: max(1, one.size(1) // 8)][:, :8] for one in parts]
            rows = zip(*(one.tolist() for one in parts), strict=True)
            fields["rows"] = array("q", map(digest, rows))
        self.write("batch", **fields)

    def fetch(self, call, fetcher, indices):
        if self.written["fetch"] >= LIMITS["fetch"]:
            return call(fetcher, indices)
        before = states(fetcher.dataset)
        try:
            return call(fetcher, indices)
        finally:
            after, worker = states(fetcher.dataset), get_worker_info()
            drawn = {k: before[k] for k in before if after.get(k) != before[k]}
            fields = {"worker": worker and worker.id, "states": drawn}
            self.write("fetch", number=self.written["fetch"], **fields)

    # --- other calls ---

    def collect(self, name: str, call, /, *args, **kwargs):
        if self.collective:  # another collective calls this one
            return call(*args, **kwargs)
        self.collective, self.ticks, where = name, self.ticks + 1, place()
        tensors = [one for one in args if isinstance(one, Tensor)]
        if self.rank is not None and not kwargs.get("group"):
            count = tensors[0].numel() if tensors else None
            self.write("collective", name=name, count=count, place=where)
        if name.startswith("all_gather") and torch.is_grad_enabled():
            # One dimension: the losses of a batch, which many scripts gather to print
            if any(one.requires_grad and one.dim() > 1 for one in tensors):
                self.gathered.append((args[0], where))
        began, sums = clock(), []
        adds = kwargs.get("op", dist.ReduceOp.SUM) == dist.ReduceOp.SUM
        plain = name == "all_reduce" and len(args) == 1 and adds and {*kwargs} <= {"op"}
        early = self.reduced.get(where, (0,))[-1] < 12 and not self.now["passes"]
        if plain and early and tensors and tensors[0].numel() <= 16:
            sums = [float(one) for one in tensors[0].flatten().tolist()]
        try:
            return call(*args, **kwargs)
        finally:
            if any(sums):
                self.reduce_again(tensors[0], sums, where)
            self.collective, self.ticks = None, self.ticks + 1
            for part in ("communication", f"{name}() in {where}"):
                self.parts[part] += clock() - began

    def reduce_again(self, tensor: Tensor, before: list, where: str) -> None:
        """Count how often a sum over all ranks is summed again, with more added."""
        one, last, count, calls = self.reduced.get(where, (None, [], 0, 0))
        grows = one is tensor and all(map(float.__ge__, before, last))
        after = [float(x) for x in tensor.flatten().tolist()]
        self.reduced[where] = tensor, after, count + 1 if grows else 0, calls + 1
        if count == 2 and grows:
            self.write("again", place=where)

    def join(self, call, *args, **kwargs):
        method = kwargs.get("init_method") or (args[1:] or [None])[0]
        port = (method or "").rpartition(":")[2]
        port = port if port.isdigit() else os.environ.get("MASTER_PORT", "")
        own = port != PORT and port.isdigit() and int(port)  # not the launcher's
        self.write("init", own_port=own, place=place())
        call(*args, **kwargs)
        self.joined(dist.get_rank(), dist.get_world_size())

    def joined(self, rank: int, world_size: int) -> None:
        """Record this process's rank."""
        self.rank, self.ticks = rank, self.ticks + 1
        self.write("rank", rank=rank, world_size=world_size)

    def save(self, call, obj, f, *args, **kwargs):
        named = isinstance(f, (str, os.PathLike))
        path = f if named else getattr(f, "name", None)
        path = os.path.abspath(path) if isinstance(path, (str, os.PathLike)) else None
        found = [*dictionaries(obj)]
        names = [[*map(str, one)] for one in found if is_state(one)]
        prefixes = "module.", "_orig_mod."
        wrapped = [all(one.startswith(prefixes) for one in own) for own in names]
        fields = {"weights": bool(names), "wrapped": any(wrapped)}
        fields["optimizer"] = any("param_groups" in one for one in found)
        kept = self.optimizer.state.values() if self.optimizer else ()
        fields["state"] = any(torch.is_tensor(v) for one in kept for v in one.values())
        top = obj.values() if isinstance(obj, dict) else obj
        top = top if isinstance(obj, (dict, list, tuple)) else ()
        fields["counts"] = any(isinstance(one, int) for one in top)
        values = [value for one in found for value in one.values()]
        values = [one for one in values if isinstance(one, Tensor)]
        shards = [x for one in values for x in getattr(one, "placements", ())]
        fields["shards"] = any(one.is_shard() for one in shards)
        fields["there"] = named and os.path.exists(path)
        self.write("save", path=path, place=place(), **fields)
        began = clock()
        result = call(obj, f, *args, **kwargs)
        self.parts["saving"] += clock() - began
        return result

    def open(self, call, file, mode="r", *args, **kwargs):
        result = call(file, mode, *args, **kwargs)
        if {*"wax"} & {*mode} and isinstance(file, (str, os.PathLike)):
            caller = sys._getframe(2)
            name, code = caller.f_globals.get("__name__", ""), caller.f_code.co_filename
            library = code.startswith((*NOT_THE_USERS, LIBRARY)) or "-packages" in code
            if not library or name.startswith(("logging", "pathlib")):
                path = os.path.abspath(os.fsdecode(file))
                self.write("opened", path=path, place=place(caller))
        return result

    def load(self, call, *args, **kwargs):
        result = call(*args, **kwargs)
        found = [*dictionaries(result)]
        if any("param_groups" in one for one in found):
            schedule = any("last_epoch" in one for one in found)
            self.write("load", place=place(), schedule=schedule)
        return result

    def restored(self, what: str, call, *args, **kwargs):
        result = call(*args, **kwargs)
        unknown = getattr(result, "unexpected_keys", ())
        state = kwargs.get("state_dict", args[1] if len(args) > 1 else ())
        lost = bool(unknown) and len(unknown) >= len(state)
        self.write("restored", what=what, place=place(), lost=lost)
        return result

    def schedule(self, call, scheduler, *args, **kwargs):
        call(scheduler, *args, **kwargs)
        self.schedules.append(scheduler)
        self.write("schedule", type=type(scheduler).__name__, place=place())

    def plateau(self, call, scheduler, metrics, *args, **kwargs):
        self.write("plateau", value=float(metrics), place=place())
        return call(scheduler, metrics, *args, **kwargs)

    def warning(self, call, message, *args, **kwargs):
        self.write("warning", text=str(message)[:300], place=place())
        return call(message, *args, **kwargs)

    def printed(self, text: str) -> None:
        """Record lines that may contain an accuracy."""
        words = ("acc", "top", "prec", "err", "correct", "loss", "ppl", "perplexity")
        if any(one in text.lower() for one in words) and any(map(str.isdigit, text)):
            self.write("printed", text=text[:2000], place=place())

    def stream(self, call, text):
        self.line += text
        if text.endswith(("\n", "\r")):
            self.printed(self.line)
            self.line = ""
        return call(text)

    def sync(self, name: str, call, tensor, /, *args, **kwargs):
        if 0 < self.steps < STEPS and self.inner is None:
            if not sys._getframe(2).f_code.co_filename.startswith(NOT_THE_USERS):
                where = f"{name.strip('_')}() in {place()}"
                self.syncs[where] += where not in self.synced
                self.synced.add(where)
        return call(tensor, *args, **kwargs)

    def excepthook(self, call, kind, error, trace):
        if not issubclass(kind, (SystemExit, KeyboardInterrupt)):
            where, path = "", getattr(error, "filename", None)
            for frame, line in traceback.walk_tb(trace):
                file = frame.f_code.co_filename
                if not file.startswith((*NOT_THE_USERS, LIBRARY)):
                    where = f"{os.path.relpath(file)}:{line}"
            text = f"{kind.__name__}: {error}"[:2000]
            self.write("error", text=text, place=where, path=str(path or ""))
        if call:
            call(kind, error, trace)

    def spawned(self, call, function, *args):
        def guarded(*inside):
            try:
                return function(*inside)
            except Exception:
                self.excepthook(None, *sys.exc_info())
                raise

        return call(guarded, *args)

    def exit(self) -> None:
        """Record the state at the end of the process."""
        if self.file is None:
            return
        self.printed(self.line)
        groups = self.optimizer.param_groups if self.optimizer else ()
        weights = whole(one for group in groups for one in group["params"])
        fields = {"weights": sample(weights), "syncs": self.syncs.most_common(9)}
        fields["schedules"] = [(length(x), x.last_epoch) for x in self.schedules]
        self.write("exit", watched=min(STEPS, self.steps), **fields)
        gc.collect()  # frees the process groups: see Gloo's threads in docs/pitfalls.md

    def monitor(self) -> None:
        """Record where the main thread is waiting if nothing happens for a while."""
        seen, since, main = -1, time.monotonic(), threading.main_thread().ident
        while True:
            time.sleep(1)
            if self.ticks != seen:
                seen, since = self.ticks, time.monotonic()
            seconds = time.monotonic() - since
            if seconds < 4 or self.file is None:
                continue
            inner = sys._current_frames().get(main)
            names = [one.f_code.co_name for one, _ in traceback.walk_stack(inner)]
            known = [one for one in names if one in (*COLLECTIVES, *HOROVOD, *WAITS)]
            what = self.collective or (known or [""])[0]
            self.write("waits", what=what, place=place(inner), seconds=seconds)
            open(f"{os.environ['DOCTOR_FOLDER']}/waits", "w").close()
            time.sleep(2)


watch = Watch()


def wrap(owner, name: str, method: Callable, *first) -> None:
    """Replace a function with a Watch method that is given the function to call."""
    call = getattr(owner, name, None)
    if call is None or hasattr(call, "_doctor"):
        return

    @functools.wraps(call)
    def wrapped(*args, **kwargs):
        if torch.compiler.is_compiling():
            return call(*args, **kwargs)
        results, failed = [], []

        def original(*args, **kwargs):
            try:
                results.append(call(*args, **kwargs))
            except BaseException as error:
                failed.append(error)
                raise
            return results[-1]

        try:
            return method(*first, original, *args, **kwargs)
        except Exception as error:
            if failed or isinstance(error, StopIteration):
                raise
            watch.collective = None  # the recorder's own error must not end the job
            return results[-1] if results else call(*args, **kwargs)

    wrapped._doctor = True
    # TorchScript then compiles the original function
    wrapped.__script_if_tracing_wrapper, wrapped.__original_fn = True, call
    with contextlib.suppress(AttributeError, TypeError):  # an unusual sys.stdout
        setattr(owner, name, wrapped)


def torch_is_there() -> None:
    """Wrap PyTorch's functions, right after PyTorch has been imported."""
    w, c10d, next_one = watch, dist.distributed_c10d, loaders._BaseDataLoaderIter
    optimizers.register_optimizer_step_pre_hook(quiet(w.before_step))
    optimizers.register_optimizer_step_post_hook(quiet(w.after_step))
    module = nn.modules.module
    module.register_module_forward_pre_hook(quiet(w.before_forward))
    module.register_module_forward_hook(quiet(w.after_forward), always_call=True)
    for owner, name, method in (
        (Optimizer, "add_param_group", w.add_param_group),
        (Optimizer, "zero_grad", w.zero_grad),
        (torch.autograd, "backward", w.backward),
        (torch.amp.GradScaler, "scale", w.scaled),
        (DDP, "forward", w.forward),
        (DDP, "__init__", w.wrapped),
        (DataLoader, "__iter__", w.iterate),
        (next_one, "_next_index", w.next_index),
        (next_one, "__next__", w.next_batch),
        (fetch._MapDatasetFetcher, "fetch", w.fetch),
        (torch, "save", w.save),
        (torch, "load", w.load),
        (builtins, "open", w.open),
        (io, "open", w.open),
        (LRScheduler, "__init__", w.schedule),
        (ReduceLROnPlateau, "step", w.plateau),
        (sys.stdout, "write", w.stream),
        (sys.stderr, "write", w.stream),
        (sys, "excepthook", w.excepthook),
        (warnings, "showwarning", w.warning),
        (sys.modules.get("torch.multiprocessing.spawn"), "_wrap", w.spawned),
    ):
        wrap(owner, name, method)
    for owner in (nn.utils, nn.utils.clip_grad):
        wrap(owner, "clip_grad_norm_", w.clip, True)
        wrap(owner, "clip_grad_value_", w.clip, False)
    wrap(Optimizer, "load_state_dict", w.restored, "optimizer")
    wrap(nn.Module, "load_state_dict", w.restored, "weights")
    for owner in (LRScheduler, *LRScheduler.__subclasses__()):
        if "load_state_dict" in vars(owner):
            wrap(owner, "load_state_dict", w.restored, "schedule")
    for name in LOSSES:
        wrap(nn.functional, name, w.loss)
    for owner in (dist, c10d):
        wrap(owner, "init_process_group", w.join)
        for name in (*COLLECTIVES, "destroy_process_group"):
            wrap(owner, name, w.collect, name)
    for owner, name in ((Tensor, "__eq__"), (Tensor, "eq"), (torch, "eq")):
        wrap(owner, name, w.equal)
    for name in "item cpu tolist numpy __bool__ __float__ __int__".split():
        wrap(Tensor, name, w.sync, name)
    atexit.register(w.exit)
    threading.Thread(target=w.monitor, daemon=True, name="doctor").start()


def horovod_is_there() -> None:
    """Wrap Horovod's functions, right after horovod.torch has been imported."""
    import horovod.torch as hvd

    def init(call, *args, **kwargs):
        call(*args, **kwargs)
        watch.joined(hvd.rank(), hvd.size())

    wrap(hvd, "init", init)
    for name in HOROVOD:
        wrap(hvd, name, watch.collect, name)
    wrap(
        hvd.optimizer._DistributedOptimizer, "synchronize", watch.collect, "synchronize"
    )
