"""Law 3: the ranks' random streams differ. Compares the states of generators."""

import os
import random
import sys
import threading
from collections import Counter
from dataclasses import field
from functools import partial
from traceback import walk_stack

from ..draws import MADE, MANY, Drawn, Draws, Same, same_draws, same_generators, since
from ..event import Compiles, Event, Exit
from ..generators import Seed, called, cause, drawn, one_state, state_of, states
from ..law import RISK, Breach, Law, check, need
from ..loaders import Loaders
from ..moments import Moments
from ..record import not_the_users, place, recorder, torch, wrap
from ..signature import plain
from ..watcher import Watcher
from .samples import same_samples, undivided

LAW = Law(3, "randomness", "Random streams differ")
FETCHES = 15  # maximum number of batches to record per pass and process
STATES = "Save each rank's own state, and restore it on that rank."
WORKERS = (
    "Seed PyTorch, and a generator given to the DataLoader, by epoch and rank; seed "
    "other generators in worker_init_fn with torch.initial_seed()."
)


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
        self.states, self.counts = None, Counter()

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
        files = (one.f_code.co_filename for one, _ in walk_stack(sys._getframe(2)))
        wraps = "_dynamo", "_compile.py"  # torch.compile wraps manual_seed()
        caller = next(x for x in files if not any(one in x for one in wraps))
        if not recorder.full(Seed) and not caller.startswith(not_the_users()[:2]):
            value = args[0] if args and isinstance(args[0], int) else ""
            call = f"{name}({value})"
            seed = Seed(generator=generator, call=call, place=place())
            if name == "torch.set_rng_state":
                seed.state = state_of(torch.random.default_generator)
            recorder.write(seed)
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
        number = self.counts[loader, epoch]
        self.counts[loader, epoch] += 1
        seen = number < FETCHES and recorder.watching
        before, Draws.here.inside = seen and states(fetcher.dataset), seen
        inner = threading.current_thread() is threading.main_thread()
        Moments.here.depth += inner  # a dataset's module, such as a crop, is no network
        try:
            result = call(fetcher, indices)
        finally:
            Draws.here.inside = False
            Moments.here.depth -= inner
        if seen:
            own, count = drawn(before, states(fetcher.dataset))
            draw = Draw(where="fetch", number=number, states=own, count=count)
            draw.loader, draw.epoch, draw.worker = loader, epoch, worker and worker.id
            draw.fields = plain(fetcher.dataset) if worker and not number else {}
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
        if own:
            number = self.counts["forward", recorder.step]
            self.counts["forward", recorder.step] += 1
            draw = Draw(where="forward", number=number, states=own, count=count)
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


def equal(rows: list[dict]) -> tuple[dict[str, list[bool]], list[Draw]]:
    """Return {generator: is it equal on two ranks, per draw?} and first equal draws."""
    found, pair = {}, []
    for key in sorted(key for key in rows[0] if all(key in row for row in rows)):
        ranks = [row[key] for row in rows]
        for name in ranks[0].states:
            values = [one.states[name] for one in ranks if name in one.states]
            same = len({*values}) < len(values)
            found.setdefault(name, []).append(same)
            pair = pair or ranks * same
    return found, pair


