"""Law 4: replicas are equal. Records weights, buffers and optimizer states."""

import weakref
from collections import Counter
from itertools import chain, pairwise

from ..event import Event, Exit
from ..law import Doubt, Law
from ..loaders import Loaders
from ..moments import Moments, Step, Wraps
from ..objects import Objects, few_of, label_of
from ..record import STEPS, place, recorder, torch
from ..sample import digest, flat, numbers
from ..watcher import Watcher

LAW = Law(4, "replicas", "Replicas are equal")
INNER = "copies of a network train for a few steps each, as in an inner loop"
# Before these steps, doctor compares optimizer states
STATES = {1, 2, 5, 10, 20, STEPS - 1}


class State(Event, limit=1000):
    """A few elements of named tensors at one moment."""

    moment: str  # first (input), start, step, other, optimizer, validation or end
    what: str  # weights, buffers, kept (see objects.py), or the network's name
    names: list[str]
    each: int
    values: list[float]
    place: str = ""
    trains: bool = True  # an optimizer contains weights of the network
    meets: int = 0  # number of collectives so far, in a script without an optimizer
    kind: int = 0  # a hash of the names and shapes of a network's tensors

    def rows(self) -> dict[str, list[float]]:
        """Return {tensor's name: its elements}."""
        parts = range(0, len(self.values), self.each)
        pairs = zip(self.names, parts, strict=True)
        return {name: self.values[n : n + self.each] for name, n in pairs}


class Replicas(Watcher):
    """Records a few elements of all weights, buffers and optimizer states."""

    def __init__(self):
        self.validated, self.seen, self.others = set(), set(), {}
        self.labels, self.made, self.objects = {}, Counter(), Objects()
        self.lasting = {}  # id of each network that was in `others` -> its last sample
        self.started = self.ran = False

    def on_input(self, network, inputs) -> None:
        if not self.ran and torch.is_grad_enabled():  # not while codes are initialized
            self.ran = True
            self.write("first", "kept", self.objects.tensors(Moments.here.known))
            self.objects.found = None  # the script may make more before a step

    def on_backward(self, root) -> None:
        if not self.started and recorder.watching:
            self.started = True
            self.write("start", "weights", self.held())

    def on_step(self, optimizer, weights, gradients) -> None:
        if not recorder.watching:
            return
        found = {"weights": self.held(), "buffers": summed(buffers())}
        if recorder.step:
            found["kept"] = self.objects.tensors(Moments.here.known)
        rows = numbers([x for own in found.values() for x in own.values()])
        for what, own in found.items():
            self.write("step", what, own, rows=[rows.pop(0) for _ in own])
        self.write_others(self.others)
        self.lasting |= dict.fromkeys(self.others, recorder.step)
        self.others = {}
        first = id(optimizer) not in self.seen and optimizer.state
        self.seen.add(id(optimizer))
        if first or recorder.step in STATES:
            self.write("optimizer", "optimizer", states(optimizer))

    def on_step_by_hand(self, weights, before, meets) -> None:
        labels = {id(one): label for label, one in self.held().items()}
        own = {labels[id(one)]: one for one in weights}
        self.write("step", "weights", own, rows=before, meets=meets)
        if recorder.step:
            kept = self.objects.tensors(Moments.here.known)
            self.write("step", "kept", kept, meets=meets)

    def on_output(self, network, outputs, batch) -> None:
        current = Loaders.here.current
        step, last = recorder.step, self.lasting.get(id(network))
        later = not (recorder.watching or step & (step - 1))  # at a power of two
        if later and last not in (None, step):
            self.lasting[id(network)] = step
            self.write_others({id(network): (weakref.ref(network), place())})
        late = not recorder.watching or recorder.step
        key = id(network), *([current.loader, current.epoch] if current else [late])
        # A network that runs before the first step may only be validated
        seen = network.training or key in self.validated or not recorder.step
        if seen and not recorder.watching:
            return
        known = Moments.here.known
        trains = any(id(one) in known for one in network.parameters())
        if recorder.watching and not trains:
            self.others[id(network)] = weakref.ref(network), place()
        if seen:
            return
        self.validated.add(key)
        found = named(network.named_parameters())
        found |= summed(named(network.named_buffers()))
        self.write("validation", type(network).__name__, found, trains=trains)

    def on_end(self) -> None:
        if recorder.step:
            self.write("end", "weights", self.held())

    def write_others(self, networks: dict) -> None:
        """Write the weights of networks that no optimizer trains."""
        for reference, where in networks.values():
            if (network := reference()) is not None:
                name, own = type(network).__name__, named(network.named_parameters())
                self.write("other", name, own, place=where, trains=False)

    def held(self) -> dict:
        """Return {name: weight} for all networks that an optimizer has trained."""
        found, seen = {}, [one() for _, one in Moments.here.known.values()]
        seen = {id(one): one for one in seen if one is not None}
        for network in [*Moments.here.networks]:
            own = {id(x): x for x in network.parameters() if x.requires_grad}
            seen |= own if own.keys() & seen.keys() else {}
        for one in seen.values():
            # Python frees an old network's weights at a different time on each rank
            known, label = self.labels.get(id(one), (None, ""))
            if known is None or known() is not one:
                label = Moments.here.name(one)
                self.made[label] += 1
                count = self.made[label]
                label += f" #{count}" * (count > 1)
                self.labels[id(one)] = weakref.ref(one), label
            found[label] = one
        return named(found.items())

    def write(self, moment: str, what: str, found: dict, rows=(), **more) -> None:
        """Write an event with a few elements (or else, these rows) of each tensor."""
        if found and not recorder.full(State):
            each, values = flat(rows or numbers([*found.values()]))
            own = {"moment": moment, "what": what, "names": [*found], "place": place()}
            own["kind"] = digest(*((name, *x.shape) for name, x in found.items()))
            recorder.write(State(each=each, values=values, **own | more))


