"""Law 3: the ranks' random streams differ. Compares the states of generators."""

import os
import random
import sys
import threading
from collections import Counter
from dataclasses import field
from functools import partial

from ..draws import (
    MADE,
    MANY,
    Drawn,
    Draws,
    Same,
    equal_owners,
    same_draws,
    same_generators,
    since,
)
from ..event import Compiles, Event
from ..generators import GENERATORS, Seed, called, cause, drawn, states
from ..law import RISK, Breach, Law, NotJudged, check, explains, several
from ..loaders import Loaders
from ..moments import Moments
from ..record import not_the_users, place, recorder, torch, wrap
from ..signature import plain
from ..watcher import Watcher
from .samples import same_samples, undivided

LAW = Law(3, "randomness", "Random streams differ")
FETCHES = 15  # maximum number of batches to record per pass and process
NOISE = "Give the script's own generator a seed that depends on the rank."
LATE = (
    "Draw what must be equal on all ranks from a separate torch.Generator(), or "
    "inside torch.random.fork_rng(): torch.manual_seed() changes all later draws."
)
WORDS = {"forward": "forward passes", "fetch": "batches"}


class Draw(Event, limit=2000):
    """The generators' states before a part of the job that draws from them."""

    where: str  # "fetch": loading a batch; "forward": a network's forward pass
    number: int  # the part's number in this pass over a DataLoader or in this step
    states: dict[str, int]  # hashes of the states of the generators that drew
    count: int  # lower bound of the number of draws
    drops: bool = False  # the network has dropout
    loader: int | None = None
    epoch: int | None = None
    worker: int | None = None
    place: str = ""  # the line that calls the network
    fields: dict[str, float] = field(default_factory=dict)  # of a worker's dataset


class Randomness(Watcher):
    """Compares the states of generators before and after they may be used."""

    def __init__(self):
        self.states = None
        self.step, self.number, self.counts = -1, 0, Counter()

    def hooks(self) -> None:
        for name in ("manual_seed", "set_rng_state"):
            wrap(torch.random, name, partial(self.seeded, "torch", f"torch.{name}"))
            setattr(torch, name, getattr(torch.random, name))
        pairs = [(random, "seed"), (random, "setstate")]
        if numpy := sys.modules.get("numpy"):
            pairs += [(numpy.random, "seed"), (numpy.random, "set_state")]
        for owner, name in pairs:
            package, call = owner.__name__.split(".")[0], f"{owner.__name__}.{name}"
            wrap(owner, name, partial(self.seeded, package, call))
            getattr(owner, name).__module__ = owner.__name__  # for pickle
            getattr(owner, name).__qualname__ = name
        fetchers = torch.utils.data._utils.fetch
        for kind in (fetchers._MapDatasetFetcher, fetchers._IterableDatasetFetcher):
            wrap(kind, "fetch", self.fetch)

    def seeded(self, generator: str, name: str, call, *args, **kwargs):
        result = call(*args, **kwargs)
        caller = sys._getframe(2)
        wraps = "_dynamo", "_compile.py"  # torch.compile wraps manual_seed()
        while any(one in caller.f_code.co_filename for one in wraps):
            caller = caller.f_back
        torchs = caller.f_code.co_filename.startswith(not_the_users()[:2])
        if not recorder.full(Seed) and not torchs:
            value = args[0] if args and isinstance(args[0], int) else ""
            text = f"{name}({value})"
            recorder.write(Seed(generator=generator, call=text, place=place()))
        return result

    def fetch(self, call, fetcher, indices):
        worker = torch.utils.data.get_worker_info()
        if worker:
            loader, epoch = map(int, os.environ["DOCTOR_PASS"].split())
            if not hasattr(fetcher, "_doctor_seen"):  # persistent workers
                self.counts["fetchers"] += 1
                fetcher._doctor_seen = True
            epoch += self.counts["fetchers"] - 1
        else:
            loader, epoch = Loaders.here.fetching.loader, Loaders.here.fetching.epoch
        key = loader, epoch
        self.counts[key] += 1
        seen = self.counts[key] <= FETCHES and recorder.watching
        before, Draws.here.inside = seen and states(fetcher.dataset), seen
        inner = threading.current_thread() is threading.main_thread()
        Moments.here.depth += inner  # a dataset's module, such as a crop, is no network
        try:
            result = call(fetcher, indices)
        finally:
            Draws.here.inside = False
            Moments.here.depth -= inner
        if not seen:
            return result
        own, count = drawn(before, states(fetcher.dataset))
        draw = Draw(where="fetch", number=self.counts[key] - 1, states=own, count=count)
        draw.loader, draw.epoch, draw.worker = loader, epoch, worker and worker.id
        if worker and draw.number == 0:
            draw.fields = plain(fetcher.dataset)
        recorder.write(draw)
        return result

    def on_input(self, network, inputs) -> None:
        trains = recorder.watching and torch.is_grad_enabled()
        self.states = states() if trains else None

    def on_output(self, network, outputs, batch) -> None:
        """Record from which generators a network in training has drawn."""
        if not self.states or not any(one.training for one in network.modules()):
            return
        own, count = drawn(self.states, states())
        if own and torch.is_grad_enabled():
            if self.step != recorder.step:
                self.step, self.number = recorder.step, -1
            self.number += 1
            draw = Draw(where="forward", number=self.number, states=own, count=count)
            draw.drops = any(dropout(one) for one in network.modules())
            draw.place = Moments.here.where
            if current := Loaders.here.current:
                draw.loader, draw.epoch = current.loader, current.epoch
            recorder.write(draw)


