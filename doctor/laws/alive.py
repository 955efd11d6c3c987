"""Law 6: every trainable weight gets gradients, is in an optimizer, and changes."""

from collections import Counter
from itertools import compress

from ..event import Event
from ..law import RISK, WRONG, Breach, Law, check, explains, need
from ..moments import Moments, Step, weights
from ..record import STEPS, TIMED, recorder, torch
from ..sample import numbers
from ..watcher import Watcher, tell
from .checkpoints import local
from .layers import Layers, Ran, networks
from .losses import cut_off
from .passes import Update
from .replicas import listed
from .states import late_network

LAW = Law(6, "alive", "Every weight learns")
# After these steps, doctor writes an event for each weight and layer
WRITES = {*range(1, 4), *range(4, STEPS, 4), STEPS}
ZERO = "Look for two factors that start at zero, and for ReLUs with negative inputs."


class Weight(Event, limit=10**6):  # enough for all weights, several times
    """The gradients that a weight has received so far, and whether it has changed."""

    name: str
    module: str  # the outermost module that has run and gets no gradients
    trainable: bool
    optimizer: int | None  # the first step of the weight's optimizer
    network: str  # the weight's network, or ""
    training: bool  # this network is in training mode
    steps: int  # number of its optimizer's steps, or of all steps if it has none
    alive: int  # number of these steps in which its gradient was not zero
    reached: bool  # a backward pass has reached the weight
    moves: bool  # the weight has changed, or its sampled gradients were all zero
    first: int  # the step in which its module first ran, or -1
    cut: bool  # its module's results need no gradient
    returned: bool  # the outer module returns its module's results
    place: str  # the line that calls its module


class Alive(Watcher):
    """Counts the gradients of each weight, and tracks which weights change."""

    def __init__(self):  # all keys are ids of weights, except those of `begins`
        self.alive, self.steps = Counter(), Counter()
        self.begins, self.optimizers = {}, {}  # first steps
        self.reached, self.begun, self.moved = set(), {}, set()
        self.nonzero = set()  # weights with nonzero sampled gradients

    def on_gradient(self, weight, gradient) -> None:
        self.reached.add(id(weight))

    def on_step(self, optimizer, whole, gradients) -> None:
        if not recorder.watching:
            return
        sampled = {id(x) for x, row in zip(whole, gradients, strict=True) if any(row)}
        own = weights(optimizer)
        first = self.begins.setdefault(id(optimizer), recorder.step)
        self.optimizers = dict.fromkeys(map(id, own), first) | self.optimizers
        self.steps.update(map(id, own))
        self.alive.update(sampled)
        self.nonzero |= sampled
        # Few rows of an embedding get gradients
        unclear = [x for x in own if not self.alive[id(x)] and x.grad is not None]
        self.alive.update(map(id, compress(unclear, lives(unclear))))
        others = self.outside()
        self.reached |= {id(one) for one in others if one.grad is not None}
        new = [one for one in own + others if id(one) not in self.begun]
        self.begun |= zip(map(id, new), numbers([*map(local, new)]), strict=True)

    def outside(self) -> list:
        """Return the networks' weights that no optimizer has updated so far."""
        found = [one for net in [*Moments.here.networks] for one in net.parameters()]
        return [one for one in found if id(one) not in self.steps]

    def after_step(self, optimizer, weights) -> None:
        if recorder.step + 1 in WRITES:
            tell("on_summary")
        elif recorder.step + 1 == STEPS + TIMED:  # the script may free its network
            self.on_end()

    def on_end(self) -> None:
        later = [x for x in self.outside() if x.requires_grad and x.grad is not None]
        known = Moments.here.known.keys() & self.begun
        idle = [x for x in later if id(x) in known]  # of an optimizer without steps
        self.alive.update(map(id, compress(idle, lives(idle))))
        later = {*map(id, later)} - self.reached  # such as a block that was added late
        self.reached |= later
        few = recorder.step < STEPS and recorder.step not in WRITES
        if self.steps and (few or later or idle):
            tell("on_summary")

    def on_summary(self) -> None:
        """Write an event for each weight."""
        owners, found = {}, {}
        for modules in networks():
            for name, module in modules.items():
                for weight in module.parameters(recurse=False):
                    owners.setdefault(id(weight), (modules, name))
                    found[id(weight)] = weight
        known = [weight() for _, weight in [*Moments.here.known.values()]]
        given = {id(one): one for one in known if one is not None}
        found |= {key: one for key, one in given.items() if key in self.steps}
        loose = Layers.here.loose({*found})
        names = {id(weight): (name, ran) for name, weight, ran in loose}
        found |= {id(weight): weight for _, weight, _ in loose}
        self.reached |= {id(one) for _, one, _ in loose if one.grad is not None}
        now = dict(zip(found, numbers([*map(local, found.values())]), strict=True))
        self.moved = {key for key in now if now[key] != self.begun.get(key, now[key])}
        for key, weight in found.items():
            name, ran = names.get(key, (Moments.here.name(weight), None))
            module, network, training = "", "", True
            if key in owners:
                module, ran = self.around(*owners[key])
                root = owners[key][0][""]
                network, training = f"{type(root).__name__} {id(root)}", root.training
            ran = ran or Ran(None, -1, "")
            unsampled = key in self.steps and key not in self.nonzero
            event = Weight(
                name=name,
                module=module,
                trainable=weight.requires_grad,
                # -1: its optimizer never stepped
                optimizer=self.optimizers.get(key, -1 if key in given else None),
                network=network,
                training=training,
                steps=self.steps[key] or recorder.step + 1,
                alive=self.alive[key],
                reached=key in self.reached,
                moves=key in self.moved or unsampled,
                first=ran.first,
                cut=ran.cut,
                returned=ran.returned,
                place=ran.place,
            )
            recorder.write(event)

    def around(self, modules: dict, name: str) -> tuple[str, Ran | None]:
        """Return (outermost module around `name` without any gradients, how it ran)."""
        found = name, Layers.here.ran.get(id(modules[name]))
        while name:
            name = name.rpartition(".")[0]
            if any(self.alive[id(one)] for one in modules[name].parameters()):
                break
            if ran := Layers.here.ran.get(id(modules[name])):
                found = name, ran
        return found


