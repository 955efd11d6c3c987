"""Law 9: all ranks make the same calls, take the same steps, and finish."""

import sys
from collections import Counter
from dataclasses import field
from itertools import compress, groupby, zip_longest

from ..event import Event, Exit, Failed, Sends
from ..job import LOST, behind, ended, errors, stuck, waiting
from ..law import NOTE, RISK, WRONG, Breach, Doubt, Law, check, need, several
from ..loaders import Epoch
from ..moments import Moments, Step, Wraps, whole
from ..objects import joins, of_a_loop, variables
from ..record import recorder, torch, wrap
from ..watcher import Watcher
from .layers import Layers

LAW = Law(9, "meeting", "All ranks meet")
ROOTS = {"broadcast": 1, "reduce": 1, "scatter": 2, "gather": 2}  # argument's position
ROOTS |= {"broadcast_object_list": 1, "gather_object": 2, "broadcast_": 1}
COUNTS = 4096  # largest size of a table of counts, such as a confusion matrix
SUMS = "all_reduce", "reduce", "broadcast"
UNEVEN = "all_to_all_single", "allgather"  # sizes may differ between ranks

ORDER = "Use the same order on all ranks, such as sorted(names): a set has no order."
ZEROS = "Sum zeros for weights without a gradient, instead of skipping them."
LEAVES = "Leave the loop on all ranks together: all_reduce() the number that ends it."
MENDS = {  # of waits; loader processes wait for their own copy of the training
    "connect_to_new_process": "Train under if __name__ == '__main__': loader processes "
    "import the script.",
    "init_process_group": "A rank is missing, or two processes have the same one: use "
    "RANK and WORLD_SIZE (LOCAL_RANK counts the processes of one machine only).",
}
NO_GPU = "Read the traceback above. If the script needs a GPU, use doctor --cpu."


class Call(Event, limit=3000):
    """The script calls a collective in which all ranks take part."""

    name: str
    sent: str  # number and type of the elements, and the source or destination rank
    place: str
    value: float | None = None  # sum of a small tensor's absolute values
    keys: dict[str, str] = field(default_factory=dict)  # strings in variables
    passes: int = 0  # number of calls of networks that have ended
    inside: list[str] = ()  # weights of the module whose forward() calls it
    gathers: list[str] = ()  # weights that it gathers
    weight: str = ""  # the weight whose gradient it sums
    joins: bool = False  # then the script joins the ranks' parts, and cuts the result


class Meeting(Watcher):
    """Records the collectives that the script calls."""

    def __init__(self):
        self.counts, self.passes = Counter(), 0
        self.owners, self.moment = {}, None  # weights by their gradients' addresses

    def hooks(self) -> None:
        from torch.distributed.algorithms.join import Join

        wrap(Join, "__enter__", self.ending)

    def on_output(self, network, outputs, batch) -> None:
        self.passes += 1

    def on_collective(self, name, args, kwargs, where) -> None:
        dist = torch.distributed
        Moments.here.tells = not recorder.full(Call)
        values = [*args, *kwargs.values()]
        groups = [one for one in values if isinstance(one, dist.ProcessGroup)]
        if recorder.rank is None or any(x is not dist.group.WORLD for x in groups):
            return
        tensors = [x for x in values if isinstance(x, torch.Tensor)]
        uneven = name in UNEVEN or "object" in name
        tensors = [] if uneven else tensors[:1]
        sent = [f"{x.numel()} x {str(x.dtype)[6:]}" for x in tensors]
        roots = [kwargs.get(x) for x in ("src", "dst", "root_rank")]
        roots += args[ROOTS[name] :][:1] if name in ROOTS else []
        sent += [f"root {x}" for x in roots if isinstance(x, int)][:1]
        call = Call(name=name, sent=", ".join(sent), place=where, passes=self.passes)
        self.counts[where] += 1
        if recorder.step < 2:
            call.inside = Layers.here.weights()
        call.joins = "gather" in name and joins(where)
        if "gather" in name and recorder.watching and self.counts[where] < 99:
            call.gathers = given(values)
        weight = self.owner(tensors[0]) if tensors and recorder.watching else ""
        call.weight = weight if name in SUMS else ""
        watches = recorder.watching or not torch.is_grad_enabled()  # a validation
        for one in tensors if watches and self.counts[where] < 99 else ():
            if name in SUMS:
                call.keys = variables(sys._getframe(), one, name == "all_reduce")
            table = one.dim() == 2 or not one.is_floating_point()
            few = one.numel() <= (COUNTS if table else 64) and recorder.watching
            if few and type(one) is torch.Tensor and not weight:
                call.value = float(one.detach().double().abs().sum())
        recorder.write(call)

    def owner(self, tensor) -> str:
        """Return the name of the weight whose gradient a tensor is, or ""."""
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
            return ""
        now, key = (recorder.step, self.passes), tensor.data_ptr()
        # A hook may sum gradients before the others exist
        if now != self.moment or (key not in self.owners and tensor.numel() <= 64):
            self.owners = {address(one): one for one in trained()}
            self.moment = now
        one = self.owners.get(key)  # its gradient may have been freed since
        return Moments.here.name(one) if one is not None and address(one) == key else ""

    def ending(self, call, context):
        recorder.write(Call(name="join", sent="", place=""))
        return call(context)


