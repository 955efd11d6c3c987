"""Law 8: files are complete. Checks whether a resume restores the script's objects."""

import math
import sys
from collections.abc import Iterator
from dataclasses import field

from ..event import Event
from ..law import RISK, Breach, Doubt, check
from ..loaders import EpochEnd
from ..moments import Moments
from ..objects import Objects, scopes
from ..record import place, quiet, recorder, torch, wrap
from ..sample import numbers
from ..watcher import Watcher
from .checkpoints import dictionaries, has, is_state, path_of
from .files import LAW, base
from .replicas import listed
from .resume import not_restored

OBJECTS, TENSORS = 500, 300  # limits: objects, and weights per network, to read


class Kept(Event, limit=100):
    """Whole numbers in the script's variables and objects, and its networks' weights.

    Several objects of one class have the same names.
    """

    moment: str  # saved: torch.save() has returned; next: the next pass; or loaded
    path: str
    counts: dict[str, list[int]]  # by name
    # A class -> for each network: {weight's name: a few elements}
    networks: dict[str, list[dict[str, list[float]]]] = field(default_factory=dict)
    trained: list[str] = ()  # names of weights that an optimizer trains
    stored: list[int] = ()  # whole numbers in the file
    place: str


class Carried(Watcher):
    """Reads the script's objects when it saves a file, and after it has loaded it."""

    def __init__(self):
        self.objects, self.paths = Objects(), set()
        self.hook, self.loaded, self.path = None, False, ""

    def hooks(self) -> None:
        wrap(torch, "save", self.save)
        wrap(torch, "load", self.load)

    def save(self, call, obj, f, *args, **kwargs):
        result, path = call(obj, f, *args, **kwargs), path_of(f)
        resumes = has(obj, "param_groups") or any(map(is_state, dictionaries(obj)))
        if path and resumes and not recorder.full(Kept):
            self.paths.add(path)
            stored = {x for own in dictionaries(obj) for x in own.values() if whole(x)}
            if self.objects.found is None:
                self.objects.search()
            self.write("saved", path, stored=[*stored])
            self.wait(path, False)
        return result

    def load(self, call, *args, **kwargs):
        result, path = call(*args, **kwargs), path_of(args[0] if args else kwargs["f"])
        if path in self.paths and has(result, "param_groups"):
            self.wait(path, True)
        return result

    def wait(self, path: str, loaded: bool) -> None:
        """Wait for the next pass of a network in training."""
        self.path, self.loaded = path, loaded
        if self.hook is None:
            hook = quiet(self.next_pass)
            self.hook = torch.nn.modules.module.register_module_forward_pre_hook(hook)

    def next_pass(self, module, inputs) -> None:
        if not torch.is_grad_enabled():
            return
        self.hook.remove()
        self.hook = None
        if self.loaded:
            self.objects.renew()
        self.write("loaded" if self.loaded else "next", self.path)

    def write(self, moment: str, path: str, **more) -> None:
        if moment != "next":
            networks, trained = self.networks()
            more |= {"networks": networks, "trained": trained}
        where, counts = place(), self.counts()
        recorder.write(
            Kept(moment=moment, path=path, counts=counts, place=where, **more)
        )

    def counts(self) -> dict[str, list[int]]:
        """Return {name: values} for whole numbers in variables and objects."""
        found = {}
        for function, values in scopes(sys._getframe()):
            prefix = "" if function == "<module>" else f"{function}()."
            for name, one in [*values.items()]:
                if whole(one):
                    found.setdefault(prefix + name, []).append(one)
            del values
        for kind, reference in self.objects.found[:OBJECTS]:
            for name, one in [*getattr(reference(), "__dict__", {}).items()]:
                if whole(one):
                    found.setdefault(f"{kind}.{name}", []).append(one)
        return found

    def networks(self) -> tuple[dict, list[str]]:
        """Return Kept.networks and Kept.trained."""
        found, trained, known = {}, set(), Moments.here.known
        for kind, reference in self.objects.networks:
            own = [*getattr(reference(), "named_parameters", tuple)()][-TENSORS:]
            rows = numbers([one.detach() for _, one in own])
            names = [name for name, _ in own]
            trained |= {name for name, one in own if id(one) in known}
            found.setdefault(kind, []).append(dict(zip(names, rows, strict=True)))
        return found, [*trained]


