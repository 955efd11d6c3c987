"""Define the moments of a job that a law can watch."""

import contextlib
import functools
import inspect
import os

watchers: list["Watcher"] = []


class Watcher:
    """A law's recorder: it wraps functions in hooks(), and overrides moments (on_...).

    Defining a subclass creates its only instance, `here`, whose __init__() runs
    again in each forked process. moments.py calls the moments; their errors do not
    reach the job. `weights` lists an optimizer's weights in order, without shards.
    """

    def __init_subclass__(cls):
        unknown = [x for x in vars(cls) if x[:3] == "on_" and not hasattr(Watcher, x)]
        if unknown:
            raise TypeError(f"{cls.__name__}: there is no moment {unknown[0]}")
        cls.here = cls()
        watchers.append(cls.here)
        os.register_at_fork(after_in_child=cls.here.renew)

    def renew(self) -> None:
        """Begin again in a forked process, which must not free a CUDA tensor."""
        kept = vars(self).copy()
        self.__init__()
        self.kept = kept

    def hooks(self) -> None:
        """Wrap functions, right after PyTorch has been imported."""

    def horovod_hooks(self, hvd) -> None:
        """Wrap functions, right after horovod.torch has been imported."""

    def checkpoint_hooks(self, dcp) -> None:
        """Wrap functions, right after torch.distributed.checkpoint was imported."""

    def on_input(self, network, inputs: list) -> None:
        """The script calls the outermost network; `inputs` are its tensor arguments."""

    def on_output(self, network, outputs, batch: "dict | None") -> None:
        """The outermost network has returned; `batch` describes its batch."""

    def on_backward(self, root) -> None:
        """A backward pass begins at `root` (one or several tensors)."""

    def after_backward(self) -> None:
        """The backward pass has ended."""

    def on_gradient(self, weight, gradient) -> None:
        """Autograd (on GPUs, in its threads) will add a gradient to weight.grad."""

    def on_clear(self, weights: list) -> None:
        """zero_grad() has cleared the gradients of these weights."""

    def on_step(self, optimizer, weights: list, gradients: list) -> None:
        """The optimizer is about to step.

        `gradients` are a few numbers of each (for None: []); in timed steps, it is [].
        """

    def on_step_by_hand(self, weights: list, before: list, meets: int) -> None:
        """A script without an optimizer has changed the weights.

        Before the last backward pass, they had the numbers `before` (a few of each),
        and the script had called `meets` collectives.
        """

    def after_step(self, optimizer, weights: list) -> None:
        """The optimizer has taken a step; recorder.step still has the old number."""

    def on_epoch(self, own, loader) -> None:
        """A pass over a DataLoader begins; `own` is its Pass (see loaders.py)."""

    def on_batch(self, own, batch: dict, seconds: float) -> None:
        """A DataLoader has returned a batch, which took `seconds`."""

    def on_collective(self, name: str, args: tuple, kwargs: dict, place: str):
        """The script (or a library) calls a collective."""

    def after_collective(self, name: str, tensors: list, place: str, seconds: float):
        """The collective has returned."""

    def on_metric(self, name: str, args: tuple, kwargs: dict, result):
        """One of scikit-learn's metrics has returned a result."""

    def on_summary(self) -> None:
        """The process ends, or has taken one of the steps in WRITES (laws/alive.py)."""

    def on_end(self) -> None:
        """The process leaves its group or ends; its networks still exist."""

    def on_exit(self) -> None:
        """The process ends."""


def tell(moment: str, *args) -> None:
    """Call a moment of all watchers; their errors do not reach the job."""
    for watcher in watchers:
        if moment in type(watcher).__dict__:
            with contextlib.suppress(Exception):
                getattr(watcher, moment)(*args)


def watch(metrics) -> None:
    """Let watchers see the results of scikit-learn's metrics."""

    def told(name, call):
        @functools.wraps(call)
        def wrapped(*args, **kwargs):
            result = call(*args, **kwargs)
            tell("on_metric", name, args, kwargs, result)
            return result

        wrapped.__module__ = metrics.__name__  # where pickle finds it
        return wrapped

    for name, call in inspect.getmembers(metrics, inspect.isfunction):
        if [*inspect.signature(call).parameters][:1] == ["y_true"]:
            setattr(metrics, name, told(name, call))
