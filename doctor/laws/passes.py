"""Law 5: a step uses the mean over all samples. Tracks backward passes and steps."""

import re
import weakref
from functools import partial, reduce
from itertools import compress
from operator import add

from ..event import Event
from ..law import WRONG, Breach, Law, check, several
from ..loaders import Loaders
from ..moments import Moments, weights
from ..record import place, recorder, torch, wrap
from ..sample import flat, numbers, picked
from ..watcher import Watcher
from .replicas import listed, weights_drift

AWAIT = "wait", "synchronize", "is_completed", "get_future", "block_current_stream"
ADAPTIVE = re.compile("Adam|RMSprop|Adagrad|Adadelta|Lamb|Lion|Muon|Rprop|Shampoo")
LAW = Law(5, "gradient", "A step uses the mean over all samples")
SEPARATE = 8  # maximum number of passes whose gradients doctor stores separately


class Update(Event):
    """The gradients of an optimizer's step, and the passes that computed them."""

    optimizer: int  # the first step of this optimizer
    names: list[str]  # the weights' names
    each: int  # number of elements per weight in the following gradients
    used: list[float]  # the gradients that the step uses
    adaptive: bool  # the optimizer divides gradients by their size, like Adam
    local: list[list[float]]  # this rank's own gradients of each pass (or their sum)
    passes: list[dict]  # see Passes.on_backward()
    lost: list[str]  # lines of passes whose gradients were cleared before the step
    stale: list[str]  # weights that still had the gradients of an earlier step
    clips: list[dict]  # see Passes.clip()
    place: str

    def part(self, values: list[float], number: int) -> list[float]:
        """Return one weight's elements in a list of gradients."""
        return values[number * self.each : (number + 1) * self.each]


class NotAwaited(Event, limit=20):
    """A step begins before the script has waited for a gradient's all_reduce()."""

    name: str  # the weight's name
    place: str