def dropout(module) -> bool:
    """Return whether a module is in training mode and uses dropout."""
    known = "p", "dropout", "drop_prob", "dropout_p", "attention_dropout"
    values = [vars(module).get(name) for name in known]
    used = any(isinstance(one, float) and one > 0 for one in values)
    named = "drop" in type(module).__name__.lower() or "dropout" in vars(module)
    return module.training and named and used


# --- checks ---


def draws(job, where: str) -> list[dict[tuple, Draw]]:
    """Return {key: draw} for each rank; draws with the same key are to be compared."""
    found = []
    for process in job.processes:
        own, epochs = {}, {epoch: n for n, epoch in enumerate(process.epochs)}
        for one in process.of(Draw, loaders=True):
            if one.where != where or not one.states:
                continue
            if where == "forward":
                own[one.step, one.number] = one
            elif one.loader == process.training and one.epoch in epochs:
                own[epochs[one.epoch], one.worker, one.number] = one
        found.append(own)
    return found


def equal(rows: list[dict]) -> tuple[Counter, list[str], int, list[Draw]]:
    """Return {generator: number of draws in which two ranks have equal states}.

    Also return the generators with too many equal states for chance (see since()), how
    many draws were compared, and the ranks' first equal draws.
    """
    keys = sorted(key for key in rows[0] if all(key in row for row in rows))
    found, pair = {}, []
    for key in keys:
        ranks = [row[key] for row in rows]
        for name in ranks[0].states:
            values = [one.states.get(name) for one in ranks]
            values = [one for one in values if one is not None]
            same = len({*values}) < len(values)
            found.setdefault(name, []).append(same)
            pair = pair or ranks * same
    names = [name for name, same in found.items() if since(same) is not None]
    return Counter({x: sum(n) for x, n in found.items()}), names, len(keys), pair


