"""Law 1: every sample is read once per epoch."""

import re
from array import array
from collections.abc import Iterator
from dataclasses import replace

from ..draws import other_orders
from ..event import Event
from ..job import Job
from ..law import (
    RISK,
    WRONG,
    Breach,
    Doubt,
    Law,
    NotJudged,
    check,
    explains,
    need,
    several,
)
from ..loaders import Pass, inside
from ..moments import Step
from ..neighbours import near_twins, other_targets
from ..reads import MORE, Feed, Reads, broken, feeds, interleaved, loaded, looped
from ..record import recorder, wrap
from ..signature import different, other_contents, plain, relabelled, signature
from ..watcher import Watcher
from .modes import Validation

LAW = Law(1, "samples", "Every sample is read once per epoch")
CLASSES = "Give classes (or words) the same numbers on every rank: sort their names."
DATA = re.compile("d.?p|data|rep|shard|batch|rank", re.I)  # names of dimensions
DIVIDES = "DistributedSampler", "BatchSamplerShard", "ElasticSampler"


class Divided(Event, limit=1):
    """The script divides a network between ranks, and not only the samples."""

    how: str


class Samples(Watcher):
    """Records datasets and samplers."""

    def on_epoch(self, own: Pass, loader) -> None:
        names = [type(x).__name__ for x in (loader.sampler, loader.batch_sampler)]
        known = "seed", "epoch", "rank", "num_replicas"
        values = {name: getattr(loader.sampler, name, None) for name in known}
        first = own.epoch == 0
        feed = Feed(
            loader=own.loader,
            epoch=own.epoch,
            divides=any(x in name for x in DIVIDES for name in names),
            shuffles=bool(getattr(loader.sampler, "shuffle", "Random" in names[0])),
            repeats=bool(getattr(loader.sampler, "replacement", False)),
            sampler={k: x for k, x in values.items() if isinstance(x, int)},
            workers=loader.num_workers,
            data=signature(loader.dataset) if first else {},
            fields=plain(loader.dataset),
            part=self.part(loader) if first else None,
        )
        recorder.write(feed)

    def part(self, loader) -> array | None:
        """Return the indices, in the innermost dataset, that the subsets choose."""
        subsets = inside(loader.dataset)[1]
        if not subsets or len(loader.dataset) > 200_000:
            return None
        chosen = range(len(loader.dataset))
        for subset in subsets:
            chosen = [subset[i] for i in chosen]
        return array("q", map(int, chosen))


class Meshes(Watcher):
    """Detects device meshes and tensor parallelism."""

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
            named = f" ({', '.join(names)})" * bool(names)
            how = f"a device mesh of {own.ndim} dimensions{named}"
            recorder.write(Divided(how=how))

    def parallel(self, call, *args, **kwargs):
        recorder.write(Divided(how="parallelize_module()"))
        return call(*args, **kwargs)


# --- checks ---


def undivided(job: Job) -> None:
    """Raise Doubt if a network is divided between ranks."""
    for one in job.of(Divided)[:1]:
        raise Doubt(f"{one.how} may divide the network between ranks")


def where(job: Job, number: int | None = None) -> str:
    """Return the line that iterates over a loader (by default, the training loader)."""
    loader = job.processes[0].loader(number)
    return loader.place if loader else job.of(Step)[0].place


@check(LAW, WRONG, needs=[Step], read="lesson 4")
def datasets_differ(job):
    """The ranks' datasets differ, but a sampler divides them as if they were the same.

    Give every rank the same samples in the same order: sort lists of files, and use the
    same seed on all ranks for random_split() and every shuffle of the dataset. If the
    script divides the samples itself, omit the sampler.
    """
    several(job)
    need(job.of(Feed), "no DataLoader is used")
    for number in sorted({one.loader for one in job.of(Feed)}):
        own = feeds(job, number)
        if not own or not all(one.divides for one in own):
            continue
        loader = job.processes[0].loader(number)
        for name in own[0].data:
            values = [one.data.get(name) for one in own]
            rank = next((n for n, x in enumerate(values) if x != values[0]), 0)
            if rank and values[rank] and values[0][:2] != values[rank][:2]:
                what = f"{loader.type}.{name}" if name else loader.type
                mend = CLASSES * relabelled(values[0], values[rank])
                yield Breach(different(what, values, rank), loader.place, mend=mend)
                break
        parts = [one.part for one in own]
        rank = next((n for n, x in enumerate(parts) if x != parts[0]), 0)
        if rank and parts[0] is not None and parts[rank] is not None:
            both = len({*parts[0]} & {*parts[rank]})
            what = f"ranks 0 and {rank} have different parts of {loader.type}, which a "
            what += f"sampler divides: {both} of {len(parts[0])} samples are in both"
            mend = "Divide the samples once: omit the sampler, or the script's own "
            yield Breach(what, loader.place, mend="" if both else f"{mend}division.")
    same = all(one.data == feeds(job)[0].data for one in feeds(job))
    unknown = same and not feeds(job)[0].data  # or else, see contents_differ()
    for labels in (True, False)[: same + unknown]:
        if what := other_contents(job, labels):
            yield Breach(what, where(job), mend=CLASSES * labels)
            return


