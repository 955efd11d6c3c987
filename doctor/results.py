"""Recompute validation results in the job's processes, and record printed lines."""

import re
import sys
import time
from array import array
from itertools import groupby, product
from math import inf

from .event import Event, Sends
from .loaders import Loaders, leaves
from .moments import Moments
from .numbers import numbers, others
from .objects import trains
from .record import place, recorder, runs_normally, torch, wrap
from .sample import MOST, digest, rows_of
from .watcher import Watcher

LOSSES = """cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss
    binary_cross_entropy binary_cross_entropy_with_logits""".split()
POINTS = "send", "recv", "isend", "irecv", "batch_isend_irecv"  # they join two ranks
EXCHANGES = "multiprocessing.managers", "mpi4py", "ray"  # doctor does not see theirs
LARGE, LABELS = 2**20, 20_000  # limits: size of an output or a loss; compared labels
OTHER = re.compile(  # results that doctor does not recompute
    r"\b(\w*iou|dice|f1|(?:\w+_)?(?:auc|auroc|ap)|\w?map|bleu|rouge|recall|rewards?|returns?|scores?|"
    r"mae|rmse|r2|psnr|ssim|fid|auprc|bpd|bpc|mrr|(?:ndcg|hits?|recall|r|p|map)@\d+)"
    r"(?![a-z])[^\d\n]{1,9}\d+\.\d",
    re.I,
)


class Printed(Event, limit=2000):
    """The script has printed a line with a number that may be a result."""

    text: str
    place: str
    exchanged: float = 0.0  # when the process last began to exchange data with others


class Measured(Event, limit=5000):
    """The sums that doctor computed from the outputs of one batch."""

    # hits, top (see places()), loss, root (of backward()), pairs (`values` are compared
    # predictions, `weights` their labels), or seen (`guesses` are hashes of inputs)
    what: str
    source: int  # the network, or the line that calls the loss
    loader: int | None
    epoch: int | None
    number: int | None  # the batch's number
    trains: bool  # gradients were enabled
    after: int  # steps completed by then; the event may be written later
    at: float  # time of the measurement
    values: array  # sums for each sample or for the batch
    weights: array  # number of targets in each sum
    guesses: array | None = None  # predicted classes, one for each sample
    training: bool = False  # a trained network has layers that are in training mode


class Scored(Event, limit=2000):
    """The script calls a metric of scikit-learn with labels and predictions."""

    name: str
    place: str
    value: float
    count: int  # number of samples
    truth: int  # a hash of the labels, the same for any order
    passes: int  # number of calls of networks that have ended


