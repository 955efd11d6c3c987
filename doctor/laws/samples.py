"""Law 1: every sample is read once per epoch."""

import re
from array import array
from collections.abc import Iterator
from dataclasses import replace

from ..draws import parts_of_orders, same_generators
from ..event import Event
from ..job import Job
from ..law import RISK, WRONG, Breach, Law, NotJudged, check, explains, need, several
from ..loaders import Pass, inside
from ..moments import Step
from ..neighbours import other_targets, takes_parts
from ..reads import MORE, PLAIN, Feed, Reads, broken, feeds, interleaved, loaded, looped
from ..record import recorder, wrap
from ..signature import different, other_contents, plain, signature
from ..watcher import Watcher
from .carried import read_again
from .meeting import one_network
from .modes import Validation
from .replicas import parts_of_layers

LAW = Law(1, "samples", "Every sample is read once per epoch")
SETTINGS = "seed", "epoch", "rank", "num_replicas"  # of samplers
REPEATS = "num_repeats", "repetitions"  # of timm's and torchvision's samplers
CLASSES = "Give classes (or words) the same numbers on every rank: sort their names."
DATA = re.compile("d.?p|data|rep|shard|batch|rank", re.I)  # names of dimensions
START = re.compile("first|start|begin|offset|shift|from|low", re.I)
DIVIDES = "DistributedSampler", "BatchSamplerShard", "ElasticSampler"
DIVIDE = "Read order[rank::world_size] of an order made with one seed from equal data"
SAME = {
    "seed": "Give the sampler the same seed on every rank.",
    "epoch": "Call set_epoch() with the same number on every rank.",
}
AGAIN = "Write `for x in loader:`. next(iter(loader)) returns the first batch again."
STREAM = (
    "Yield only every world_size-th sample, starting at the rank's number; loader "
    "processes (see get_worker_info()) must divide this part further."
)


class Divided(Event, limit=1):
    """The script divides a network between ranks, and not only the samples."""

    how: str


class Samples(Watcher):
    """Records datasets and samplers, and detects tensor parallelism."""

    def hooks(self) -> None:
        import torch.distributed.device_mesh as meshes
        import torch.distributed.tensor.parallel as parallel

        wrap(meshes.DeviceMesh, "__init__", self.mesh)
        for owner in (parallel, parallel.api):
            wrap(owner, "parallelize_module", self.parallel)

    def mesh(self, call, own, *args, **kwargs):
        call(own, *args, **kwargs)
        names = own.mesh_dim_names or ()
        if own.ndim > 1 or (names and not DATA.search(" ".join(names))):
            dimensions = ", ".join(names) or f"{own.ndim} dimensions"
            recorder.write(Divided(how=f"a device mesh ({dimensions})"))

    def parallel(self, call, *args, **kwargs):
        recorder.write(Divided(how="parallelize_module()"))
        return call(*args, **kwargs)

    def on_epoch(self, own: Pass, loader) -> None:
        names = [type(x).__name__ for x in (loader.sampler, loader.batch_sampler)]
        values = {x: getattr(loader.sampler, x, None) for x in SETTINGS + REPEATS}
        feed = Feed(
            loader=own.loader,
            epoch=own.epoch,
            divides=any(x in name for x in DIVIDES for name in names),
            shuffles=bool(getattr(loader.sampler, "shuffle", "Random" in names[0])),
            repeats=bool(getattr(loader.sampler, "replacement", False)),
            sampler={k: x for k, x in values.items() if isinstance(x, int)},
            workers=loader.num_workers,
            data=signature(loader.dataset) if own.epoch == 0 else {},
            fields=plain(loader.dataset),
            part=part(loader.dataset) if own.epoch == 0 else None,
        )
        recorder.write(feed)


def part(dataset) -> array | None:
    """Return the indices, in the innermost dataset, that the subsets choose."""
    subsets = inside(dataset)[1]
    if not subsets or len(dataset) > 200_000:
        return None
    chosen = range(len(dataset))
    for subset in subsets:
        chosen = [subset[i] for i in chosen]
    return array("q", map(int, chosen))


def undivided(job: Job) -> None:
    """Raise NotJudged if a network is divided between ranks."""
    for one in job.of(Divided)[:1]:
        raise NotJudged(f"{one.how} may divide the network between ranks")
    one_network(job)


def where(job: Job, number: int | None = None) -> str:
    """Return the line that iterates over a loader (by default, the training loader)."""
    loader = job.processes[0].loader(number)
    return loader.place if loader else job.of(Step)[0].place