class Passes(Watcher):
    """Tracks backward passes, and records the gradients that each pass adds."""

    def __init__(self):
        self.passes, self.number, self.current = {}, 0, None
        self.local, self.stepped, self.stale = {}, set(), {}
        self.lost, self.clips, self.first = {}, [], {}
        self.forwards, self.model = [], lambda: None
        self.scale, self.scaler = None, lambda: None
        self.works = {}  # asynchronous calls that have not been awaited

    def hooks(self) -> None:
        dist = torch.distributed
        for owner in (dist, dist.distributed_c10d):
            wrap(owner, "all_reduce", self.reduce)
        for name in AWAIT:
            wrap(dist.Work, name, self.awaited)
        utils, ddp = torch.nn.utils, torch.nn.parallel.DistributedDataParallel
        wrap(ddp, "forward", self.forward)
        wrap(torch.amp.GradScaler, "scale", self.scaled)
        wrap(torch.amp.GradScaler, "step", self.scaler_step)
        for owner in (utils, utils.clip_grad):
            wrap(owner, "clip_grad_norm_", partial(self.clip, True))
            wrap(owner, "clip_grad_value_", partial(self.clip, False))

    def reduce(self, call, tensor, *args, **kwargs):
        work = call(tensor, *args, **kwargs)
        if work is not None and recorder.watching:
            self.works[id(work)] = tensor.data_ptr(), place()
        return work

    def awaited(self, call, work, *args, **kwargs):
        self.works.pop(id(work), None)
        return call(work, *args, **kwargs)

    def forward(self, call, model, *args, **kwargs):
        if recorder.watching and torch.is_grad_enabled():
            self.forwards.append(bool(model.require_backward_grad_sync))
            self.model = weakref.ref(model)
        return call(model, *args, **kwargs)

    def scaled(self, call, scaler, *args, **kwargs):
        result = call(scaler, *args, **kwargs)
        if scaler.is_enabled() and recorder.watching:
            self.scale, self.scaler = scaler._scale.clone(), weakref.ref(scaler)
        return result

    def scaler_step(self, call, scaler, optimizer, *args, **kwargs):
        before = recorder.step
        result = call(scaler, optimizer, *args, **kwargs)
        if recorder.step == before:  # a scaler skips infinite gradients
            self.after_step(optimizer, weights(optimizer))
            for one in weights(optimizer):
                self.local.pop(id(one), None)
        return result

    def on_backward(self, root) -> None:
        if not recorder.watching:
            return
        self.number += 1
        current, model = Loaders.here.current, self.model()
        self.current = {
            "place": Moments.here.where,
            "loader": current and current.loader,
            "epoch": current and current.epoch,
            "forwards": self.forwards,  # DDP's flags: whether this pass will average
            "flag": bool(model.require_backward_grad_sync) if model else None,
            "scale": self.scale,
        }
        self.passes[self.number] = self.current
        self.forwards, self.scale = [], None

    def on_gradient(self, weight, gradient) -> None:
        key = id(weight)
        if not self.number or not Moments.here.backing:  # or else, autograd.grad()
            return
        if key in self.stepped or weight.grad is None:
            self.local.pop(key, None)
        if key in self.stepped and weight.grad is not None:
            self.stale[key] = picked(weight.grad, 8)
        self.stepped.discard(key)
        entry = self.number, picked(gradient, 8)
        self.local.setdefault(key, []).append(entry)

    def on_clear(self, weights) -> None:
        for key in map(id, weights):
            entries = self.local.pop(key, ())
            if key not in self.stepped:
                self.lost |= dict.fromkeys((number for number, _ in entries), key)
            self.stepped.discard(key)
            self.stale.pop(key, None)

    def clip(self, norm: bool, call, parameters, *args, **kwargs):
        """Record the gradients before the script clips them."""
        single = isinstance(parameters, torch.Tensor)
        found = [parameters] if single else [*parameters]
        if recorder.watching and not any(hasattr(one, "placements") for one in found):
            scaler = self.scaler()
            done = scaler._per_optimizer_states.values() if scaler else ()
            rows = numbers([one.grad for one in found])
            entry = {
                "before": dict(zip(map(id, found), rows, strict=True)),
                "scaled": bool(scaler) and not any(x["stage"].value for x in done),
                "norm": norm,
                "place": place(),
            }
            self.clips.append(entry)
        return call(parameters if single else found, *args, **kwargs)

    def on_step(self, optimizer, whole, gradients) -> None:
        if not recorder.watching:
            return
        unused = self.stepped & {*self.local}  # no pass uses these weights
        fresh = [id(one) not in unused for one in whole]
        whole, gradients = [*compress(whole, fresh)], compress(gradients, fresh)
        keys = [id(one) for one in whole]
        works, self.works = dict(self.works.values()), {}
        for one in whole if works else ():
            if one.grad is not None and (where := works.get(one.grad.data_ptr())):
                name = Moments.here.name(one)
                recorder.write(NotAwaited(name=name, place=where))
        # A fused optimizer unscales the gradients itself
        scale = float(getattr(optimizer, "grad_scale", None) or 1)
        gradients = [[x / scale for x in one] for one in gradients]
        each, used = flat(gradients)
        found = [self.local.get(key, []) for key in keys]
        order = sorted({n for one in found for n, _ in one} & {*self.passes})
        groups = [[n] for n in order] if len(order) <= SEPARATE else [order]
        sums = [
            reduce(add, own) if (own := [x for n, x in one if n in group]) else None
            for group in groups
            for one in found
        ]
        rows, count = numbers(sums), len(whole)
        local = [flat(rows[n : n + count])[1] for n in range(0, len(rows), count or 1)]
        old = numbers([self.stale.pop(key, None) for key in keys])
        stale = [one for one, row in zip(whole, old, strict=True) if any(row)]
        passes = [self.passes[number] for number in order]
        for one in passes:
            one["scale"] = None if one["scale"] is None else float(one["scale"])
        clips = []
        for one in self.clips:
            before = [one["before"].get(key) for key in keys]
            if any(before):
                before = [] if None in before else flat(before)[1]
                clips.append(one | {"before": before})
        lost = {number for number, key in self.lost.items() if key in keys}
        update = Update(
            optimizer=self.first.setdefault(id(optimizer), recorder.step),
            adaptive=bool(ADAPTIVE.search(type(optimizer).__name__)),
            names=[Moments.here.name(one) for one in whole],
            each=each,
            used=used,
            local=local,
            passes=passes,
            lost=[self.passes[x]["place"] for x in sorted(lost) if x in self.passes],
            stale=[Moments.here.name(one) for one in stale],
            clips=clips,
            place=place(),
        )
        recorder.write(update)
        self.after_step(optimizer, whole)  # a step's closure may run again

    def after_step(self, optimizer, whole) -> None:
        keys = {id(one) for one in whole}
        self.stepped |= keys
        self.clips = []
        self.lost = {x: key for x, key in self.lost.items() if key not in keys}
        used = [number for one in self.local.values() for number, _ in one]
        kept = {*used, *self.lost, self.number}
        self.passes = {x: one for x, one in self.passes.items() if x in kept}


@check(LAW, WRONG, effects=[weights_drift], read="lesson 5")
def not_awaited(job):
    """A step uses gradients before all_reduce() has ended.

    Call wait() on each all_reduce(..., async_op=True) before you use the gradient.
    """
    several(job)
    if found := job.of(NotAwaited):
        names = listed(one.name for one in found)
        what = f"step {found[0].step + 1} does not wait for all_reduce() of {names}"
        yield Breach(what, found[0].place)