def one_network(job) -> None:
    """Raise NotJudged if each rank trains its own network, or stage of a pipeline.

    If ranks never meet in the watched steps, different learning rates are no accident.
    """
    first = [x for x in job.of(Step) if x.step == 0]
    trained, rates = {x.which for x in first}, {(*x.rates,) for x in first}
    meets = any(0 < one.step < job.watched for one in job.of(Call))
    alone = (len(trained) > 1 or len(rates) > 1) and not (meets or job.of(Wraps))
    need(not alone, "each rank trains its own network, and they do not meet")
    if len(sends := job.of(Sends)) == len(job.processes):
        stages = len(trained) > 1 and not any(x.step for x in sends)
        peers = not job.of(Wraps) and all(x.step and x.count > 1000 for x in sends)
        text = "the ranks exchange tensors, and may train different weights"
        need(not (stages or peers), text)


def same_steps(job) -> None:
    """Raise NotJudged if join() has let the ranks take different numbers of steps."""
    joins = any(one.name == "join" for one in job.of(Call))
    uneven = joins and len({one.step for one in job.of(Exit)}) > 1
    need(not uneven, "join() lets the ranks take different numbers of steps")


def trained() -> list:
    """Return the weights that this process holds in full."""
    known = [weight() for _, weight in [*Moments.here.known.values()]]
    return whole([one for one in known if one is not None])


def address(weight) -> int | None:
    """Return the address of a weight's gradient, or None if it has no dense one."""
    dense = weight.grad is not None and weight.grad.layout == torch.strided
    return weight.grad.data_ptr() if dense else None


def given(values: list) -> list[str]:
    """Return the names of weights that are arguments of a collective."""
    own = [one for one in values if type(one) is torch.Tensor and not one.is_sparse]
    own = {one.data_ptr() for one in own}
    return [Moments.here.name(one) for one in trained() if one.data_ptr() in own]


@check(LAW, RISK, general=True, needs=[Step], read="pitfall 12")
def steps_differ(job):
    """The ranks take different numbers of optimizer steps.

    If one rank skips a step, all ranks must skip it: all_reduce the condition.
    Not a mistake if: the ranks' weights are averaged later, or only some ranks train.
    """
    several(job)
    by_hand = any(one.by_hand for one in job.of(Step))
    need(not by_hand, "the script changes the weights without an optimizer")
    done = {one.rank: one.step for one in job.of(Exit)}
    idle = [x for x in job.processes if not (x.of(Epoch) or x.of(Step))]
    idle = [one for x in idle for one in x.of(Exit) if not one.passes]
    need(not idle, "some ranks run no backward pass, and use no DataLoader")
    need(not job.apart, job.apart)
    need(len(done) == len(job.processes), "not every rank ran to its end")
    if len({*done.values()}) > 1:
        same_steps(job)
        counts = [f"rank {rank} takes {done[rank]}" for rank in sorted(done)]
        yield Breach(f"{', '.join(counts)} steps", job.of(Step)[0].place)
    else:
        yield f"{len(done)} ranks took {done[0]:,} steps each"