@check(LAW, RISK, general=True, causes=[same_samples], read="pitfall 9")
def same_random_numbers(job):
    """Ranks draw the same random numbers, for example for augmentation or dropout.

    At the start of each epoch, call torch.manual_seed(seed + 1000 * epoch + rank). Seed
    the script's own generators differently on each rank, too.
    Not a mistake if: all ranks are meant to draw the same numbers, such as a size.
    """
    undivided(job)
    ends = job.of(Exit)
    need(not ends or any(x.passes for x in ends), "no backward pass was seen")
    held, some, found = [], "", False
    for where, words in (("forward", "forward passes"), ("fetch", "batches")):
        rows = draws(job, where)
        same, pair = equal(rows)
        names = [name for name, one in same.items() if since(one) is not None]
        count, most = (max(map(f, same.values()), default=0) for f in (len, sum))
        shared = max((one[k].count for one in rows for k in one), default=0)
        decided = where == "forward" and shared < MANY
        if names and not (decided and not any(one.drops for one in pair)):
            told = " and ".join(map(called, names))
            place, origin = cause(job, names[0], pair)
            what = f"the generators of {told} have equal states on several ranks in "
            what += f"{most} of {count} {words} that draw"
            what += f", from step {pair[0].step + 1} on" * (pair[0].step > 2)
            what += origin
            loader = job.processes[0].loader()
            place = place or (loader.place if loader and where == "fetch" else "")
            yield Breach(what, place, mend=advice(names[0], origin, pair[0]))
            found = True
        elif most:
            some = f"states are equal in {most} of {count} {words}"
        elif count > 2:
            held.append(f"in {count} of {count} {words} that draw")
    lines, differ = same_draws(job)
    for place, one in lines.items() if not found else ():
        some = one.what if one.together else some
        if not one.together:
            yield worded(job, place, one)
    same, what, place = same_generators(job)
    if what and not found:
        yield Breach(what, place)
    held += [f"in {differ} draws of the script's own lines"] * (differ > 2)
    if same and not some:
        some = "the script's own generators draw the same numbers on several ranks"
    need(not some, f"{some}, perhaps for a joint decision")
    seen = job.of(Drawn) or not job.of(Compiles)
    need(seen, "torch.compile() hides what the script draws itself")
    need(not new_contents(job), "the samples change at random, but no draw was seen")
    need(held, "no draw from a global generator was seen")
    one = None if found or lines else one_state(job)
    if one and (count := differing(job, one.time)):
        what = f"after step {one.step}, {one.call} sets equal states on all ranks; "
        what += f"before, their generators differed in {count} draws"
        yield Breach(what, one.place, mend=STATES)
    yield f"the ranks' generators differ {', '.join(held)}"


def differing(job, end: float) -> int:
    """Return how often the ranks' generators drew and differed before a time."""
    own = [x for x in job.rows(Drawn) if not (x[0].own or x[0].name in MADE)]
    rows = [x for x in job.rows(Draw) if {one.where for one in x} == {"forward"}]
    values = [[one.value for one in row] for row in own if row[0].time < end]
    values += [[x.states.get("torch") for x in y] for y in rows if y[0].time < end]
    return sum(len({*row}) == len(row) for row in values)


def worded(job, place: str, one: Same) -> Breach:
    """Return the breach for a line that draws equal numbers."""
    if one.draws[0].own:
        mend = "Give the script's own generator a seed that depends on the rank."
        return Breach(one.what, place, mend=mend)
    name = "numpy" if one.draws[0].name in MADE else "torch"
    seed, origin = cause(job, name, one.draws)
    if origin:
        mend = STATES * ("state" in origin)
        return Breach(f"{one.what} at {place}{origin}", seed, mend=mend)
    return Breach(one.what, place)


def new_contents(job) -> bool:
    """Return whether samples change between epochs although doctor saw no draws."""
    process, found = job.processes[0], {}
    for epoch in process.epochs:
        for one in process.batches(epoch):
            for index, row in zip(one.indices or (), one.rows or (), strict=False):
                found.setdefault(index, set()).add(row)
    seen = any(draws(job, "fetch"))
    return not seen and sum(len(x) > 1 for x in found.values()) > 10


def advice(name: str, origin: str, draw: Draw) -> str:
    """Return the advice for a generator, or "" for the check's own advice."""
    if "state" in origin:  # set_rng_state(), setstate()
        return STATES
    if draw.worker is not None:
        return WORKERS
    own = name not in ("torch", "cuda")
    return f"Seed {called(name)} with a number that depends on the rank." * own
