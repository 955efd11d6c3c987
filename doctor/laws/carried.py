"""Law 8: files are complete. Checks whether a resume restores the script's objects."""

import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import field
from itertools import pairwise, product

from ..event import Event, Rank
from ..law import RISK, Breach, Doubt, check
from ..loaders import Batch, Epoch, EpochEnd
from ..moments import Moments, Step
from ..objects import Objects, namespaces, nested
from ..record import place, quiet, recorder, torch, wrap
from ..sample import numbers
from ..watcher import Watcher
from .checkpoints import dictionaries, has, is_state, mark_of, parts, path_of
from .files import LAW, base
from .replicas import listed
from .resume import Restored, not_restored

MOST, TENSORS = 8, 300  # limits: objects of a class; arrays, or weights of a network
METER = re.compile("meter|timer|speed|throughput|log|monitor|profil|progress", re.I)
WEIGHTS = "Save all trained weights, and load them with strict=True."


class Kept(Event, limit=300):
    """Numbers in the script's variables and objects, and its networks' weights.

    Several objects of one class have the same names.
    """

    moment: str  # saved: torch.save() has returned; next, loaded: at the next pass
    path: str
    mark: int = 0  # a hash of the file's contents
    counts: dict[str, list[float]]  # numbers by name (NaN: a best result is None)
    arrays: dict[str, list[list[float]]] = field(default_factory=dict)  # in objects
    # A class -> for each network: weight -> whether it is trained, and a few elements
    networks: dict[str, list[dict[str, tuple[bool, list[float]]]]] = field(
        default_factory=dict
    )
    stored: list[float] = ()  # numbers in the file
    place: str


class Carried(Watcher):
    """Reads the script's objects when it saves a file, and after it has loaded it."""

    def __init__(self):
        self.objects, self.saves = Objects(), 0
        self.hook, self.loaded, self.file = None, False, ("", 0)

    def hooks(self) -> None:
        wrap(torch, "save", self.save)
        wrap(torch, "load", self.load)

    def save(self, call, obj, f, *args, **kwargs):
        result, path = call(obj, f, *args, **kwargs), path_of(f)
        resumes = has(obj, "param_groups") or any(map(is_state, dictionaries(obj)))
        if path and resumes and not recorder.full(Kept):
            if self.objects.found is None:
                self.objects.search()
            self.saves += 1
            self.write("saved", path, mark_of(obj), stored=stored(obj))
            if self.saves < 9:
                self.wait(path, mark_of(obj), False)
        return result

    def load(self, call, *args, **kwargs):
        result, path = call(*args, **kwargs), path_of(args[0] if args else kwargs["f"])
        if path and has(result, "param_groups") and not recorder.full(Kept):
            self.wait(path, mark_of(result), True)
        return result

    def wait(self, path: str, mark: int, loaded: bool) -> None:
        """Wait for the next pass of a network in training."""
        self.file, self.loaded = (path, mark), loaded
        if self.hook is None:
            hook = quiet(self.next_pass)
            self.hook = torch.nn.modules.module.register_module_forward_pre_hook(hook)

    def next_pass(self, module, inputs) -> None:
        if self.hook is None or not torch.is_grad_enabled():
            return
        self.hook.remove()
        self.hook = None
        if self.loaded:
            self.objects.renew()
        self.write("loaded" if self.loaded else "next", *self.file)

    def write(self, moment: str, path: str, mark: int, **more) -> None:
        more |= {"path": path, "mark": mark, "place": place(), "counts": self.counts()}
        more |= {"networks": self.networks()} if moment != "next" else {}
        more["arrays"] = self.arrays()
        recorder.write(Kept(moment=moment, **more))

    def counts(self) -> dict[str, list[float]]:
        """Return {name: values} for numbers in variables and objects."""
        found, pairs = {}, []
        for prefix, own in namespaces(sys._getframe()):
            pairs += [(prefix + name, one) for name, one in [*own.items()]]
        for name, value in (*pairs, *self.fields()):
            value = math.nan if value is None and "best" in name.lower() else value
            if type(value) in (int, float):
                found.setdefault(name, []).append(value)
        return found

    def fields(self) -> Iterator[tuple]:
        """Yield the name and value of each field of the script's objects."""
        sizes = Counter(kind for kind, _ in self.objects.found)
        for kind, reference in self.objects.found:
            if sizes[kind] <= MOST:
                own = [*getattr(reference(), "__dict__", {}).items()]
                yield from ((f"{kind}.{name}", value) for name, value in own)

    def arrays(self) -> dict[str, list[list[float]]]:
        """Return {name: a few numbers of each} for arrays in the script's objects."""
        found, own = {}, [(name, nested(x, "", 1, 2)) for name, x in self.fields()]
        own = [(name + key, x) for name, pairs in own for key, x in pairs]
        rows = numbers([one for _, one in own[:TENSORS]])
        for (name, _), few in zip(own, rows, strict=False):
            found.setdefault(name, []).append(few)
        return found

    def networks(self) -> dict[str, list[dict]]:
        """Return Kept.networks."""
        found, known = {}, Moments.here.known
        for kind, reference in self.objects.networks:
            own = [*getattr(reference(), "named_parameters", tuple)()][-TENSORS:]
            own = [(name, one) for name, one in own if not parts(one)]
            rows = numbers([one.detach() for _, one in own])
            pairs = zip(own, rows, strict=True)
            row = {name: (id(one) in known, few) for (name, one), few in pairs}
            found.setdefault(kind, []).append(row)
        return found