def lives(tensors: list) -> list[bool]:
    """Return, for each tensor, whether its gradient has a nonzero element."""
    parts = [local(one.grad) for one in tensors]
    parts = [one.coalesce().values() if one.is_sparse else one for one in parts]
    flags = [one.any() if one.numel() else torch.tensor(True) for one in parts]
    return [flag > 0 for (flag,) in numbers(flags)]


def latest(job) -> dict[str, list[Weight]]:
    """Return each weight's last events by name, those of ranks that train it first."""
    found = {}
    for process in job.processes:
        events, count = process.of(Weight), Counter()
        for one in events:
            if one.step == events[-1].step:
                count[one.name] += 1
                found.setdefault(f"{one.name} {count[one.name]}", []).append(one)
    for row in found.values():
        row.sort(key=lambda one: (one.optimizer is None, one.optimizer == -1))
    return found


def names(events: list[Weight]) -> str:
    """Return the names of the first few weights of a list, as text."""
    return listed(one.name for one in events)


@check(LAW, RISK, general=True, needs=[Step, Weight])
def dead_weights(job):
    """Some trainable weights never get a gradient.

    Look between these weights' layers and the loss for detach(), no_grad(), item(),
    argmax(), or a reentrant checkpoint whose inputs need no gradient.
    Not a mistake if: you do not want to train them; then call requires_grad_(False).
    """
    rows = [x for x in latest(job).values() if x[0].optimizer not in (None, -1)]
    rows = need([x for x in rows if x[0].trainable], "no optimizer's weights were seen")
    dead = [x[0] for x in rows if not any(one.alive for one in x)]
    alive = [x[0] for x in rows if any(one.alive for one in x)]
    orders = [[x.name for x in p.of(Weight) if x.step == 1] for p in job.processes]
    same = all(x == orders[0] for x in orders)
    need(same, "the ranks' weights differ in their names or their order")
    need((steps := max(x[0].steps for x in rows)) > 1, "only one step was seen")
    for number in sorted({x.optimizer for x in dead} - {x.optimizer for x in alive}):
        own = [one for one in dead if one.optimizer == number]
        dead = [one for one in dead if one.optimizer != number]
        what = f"all {len(own)} weights of an optimizer have no gradient or zero "
        what += f"gradients: {names(own)}"
        yield Breach(what, own[0].place or job.of(Step)[0].place, facts=own)
    runs = max((one.first for one in alive), default=-1)
    if lost(job):  # then an optimizer may have the weights of an old head
        dead = [one for one in dead if one.network]
    live = {one.name for one in alive}  # a bias can cancel out, as in a difference
    needed = [
        one
        for one in dead
        if (one.cut and one.first >= 0)
        or (one.reached and not one.returned)  # DDP gives unused results zeros
        or (one.module and 0 <= one.first < runs and not one.returned)
    ]
    needed = [x for x in needed if x.name.removesuffix("bias") + "weight" not in live]
    count = f"of {len(rows)} trainable weights"
    never = f"{count} never get a gradient in {steps} steps"
    moved, still = [[x for x in alive if x.moves is own] for own in (True, False)]
    zero = [x for x in still if cancels(job, x.name)]
    still = [x for x in still if x not in zero]
    stuck = f"{len(still)} {count} get gradients, but do not change"
    if needed:
        what, zero = f"{len(needed)} {never}", all(one.reached for one in needed)
        if zero:
            what = what.replace("never get a gradient", "get only zero gradients")
        what += f": {names(needed)}"
        what += f"; {stuck}: {names(still)}" * bool(still)
        yield Breach(what, needed[0].place, facts=needed, mend=ZERO * zero)
    elif dead:
        what = f"{len(dead)} {never}: {names(dead)}"
        need(cut := cut_off(job), f"{what}; perhaps the loss should use them")
        what += "; all_gather() returns tensors without a gradient"
        yield Breach(what, cut[0], facts=dead)
    elif alive:
        need(not still, f"{stuck}: {names(still)}")
        text = f"{len(moved)} {count} get gradients and change in {steps} steps"
        yield text + f"; the gradient of {names(zero)} cancels out" * bool(zero)
        late_network(job)