def copies(job) -> list[list[int]]:
    """Return the steps of networks with equal names that train for a few steps each."""
    steps = {}
    for one in job.processes[0].of(Step):
        steps.setdefault((one.which, one.network), []).append(one.step)
    brief = {}
    for (which, _), own in steps.items():
        if own[-1] - own[0] < 12:
            brief.setdefault(which, []).append(own)
    return max(brief.values(), key=len, default=[])


def dealt(values: list[list[list[float]]]) -> bool:
    """Return whether two ranks change the same few entries, but in different steps.

    Then each rank updates a table with its own samples only, which another rank reads
    later. Sums, and buffers that are filled in order, do not matter.
    """
    rows, steps = [], [*enumerate(pairwise(values))]
    for n in range(len(values[0][0]) - 1):  # the last one is a sum
        ranks = [{k for k, (a, b) in steps if a[r][n] != b[r][n]} for r in (0, 1)]
        rows += [ranks] * all(ranks)
    apart = [min(one) for one, other in rows if one.isdisjoint(other)]
    moves = [
        y - x
        for _, pair in steps
        for x, y in zip(*map(chain.from_iterable, pair), strict=True)
    ]
    both = min(moves) < 0 < max(moves)  # a sum only grows
    return len(apart) > max(2, 0.8 * len(rows)) and apart != sorted(apart) and both


def late_network(job) -> None:
    """Raise Doubt if DDP wraps another network only after the watched steps."""
    own = job.processes[0]
    last = max((x.step for x in own.of(Step) if x.watched), default=0)
    early = [(x.weights, x.frozen) for x in own.of(Wraps) if x.step <= last]
    end = max((one.step for one in own.of(Exit)), default=0)
    for one in own.of(Wraps):
        if early and last < one.step < end and (one.weights, one.frozen) not in early:
            what = f"the network that DDP wraps after step {one.step} was not watched"
            raise Doubt(f"{what}; --steps {one.step + STEPS} watches it")


def named(pairs) -> dict:
    """Return {name: floating-point tensor}; equal names get numbers."""
    found = {}
    for name, one in pairs:
        if one.is_floating_point() and not hasattr(one, "placements"):
            found[label_of(name.removeprefix("module."), found)] = one
    return found


def summed(found: dict) -> dict:
    """Return few_of() of each tensor: most entries of a code book may be unused."""
    return {name: few_of(one) for name, one in found.items()}


def kept(network) -> list[tuple]:
    """Return a network's saved buffers: (name, buffer, whether it is batch norm's)."""
    norm = torch.nn.modules.batchnorm._BatchNorm
    return [
        (name, one, isinstance(module, norm))
        for path, module in network.named_modules()
        for name, one in module.named_buffers(path, recurse=False)
        if name.rpartition(".")[2] not in module._non_persistent_buffers_set
    ]


def buffers() -> dict:
    """Return the buffers that networks save, except batch norm's."""
    own = [row for network in [*Moments.here.networks] for row in kept(network)]
    return named({id(x): (name, x) for name, x, norm in own if not norm}.values())


def states(optimizer) -> dict:
    """Return the tensors of an optimizer's state."""
    pairs = (
        (f"{name} of {Moments.here.name(weight)}", one)
        for weight, own in optimizer.state.items()
        for name, one in own.items()
        if torch.is_tensor(one)
    )
    return named(pairs)
