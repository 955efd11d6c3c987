"""Law 2: ranks are exchangeable. Compares statistics of their batches and losses."""

from array import array
from collections import Counter, deque
from functools import partial
from math import comb, isfinite
from statistics import fmean, pstdev

from ..event import Event
from ..law import RISK, Breach, Law, check, need
from ..moments import Moments
from ..neighbours import Input, Targets
from ..reads import feeds
from ..record import STEPS, place, recorder, torch, wrap
from ..results import LOSSES
from ..results import Measured as Evaluated
from ..sample import GOLDEN, numbers, picked
from ..watcher import Watcher
from .replicas import other_network_differs
from .samples import datasets_differ, undivided, where

LAW = Law(2, "ranks", "Ranks are exchangeable")
CAUSES = datasets_differ, other_network_differs
FEWEST, BATCHES = 20, 8  # minimum numbers of passes and of distinct batches
WEIGHTED = "loss of", "gradient norm of"
MORE = "kl_div ctc_loss triplet_margin_loss gaussian_nll_loss poisson_nll_loss".split()


class Measured(Event, limit=1000):
    """Named statistics of a batch or of a backward pass."""

    loader: int | None  # None for a backward pass
    values: dict[str, float]


class Facts(Event, limit=1000):
    """Named settings of a training pass."""

    values: dict[str, str]
    place: str


class Ranks(Watcher):
    """Records statistics of batches, inputs, targets, losses and gradients."""

    def __init__(self):
        self.gradients, self.targets, self.facts, self.moves = {}, [], {}, False
        self.pending = deque(maxlen=128)

    def hooks(self) -> None:
        for name in LOSSES + MORE:
            wrap(torch.nn.functional, name, partial(self.loss, name))

    def keep(self, loader: int | None, values: dict) -> None:
        """Store one-element tensors, which on_step() reads."""
        if values:
            self.pending.append((loader, values))

    def loss(self, name: str, call, /, *args, **kwargs):
        if recorder.watching and torch.is_grad_enabled():
            self.learn(f"{name}() in {place()}", args, kwargs)
        return call(*args, **kwargs)

    def learn(self, where: str, args: tuple, kwargs: dict) -> None:
        """Store the arguments of a loss function."""
        for key, value in kwargs.items():
            if isinstance(value, (int, float, str, bool)):
                self.facts[f"{key} of {where}"] = str(value)
            elif key in ("weight", "pos_weight") and value is not None:
                rounded = [float(f"{x:.4g}") for x in numbers([value], 6)[0]]
                self.facts[f"{key} of {where}"] = str(rounded)
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        if target is not None and target.dim():
            values = measured(f"targets of {where}", target, 2**16)
            if not target.is_floating_point():
                valid = target != kwargs.get("ignore_index", -100)
                share = valid.sum().double() / valid.numel()
                values[f"share of valid targets of {where}"] = share
            self.keep(None, values)
            if target.dim() == 1 and len(self.targets) < 16:
                self.targets.append((len(target), target.detach()[:64]))

    def on_batch(self, own, batch, seconds) -> None:
        values = {}
        for number, one in enumerate(batch["tensors"] if recorder.watching else (), 1):
            values |= measured(f"tensor {number} of the batch", one)
        self.keep(own.loader, values)

    def on_input(self, network, inputs) -> None:
        if recorder.full(Facts) or not recorder.watching or not torch.is_grad_enabled():
            return
        values = {}
        for number, one in enumerate(inputs[:2], 1):
            moves = one.is_leaf and one.requires_grad  # such as an attack's image
            if not (moves and self.moves):
                values |= measured(f"input {number} of the network", one)
            self.moves |= moves
        self.keep(None, values)
        modes = [one.training for one in network.modules()]
        trainable = sum(one.requires_grad for one in network.parameters())
        facts = {
            "input types": ", ".join(sorted({str(x.dtype)[6:] for x in inputs})),
            "modules in eval mode": f"{modes.count(False)} of {len(modes)}",
            "trainable weights": str(trainable),
        }
        recorder.write(Facts(values=facts, place=Moments.here.where))

    def on_gradient(self, weight, gradient) -> None:
        if len(self.gradients) < 8:
            self.gradients.setdefault(id(weight), picked(gradient, 16))

    def on_backward(self, root) -> None:
        self.gradients = {}
        if recorder.watching and getattr(root, "numel", int)() == 1:
            self.keep(None, {f"loss of {Moments.here.where}": root.detach()})

    def after_backward(self) -> None:
        if self.gradients and recorder.watching:
            norm = sum(one.square().sum() for one in self.gradients.values()).sqrt()
            first = Moments.here.names.get(next(iter(self.gradients)), "a weight")
            name = f"gradient norm of {first} and others in {Moments.here.where}"
            self.keep(None, {name: norm})

    def on_step(self, optimizer, weights, values) -> None:
        pending, targets, facts = self.pending, self.targets, self.facts
        self.__init__()
        if facts:
            where = [*facts][0].rpartition(" in ")[2]
            recorder.write(Facts(values=facts, place=where))
        kept = [x for _, one in pending for x in one.values()]
        rows = iter(numbers(kept + [one for _, one in targets], 64))
        for loader, one in pending:
            found = {name: next(rows)[0] for name in one}
            recorder.write(Measured(loader=loader, values=found))
        for count, _ in targets:
            recorder.write(Targets(count=count, values=array("d", next(rows))))


