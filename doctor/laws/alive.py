"""Law 6: every trainable weight gets gradients, is in an optimizer and is changed."""

from dataclasses import dataclass

from ..event import Event
from ..law import RISK, WRONG, Breach, Law, check, explains
from ..moments import Moments, Step
from ..record import STEPS, recorder
from ..watcher import Watcher

LAW = Law(6, "alive", "Every weight lives")


@dataclass(kw_only=True)
class Weight(Event):
    """What happened to one weight of a network in the watched steps."""

    name: str
    number: int  # the order in which the network's layers ran
    trainable: bool
    held: bool  # by an optimizer that stepped
    steps: int  # of its optimizer (or of any, if none holds it)
    gradients: int  # in how many of them its gradient was not zero
    place: str  # where its network was called


class Alive(Watcher):
    """Counts the gradients of each weight."""

    def __init__(self):
        self.gradients, self.steps, self.written = {}, {}, False
        self.order = {}  # of weights, by the layers that ran

    def on_input(self, network, inputs) -> None:
        if recorder.step < 3:
            for module in network.modules():
                for weight in module.parameters(recurse=False):
                    self.order.setdefault(id(weight), len(self.order))

    def on_step(self, optimizer, weights, gradients) -> None:
        for weight, values in zip(weights, gradients, strict=bool(gradients)):
            self.steps[id(weight)] = self.steps.get(id(weight), 0) + 1
            alive = self.gradients.get(id(weight), 0) + any(values)
            self.gradients[id(weight)] = alive

    def after_step(self, optimizer, weights) -> None:
        if recorder.step == STEPS - 1:
            self.write()

    def on_exit(self) -> None:
        self.write()

    def write(self) -> None:
        """Write what was counted, once."""
        if self.written or not recorder.step:
            return
        self.written = True
        for network in [*Moments.here.networks]:
            for weight in network.parameters():
                held = id(weight) in self.steps
                one = Weight(
                    name=Moments.here.name(weight),
                    number=self.order.get(id(weight), -1),
                    trainable=weight.requires_grad,
                    held=held,
                    steps=self.steps.get(id(weight), recorder.step),
                    gradients=self.gradients.get(id(weight), 0),
                    place="",
                )
                recorder.write(one)


@check(LAW, RISK, general=True, needs=[Step, Weight], read="docs/pitfalls.md")
def dead_weights(job):
    """Trainable weights never get a gradient, or no optimizer has them.

    Check that the loss depends on them, and give the optimizer the final network's
    parameters.
    Not a mistake if: they are not meant to be trained.
    """
    weights = [one for one in job.processes[0].of(Weight) if one.trainable]
    dead = [one for one in weights if not one.gradients]
    if dead:
        names = ", ".join(one.name for one in dead[:2])
        names += f" and {len(dead) - 2} more" * (len(dead) > 2)
        what = f"{len(dead)} of {len(weights)} trainable weights never get a gradient"
        what += f" in {dead[0].steps} steps: {names}"
        yield Breach(what, job.of(Step)[0].place, facts=dead)
        return
    yield f"{len(weights)} of {len(weights)} trainable weights live"


@explains(dead_weights, WRONG)
def not_in_an_optimizer(job, breach):
    """No optimizer has some of the trainable weights.

    Give the optimizer the final network's parameters: make it after the last change.
    """
    lost = [one for one in breach.facts if not one.held]
    if lost and len(lost) == len(breach.facts):
        names = ", ".join(one.name for one in lost[:4])
        return Breach(f"no optimizer has {names}, which are trainable")
    return None