def stored(obj) -> list[float]:
    """Return the numbers in a saved object, and in the small dictionaries in it."""
    top = obj if isinstance(obj, dict) else {}
    small = [x for x in top.values() if isinstance(x, dict) and len(x) < 50]
    values = [x for own in (top, *small) for x in own.values()]
    return [x for x in values if type(x) in (int, float)]


@check(LAW, RISK, causes=[not_restored], read="pitfall 18")
def not_carried_on(job):
    """A resumed run does not restore the script's own objects, or some of the weights.

    Save this object's state in the same file, and set it when you resume.
    Not a mistake if: nothing that matters depends on it.
    """
    unsure = []
    for process in job.processes:
        saves, events, restored = [], [], False  # since the last resume
        for one in process.launches:
            restored |= isinstance(one, Restored) and one.what == "optimizer"
            if isinstance(one, Kept) and one.moment == "loaded":
                same = [n for n, x in enumerate(saves) if x.mark == one.mark != 0]
                if same and restored and continues(saves[same[-1]], one):
                    saves = saves[: same[-1] + 1]
                    when = f"after the resume from {base(one.path)}"
                    for text, mend in lost(saves[-1], one, restored_rows(job, one)):
                        yield Breach(f"{when}, {text}", one.place, mend=mend)
                    for what in reset(saves, events, one):
                        yield Breach(f"{when}, {what}", one.place)
                    for name, sure in fallen(saves, events, one):
                        now, then = one.counts[name][0], saves[-1].counts[name][0]
                        now = None if math.isnan(now) else f"{now:g}"
                        what = f"{when}, {name} is {now}; in the save, it was {then:g}"
                        if sure:
                            yield Breach(what, one.place)
                        else:
                            unsure.append(what)
                saves, events, restored = [], [], False
            elif isinstance(one, Kept) and one.moment == "saved":
                saves.append(one)
            elif isinstance(one, (Kept, Epoch, EpochEnd)):
                events.append(one)
    if unsure:
        raise Doubt(listed(unsure))


def continues(saved: Kept, now: Kept) -> bool:
    """Return whether training continues: many trained weights are those of a file."""
    for kind, networks in saved.networks.items():
        for own, other in product(networks, now.networks.get(kind, ())):
            trained = [x for x in own if own[x][0] and x in other]
            same = sum(near(own[x][1], other[x][1]) for x in trained)
            if same > len(trained) / 4:
                return True
    return False


