"""Law 6: every weight learns. Records which layers run, and in which modes."""

import weakref
from dataclasses import dataclass, field

from ..loaders import leaves
from ..moments import Moments
from ..objects import kind, unwrapped
from ..record import STEPS, place, quiet, recorder, runs_normally, torch
from ..watcher import Watcher


@dataclass
class Ran:
    """When, where and in which modes a module has run."""

    module: weakref.ref
    first: int
    place: str
    cut: bool = False  # its results need no gradient
    returned: bool = False  # the module around it returns its results
    modes: dict[str, set] = field(default_factory=dict)  # mode -> steps


class Layers(Watcher):
    """Tracks which modules run, and in which modes."""

    def __init__(self):
        self.ran, self.results, self.outer = {}, {}, lambda: None
        self.running = []  # modules whose forward() runs, in the first steps

    def hooks(self) -> None:
        module = torch.nn.modules.module
        self.hook = module.register_module_forward_pre_hook(quiet(self.before))
        self.other = module.register_module_forward_hook(quiet(self.after))

    def on_input(self, network, inputs) -> None:
        self.outer = weakref.ref(network)
        self.running = []

    def on_output(self, network, outputs, batch) -> None:
        self.running = []

    def on_backward(self, root) -> None:
        self.running = []

    def before(self, module, inputs) -> None:
        """Record when a module first runs and, for batch norm or dropout, its mode."""
        if not recorder.watching or not runs_normally():
            return
        if recorder.step < 2 and not Moments.here.backing:
            self.running.append(weakref.ref(module))
        known = self.ran.get(id(module))
        if known is None or known.module() is not module:
            known = Ran(weakref.ref(module), len(self.ran), place())
            self.ran[id(module)] = known
        if kind(module):
            mode = "train" if module.training else "eval"
            outer = unwrapped(self.outer())
            if mode == "eval" and getattr(outer, "training", False):
                mode = "fixed"  # only this layer is in evaluation mode
            mode += "" if torch.is_grad_enabled() else " without gradients"
            known.modes.setdefault(mode, set()).add(recorder.step)

    def after(self, module, inputs, outputs) -> None:
        """In the first steps, record whether a module's results need a gradient."""
        if recorder.step > 1 or not runs_normally() or id(module) not in self.ran:
            return
        while self.running and self.running.pop()() is not module:
            pass  # a module whose forward() has failed
        for one in (tensors := leaves(outputs)):
            for owner, reference in self.results.get(id(one), ()):
                if owner != id(module) and reference() is one:
                    self.ran[owner].returned = True
            self.results.setdefault(id(one), []).append((id(module), weakref.ref(one)))
        if self.outer() is module:
            self.results.clear()
        needed = [one.requires_grad for one in tensors if one.is_floating_point()]
        self.ran[id(module)].cut = bool(needed) and not any(needed)

    def after_step(self, optimizer, weights) -> None:
        if recorder.step:
            self.other.remove()
        if recorder.step + 1 >= STEPS:
            self.hook.remove()

    def weights(self) -> list[str]:
        """Return names of the weights of the innermost module that runs, if any."""
        inner = self.running[-1]() if self.running else None
        own = inner.parameters() if inner is not None else ()
        return [Moments.here.name(one) for one in own]

    def loose(self, known: set[int]) -> list[tuple]:
        """Return (name, weight, Ran) for weights of modules outside all networks."""
        modules = [(ran.module(), ran) for ran in [*self.ran.values()]]
        return [
            (f"{name} of {type(module).__name__}", weight, ran)
            for module, ran in modules
            if module is not None
            for name, weight in module.named_parameters(recurse=False)
            if id(weight) not in known
        ]


def networks() -> list[dict]:
    """Return {name: module} for each outermost network."""
    return [dict(one.named_modules()) for one in [*Moments.here.networks]]