def whole(value) -> bool:
    """Return whether a value is a whole number, and no truth value."""
    return type(value) is int and abs(value) < 2**63


@check(LAW, RISK, causes=[not_restored], read="pitfall 18")
def not_carried_on(job):
    """A resumed run does not restore the script's own objects.

    Save this object's state in the same file, and set it when you resume.
    Not a mistake if: nothing that matters depends on it.
    """
    unsure = []
    for process in job.processes:
        saves, after = {}, []  # since the start, or since the last resume
        for one in process.of(Kept):
            if one.moment == "saved":
                saves[one.step] = one
            elif one.moment == "next":
                after.append(one)
            else:
                own = [x for x in saves.values() if x.path == one.path]
                if own:
                    until = [x for x in saves.values() if x.time <= own[-1].time]
                    when = f"after the resume from {base(one.path)}"
                    for text in lost(own[-1], one):
                        yield Breach(f"{when}, {text}", one.place)
                    for name, sure in fallen(process, until, after, one):
                        now, then = one.counts[name][0], own[-1].counts[name][0]
                        what = f"{when}, {name} is {now}; it was {then} when the file "
                        what += "was saved"
                        if sure:
                            yield Breach(what, one.place)
                        else:
                            unsure.append(what)
                saves, after = {}, []
    if unsure:
        raise Doubt(listed(unsure))


def lost(saved: Kept, now: Kept) -> Iterator[str]:
    """Yield a text for each class of networks whose saved weights no network has."""
    for kind, networks in saved.networks.items():
        for own in networks:
            others = [x for x in now.networks.get(kind, ()) if x.keys() == own.keys()]
            gone = [[x for x in own if not near(own[x], one[x])] for one in others]
            fewest, trained = min(gone, key=len, default=[]), {*saved.trained}
            text = f"of {kind} are not those of the moment when the file was saved"
            if fewest and not trained & own.keys():
                yield f"the weights {text}; no optimizer trains them"
                break
            fewest = [name for name in fewest if name in trained]
            if fewest and len(fewest) < len(trained & own.keys()):
                yield f"the weights {listed(fewest)} {text}, but others are"
                break


def near(one: list[float], other: list[float]) -> bool:
    """Return whether two samples of a tensor are equal up to rounding."""
    return math.dist(one, other) <= 1e-4 * math.hypot(*one)


def fallen(process, saves: list[Kept], after: list[Kept], now: Kept) -> Iterator[tuple]:
    """Yield (name, whether it matters) of counters that begin again after a resume.

    A counter grows from save to save, and does not begin again in each epoch. It
    matters if the file contains it, or if an object counts each optimizer step with it.
    """
    ends = [x for x in process.of(EpochEnd) if x.steps]
    passes = sum(one.time < saves[-1].time for one in ends)
    series = {}
    for name in saves[-1].counts:
        values = [one.counts.get(name, ()) for one in saves]
        single = {*map(len, values), len(now.counts.get(name, ()))} == {1}
        values = [x for own in values for x in own]
        if single and len(values) > 1 and values == sorted({*values}):
            series[name] = values
    for name, values in series.items():
        gains = [b - a for a, b in zip(values, values[1:], strict=False)]
        steps = [b.step - a.step for a, b in zip(saves, saves[1:], strict=False)]
        slower = any(0 < x[-1] - x[0] < values[-1] - values[0] for x in series.values())
        own = (one.counts.get(name, [values[0]])[-1] for one in after)
        restarts = any(value < values[0] for value in own)
        again = now.counts[name][0] < values[0]
        if again and not restarts and (passes > 1 if ends else slower):
            yield (
                name,
                values[-1] in saves[-1].stored
                or (gains == steps and "()" not in name and "." in name),
            )
