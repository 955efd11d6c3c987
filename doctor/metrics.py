"""Record the results of scikit-learn's metrics, which doctor/hook wraps."""

import sys

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
        if len(pair[0]) > LARGE:
            return
        array = sys.modules["numpy"].array
        truth, guesses = (torch.from_numpy(array(x)) for x in pair)
        classes = not (truth.is_floating_point() or guesses.is_floating_point())
        if len(truth) > 30 and classes and truth.shape == guesses.shape:
            Results.here.measure("pairs", "pairs", guesses, truth)
        if isinstance(result, float) and kwargs.get("average") != "samples":
            kinds = [x[:MOST].tolist() for x in truth.unique(return_counts=True)]
            own = {"count": len(truth), "truth": digest(*kinds), "value": float(result)}
            outputs = Results.here.outputs
            recorder.write(Scored(name=name, place=place(), passes=outputs, **own))