def restored_rows(job, now: Kept) -> set[tuple]:
    """Return the numbers in the weights of all networks that ranks have restored."""
    same = [x for x in job.of(Kept) if (x.moment, x.mark) == (now.moment, now.mark)]
    rows = [own for x in same for nets in x.networks.values() for own in nets]
    return {(*few,) for own in rows for _, few in own.values()}


def lost(saved: Kept, now: Kept, there: set[tuple]) -> Iterator[tuple[str, str]]:
    """Yield (text, advice) for each class of networks with other weights than saved.

    A network may be a copy of another one that a rank has restored (`there`).
    """
    for kind, networks in saved.networks.items():
        for own in networks:
            if all((*few,) in there for _, few in own.values()):
                continue
            others = [x for x in now.networks.get(kind, ()) if x.keys() == own.keys()]
            gone = [[x for x in own if not near(own[x][1], y[x][1])] for y in others]
            fewest = min(gone, key=len, default=[])
            trained = [name for name in own if own[name][0]]
            if fewest and not trained:
                text = f"{len(fewest)} of {len(own)} weights of {kind}, which no "
                yield f"{text}optimizer trains, are not those of the save", ""
                break
            fewest = [name for name in fewest if name in trained]
            if 0 < len(fewest) < len(trained):
                text = f"{len(fewest)} of {len(trained)} trained weights of {kind} are "
                yield f"{text}not those of the save: {listed(fewest)}", WEIGHTS
                break


def reset(saves: list[Kept], events: list[Event], now: Kept) -> Iterator[str]:
    """Yield a text if arrays of objects, which last longer than an epoch, are lost."""
    found, last, counts = [], saves[-1].arrays, saves[-1].counts
    loop = not any(isinstance(one, Epoch) for one in events)
    pairs = {x: (now.counts.get(x, own)[0], own[0]) for x, own in counts.items()}
    fewer = {x.partition(".")[0] for x, (a, b) in pairs.items() if 0 <= 4 * a < b}
    after = [one.arrays for one in events if isinstance(one, Kept)]
    for name in last.keys() & now.arrays.keys():
        values = [x.arrays.get(name, [()])[0] for x in saves] + now.arrays[name]
        single = {len(last[name]), len(now.arrays[name]), *map(len, values)}
        if len(single) != 2 or 1 not in single or near(*values[-2:]):
            continue
        later = [x[name][0] for x in after if name in x]
        stays = bool(later) and all(any(near(x, y) for y in values[:-1]) for x in later)
        new = len({*values[-1]}) == 1 or name.partition(".")[0] in fewer
        if loop and new and not later and re.search("mean|var|std|norm", name, re.I):
            stays = any(x % 1 for x in values[-2])
        if stays and (len(saves) == 1 or not near(values[0], values[-2])):
            found.append(name)
    if found:
        yield f"{listed(sorted(found))} are not those of the save"


def near(one: list[float], other: list[float]) -> bool:
    """Return whether two samples of a tensor are equal up to rounding to 16 bits."""
    return one == other or math.dist(one, other) <= 3e-3 * math.hypot(*one)


def fallen(
    saves: list[Kept], events: list[Event], now: Kept
) -> Iterator[tuple[str, bool]]:
    """Yield (name, whether it matters) of numbers that begin again after a resume.

    From save to save, such a number only grows (or falls), and it does not begin again
    in each epoch. It matters if the file contains it, if an object counts all optimizer
    steps with it, or if it is a best result.
    """
    saves = [*{one.step: one for one in saves}.values()]
    ends = [one for one in events if isinstance(one, EpochEnd) and one.steps]
    passes = sum(one.time < saves[-1].time for one in ends)
    loop = not any(isinstance(one, Epoch) for one in events)
    series, last = {}, saves[-1]
    for name in last.counts:
        values = [one.counts.get(name, ()) for one in saves]
        single = {*map(len, values), len(now.counts.get(name, ()))} == {1}
        values = [x for own in values for x in own if not math.isnan(x)]
        if single and len({*values}) > 1 and not math.isnan(last.counts[name][0]):
            series[name] = values
    steps = [b.step - a.step for a, b in pairwise(saves)]
    for name, values in series.items():
        start, best = values[0], "best" in name.lower()
        gains = [b - a for a, b in pairwise(values)]
        sign = 1 if values[-1] > start else -1
        later = [one for one in events if isinstance(one, Kept)]
        later = [one.counts.get(name, [start])[-1] for one in later]
        # NaN, too, is a number that begins again
        begins = [not sign * x >= sign * start for x in (*later, now.counts[name][0])]
        counter = type(last.counts[name][0]) is int and min(gains) > 0
        slower = any(0 < x[-1] - x[0] < values[-1] - start for x in series.values())
        grows = min(sign * x for x in gains) >= 0 and (counter or best)
        if grows and begins[-1] and not any(begins[:-1]):
            pairs = zip(values, saves, strict=False)
            sure = best or all(x in y.stored for x, y in pairs)
            counts = gains == steps and "()" not in name and "." in name
            if best or passes > 1 or (loop and slower):
                yield name, sure or (counts and not METER.search(name))


