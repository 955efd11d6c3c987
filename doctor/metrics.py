"""Record the results of scikit-learn's metrics, which doctor/hook wraps."""

from .event import Event
from .record import place, recorder, torch
from .results import Results
from .sample import MOST, digest
from .watcher import Watcher

LARGE = 20_000  # largest number of labels in one call


class Scored(Event, limit=2000):
    """The script calls a metric of scikit-learn with labels and predictions."""

    name: str
    place: str
    value: float
    count: int  # number of samples
    truth: int  # a hash of the labels, the same for any order
    passes: int  # number of calls of networks that have ended


class Metrics(Watcher):
    """Records results of metrics, and the predictions and labels behind them."""

    def on_metric(self, name: str, args: tuple, kwargs: dict, result) -> None:
        named = sorted((x for x in kwargs if x[:2] == "y_"), reverse=True)
        pair = [*args, *(kwargs[x] for x in named)][:2]  # y_true is the last name
        truth, guesses = (torch.as_tensor(x).detach().clone() for x in pair)
        if truth.numel() > LARGE or not truth.dim():
            return
        classes = not (truth.is_floating_point() or guesses.is_floating_point())
        if classes and truth.shape == guesses.shape == truth.shape[:1]:
            Results.here.measure("pairs", "pairs", guesses, truth)
        if kwargs.get("average") != "samples" and isinstance(result, float):
            kinds = [x[:MOST].tolist() for x in truth.unique(return_counts=True)]
            one = Scored(
                name=name,
                place=place(),
                value=float(result),
                count=len(truth),
                truth=digest(*kinds),
                passes=Results.here.outputs,
            )
            recorder.write(one)