@check(LAW, WRONG, effects=[steps_differ], read="lesson 11")
def hangs(job):
    """A process waits for other processes, which never arrive.

    Find the call that only some ranks make, or the rank that has an extra batch.
    """
    parts, mend = [], ""
    for process in job.processes:
        one, wait = process.events[-1], waiting(process)
        mend = MENDS.get(wait and wait.what, mend)
        does = wait.text if wait else "has ended"
        parts.append(f"after step {one.step}, rank {process.rank} {does}")
    if stuck(job):
        yield Breach("; ".join(parts), mend=mend)


@check(LAW, WRONG, general=True, effects=[steps_differ, hangs], read="docs/pitfalls.md")
def ends_with_an_error(job):
    """A process ends with an error.

    Read the traceback above: PyTorch's messages often say what to change.
    """
    for one in errors(job)[:1]:
        if not (LOST.search(one.text) and job.hung):
            text = one.text.split("\n")[0][:200]
            what = f"in step {one.step + 1}, rank {one.rank} ends with {text}"
            mend = NO_GPU * (not one.cuda and not job.of(Step))
            yield Breach(what, one.place, mend=mend)
        return
    need(not job.interrupted, "the job was interrupted")
    if job.status and not job.hung:
        what = f"the command ends with status {job.status} and no Python error"
        mend, level = "", WRONG
        if all(process.of(Exit) for process in job.processes):  # atexit ran
            what, level = f"{what}, after all ranks ended", NOTE
            mend = "For 'terminate called', see Gloo's threads in docs/pitfalls.md."
        yield Breach(what, level=level, mend=mend)
    elif not job.hung and len(ended(job)) == len(job.processes):
        yield f"{len(job.processes)} of {len(job.processes)} ended without an error"


EFFECTS = steps_differ, hangs, ends_with_an_error


@check(LAW, WRONG, general=True, needs=[Call], effects=EFFECTS, read="lesson 11")
def collectives_differ(job):
    """The ranks call different collectives, or call them in different orders.

    Make every rank call every collective: move it out of branches that some ranks skip,
    and all_reduce() the condition on which a rank leaves the loop.
    """
    several(job)
    gone = ended(job) if not job.interrupted else []
    for one in errors(job)[:1]:
        if gone and LOST.search(one.text):
            what = f"rank {gone[0].rank} ends while rank {one.rank} waits for it"
            yield Breach(what, one.place)
            return
    rows = [process.of(Call) for process in job.processes]
    for number, calls in enumerate(zip_longest(*rows), 1):
        joins = any(one and one.name == "join" for one in calls)
        need(not joins, "join() lets some ranks end earlier")
        if None in calls:
            without = job.processes[calls.index(None)]
            one = next(one for one in calls if one)
            known = stuck(job) or without in gone or behind(job, without, one)
            # Perhaps a library ended rank `one`, and the other rank fails elsewhere
            alone = all(LOST.search(x.text) and x.rank != one.rank for x in errors(job))
            lost = [x for x in without.of(Failed) if alone and x.step == one.step]
            known = known or (lost and not job.interrupted)
            need(known, "the job ended between two collectives")
            what = f"rank {one.rank} calls {one.name}(), rank {without.rank} does not"
            if wait := waiting(without):
                what += f" and {wait.text} instead"
            elif lost:
                what += f" and is at {lost[0].place} instead"
            leaves = one.name == "destroy_process_group"
            yield Breach(what, one.place, mend=LEAVES * leaves)
            return
        names = {one.name for one in calls}
        if len({(one.name, one.sent) for one in calls}) > 1:
            made = [f"{x.name}({x.sent}) at {x.place} on rank {x.rank}" for x in calls]
            what, mend = f"collective call {number} is {', but '.join(made)}", ""
            if len(names) == 1:
                mend = "Give this call the same size, type and root on every rank."
            elif "destroy_process_group" in names:
                mend = LEAVES
            yield Breach(what, calls[0].place, mend=mend)
            return
    if found := mixed(rows):
        yield found
        return
    yield f"{len(rows[0]):,} collective{'s' * (len(rows[0]) > 1)} in the same order"