@check(LAW, RISK, read="pitfall 18")
def read_again(job):
    """A resumed run reads samples of this epoch again, or leaves some out.

    Save the number of the epoch's samples that all ranks have read, and skip as many.
    Not a mistake if: a few samples more or less do not matter to you.
    """
    saved, passes, fed, now, resumed, done = {}, {}, None, None, [], []
    worlds = {x.world_size for x in job.processes[0].launches if isinstance(x, Rank)}
    for one in job.processes[0].launches:
        if isinstance(one, Epoch):
            now = passes[one.loader] = [one, [], 0]  # batches; number that steps used
        elif isinstance(one, Batch) and one.loader in passes:
            passes[one.loader][1].append(one)
        elif isinstance(one, EpochEnd) and one.loader in passes:
            done += [passes[one.loader]] * one.whole
        elif isinstance(one, Step) and one.loader in passes:
            fed = passes[one.loader]
            fed[2] = len(fed[1])
        elif isinstance(one, Kept) and one.moment == "saved" and fed:
            saved[one.mark] = fed[0], fed[1][: fed[2]]
        elif isinstance(one, Kept) and one.moment == "loaded" and one.mark in saved:
            if one.mark and len(now[1]) == 1:
                resumed.append((one, *saved[one.mark], now))
    whole = [x for x in done if all(x is not own for *_, own in resumed)]
    for one, before, old, (begun, new, _) in resumed:
        sizes = {len(x[0].indices or ()) for x in (old, new) if x}  # of a batch
        alike = before.place == begun.place and len(sizes) == len(worlds) == 1
        lengths = {len(x[1]) for x in whole if x[0].place == before.place}  # of streams
        length = before.length or sum(lengths) * (len(lengths) == 1)
        left, ended = length - len(old), any(x[1] is new for x in done)
        ended = ended or len(new) == begun.length
        if alike and ended and len(new) < left - 1:
            what = f"after the resume from {base(one.path)}, the epoch's last part has "
            yield Breach(f"{what}{len(new)} batches instead of {left}", begun.place)
        at = next((n for n, x in enumerate(old) if same_batch(new[0], x)), None)
        if at is None or before.place != begun.place or new[0] is old[0]:
            continue
        part = 1 < len(old) < (before.length or math.inf)
        begins = at == 0 and before.length and before.length == begun.length
        laps = [sum(same_batch(x, y) for y in old) for x in (new[0], old[-1])]
        pairs = [*zip(new[1:3], old[at + 1 :], strict=False)] * (laps[0] == laps[1])
        if part and (begins or (at and pairs and all(same_batch(*x) for x in pairs))):
            what = f"after the resume from {base(one.path)}, reading begins at batch "
            what += f"{at + 1} of the {len(old)} that were read before the save"
            yield Breach(what, begun.place)


def same_batch(one: Batch, other: Batch) -> bool:
    """Return whether two batches have the same samples, as far as these are known."""
    rows = one.rows is None or other.rows is None or one.rows == other.rows
    return bool(one.indices) and one.indices == other.indices and rows