@check(LAW, WRONG, needs=[Step], read="lesson 4")
def datasets_differ(job):
    """The ranks' datasets differ, but a sampler divides them as if they were the same.

    Sort lists of files and of classes, seed random_split() and each shuffle of the
    dataset alike on all ranks, and do not use hash() of strings, which differs between
    processes. If the script divides the samples itself, omit the sampler.
    Not a mistake if: each rank augments its samples once, and keeps them.
    """
    several(job)
    need(job.of(Feed), "no DataLoader is used")
    for number in sorted({one.loader for one in job.of(Feed)}):
        own = feeds(job, number)
        if not own or not all(one.divides for one in own):
            continue
        loader = job.processes[0].loader(number)
        for name, one in own[0].data.items():
            values = [feed.data.get(name) for feed in own]
            ranks = [n for n, x in enumerate(values) if x and x[:2] != one[:2]]
            if ranks:
                what = f"{loader.type}.{name}" if name else loader.type
                yield Breach(different(what, values, ranks[0]), loader.place)
                break
        parts = [one.part for one in own]
        rank = next((n for n, x in enumerate(parts) if x != parts[0]), 0)
        if rank and None not in (parts[0], parts[rank]):
            what = f"a sampler divides different parts of {loader.type} on each rank"
            yield Breach(what, loader.place)
    first = need(feeds(job), "no DataLoader feeds the steps of every rank")
    same = all(one.data == first[0].data for one in first)
    for labels in (True, False) if same else ():
        if what := other_contents(job, labels):
            level = "" if labels else RISK  # perhaps augmented
            yield Breach(what, where(job), level=level, mend=CLASSES * labels)
            return


CAUSES = datasets_differ, read_again


@check(LAW, RISK, general=True, needs=[Step], causes=CAUSES, read="lesson 4")
def left_out(job):
    """Some samples are read twice in an epoch, or never.

    Give DistributedSampler the number of processes and the global rank, and call
    set_epoch() on every rank.
    Not a mistake if: samples are repeated or left out on purpose.
    """
    several(job)
    undivided(job)
    looping = any(process.training is None for process in job.processes)
    if looping or job.processes[0].loader().stream:
        if what := parts_of_orders(job):
            yield Breach(what, job.of(Step)[0].place, mend=DIVIDE + ".")
            return
    if looping:
        yield from judged(job, looped(job), job.of(Step)[0].place)
        return
    validated = {one.loader for one in job.of(Validation) if not one.gradients}
    others, later = interleaved(job)
    for number in (None, *(x for x in others if x not in validated)):
        yield from judged(job, [*loaded(job, number)], where(job, number))
    need(not later, f"{where(job)} reads several DataLoaders, one after another")


def judged(job: Job, epochs: list[Reads], place: str) -> Iterator[Breach | str]:
    """Judge the epochs of one loader, or of a loop without a loader."""
    held, unsure = [], ""
    for one in need(epochs, "no epoch of training was seen"):
        need(not one.vague(), "the inputs do not identify samples")
        counts, what = one.numbers(), broken(one)
        loop = not one.index and not one.feeds and not one.shift
        noise = loop and one.together()[0] > one.together(0.8)[0] + 0.5
        need(not noise, "some inputs, such as noise, are equal on several ranks")
        if what:
            shared = parts_of_layers(job)
            need(not shared, "the ranks share the work of some layers, so also samples")
            stays, together = loop and one.stays(), one.together()[0] >= 0.9
            need(not stays, "the inputs are the same in each step, as with a graph")
            equal = loop and same_generators(job)[2]
            need(not equal, "several ranks have generators in equal states")
            others = loop and together and not one.ids and other_targets(job)
            need(not others, "equal inputs have other targets or smaller inputs")
            parts = together and one.feeds and takes_parts(job)
            need(not parts, "each rank trains on its own part of the same batches")
            drawn = not together and one.random()
            need(not drawn, "each rank may draw its samples at random")
            need(not one.repeated(), "the sampler repeats samples within a batch")
            copies = [x.sampler.get(name, 1) for x in one.feeds for name in REPEATS]
            need(max(copies, default=1) < 2, "the sampler repeats samples on purpose")
            again = not together and one.computed()
            need(not again, "one batch has the same input several times")
            extra, mend = mechanism(job, one, held != [])
            level = WRONG * (mend in SAME.values())
            yield Breach(what + extra, place, facts=one, mend=mend, level=level)
            return
        drawn = counts["within"] or any(x.repeats for x in one.feeds)
        need(not (one.index and drawn), "the sampler draws samples with replacement")
        known = one.total and not one.stream
        text = f"{one.text}: {counts['read']:,} samples read, {counts['distinct']:,} "
        held.append(text + "distinct" + (f" of {one.total:,}" if known else ""))
        repeats = counts["again"] > one.slack + MORE * counts["read"]
        if repeats or not known:
            unsure = unsure or f"{held[-1]}; the size of the dataset is not known"
    need(not unsure, unsure)
    short = [one.text for one in epochs[1:] if not one.whole]
    if epochs[0].feeds and len(short) > 1:
        reads = [x for one in epochs for own in one.all for x in own]
        what = f"{len(short)} passes over the loader end early; the passes read "
        what += f"{len(reads):,} samples, {len({*reads}):,} distinct ones"
        firsts = [tuple(map(tuple, own)) for one in epochs for own in one.ranks]
        single = {*map(len, firsts)} == {1}
        need(single and len(firsts) > 2 * len({*firsts}), what)
        yield Breach(what, place, mend=AGAIN)
        return
    if epochs[0].whole and short:
        raise NotJudged(f"{held[0]}, but only {short[0]} were read")
    text = f"{place}, " * (epochs[0].loader is not None) + held[0]
    more = "epoch 1" if len(held) == 2 else f"epochs 1 to {len(held) - 1}"
    yield text + f"; {more} likewise" * (len(held) > 1)