@check(LAW, RISK, general=True, causes=[same_samples], read="pitfall 9")
def same_random_numbers(job):
    """Ranks draw the same random numbers.

    At the start of each epoch, call torch.manual_seed(seed + 1000 * epoch + rank).
    Not a mistake if: all ranks are meant to draw the same numbers.
    """
    several(job)
    undivided(job)
    held, some, found = [], "", False
    for where in ("forward", "fetch"):
        rows = draws(job, where)
        same, names, count, pair = equal(rows)
        shared = max((one[k].count for one in rows for k in one), default=0)
        decided = where == "forward" and shared < MANY
        if names and not (decided and not any(one.drops for one in pair)):
            told = " and ".join(map(called, names))
            own = [one.states.get(names[0]) for one in pair]
            ranks = [str(n) for n, x in enumerate(own) if own.count(x) > 1]
            what = f"the generators of {told} have equal states on ranks "
            what += f"{' and '.join(ranks)} in {max(same.values())} of {count} "
            place, origin = cause(job, names[0], pair)
            what += f"{WORDS[where]} that draw"
            if where == "forward" and pair[0].step > 2:
                what += f", from step {pair[0].step + 1} on"
            what += origin
            loader = job.processes[0].loader()
            place = place or (loader.place if loader and where == "fetch" else "")
            mend, found = advice(names[0], origin, pair[0]), True
            yield Breach(what, place, facts=where, mend=mend)
        elif equals := max(same.values(), default=0):
            some = f"states are equal in {equals} of {count} {WORDS[where]}"
        elif count > 2:
            held.append(f"in {count} of {count} {WORDS[where]} that draw")
    lines, differ = same_draws(job)
    for place, one in lines.items() if not found else ():
        some = one.what if one.together else some
        if not one.together:
            what, where, mend = worded(job, place, one)
            yield Breach(what, where, facts="loop", mend=mend)
    what, place, mend = equal_owners(job)
    if what and not found:
        yield Breach(what, place, facts="loop", mend=mend)
    held += [f"in {differ} draws of the script's own lines"] * (differ > 2)
    if some:
        raise NotJudged(f"{some}, perhaps for a joint decision")
    if same_generators(job) is not None:
        what = "the script's own generators draw the same numbers on several ranks"
        raise NotJudged(f"{what}, perhaps for a joint decision")
    if job.of(Compiles) and not job.of(Drawn):
        raise NotJudged("torch.compile() hides what the script draws itself")
    if new_contents(job):
        raise NotJudged("the samples change at random, but no draw was seen")
    if not held:
        raise NotJudged("no draw from a global generator was seen")
    yield f"the ranks' generators differ {', '.join(held)}"


def worded(job, place: str, one: Same) -> tuple[str, str, str]:
    """Return a message, place and advice for a line that draws equal numbers."""
    if one.draws[0].own:
        return one.what, place, NOISE
    name = "numpy" if one.draws[0].name in MADE else "torch"
    seed, origin = cause(job, name, one.draws)
    what = f"{one.what} at {place}{origin}"
    return (what, seed, LATE * one.late) if origin else (one.what, place, "")


def new_contents(job) -> bool:
    """Return whether samples change between epochs although doctor saw no draws."""
    process, found = job.processes[0], {}
    for epoch in process.epochs:
        for one in process.batches(epoch):
            for pair in zip(one.indices or (), one.rows or (), strict=False):
                found.setdefault(pair[0], set()).add(pair[1])
    seen = any(one for row in draws(job, "fetch") for one in row)
    return not seen and sum(len(x) > 1 for x in found.values()) > 10


def advice(name: str, origin: str, draw: Draw) -> str:
    """Return the advice for a generator, or "" for the check's own advice."""
    if "state" in origin:  # set_rng_state(), setstate()
        return "Save each rank's own state, and restore it on that rank."
    text = "Seed PyTorch, and a generator given to the DataLoader, by epoch and rank; "
    if name.startswith("its ") and draw.worker is not None:
        return f"{text}seed {called(name)} in worker_init_fn with torch.initial_seed()."
    if draw.worker is not None:
        return f"{text}use torch.initial_seed() in worker_init_fn."
    if name.startswith("its "):
        return f"Seed {called(name)} with a number that depends on the rank."
    if name in ("random", "numpy"):
        return f"Seed {GENERATORS[name]} with a number that depends on the rank."
    return ""


@explains(same_random_numbers)
def same_augmentation(job, breach):
    """Ranks draw the same random numbers for their samples.

    At the start of each epoch, call torch.manual_seed(seed + 1000 * epoch + rank).
    Not a mistake if: the random numbers do not change the samples.
    """
    return breach if breach.facts == "fetch" else None


@explains(same_random_numbers)
def same_dropout(job, breach):
    """Ranks draw the same random numbers in their networks, for example for dropout.

    At the start of each epoch, call torch.manual_seed(seed + 1000 * epoch + rank).
    Not a mistake if: the network itself is divided between the ranks.
    """
    return breach if breach.facts == "forward" else None


@explains(same_random_numbers)
def same_noise(job, breach):
    """Ranks draw the same noise in their training loops.

    At the start of each epoch, call torch.manual_seed(seed + 1000 * epoch + rank). Seed
    the loop's own generators differently on each rank, too.
    Not a mistake if: all ranks are meant to draw the same value, such as a size.
    """
    return breach if breach.facts == "loop" else None