def measured(name: str, tensor, most: int = 2048) -> dict:
    """Return statistics of a tensor (N, ...) as one-element tensors; {} for ids."""
    if not tensor.dim() or not tensor.numel() or tensor.is_complex():
        return {}
    few, whole = picked(tensor, most), not tensor.is_floating_point()
    if whole and tensor.dim() == 1 and len(few) > 7 and tensor.is_cpu:
        if len(few.unique()) == len(few):
            return {}
    found = {f"mean of {name}": few.mean()}
    found[f"spread of {name}"] = few.std(correction=0)
    if whole:  # the mean of token ids means little
        found[f"codes of {name}"] = (few * GOLDEN % 1).mean()
        found[f"zeros of {name}"] = (few == 0).double().mean()
    if tensor.dim() > 1:  # such as padded sequences
        found[f"length of {name}"] = few.new_full((), tensor[0].numel())
    return found


def series(job) -> dict[str, list[list[float]]]:
    """Return {statistic: its values in all passes, as one list per rank}."""
    found: dict[str, list[dict]] = {}
    for number, process in enumerate(job.processes):
        order = Counter()
        for one in process.of(Measured):
            if one.loader not in (None, process.training):
                continue
            step = one.step if one.loader is None else None
            for name, value in one.values.items():
                order[step, name] += 1
                rows = found.setdefault(name, [{} for _ in job.processes])
                if isfinite(value):
                    rows[number][step, order[step, name]] = value
    every = {name: set.intersection(*map(set, rows)) for name, rows in found.items()}
    return {
        name: [[row[key] for key in row if key in every[name]] for row in rows]
        for name, rows in found.items()
    }


def independent(job) -> float:
    """Return how many batches each rank's distinct samples fill, at least."""
    counts = []
    for process in job.processes:
        rows = [x.indices or x.rows for x in process.trained if x.step < STEPS]
        rows = rows or [x.rows for x in process.of(Input)]
        rows = [one for one in rows if one]
        distinct = len({x for one in rows for x in one})
        counts.append(distinct * len(rows) / max(1, sum(map(len, rows))))
    return min(counts)


def unequal_shares(job) -> bool:
    """Return whether some ranks have more than 5% more samples than others."""
    rows = [[len(one.rows) for one in row] for row in job.rows(Input)]
    totals = [sum(own) for own in zip(*rows, strict=True)]
    return max(totals, default=0) > 1.05 * min(totals, default=0)


def acts(job) -> bool:
    """Return whether most training inputs were evaluated, without gradients, before."""
    shares = []
    for process in job.processes:
        looks = [one for one in process.of(Evaluated) if one.what == "seen"]
        seen = {x for one in looks for x in one.guesses}
        rows = [x for one in process.of(Input) for x in one.rows]
        shares.append(sum(x in seen for x in rows) / max(1, len(rows)))
    return min(shares) > 0.5


def odds(above: int, count: int) -> float:
    """Return the probability that `count` coin tosses split at least this unevenly."""
    most = max(above, count - above)
    return min(1, 2 * sum(comb(count, k) for k in range(most, count + 1)) / 2**count)