@check(LAW, RISK, general=True, needs=[Step], causes=[datasets_differ], read="lesson 4")
def left_out(job):
    """Some samples are read twice in an epoch, or never.

    Give DistributedSampler the number of processes and the global rank, and call
    set_epoch() on every rank.
    Not a mistake if: samples are repeated or left out on purpose.
    """
    several(job)
    undivided(job)
    if any(process.training is None for process in job.processes):
        yield from judged(job, looped(job), job.of(Step)[0].place)
        return
    validated = {one.loader for one in job.of(Validation) if not one.gradients}
    others, later = interleaved(job)
    for number in (None, *(x for x in others if x not in validated)):
        yield from judged(job, [*loaded(job, number)], where(job, number))
    if later:
        raise NotJudged(f"{where(job)} reads several DataLoaders, one after another")


def judged(job: Job, epochs: list[Reads], place: str) -> Iterator[Breach | str]:
    """Judge the epochs of one loader, or of a loop without a loader."""
    held, unsure = [], ""
    for one in need(epochs, "no epoch of training was seen"):
        if one.vague():
            raise NotJudged("the inputs do not identify samples, as with single words")
        counts, what = one.numbers(), broken(one)
        loop = not one.index and not one.feeds and not one.shift
        if loop and one.together()[0] > one.together(0.8)[0] + 0.5:
            raise NotJudged("some inputs, such as noise, are equal on several ranks")
        if loop and what and one.stays():
            raise NotJudged("the inputs are the same in each step, as with a graph")
        if loop and what and one.together()[0] >= 0.9 and other_targets(job):
            raise NotJudged("equal inputs have different targets on each rank")
        if what and one.together()[0] < 0.9:
            if one.random():
                raise NotJudged("each rank may draw its samples at random")
            if one.computed():
                raise NotJudged("one batch has the same input several times")
        if what:
            extra, mend = mechanism(job, one, held != [])
            yield Breach(what + extra, place, facts=one, mend=mend)
            return
        if loop and not one.ids and (what := near_twins(job)):
            yield Breach(what, place, facts=one, mend=mechanism(job, one)[1])
            return
        drawn = counts["within"] or any(x.repeats for x in one.feeds)
        if one.index and drawn:
            raise NotJudged("the sampler draws samples with replacement")
        held.append(f"{one.text}: {counts['read']:,} samples read, ")
        held[-1] += f"{counts['distinct']:,} distinct"
        held[-1] += f" of {one.total:,}" if one.total and not one.stream else ""
        repeats = counts["again"] > one.slack + MORE * counts["read"]
        if one.stream or not one.total or repeats:
            more = "" if one.index else " (by their contents)"
            why = "the size of the dataset is not known"
            if one.index and not one.total:
                ends = "may leave out samples" if one.whole else "has not ended"
                why = f"the script's own sampler {ends}"
            unsure = unsure or f"{held[-1]}{more}; {why}"
    if unsure:
        raise NotJudged(unsure)
    short = [one.text for one in epochs[1:] if not one.whole]
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
    if one.shift or (one.together()[0] < 0.9 and not one.read_by_all()):
        return None
    return replace(breach, level=RISK if one.together()[0] < 0.9 else WRONG)