def mixed(rows: list[list[Call]]) -> Breach | None:
    """Return a breach if the ranks' calls, or the sums in a tensor, differ in order."""
    found, columns = [], [*zip(*rows, strict=False)]
    sets = [{x.weight for x in own if x.weight} for own in rows]
    for number, calls in enumerate(columns, 1):
        names = [x.weight for x in calls]
        known = all(names) and not any(" of shape " in one for one in names)
        if known and len({*names}) > 1 and set.intersection(*sets):
            told = ", ".join(f"{x} on rank {n}" for n, x in enumerate(names[:4]))
            what = f"collective call {number} sums the gradient of {told}"
            now = [{x.weight for x in own if x.step == calls[0].step} for own in rows]
            mend = ORDER if all(x == now[0] for x in now) else ZEROS
            return Breach(what, calls[0].place, mend=mend)
    for _, run in groupby(columns, lambda x: (x[0].place, x[0].step, x[0].passes)):
        ranks = [*zip(*run, strict=True)]
        one = ranks[0][0]
        texts = {k: [[x.keys.get(k, "") for x in y] for y in ranks] for k in one.keys}
        keys = {k: ["\n".join(x).split("\n") for x in own] for k, own in texts.items()}
        keys = {k: x for k, x in keys.items() if of_a_loop(x[0])}
        if not any(all(own == x[0] for own in x) for x in keys.values()):
            orders = [(k, x) for k, x in keys.items() if len({*map(frozenset, x)}) == 1]
            found += [(one, *order) for order in orders[:1]]
    for one, name, lists in found[:1]:
        pair = next(x for x in zip(*lists, strict=True) if len({*x}) > 1)
        told = ", ".join(f"{x} on rank {n}" for n, x in enumerate(pair[:4]))
        listed = "\n" in one.keys[name]  # perhaps the order of the tensor's elements
        loops = f"in {len(found)} loop{'s' * (len(found) > 1)}, " * (not listed)
        what = f"{loops}{one.name}() gets different {name}: {told}"
        return Breach(what, one.place, level=RISK * listed, mend=ORDER)
    return None


@check(
    LAW, RISK, general=True, effects=[*EFFECTS, collectives_differ], read="pitfall 12"
)
def batch_counts_differ(job):
    """The ranks have different numbers of training batches.

    Give each rank as many batches as the others (DistributedSampler), or use join().
    Not a mistake if: the loop handles ranks that run out of batches.
    """
    several(job)
    feeds = [process.loader() for process in job.processes]
    need(all(feeds), "no DataLoader feeds the steps of every rank")
    joins = any(one.name == "join" for one in job.of(Call))
    need(not joins, "join() handles ranks that run out of batches")
    ends_early = job.status and not job.interrupted and not ended(job)
    failed = stuck(job) or job.of(Failed) or ends_early
    lengths = [one.length for one in feeds]
    epochs = sorted({epoch for one in job.processes for epoch in one.epochs})
    for epoch in epochs:
        counts = [len(one.batches(epoch)) for one in job.processes]
        whole = [one.whole(epoch) for one in job.processes]
        ends = [*compress(counts, whole)]
        if failed and None not in lengths and len({*lengths}) > 1:
            counts = lengths
        elif not ends or not (all(whole) or max(counts) > min(ends)):
            break
        if len({*counts}) > 1:
            told = ", ".join(map(str, counts))
            what = f"the ranks have {told} batches in epoch {epoch}"
            taken = {one.step for one in job.of(Exit)}
            if not failed and len(taken) == 1 and 0 not in taken:
                raise Doubt(f"{what}, but take equal numbers of steps")
            yield Breach(what, feeds[0].place, level=WRONG if failed else RISK)
            return
    done = [n for n in epochs if all(one.whole(n) for one in job.processes)]
    need(done, "no epoch was read to its end on every rank")
    yield f"{len(job.processes[0].batches(done[0])):,} batches per epoch each"