@explains(left_out, WRONG)
def same_samples(job, breach):
    """Several ranks train on the same samples.

    Give the DataLoader a DistributedSampler.
    Not a mistake if: every rank is meant to read all samples in each epoch.
    """
    one = breach.facts
    if "in the same step" in breach.what:
        return breach
    if not one or one.shift or (one.together()[0] < 0.9 and not one.read_by_all()):
        return None
    return replace(breach, level=RISK if one.together()[0] < 0.9 else WRONG)


def mechanism(job: Job, one: Reads, later=False) -> tuple[str, str]:
    """Return (why ranks read samples twice or never, advice); each is "" if unknown."""
    if one.resumed:
        return "", "After a resume, skip the batches that the epoch has already read."
    if one.later or (later and not one.feeds):
        mend = "in each epoch. Shuffle only a copy of a part: NumPy's slice is a view."
        return "", f"{DIVIDE}, {mend}"
    if one.shift:
        extra = f"; in most steps, sample {one.shift + 1} of a rank is another's first"
        return extra, f"Move by world_size * batch size in each step. {DIVIDE}."
    if not one.feeds:
        mend = "If batches are drawn at random, seed each rank differently."
        return "", f"{DIVIDE}. {mend}"
    first, loader = one.feeds[0], job.processes[0].loader(one.loader)
    for name in SETTINGS if first.divides else ():
        values = [x.sampler.get(name) for x in one.feeds]
        wrong = len({*values}) != (len(values) if name == "rank" else 1)
        wrong |= name == "num_replicas" and values[0] != job.world_size
        if wrong and None not in values:
            told = ", ".join(f"{x} on rank {n}" for n, x in enumerate(values))
            return f"; sampler.{name} is {told}", SAME.get(name, left_out.mend)
    if loader.stream:
        return "", STREAM
    if first.repeats:
        mend = "Seed the sampler's generator with a number that depends on the rank."
        return f"; {loader.sampler} draws them with replacement", mend
    if first.divides or loader.sampler in (*PLAIN, "DistributedSampler"):
        return "", ""
    return "", f"Let {loader.sampler} yield this rank's part. {DIVIDE}."


@check(LAW, WRONG, causes=[datasets_differ], read="lesson 4")
def trained_on_validation(job):
    """Training uses validation samples.

    Split the dataset once, in the same way on every rank.
    Not a mistake if: the two datasets number their samples differently.
    """
    passes, trained, own = {}, set(), feeds(job)
    for process in job.processes:
        trained |= {x for batch in process.trained for x in batch.indices or ()}
        for one in process.of(Validation):
            fed = [x.loader for x in process.of(Step) if x.step < one.step][-1:]
            if not one.gradients and fed == [process.training] != [one.loader]:
                batches = process.batches(one.epoch, one.loader)
                read = {x for batch in batches for x in batch.indices or ()}
                passes[one.loader] = passes.get(one.loader, set()) | read
    need(passes, "no validation with its own DataLoader was seen")
    for loader, validated in sorted(passes.items()):
        other = feeds(job, loader)
        same = own and other and own[0].data and own[0].data == other[0].data
        if not same or own[0].part == other[0].part:
            continue  # equal parts: the pass measures training accuracy
        pairs = [(k, x, other[0].fields.get(k)) for k, x in own[0].fields.items()]
        moves = {k: y - x for k, x, y in pairs if type(x) is type(y) is int and x != y}
        # Each part of a series may begin at another position
        starts = [x for k, x in moves.items() if START.search(k)]
        shared = [{x + n for x in validated} & trained for n in (0, *starts)]
        both = min(shared, key=len)
        if both:
            what = f"training uses {len(both)} of {len(validated)} validation samples"
            level = RISK * bool(moves)
            yield Breach(what, job.processes[0].loader(loader).place, level=level)