def cancels(job, name: str) -> bool:
    """Return whether a bias gets only rounding errors, as before batch norm."""
    pair, sizes = (name, name.removesuffix("bias") + "weight"), []
    for one in job.of(Update):
        if pair[0] != pair[1] and {*pair} <= {*one.names}:
            rows = [one.part(one.used, one.names.index(x)) for x in pair]
            sizes.append([max(map(abs, own)) for own in rows])
    return bool(sizes) and all(x < 1e-4 * y for x, y in sizes)


@explains(dead_weights, WRONG, read="lesson 16")
def zero_gradients(job, breach):
    """The gradients of all of an optimizer's parameters are zero.

    Give the optimizer the network's final weights (after fully_shard(), for example),
    and check that the loss depends on them: the cross-entropy of a single output is
    always 0.
    """
    if not breach.what.startswith("all "):
        return None
    if not any(one.network for one in breach.facts):
        breach.what += "; no network has these weights"
    number = breach.facts[0].optimizer
    if cleared := [x for x in job.of(Update) if x.optimizer == number and x.lost]:
        what = f"zero_grad() clears all gradients after backward(): {breach.what}"
        mend = "Call zero_grad() before backward(), or after step()."
        return Breach(what, cleared[0].lost[0], mend=mend)
    return Breach(breach.what)


def lost(job) -> list[Weight]:
    """Return the weights that get gradients but that no optimizer updates."""
    rows = [*latest(job).values()]
    used = {x[0].network for x in rows if x[0].optimizer is not None}
    rows = [x for x in rows if x[0].trainable and x[-1].optimizer is None]
    rows = [x for x in rows if x[0].training or x[0].network in used]
    rows = [[one for one in x if one.optimizer is None] for x in rows]  # on some ranks
    rows = [x for x in rows if not any(one.moves for one in x)]
    return [x[0] for x in rows if any(one.reached for one in x)]


@check(LAW, RISK, needs=[Step, Weight], causes=[zero_gradients], read="docs/convert.md")
def not_in_an_optimizer(job):
    """Some weights get gradients but are in no optimizer.

    Create the optimizer, with all parameters, after the last change to the network.
    Not a mistake if: these weights should not change; then call requires_grad_(False).
    """
    every = job.of(Weight)
    first = [x for x in every if x.step == every[0].step and x.optimizer is not None]
    flat = any(x.alive for x in first) and not any(x.network for x in first)
    moved = any(x.moves and x.network and x.optimizer is None for x in every)
    text = "the optimizer's weights may be parts of the networks' weights, which change"
    need(not (flat and moved), text)
    found, rows = lost(job), [x[0] for x in latest(job).values()]
    still = [x[0] for x in latest(job).values() if not any(one.moves for one in x)]
    end = job.of(Step)[-1].step  # events at the job's end have a higher number
    idle = [x for x in still if x.step > end and x.optimizer == -1 and x.alive]
    if idle and job.status == 0:  # otherwise, a later phase may be missing
        what = f"the optimizer of {len(idle)} weights takes no step: {names(idle)}"
        mend = "Call step() of each optimizer after backward()."
        yield Breach(what, job.of(Step)[0].place, mend=mend)
    if found:
        count = f"{len(found)} of {sum(x.trainable for x in rows)} weights"
        what = f"{count} get gradients, but no optimizer has them: {names(found)}"
        old = [x for x in rows if not (x.alive or x.network or x.optimizer is None)]
        if old:
            what += f"; an optimizer has {len(old)} that no network has: {names(old)}"
        where = found[0].place or job.of(Step)[0].place
        yield Breach(what, where, level=WRONG if old else RISK)
