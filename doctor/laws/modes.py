"""Law 6: every weight learns. Checks the modes of layers, and frozen weights."""

import weakref

from ..event import Event
from ..law import RISK, Breach, check, need
from ..loaders import EpochEnd, Loaders
from ..moments import Step, weights
from ..objects import trains, unwrapped
from ..record import place, quiet, recorder, torch
from ..watcher import Watcher
from .alive import LAW, Alive
from .layers import Layers, networks


class Mode(Event, limit=10**6):  # enough for all layers, several times
    """The modes in which a batch norm or dropout layer has run so far."""

    name: str
    lives: bool  # weights of the layer or the module around it get gradients
    ran: dict[str, list[int]]  # mode (train, eval, train without gradients) -> steps
    place: str


class Validation(Event, limit=1000):
    """The first batch of a network's pass over a validation loader."""

    network: str
    loader: int
    epoch: int
    training: bool  # batch norm or dropout layers are in training mode
    gradients: bool
    place: str


class Trained(Event, limit=1000):
    """A network's second step in an epoch, in which an optimizer updates it."""

    network: str
    epoch: int
    training: bool  # some layers, or the network itself, are in training mode
    place: str


class Modes(Watcher):
    """Records the modes of batch norm and dropout layers."""

    def __init__(self):
        self.pending, self.validated = None, set()
        self.optimizer = lambda: None  # the last one that took a step

    def hooks(self) -> None:
        from torch.optim import optimizer as optimizers

        optimizers.register_optimizer_step_post_hook(quiet(self.stepped))

    def stepped(self, optimizer, *_) -> None:
        self.optimizer = weakref.ref(optimizer)

    def on_output(self, network, outputs, batch) -> None:
        """Record a network's mode, if its batch is not from the training loader."""
        self.pending, gradients = None, torch.is_grad_enabled()
        current = Loaders.here.current
        if batch is None or current is None or not recorder.step:
            return
        steps = gradients and current.steps > 0
        key = id(network), current.loader, current.epoch, steps
        if key in self.validated:
            return
        inner = unwrapped(network)
        own = {"network": type(inner).__name__, "training": trains(network)}
        own |= {"epoch": current.epoch, "place": place()}
        if steps:
            self.validated.add(key)
            last = self.optimizer()
            updated = {*map(id, weights(last))} if last else ()
            needed = [x for x in network.parameters() if x.requires_grad]
            if any(id(one) in updated for one in needed):
                own["training"] |= inner.training  # or only some layers are frozen
                recorder.write(Trained(**own))
            return
        one = Validation(gradients=gradients, loader=current.loader, **own)
        self.pending = key, one
        if not gradients:  # or else, a backward pass may follow
            self.keep()

    def keep(self) -> None:
        """Record the pending event."""
        if self.pending:
            self.validated.add(self.pending[0])
            recorder.write(self.pending[1])
            self.pending = None

    def on_backward(self, root) -> None:
        self.pending = None

    def on_batch(self, epoch, batch, seconds) -> None:
        self.keep()

    def on_summary(self) -> None:
        """Write an event for each layer."""
        seen, alive = set(), Alive.here.alive
        ran = Layers.here.ran
        for modules in networks():
            for name, module in modules.items():
                known = ran.get(id(module))
                if id(module) in seen or known is None or not known.modes:
                    continue
                seen.add(id(module))
                part = name
                while part and not [*modules[part].parameters()]:
                    part = part.rpartition(".")[0]
                own = [*modules[part].parameters()]
                event = Mode(
                    name=name.removeprefix("module."),
                    lives=any(alive[id(one)] for one in own),
                    ran={mode: sorted(steps) for mode, steps in known.modes.items()},
                    place=known.place,
                )
                recorder.write(event)


def layers(job) -> list[Mode]:
    """Return the last Mode event of each layer of rank 0's networks."""
    own = job.processes[0].of(Mode)
    return [one for one in own if one.step == own[-1].step]


@check(LAW, RISK, read="docs/found.md")
def eval_mode(job):
    """A network trains in evaluation mode, or validates in training mode.

    Call model.train() at the start of each epoch, and model.eval() before validation.
    Not a mistake if: dropout and batch norm are meant to behave this way.
    """
    ran = job.of(Mode) or job.of(Validation)
    need(ran, "no batch norm or dropout layer ran")
    steps = {one.step for one in job.processes[0].of(Step) if one.watched}
    own = [one for one in layers(job) if one.lives]
    trains = {n for one in own for n in one.ran.get("train", ())}
    evals = {n for one in own for n in one.ran.get("eval", ())}
    if found := sorted((evals - trains) & steps):
        what = f"in {len(found)} of {len(steps)} steps, {own[0].name} is in eval mode"
        yield Breach(what, own[0].place)
    trained = {}
    for one in job.processes[0].of(Trained) if not found else ():
        trained.setdefault((one.network, one.place), []).append(one)
    for own in trained.values():
        last = [one for one in own if not one.training]
        if own[0].training and last and own[-len(last) :] == last:
            if len(last) > 1 or len(own) == 2:
                one = last[0]
                what = f"from epoch {one.epoch} on, {one.network} is in eval mode"
                yield Breach(what, one.place)
    for one in [one for one in validations(job) if one.training][:1]:
        yield Breach(f"{one.network} validates in training mode", one.place)


def validations(job) -> list[Validation]:
    """Return Validation events, by time, of loaders whose batches no step uses."""
    found = []
    for process in job.processes:
        feeding = {one.loader for one in process.of(Step)}
        feeding |= {one.loader for one in process.of(EpochEnd) if one.steps}
        found += [x for x in process.of(Validation) if x.loader not in feeding]
    return sorted(found, key=lambda one: one.time)
