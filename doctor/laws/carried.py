"""Law 8: files are complete. Checks whether a resume restores the script's objects."""

import math
import sys
from collections.abc import Iterator
from dataclasses import field
from itertools import pairwise

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
    """Numbers in the script's variables and objects, and its networks' weights.

    Several objects of one class have the same names.
    """

    moment: str  # saved: torch.save() has returned; next: the next pass; or loaded
    path: str
    counts: dict[str, list[float]]  # numbers by name
    # A class -> for each network: {weight's name: a few elements}
    networks: dict[str, list[dict[str, list[float]]]] = field(default_factory=dict)
    trained: list[str] = ()  # names of weights that an optimizer trains
    stored: list[float] = ()  # numbers in the file
    place: str


class Carried(Watcher):
    """Reads the script's objects when it saves a file, and after it has loaded it."""

    def __init__(self):
        self.objects = Objects()
        self.hook, self.loaded, self.path = None, False, ""

    def hooks(self) -> None:
        wrap(torch, "save", self.save)
        wrap(torch, "load", self.load)

    def save(self, call, obj, f, *args, **kwargs):
        result, path = call(obj, f, *args, **kwargs), path_of(f)
        resumes = has(obj, "param_groups") or any(map(is_state, dictionaries(obj)))
        if path and resumes and not recorder.full(Kept):
            stored = {
                x
                for own in dictionaries(obj)
                for x in own.values()
                if type(x) in (int, float)
            }
            if self.objects.found is None:
                self.objects.search()
            self.write("saved", path, stored=[*stored])
            self.wait(path, False)
        return result

    def load(self, call, *args, **kwargs):
        result, path = call(*args, **kwargs), path_of(args[0] if args else kwargs["f"])
        if path and has(result, "param_groups"):
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

    def counts(self) -> dict[str, list[float]]:
        """Return {name: values} for numbers in variables and objects."""
        found = {}
        for function, values in scopes(sys._getframe()):
            prefix = "" if function == "<module>" else f"{function}()."
            for name, one in [*values.items()]:
                if type(one) in (int, float):
                    found.setdefault(prefix + name, []).append(one)
            del values
        for kind, reference in self.objects.found[:OBJECTS]:
            for name, one in [*getattr(reference(), "__dict__", {}).items()]:
                if type(one) in (int, float):
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


@check(LAW, RISK, causes=[not_restored], read="pitfall 18")
def not_carried_on(job):
    """A resumed run does not restore the script's own objects.

    Save this object's state in the same file, and set it when you resume.
    Not a mistake if: nothing that matters depends on it.
    """
    unsure = []
    for process in job.processes:
        saves, after, ends = {}, [], []  # since the last resume
        for one in process.launches:
            if isinstance(one, EpochEnd):
                ends.append(one)
            elif isinstance(one, Kept) and one.moment == "saved":
                saves[one.step] = one
            elif isinstance(one, Kept) and one.moment == "next":
                after.append(one)
            elif isinstance(one, Kept):
                if own := [x for x in saves.values() if x.path == one.path]:
                    when = f"after the resume from {base(one.path)}"
                    for text in lost(own[-1], one):
                        yield Breach(f"{when}, {text}", one.place)
                    until = [x for x in saves.values() if x.time <= own[-1].time]
                    for name, sure in fallen(ends, until, after, one):
                        now, then = one.counts[name][0], own[-1].counts[name][0]
                        what = f"{when}, {name} is {now:g}; it was {then:g} when the "
                        what += "file was saved"
                        if sure:
                            yield Breach(what, one.place)
                        else:
                            unsure.append(what)
                saves, after, ends = {}, [], []
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


def fallen(
    ends: list[EpochEnd], saves: list[Kept], after: list[Kept], now: Kept
) -> Iterator[tuple[str, bool]]:
    """Yield (name, whether it matters) of numbers that begin again after a resume.

    From save to save, such a number only grows (or falls), and it does not begin again
    in each epoch. It matters if the file contains it, if an object counts all optimizer
    steps with it, or if it is a best result.
    """
    passes = sum(one.steps > 0 and one.time < saves[-1].time for one in ends)
    series, last = {}, saves[-1]
    for name in last.counts:
        values = [one.counts.get(name, ()) for one in saves]
        single = {*map(len, values), len(now.counts.get(name, ()))} == {1}
        values = [x for own in values for x in own]
        if single and len({*values}) > 1:
            series[name] = values
    steps = [b.step - a.step for a, b in pairwise(saves)]
    for name, values in series.items():
        start, best = values[0], "best" in name.lower()
        gains = [b - a for a, b in pairwise(values)]
        sign = 1 if values[-1] > start else -1
        own = [one.counts.get(name, [start])[-1] for one in after]
        begins = [sign * x < sign * start for x in (*own, now.counts[name][0])]
        counter = type(last.counts[name][0]) is int and min(gains) > 0
        slower = any(0 < x[-1] - x[0] < values[-1] - start for x in series.values())
        grows = min(sign * x for x in gains) >= 0 and (counter or best)
        if grows and begins[-1] and not any(begins[:-1]):
            sure = values[-1] in last.stored or best
            sure |= gains == steps and "()" not in name and "." in name
            if best or passes > 1 or (not passes and slower):
                yield name, sure