class Results(Watcher):
    """Records printed results, and recomputes them with few waits for a GPU."""

    def __init__(self):
        self.line, self.batch, self.sources = "", None, {}
        self.waiting = []  # measured tensors to read later
        self.inside = []  # losses that a network computes itself
        self.guesses, self.tries = [], 0  # predicted classes that have no labels yet
        self.outputs, self.learns = 0, False  # number of outputs; the last has a graph
        self.left = 100 * LABELS  # number of labels that on_metric() may still read
        self.training = False  # see Measured
        self.best = None  # one of the guesses: the classes with the highest scores
        self.found = {}  # the last output whose predictions the script compared
        self.others = 0  # number of printed lines with other results

    def hooks(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            wrap(stream, "write", self.write)
        for name in LOSSES:
            wrap(torch.nn.functional, name, self.loss)
        wrap(torch, "eq", self.equal)
        wrap(torch.Tensor, "eq", self.equal)
        wrap(torch.Tensor, "__eq__", self.equal)
        dist = torch.distributed
        for name in POINTS:
            wrap(dist.distributed_c10d, name, self.send)
            # P2POp compares its argument with the inner module's function
            setattr(dist, name, getattr(dist.distributed_c10d, name))
        for name in ("get", "multi_get"):
            wrap(dist.Store, name, self.exchange)

    def horovod_hooks(self, hvd) -> None:
        for name in ("synchronize", "alltoall", "grouped_allreduce"):
            wrap(hvd, name, self.exchange)

    def send(self, call, *args, **kwargs):
        first = args[0] if args else kwargs.get("tensor", kwargs.get("p2p_op_list"))
        first = first[0].tensor if isinstance(first, list) else first
        recorder.write(Sends(count=first.numel()))
        return self.exchange(call, *args, **kwargs)

    def exchange(self, call, *args, **kwargs):
        Moments.here.exchanged = time.time()
        return call(*args, **kwargs)

    def write(self, call, text):
        self.line = (self.line + text)[-4000:]
        if text.endswith("\n"):
            self.printed()
            self.line = ""
        self.line = self.line.rpartition("\r")[2]  # a progress bar starts again
        return call(text)

    def printed(self) -> None:
        """Record a line that may contain a result."""
        known = OTHER.search(self.line) or any(numbers(self.line))
        if not known:
            if self.others == 300 or not any(others(self.line)):
                return
            self.others += 1
        unseen = any(name in sys.modules for name in EXCHANGES)
        last = inf if unseen else Moments.here.exchanged
        recorder.write(Printed(text=self.line[-2000:], place=place(), exchanged=last))

    def keeps(self) -> bool:
        """Return whether doctor measures the current outputs."""
        now = recorder.timing or not torch.is_grad_enabled()
        return now and not recorder.full(Measured)

    def measure(self, what, source, values, weights, labels=None, **more) -> None:
        """Store tensors for read(); hits are elements of `values` that equal `labels`.

        If `more` contains `sure` (a tensor), only an output's first sure entry counts.
        """
        number = self.sources.setdefault(source, len(self.sources))
        batch = self.batch or {}
        fields = {key: batch.get(key) for key in ("loader", "epoch", "number")}
        fields |= {"what": what, "source": number, "after": recorder.step}
        trains = torch.is_grad_enabled()
        fields |= {"trains": trains, "at": time.time()}
        fields |= {"training": self.training and not trains, **more}
        self.waiting.append((fields, values, weights, labels))
        if len(self.waiting) > 64:
            self.read()

    def read(self) -> None:
        """Read the stored tensors, and write their events."""
        waiting, self.waiting = self.waiting, []
        for fields, values, weights, labels in waiting:
            if "sure" in fields:
                sure, output = fields.pop("sure"), fields.pop("output")
                if output == self.found.get(fields["what"]) or not sure:
                    continue
                self.found[fields["what"]] = output
            values = values.cpu()
            if labels is not None:
                labels = labels.cpu().reshape(-1, 1)
                if values.numel() == len(labels) and not fields["trains"]:
                    fields["guesses"] = array("q", values.reshape(-1).tolist())
                same = ~(values.reshape(len(labels), -1) != labels)
                values = places(same) if fields["what"] == "top" else same.any(1)
            values = array("d", values.double().reshape(-1).tolist())
            weights = [1.0] * len(values) if weights is None else weights.tolist()
            one = Measured(**fields, values=values, weights=array("d", weights))
            recorder.write(one)

    def on_input(self, network, inputs) -> None:
        """Record which samples the script validates without a DataLoader."""
        inputs = [one for one in inputs if one.dim() and len(one)]
        current = Loaders.here.current
        loads = current is not None and not current.ended
        if not inputs or loads or torch.is_grad_enabled() or recorder.full(Measured):
            return
        # An input of another length may be a mask, the same one in all batches
        rows = rows_of([one for one in inputs if len(one) == len(inputs[0])])
        self.batch, empty = None, torch.empty(0)
        self.measure("seen", ("network", id(network)), empty, empty, guesses=rows)

    def on_output(self, network, outputs, batch) -> None:
        self.batch, self.guesses, self.tries = batch, [], 0
        self.outputs, self.learns = self.outputs + 1, torch.is_grad_enabled()
        inside, self.inside = self.inside, []
        if not self.keeps():
            return
        known, bare = Moments.here.known, not torch.is_grad_enabled()
        self.training = bare and any(id(one) in known for one in network.parameters())
        self.training = self.training and trains(network)
        for one in inside:
            self.measure("loss", *one)
        self.source = "network", id(network)
        outputs = getattr(outputs, "logits", outputs)
        found = [one.detach() for one in leaves(outputs) if one.dim()]
        scores = [one for one in found if one.dim() == 2 and one.size(1) > 1]
        labels = batch and batch["labels"]
        if scores and labels is not None and len(labels) == len(scores[0]):
            one = scores[0]
            if int(labels.max()) < one.size(1):
                self.measure("hits", self.source, one.argmax(1), None, labels)
                if one.size(1) > 5:
                    self.measure("top", self.source, best_of(one), None, labels)
        elif found and found[0].numel() <= LARGE and found[0].is_floating_point():
            one = found[0]
            if one.numel() == len(one):
                self.guesses = [one.reshape(-1) > 0, one.reshape(-1) > 0.5]
            else:
                self.guesses = [one.argmax(axis) for axis in {1, one.dim() - 1}]
                if one.dim() == 2 and one.size(1) > 2:
                    self.best = best_of(one)
                    self.guesses.append(self.best)

    def equal(self, call, *args, **kwargs):
        result = call(*args, **kwargs)
        operands = [x for x in (*args, *kwargs.values()) if torch.is_tensor(x)]
        if isinstance(result, torch.Tensor) and result.dim() and len(operands) == 2:
            self.compared(result, operands)
        return result

    def compared(self, result, operands: list) -> None:
        """Measure hits if one operand is a tensor of predicted classes."""
        if 30 < result.numel() < LABELS and self.keeps():
            whole = not any(x.is_floating_point() or x.requires_grad for x in operands)
            if whole and operands[0].shape == operands[1].shape == result.shape[:1]:
                self.measure("pairs", "pairs", operands[0], operands[1])
        self.tries += 1
        guesses = self.guesses if self.tries < 7 else ()
        for guess, (one, other) in product(guesses, (operands, operands[::-1])):
            right, ranked = result, guess is self.best
            if ranked and one.dim() == 2 and result.shape == one.shape:
                if len(one) != len(guess):  # (k, N)
                    one, right = one.t(), result.t()
                guess = guess[:, : one.size(1)]
            fits = one.numel() == guess.numel() and one.device == guess.device
            if fits and len(right) == len(guess) and right.shape == one.shape:
                sure = ~(one.reshape(-1) != guess.reshape(-1)).any()  # == is wrapped
                more = {"sure": sure, "output": self.outputs}
                if ranked:
                    place = places(right.reshape(guess.shape))
                    self.measure("top", self.source, place, None, **more)
                    continue
                same = other.shape == one.shape
                valid = other != -100 if same else torch.ones_like(result)
                both = result & valid, valid
                counts = [x.reshape(len(guess), -1).sum(1) for x in both]
                self.measure("hits", self.source, *counts, **more)

    def on_metric(self, name: str, args: tuple, kwargs: dict, result) -> None:
        truth, guesses = both_of(args, kwargs)
        self.left -= len(truth) * (not self.learns)
        if self.learns or self.left < 0 or recorder.full(Scored):
            return
        classes = not (truth.is_floating_point() or guesses.is_floating_point())
        if len(truth) > 30 and classes and truth.shape == guesses.shape:
            self.measure("pairs", "pairs", guesses, truth)
        if isinstance(result, float) and kwargs.get("average") != "samples":
            kinds = [x[:MOST].tolist() for x in truth.unique(return_counts=True)]
            own = {"count": len(truth), "truth": digest(*kinds), "value": float(result)}
            recorder.write(Scored(name=name, place=place(), passes=self.outputs, **own))

    def loss(self, call, /, *args, **kwargs):
        result = call(*args, **kwargs)
        usual = isinstance(result, torch.Tensor) and kwargs.get("weight") is None
        if usual and self.keeps() and runs_normally():
            found = self.rows(call, result.detach(), args, kwargs)
            if found and Moments.here.depth:
                self.inside.append(found)
            elif found:
                self.measure("loss", *found)
        return result

    def rows(self, call, result, args: tuple, kwargs: dict):
        """Return a loss's line, its sums, and the number of targets in each sum."""
        target = kwargs["target"] if "target" in kwargs else args[1]
        ignored = kwargs.get("ignore_index", -100)
        whole = target.is_floating_point() or target.dim() == 0
        valid = torch.ones_like(target) if whole else target != ignored
        count = valid.double().sum()
        where = f"loss {place()}"
        if torch.is_grad_enabled():  # the batch's sum is enough
            summed = result.numel() > 1 or kwargs.get("reduction") == "sum"
            total = result.double().sum() * (1 if summed else count)
            return where, total[None], count[None]
        if target.numel() > LARGE or not target.dim():
            return None
        each = call(*args, **{**kwargs, "reduction": "none"}).detach().double()
        size = len(each)
        if self.batch and self.batch["indices"] and not Moments.here.depth:
            own = len(self.batch["indices"])  # sum tokens per sample
            size = own if size % own == 0 else size
        sums, counts = each.reshape(size, -1).sum(1), valid.double()
        if whole and target.numel() != each.numel():
            return where, sums, torch.ones_like(sums)  # class probabilities
        return where, sums, counts.reshape(size, -1).sum(1)

    def on_backward(self, root) -> None:
        if isinstance(root, torch.Tensor) and root.numel() == 1 and self.keeps():
            one = root.detach().double().reshape(1)
            self.measure("root", "root", one, torch.ones(1))

    def on_exit(self) -> None:
        self.printed()
        self.read()


def both_of(args: tuple, kwargs: dict) -> tuple:
    """Return the labels and predictions that a metric of scikit-learn gets."""
    named = sorted((x for x in kwargs if x[:2] == "y_"), reverse=True)
    pair = [*args, *(kwargs[x] for x in named)][:2]  # y_true is the last name
    truth, guesses = (torch.from_numpy(sys.modules["numpy"].array(x)) for x in pair)
    return truth, guesses


def best_of(scores):
    """Return the classes with the highest scores, best first: (N, at most 10)."""
    most = 10 if scores.element_size() > 2 else 5  # ties: topk(10) and topk(5) differ
    return scores.topk(min(most, scores.size(1))).indices


def places(same):
    """Return each row's first true column, or minus the number of columns if none."""
    return torch.where(same.any(1), same.int().argmax(1), -same.size(1))


def repeated(job) -> dict[tuple[int, int], list[float]]:
    """Return {(rank, step): the times at which passes over the same inputs began}."""
    found = {}  # nothing else separates passes with old and with restored weights
    for process in job.processes:
        seen = [one for one in process.of(Measured) if one.what == "seen"]
        for step, group in groupby(seen, lambda one: one.after):
            rows = [*group]
            inputs = [one.guesses for one in rows]
            count = inputs.count(inputs[0])
            size = len(rows) // count
            size = size if inputs == inputs[:size] * count else len(rows)
            begun = [one.at for one in rows[::size]]
            found.setdefault(step, {})[process.rank, step] = begun
    same = [one for one in found.values() if len({*map(len, one.values())}) == 1]
    return {key: begun for one in same for key, begun in one.items()}