def mechanism(job: Job, one: Reads, later=False) -> tuple[str, str]:
    """Return (why ranks read samples twice or never, advice); each is "" if unknown."""
    if one.later:
        return "", "Divide the samples in each epoch as in the first epoch."
    if one.resumed:
        return "", "After a resume, skip the batches that the epoch has already read."
    if one.shift:
        extra = f"; in most steps, sample {one.shift + 1} of a rank is another's first"
        mend = "Begin at rank * batch size, and in each step move by the batches of "
        return extra, f"{mend}all ranks (world_size * batch size)."
    if not one.feeds and later:
        mend = "The ranks no longer divide the same order: make each epoch's order "
        mend += "from the epoch's number, and shuffle a copy of a rank's part (NumPy's "
        return "", f"{mend}order[rank::world_size] is a view of the order)."
    if not one.feeds:
        mend = "Shuffle the samples in the same order on all ranks, then divide them "
        mend += "(order[rank::world_size])"
        if one.together()[0] >= 0.9:
            return "", f"{mend}; or seed each rank differently."
        line = other_orders(job, 2 * one.batch)
        extra = f"; {line} draws a different order on each rank" * bool(line)
        return extra, f"{mend}: draw this order with the same seed."
    first, counts = one.feeds[0], one.numbers()
    wanted = {"seed": "the same seed", "epoch": "set_epoch(epoch) on every rank"}
    for name, text in wanted.items():
        values = [x.sampler.get(name) for x in one.feeds]
        if first.divides and len({*values}) > 1:
            told = ", ".join(f"{x} on rank {n}" for n, x in enumerate(values))
            return f"; sampler.{name} is {told}", f"Give all samplers {text}."
    ranks = [x.sampler.get("rank") for x in one.feeds]
    sizes = {x.sampler.get("num_replicas") for x in one.feeds}
    if first.divides and (len({*ranks}) < len(ranks) or sizes != {job.world_size}):
        told = ", ".join(f"{x} on rank {n}" for n, x in enumerate(ranks))
        if None not in ranks:
            mend = "Give DistributedSampler dist.get_world_size() and dist.get_rank()."
            return f"; sampler.rank is {told} (of {[*sizes][0]})", mend
    loader = job.processes[0].loader(one.loader)
    if loader.stream:
        part = "Yield only every world_size-th sample, starting at the rank's number"
        if first.workers > 1:
            part = "Divide the stream into world_size * num_workers parts, and yield "
            part += "part rank * num_workers + worker (from get_worker_info())"
            if counts["within"] and not counts["ranks"]:
                extra = f"; each of the {first.workers} loader processes yields them"
                return extra, f"{part}."
        return "", f"{part}; first, put all samples in the same order on all ranks."
    if first.repeats:
        mend = "Seed the sampler's generator with a number that depends on the rank; "
        text = f"; {loader.sampler} draws them with replacement"
        return text, f"{mend}the classes stay balanced."
    if first.divides or loader.sampler in ("RandomSampler", "SequentialSampler"):
        return "", ""
    mend = f"Let {loader.sampler} yield this rank's part, order[rank::world_size], "
    return "", f"{mend}of an order that is equal on all ranks."


@check(LAW, WRONG, causes=[datasets_differ], read="lesson 4")
def trained_on_validation(job):
    """Training uses validation samples.

    Split the dataset once, in the same way on every rank.
    """
    passes, why = {}, "no validation with its own DataLoader was seen"
    for one in need([x for x in job.of(Validation) if not x.gradients], why):
        process = next(x for x in job.processes if x.rank == one.rank)
        fed = [x.loader for x in process.of(Step) if x.step < one.step]
        if fed and fed[-1] == process.training != one.loader:
            passes.setdefault(one.loader, []).append((process, one))
    own, trained = feeds(job), set()
    for process in job.processes:
        for epoch in process.epochs:
            trained |= {x for b in process.batches(epoch) for x in b.indices or ()}
    for loader, found in sorted(passes.items()):
        other = feeds(job, loader)
        if not own or not other or other[0].data != own[0].data or not own[0].data:
            continue  # different files
        if other[0].part == own[0].part:
            continue  # the pass measures training accuracy
        validated = set()
        for process, one in found:
            for batch in process.batches(one.epoch, loader):
                validated |= {*(batch.indices or ())}
        if both := validated & trained:
            what = f"training uses {len(both)} of {len(validated)} validation samples"
            yield Breach(what, job.processes[0].loader(loader).place)