def tells(name: str, found: dict[str, list[list[float]]]) -> bool:
    """Return whether a statistic can show that a rank differs.

    It can if it changes between passes, or if it is a batch's and constant per rank.
    Targets may be positions (arange(N) + rank * N), unless each rank's are all equal.
    """
    rows = found[name]
    still = [pstdev(x) <= 1e-9 for x in rows]
    if not any(still):
        return True
    means = [fmean(x) for x in rows]
    gap = max(means) - min(means)
    spread = found.get(name.replace("mean of targets", "spread of targets"), rows)
    equal = spread is not rows and not any(map(any, spread))
    label = name.endswith("of the batch") and not name.startswith("length") or equal
    return label and gap >= 0.05 * max(map(abs, means)) > 0


def apart(values: list[float], others: list[float], batches: float) -> tuple:
    """Return (difference in standard errors, its share of the larger mean, count).

    The rank is higher in `count` passes. Standard errors count each sample once,
    because a rank may see a few samples repeatedly.
    """
    gaps = [a - b for a, b in zip(values, others, strict=True)]
    moves = [(a - b) ** 2 for a, b in zip(gaps, gaps[1:], strict=False)]
    error = (fmean(moves) / 2 / min(batches, len(gaps))) ** 0.5
    means = abs(fmean(values)), abs(fmean(others))
    share = abs(fmean(gaps)) / (max(means) or 1)
    return abs(fmean(gaps)) / (error or 1e-12), share, sum(one > 0 for one in gaps)


@check(LAW, RISK, general=True, needs=[Measured], causes=CAUSES)
def ranks_differ(job):
    """One rank's samples, losses or gradients differ significantly from the others'.

    Look for what differs there: files, preprocessing, hash() of strings, labels, GPU.
    Not a mistake if: the ranks have different samples on purpose, such as languages.
    """
    undivided(job)
    lists, batches = series(job), independent(job)
    every = {k: x for k, x in lists.items() if len(x[0]) >= FEWEST and tells(k, lists)}
    few = f"each rank needs {FEWEST} passes and {BATCHES} batches of distinct samples"
    need(every and batches >= BATCHES, few)
    if unequal_shares(job):
        every = {k: x for k, x in every.items() if not k.startswith(WEIGHTED)}
        need(every, "the ranks have unequal numbers of samples")
    ranks = range(1 if len(job.processes) == 2 else 0, len(job.processes))
    found, tested, tests = [], 0, len(every) * len(ranks)
    for name, rows in every.items():
        for rank in ranks:
            others = [x for n, x in enumerate(rows) if n != rank]
            others = [fmean(values) for values in zip(*others, strict=True)]
            error, share, above = apart(rows[rank], others, batches)
            tested = max(tested, error)
            # Sorted samples that are dealt out in turn have slightly unequal lengths
            least = 0.2 if name.startswith("length of") else 0.05
            if error > 6 and share >= least:
                if odds(above, len(others)) * tests < 1e-6:
                    found.append((name, error, rank, rows[rank], others, above))
    need(tested >= 1e-3, "the ranks' numbers are the same in all passes")
    text = "the network has evaluated most training inputs before, as in reinforcement "
    need(not (found and acts(job)), f"{text}learning: each rank may go its own way")
    if not found:
        need(tested <= 6, f"one rank differs by {tested:.1f} standard errors")
        passes = max(len(rows[0]) for rows in every.values())
        text = f"{len(every)} statistics of batches, losses and gradients in {passes} "
        yield f"{text}passes: no rank stands out (at most {tested:.1f} standard errors)"
        return
    same = [one for one in found if one[0] == found[0][0]]
    name, _, rank, values, others, above = max(same)
    count, side = len(values), "higher" if 2 * above > len(values) else "lower"
    what = f"{name}: rank {rank} is {side} in {max(above, count - above)} of {count} "
    what += f"passes ({fmean(values):.4g} against {fmean(others):.4g})"
    own, mend = feeds(job), ""
    if own and all(one.divides and not one.shuffles for one in own):
        mend = "Give DistributedSampler shuffle=True: every n-th sample may be alike."
    yield Breach(what, where(job), mend=mend)
