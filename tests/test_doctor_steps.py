"""doctor calls a law broken, held or not judged by events like those that a job records."""

import math
import re
import weakref
from dataclasses import fields, replace
from operator import add
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy
import pytest
import torch
from conftest import ROOT
from torch.nn.functional import cross_entropy

import doctor.laws  # noqa: F401  its checks
from doctor.event import Exit, Failed, Rank, Sends, Start
from doctor.generators import Seed
from doctor.job import Job, Process
from doctor.law import CHECKS, examine
from doctor.laws.alive import LAW as LEARNS
from doctor.laws.alive import Alive, Weight
from doctor.laws.carried import Kept
from doctor.laws.checkpoints import Checkpoints, Cut, Saved, cut
from doctor.laws.files import Opened
from doctor.laws.layers import Layers
from doctor.laws.losses import Losses, outer, terms
from doctor.laws.meeting import Call, Meeting
from doctor.laws.modes import Modes, Trained, Validation
from doctor.laws.passes import Passes, Update
from doctor.laws.resume import Loaded, Restored
from doctor.laws.schedule import Schedule, Schedules, length
from doctor.laws.settings import Fitted, fitted
from doctor.laws.states import Replicas, State, dealt, summed
from doctor.laws.time import Spans
from doctor.loaders import EpochEnd, Loaders, Pass
from doctor.moments import Moments, Step, Wraps
from doctor.neighbours import Input
from doctor.objects import Objects, is_users
from doctor.page import explanation, page
from doctor.record import quiet, recorder, wrap

SAMPLES = [[1.0, -2, 3, 0.5, 7, 2, -1, 4], [2.0, 1, -1, 4, 0.3, -6, 5, 2]]  # gradients
SAMPLES = torch.tensor(SAMPLES, dtype=torch.float64)
MEAN = SAMPLES.mean(0)
EMPTY = {"str": "", "int": 0, "float": 0.0, "bool": False}


def event(kind, step=0, /, **values):
    """Return an event with these fields; its other fields are empty."""
    given = {}
    for one in fields(kind):
        name = str(getattr(one.type, "__name__", one.type)).split("[")[0]
        given[one.name] = {"list": [], "dict": {}}.get(name, EMPTY.get(name))
    return kind(**given | {"step": step, "time": float(step)} | values)


def made(*ranks, steps=4, **step):
    """Return a job with these ranks, each with its own events and some steps."""
    processes = []
    for rank, own in enumerate(ranks):
        start = event(Start, parent="a-1", host="a", environment={})
        step |= {"rates": [0.1], "watched": True}
        taken = [event(Step, n, **step) for n in range(steps)]
        joined = Rank(own=rank, world_size=len(ranks))
        events = start, joined, *own, *taken, Exit(passes=1)
        events = [replace(one, rank=rank) for one in events]
        processes.append(Process(rank, len(ranks), events))
    return Job(processes, status=0)


def judged(*ranks, **more):
    """Return the report on a job of these ranks."""
    report = examine(made(*ranks, **more))
    reasons = [x for one in report.verdicts for x in one.not_judged.values()]
    assert not [x for x in reasons if "own error" in x]
    return report


def named(report):
    """Return the names and levels of the findings."""
    return {one.check: one.level for one in report.findings}


def law(report, number):
    """Return a law's state: held, broken or not judged."""
    return report.verdicts[number - 1].state


def one_pass(terms=((1.0, "mean", 8, 1, 1),), **values):
    """Return a backward pass of a loss with these terms."""
    found = {"place": "a.py:9", "loader": 0, "epoch": 0, "forwards": [True]}
    found |= {"flag": True, "scale": None, "sums": []}
    return found | {"terms": terms} | values


def steps(used, passes=({},), own=({}, {}), **values):
    """Return the updates of two ranks in four steps, whose `passes` and ranks have `own` fields.

    In pass p of step n, the gradient is the rank's gradient times n + 1, rotated by p places.
    `used` is the gradient of a step, or a function of rank and n that returns it.
    """
    loss = values.pop("terms", ((1.0 / len(passes), "mean", 8, 1, 1),))
    ranks = []
    for rank, sample in enumerate(SAMPLES):
        found = []
        for n in range(4):
            turned = [(n + 1) * sample.roll(-p) for p in range(len(passes))]
            step = (n + 1) * (used(rank, n) if callable(used) else used)
            row = {"local": [x.tolist() for x in turned], "used": step.tolist()}
            row["passes"] = [one_pass(loss) | one | own[rank] for one in passes]
            row = {"names": ["net.weight"], "each": 8} | row | values
            found.append(event(Update, n, **row))
        ranks.append(found)
    return ranks


def states(*values, **more):
    """Return a rank's states, one in each step, with these values."""
    given = {"moment": "step", "what": "weights", "names": ["net.weight"]}
    given |= {"each": len(values[0])} | more
    return [event(State, n, values=x, **given) for n, x in enumerate(values)]


def written(monkeypatch):
    """Return a list that gets all events that are written from now on, in step 0."""
    found = []
    monkeypatch.setattr(recorder, "write", found.append)
    monkeypatch.setattr(recorder, "step", 0)
    return found


def known(monkeypatch, *weights):
    """Make the watchers know these weights of optimizers."""
    numbers = {id(one): (n, weakref.ref(one)) for n, one in enumerate(weights)}
    monkeypatch.setattr(Moments.here, "known", numbers)
    return numbers


def divided(*counts, weighted=False):
    """Return the ranks' losses, which are means over their counts of samples or weights."""
    return [{"terms": [(1.0, "mean", x, 1, 1, weighted)]} for x in counts]


def several(*factors):
    """Return the ranks' losses, which are three sums over their own numbers of targets."""
    rows, own = zip(factors, [(8, 4, 3), (8, 6, 1)], strict=True), [16.0, 10.0, 4.0]
    rows = [[(x, "sum", y) for x, y in zip(*row, strict=True)] for row in rows]
    return [{"terms": row, "sums": own} for row in rows]


BOTH, PAIR = MEAN + MEAN.roll(-1), ({}, {})  # two passes
LEFT = steps(BOTH, PAIR)
for own, more in zip(LEFT, steps(3 * MEAN, [*PAIR, {"epoch": 1}]), strict=True):
    own[2] = more[2]
SHARE = steps(MEAN)
for one in SHARE[0] + SHARE[1]:  # 5 times a term's mean
    one.passes[0]["terms"] = [(5.0 / (one.step + 2), "sum", one.step + 2, 1, 1)]
DOUBLED = steps(torch.cat([MEAN[:4], 2 * MEAN[4:]]), each=4, names=["a", "b"])
ALONE = steps(MEAN, each=1, names=[*"abcdefgh"])
for one in ALONE[0] + ALONE[1]:
    one.used[1] *= 0.3 + 0.1 * one.step
CLIPPED = steps(lambda _, n: (0.1 + 0.1 * n) * SAMPLES[0] + 0.45 * SAMPLES[1])
ONE, HALF, THIRD = (((x, "mean", 8, 1, 1),) for x in (1.0, 1 / 2, 1 / 3))
TWICE, THIRDS = MEAN + BOTH, (2 * SAMPLES[0] + SAMPLES[1]) / 3
TOTAL = {"terms": [(x / 17, "sum", 8, 1, 1) for x in (1.0, 2.0)], "sums": [3.0, 34.0]}
COUNTED = {"terms": [(1 / 16, "sum", 8, 1, 1)], "sums": [16.0]}
LOSSES = {"place": "a.py:0"}, {"place": "a.py:1"}
MERGED = steps(MEAN, terms=((1 / 8, "sum", 8),))
for one in MERGED[1]:
    one.passes *= 2  # one vector holds the gradients of both
COUNTS = [[(1.0 / x, "sum", 8, 1, 1), (2.0 / x, "sum", 8, 4, 1)] for x in (20, 14)]
COUNTS = [{"terms": x} for x in COUNTS]  # two terms, divided by the same number
OWN, JOINT = several([1 / 8, 1 / 4, 1 / 3], [1 / 8, 1 / 6, 1]), [1 / 8, 1 / 5, 1 / 2]
HEAVY, EQUAL = (divided(x, 10.0, weighted=True) for x in (40.0, 12.0))
GATHERED = {"received": "a.py:8", "gathered": ("a.py:8", True)}
LOW = several(*[[x / 2 for x in JOINT]] * 2)
SINGLE = steps(MEAN, own=OWN)
for n, own in enumerate(SINGLE):  # a batch has as many samples
    own.append(event(Input, rows=[n, n + 10, n + 20]))
CLIP = {"before": [1.0], "scaled": False, "norm": False, "place": "a.py:9"}
OTHER_CLIP = CLIP | {"place": "a.py:10"}
NORM = CLIP | {"norm": True, "before": (4 * MEAN).tolist()}
GLOBAL = steps(2 * MEAN, each=4, names=["a", "b"])
for one in GLOBAL[0] + GLOBAL[1]:  # b's gradient is the same on all ranks
    one.local[0][4:] = one.used[4:] = [(one.step + 1) ** 2 * x for x in (1.0, 5, 2, 7)]
TWO = [one_pass([(1.0, "mean", x, 1, 1)], place=f"a.py:{x}") for x in (16, 4)]
APART = steps(MEAN.roll(-1), TWO, each=1, names=[*"abcdefgh"])
for one in APART[0] + APART[1]:  # the first loss reaches one of the weights
    one.used[0] += (one.step + 1) * float(MEAN[0])
    one.local[0][1:] = 7 * [0.0]
FROZEN, SHRUNK = (torch.cat([x * MEAN[:4], MEAN[4:]]) for x in (0, 0.3))
HALVES = {"each": 4, "names": ["a", "b"], "clips": [NORM]}
# name -> the check that finds the mistake, or the law's state; and the steps
GRADIENTS = {
    "a mean": ("held", steps(MEAN)),
    "two passes": ("held", steps(BOTH, PAIR)),
    "sums divided by the ranks": ("held", steps(2 * MEAN, terms=HALF)),
    "a penalty": ("not judged", steps(2 * MEAN, terms=[*HALF, (0.1, "sum", 9)])),
    "an unreadable loss": ("not judged", steps(MEAN, terms=[(1.0, "")])),
    "a loss divided by 3": ("not judged", steps(MEAN, terms=THIRD)),
    "a loss divided by the ranks": ("loss_scale", steps(MEAN, terms=HALF)),
    "a sum of gradients": ("summed", steps(2 * MEAN)),
    "rank 0's gradient": ("mean_gradient", steps(SAMPLES[0])),
    "a summed loss": ("summed_loss", steps(MEAN, terms=((1.0, "sum", 8, 20, 1),))),
    "a sum, times ranks": ("not judged", steps(MEAN, terms=[(2.0, "sum", 8, 20, 1)])),
    "a heavy mean over the rank's targets": ("not judged", SHARE),
    "a loss divided by all samples": ("summed_loss", steps(MEAN, [COUNTED])),
    "a sum in a bucket": ("mean_gradient", DOUBLED),
    "a weight that is clipped alone": ("not judged", ALONE),
    "passes that are summed again": ("mean_gradient", steps(TWICE, PAIR)),
    "two losses": ("held", steps(BOTH, LOSSES, terms=ONE)),
    "left-over passes": ("leaked_passes", LEFT),
    "cleared passes": ("not_cleared", steps(MEAN, lost=["a.py:9"])),
    "batches of other sizes": ("unequal_means", steps(MEAN, own=divided(8, 4))),
    "sums over own counts": ("unequal_means", steps(MEAN, own=COUNTS)),
    "sums over a joint count": ("held", steps(MEAN, [TOTAL])),
    "sums of unequally many passes": ("not judged", MERGED),
    "several own counts": ("unequal_means", steps(MEAN, own=OWN)),
    "several joint counts": ("held", steps(MEAN, own=several(JOINT, JOINT))),
    "joint counts, averaged again": ("summed_loss", steps(MEAN, own=LOW)),
    "one loss per sample": ("not judged", SINGLE),
    "sums of class weights": ("unequal_means", steps(MEAN, own=HEAVY)),
    "nearly equal weights": ("not judged", steps(MEAN, own=EQUAL)),
    "gradients that each rank clips": ("mean_gradient", CLIPPED),
    "a loss scale": ("not judged", steps(2**-16 * MEAN, terms=[(1.0, "")])),
    "weights for other sizes": ("held", steps(THIRDS, own=divided(8, 4))),
    "clips in each pass": ("clip_order", steps(BOTH, PAIR, clips=2 * [CLIP])),
    "a clip of each kind": ("not judged", steps(BOTH, PAIR, clips=[CLIP, OTHER_CLIP])),
    "a clip, and a weight that freezes": ("not judged", steps(FROZEN, **HALVES)),
    "a clip, and a weight that shrinks": ("clip_order", steps(SHRUNK, **HALVES)),
    "a gradient over all samples": ("not judged", GLOBAL),
    "losses of other weights": ("not judged", APART),
    "a gather": ("gathered_without_gradient", steps(MEAN, [GATHERED])),
    "tensors of other ranks": ("not judged", steps(MEAN, [{"received": "a.py:8"}])),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_weight_of_each_sample_in_a_step(name):
    wanted, events = GRADIENTS[name]
    report = judged(*events)
    if wanted in ("held", "not judged"):
        assert law(report, 5) == wanted and not report.findings, report
    else:
        assert wanted in named(report), report.findings
        assert law(report, 5) == "broken"


def test_a_law_is_broken_by_the_effect_of_another_one():
    """If nothing averages the gradients, the replicas drift apart, and two laws are broken."""
    ranks = steps(lambda rank, n: SAMPLES[rank])
    for own, used in zip(ranks, SAMPLES.tolist(), strict=True):
        own += states(*([n * used[0]] for n in range(4)))
        kept = ([n + used[0] * (n > 5)] for n in range(12))  # an effect's effect
        own += states(*kept, what="kept", names=["Codes.sum"])
    report = examine(job := made(*ranks))
    assert [*named(report)] == ["not_averaged"]
    words = " ".join(page(job, report).split())
    assert "it could be an effect of not_averaged 5 broken" in words
    assert [law(report, n) for n in (4, 5)] == ["broken", "broken"]


@pytest.mark.parametrize("k, ddp, at", [(3, 1, 2), (3, 5, 2), (4, 1, 2), (3, 1, 20)])
def test_copies_of_a_ddp_model_are_averaged(k, ddp, at):
    found = [event(Step, n, network=n // k) for n in range(15)]
    found += [event(Update, at, passes=[one_pass(forwards=[True])])]
    found = judged(found + [event(Wraps)] * ddp, [], steps=0)
    assert ("copies_averaged" in named(found)) == (k + ddp + at == 6)


def test_the_advice_on_ddp_and_on_a_prepared_scheduler():
    """One script sets DDP's flag only after forward(); accelerate steps a scheduler per process."""
    passes = {"forwards": [True]}, {"forwards": [False]}
    ranks = steps(lambda rank, n: SAMPLES[rank], passes)
    found = judged(*([event(Wraps), *own] for own in ranks)).findings
    mends = {one.check: one.mend for one in found}
    assert "require_backward_grad_sync before forward()" in mends["not_averaged"]
    given = {"names": ["net.weight", "head.weight"], "each": 4}
    ranks = steps(lambda rank, n: torch.cat([SAMPLES[rank][:4], MEAN[4:]]), **given)
    layout = event(Wraps, frozen=["net.weight"])
    (found,) = judged(*([layout, *own] for own in ranks)).findings
    assert found.check == "not_averaged" and "frozen when DDP was made" in found.what
    assert found.mend.startswith("Wrap the network in DDP again")
    for k, told in ((1, "but the ranks then change them"), (0, "nothing averages")):
        noisy = steps(lambda rank, n: (SAMPLES[rank], MEAN + rank / 9)[k], passes[:1])  # noqa: B023
        assert told in judged(*([event(Wraps), *x] for x in noisy)).findings[0].what
    plan = {"type": "LambdaLR", "planned": 4, "taken": 8}
    for planned, advice in ((4, "accelerator"), (8, "load_state_dict")):
        found = judged(*[[event(Schedule, 4, made=planned, **plan)]] * 2).findings
        assert [x.law for x in found] == [LEARNS] and advice in found[0].mend


def test_the_length_of_a_schedule():
    """A schedule ends where its decay first ends; with warm restarts, its length is unknown."""
    half = [(1 + math.cos(math.pi * n / 60)) / 2 for n in range(540)]
    again = [(1 + math.cos(math.pi * (n % 20) / 20)) / 2 for n in range(540)]
    rises = [min(1, (n + 1) / 6) * x for n, x in enumerate(half)]
    for rates, wanted in ((half, 60), (rises, 60), (again, None)):
        own = SimpleNamespace(lr_lambdas=[rates.__getitem__], last_epoch=60)
        assert length(own) == wanted


def weights(name, **values):
    """Return an optimizer's weight, which gets gradients, as both ranks see it."""
    alive = {"trainable": True, "optimizer": 0, "network": "Net", "training": True}
    alive |= {"steps": 4, "alive": 4, "reached": True, "first": 0, "moves": True}
    return [[event(Weight, 1, name=name, **alive | values)] for _ in range(2)]


def test_weights_that_never_live_are_named():
    head = weights("head.weight", first=1)
    report = judged(*head)
    assert law(report, 6) == "held" and not report.findings
    dead = {"alive": 0, "reached": False, "cut": True, "place": "a.py:7"}
    stage = weights("stage.weight", module="stage", **dead)
    found = judged(*map(add, stage, head)).findings
    assert [(x.check, x.place) for x in found] == [("dead_weights", "a.py:7")]
    assert found[0].what.startswith("1 of 2 trainable weights never get a gradient")
    assert "stage.weight" in found[0].what
    dead |= {"cut": False, "module": "tower", "first": 2}
    still = weights("stage.weight", moves=False)
    bias = weights("head.bias", alive=0)  # its gradient may cancel out
    doubts = (weights("tower.weight", **dead), head), (still, head), (bias, head)
    for one, other in doubts:
        assert law(judged(*map(add, one, other)), 6) == "not judged"
    still, names = weights("head.bias", moves=False), ["head.bias", "head.weight"]
    for size, state in ((1e-9, "held"), (0.5, "not judged")):  # as before batch norm
        own = {"names": names, "each": 1, "used": [size, 1.0]}
        ranks = [
            [*x, *y, event(Update, 1, **own)] for x, y in zip(still, head, strict=True)
        ]
        assert law(judged(*ranks), 6) == state
    cut = [event(Update, 1, passes=[one_pass(gathered=("a.py:8", False))])]
    ranks = [[*one, *other, *cut] for one, other in zip(*doubts[0], strict=True)]
    assert "dead_weights" in named(judged(*ranks))
    for rank, moves in ((0, True), (1, True), (1, False)):  # a stage, or an old weight
        parts = weights("stage.weight")
        parts[rank][0].optimizer, parts[rank][0].moves = None, moves
        assert law(judged(*map(add, parts, head)), 6) == ("held" if moves else "broken")
    flat = weights("flat", network="")  # it may contain the network's weights
    lost = weights("a.weight", optimizer=None, moves=False)
    found = [judged(*map(add, lost, flat))]
    found += [judged(*map(add, lost, map(add, flat, weights("b", optimizer=None))))]
    assert [[*named(one)] for one in found] == [["not_in_an_optimizer"], []]
    for moves in (False, True):  # another object updates the network
        lost = weights("weight of Linear", optimizer=None, moves=moves)
        found = named(judged(*map(add, lost, head)))
        assert ("not_in_an_optimizer" in found) != moves


@pytest.mark.parametrize("added", [0, 1])
def test_a_layer_that_is_added_late_is_told_at_the_end(added, monkeypatch):
    network, told, alive = torch.nn.Linear(2, 2), [], Alive()
    monkeypatch.setattr(Moments.here, "networks", {network: True})
    monkeypatch.setattr(recorder, "step", 59)  # the last one that is timed
    monkeypatch.setattr("doctor.laws.alive.tell", told.append)
    alive.steps.update({id(network.weight): 40, 1: 40} if not added else {1: 40})
    network.weight.grad = torch.ones(2, 2)
    alive.after_step(None, [])
    assert told == ["on_summary"] * added


@pytest.mark.parametrize("right", [True, False])
def test_the_modes_of_networks_and_passes(right, monkeypatch):
    """After the timed steps, no event tells which loader's batch a step used."""
    own = event(Validation, loader=1, training=True)
    found = judged([own, event(EpochEnd, loader=1, steps=3 * right)], [])
    assert named(found) == ({} if right else {"eval_mode": "RISK"})
    own.training = False
    for count, first in ((2, 1), (3, 1), (4, 2), (4, 3)):  # the first in eval mode
        later = [event(Trained, epoch=n, training=n < first) for n in range(count)]
        found = named(judged([own, *later[: right or count]], []))
        assert ("eval_mode" in found) == (not right and first < 3)
    outer = torch.nn.DataParallel(torch.nn.Dropout())
    net = outer.module.train(right)  # as in DDP, whose own flag this does not change
    Layers.here.on_input(outer, [])
    Layers.here.before(net, ())
    assert [*Layers.here.ran.pop(id(net)).modes] == ["train" if right else "eval"]
    found, now = written(monkeypatch), Pass(0, 1, steps=int(right))
    monkeypatch.setattr(Loaders.here, "current", now)
    monkeypatch.setattr(recorder, "step", 99)
    net.weight = torch.nn.Parameter(torch.ones(1))
    for own in ([torch.ones(1)], [net.weight]):
        watcher, optimizer = Modes(), torch.optim.SGD(own)
        watcher.stepped(optimizer)
        for _ in range(2):
            watcher.on_output(outer, None, {})
    assert [type(one) for one in found] == [Trained] * right


def test_what_a_checkpoint_holds():
    good = {"path": "a.pt", "whole": 6, "has": ["optimizer"], "counts": True}
    good |= {"holds": ["optimizer"], "place": "a.py:5", "loads": True}
    file = event(Opened, path="a.pt", saved=True)
    for state, wanted, values in (
        ("held", {}, {}),
        ("held", {"save_in_place": "note"}, {"overwrites": True}),
        ("broken", {"no_optimizer": "RISK"}, {"holds": []}),
        ("broken", {"no_optimizer": "RISK"}, {"has": ["a", "b"], "loads": False}),
        ("not judged", {}, {"holds": [], "loads": False}),  # such as the best weights
        ("broken", {"lacking": "RISK"}, {"missing": ["norm.running_mean"]}),
    ):
        report = judged([file, event(Saved, 4, **good | values)], [])
        assert (law(report, 8), named(report)) == (state, wanted)
    two = [event(Saved, 4, **good | x) for x in ({"holds": []}, {"path": "last.pt"})]
    part = event(Saved, 4, **good | {"path": "b.pt", "missing": ["b"]})
    assert not named(judged([event(Saved, 4, **good | {"names": ["b"]})], [part]))
    tested = [file, two[0], event(Restored, 9, what="weights")]
    assert not judged([file, *two], []).findings + judged(tested, []).findings
    parts = [[event(Cut, 4, path="a.pt", names=["net.weight"])] for _ in range(2)]
    assert named(judged([file, *parts[0]], [])) == {"shards_saved": "WRONG"}
    assert not named(judged(*parts))


def test_optimizers_states_are_known_by_their_names():
    weight, files = torch.nn.Parameter(torch.ones(2)), Checkpoints()
    optimizer = torch.optim.SGD([weight])
    state = {"net": {"w": weight}, "own": {"w": {"momentum_buffer": weight}}}
    assert files.content(state)["holds"] == []
    optimizer.state[weight]["momentum_buffer"] = torch.zeros(2)
    files.after_step(optimizer, [])
    assert files.content(state)["holds"] == ["optimizer"]


def test_what_a_loss_is_divided_by():
    """The divisor can be a sum of class weights, or a mask's count times a factor."""
    logits = torch.randn(5, 3, requires_grad=True)
    targets = torch.tensor([0, 2, 2, 1, -1])
    each = torch.tensor([0.5, 1.0, 25.0])
    loss = cross_entropy(logits, targets, weight=each, ignore_index=-1)
    losses = cross_entropy(logits, targets, ignore_index=-1, reduction="none")
    total = cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
    mask = torch.tensor([0, 0.5, 0.5, 0, 0.5])
    pair, rows = torch.stack([loss, losses.sum()]), torch.tensor([2.0, 4.0])
    for one, *wanted in (
        (loss, 1, "mean", 51.5, True),
        (losses.sum() / 4, 0.25, "sum", 4, False),
        ((losses * mask).sum(), 0.5, "sum", 3, False),
        ((losses * (mask > 0)).sum(), 1, "sum", 3, False),
        ((total / rows[1:]).sum(), 0.25, "sum", 4, False),
        ((logits.square() / 8).sum(), 1 / 8, "sum", 5, False),
        ((pair * logits.exp()[0, :2]).sum(), 1, "", 0, False),  # learned weights
    ):
        (found,) = terms(one.grad_fn)
        assert [found.factor, found.kind, found.rows, found.weighted] == wanted
    first, second = pair / rows
    for whole in ((pair / rows).sum(), pair @ (1 / rows), first + second):
        pairs = [(x.factor, x.kind) for x in terms(whole.grad_fn)]
        assert pairs == [(0.5, "mean"), (0.25, "sum")]
    mask = (targets >= 0)[:, None].expand(5, 2)
    columns = (logits[:, :2] * mask).sum(0) / rows
    assert [x[0] * x.rows for x in terms(columns.sum().grad_fn)] == [2, 1]
    assert outer((3 * loss / 4).grad_fn) == [0.25, 3]
    own = (0.7, "mean", 8, 1, 1), (0.04, "sum", 8, 4, 1)
    told = judged(*steps(MEAN, terms=own)).verdicts[4].not_judged["mean_gradient"]
    assert "0.7 x a mean, 0.04 x a sum; doctor cannot know" in told


@pytest.mark.parametrize(("first", "mixed"), [(0, 0), (1, 0), (0, 1)])
def test_weights_of_a_losss_parts_that_drift_apart(first, mixed):
    """Not random ones, which differ early, nor those whose sum is equal, as in mixup."""
    gaps, ranks = [[0.1 * r * (n > 1 or first) for n in range(20)] for r in (0, 1)], []
    for own in gaps:
        pairs = [[(1 - x * mixed, "mean", 8), (1 + x, "mean", 8)] for x in own]
        passes = enumerate(map(one_pass, pairs))
        ranks.append([event(Update, n, passes=[x]) for n, x in passes])
    assert ("factors_drift" in named(judged(*ranks))) != (first or mixed)


def test_what_a_loss_receives(monkeypatch):
    net, watcher = torch.nn.Linear(1, 1), Losses()
    with torch.no_grad():
        watcher.on_input(net.eval(), [])
    watcher.received = [1]
    watcher.on_input(net.train(), [])
    assert not watcher.received
    for inner in (False, True):
        monkeypatch.setattr(Passes.here, "current", found := {})
        watcher.received = [([net.weight], False, inner, "a.py:1")]
        watcher.on_backward(net(torch.ones(1, 1)).sum())
        assert ("gathered" in found) != inner


def test_steps_without_an_optimizer(monkeypatch):
    """A change of the weights is a step; doctor compares ranks after as many collectives."""
    moments, net, found = Moments(), torch.nn.Linear(2, 1), written(monkeypatch)
    moments.learn(net)
    for change in (0.0, 1.0):
        moments.begin_by_hand()
        net.weight.data += change
        moments.end_by_hand()
    assert [x.by_hand for x in found if isinstance(x, Step)] == [True]
    assert recorder.step == 1
    moments.add_param_group(lambda *_: None, None, {"params": [*net.parameters()]})
    assert len(moments.handles) == 2
    for meets, wanted in ((3, {"weights_differ": "WRONG"}), (4, {})):
        ranks = states([1.0], meets=3), states([2.0], meets=meets)
        assert named(judged(*ranks)) == wanted


def both(value, **more):
    """Return two ranks' states in 12 steps; `value(rank, step)` is a list of numbers."""
    return [states(*(value(r, n) for n in range(12)), **more) for r in (0, 1)]


TEACHER = {"moment": "other", "what": "Net"}
KEPT = "Codes.code", "Net.b", "layer Net.b"
CODES, PLAIN, LAYERS = ({"what": "kept", "names": [x]} for x in KEPT)
COPIED, DRIFTS = {"other_network_differs": "RISK"}, {"tensors_drift": "RISK"}


@pytest.mark.parametrize("moves", [False, True])
def test_an_optimizer_may_have_parts_of_a_networks_weights(moves):
    part = both(lambda r, n: [n + r + 1.0], names=["weight 1 of shape (3,)"])
    whole = both(lambda r, n: [1.0 + n * moves], **TEACHER)
    found = judged(*map(add, part, whole))
    assert named(found) == ({} if moves else {"weights_differ": "WRONG"})
    assert law(found, 4) == ("not judged" if moves else "broken")
    assert not named(judged(*both(lambda r, n: [1.0 + r + n], **TEACHER)))


def test_what_no_optimizer_updates_is_compared():
    """A teacher may be copied before DDP exists, or one rank alone may update it."""
    for value, kind, wanted, words in (
        (lambda r, n: [1], TEACHER, {}, ""),
        (lambda r, n: [1 + r], TEACHER, COPIED, "after DDP has wrapped"),
        (lambda r, n: [1 + r * (n > 1)], TEACHER, COPIED, "equal before step 2"),
        (lambda r, n: [n + r], CODES, {}, ""),  # such as a rank's samples
        (lambda r, n: [n + r * (n > 5)], CODES, DRIFTS, ""),
        # A constant of a layer, which each rank may draw itself
        (lambda r, n: [1.0 + r, 2 + r, 3 + r, 5 + r], PLAIN, {}, ""),
        (lambda r, n: [1.0 + r, 2 + r, 3 + r, 5 + r], LAYERS, DRIFTS, ""),
        (lambda r, n: [x + r + n for x in (1.0, 2, 3, 5)], LAYERS, {}, ""),
    ):
        ranks = [own + states(*[[1.0]] * 12) for own in both(value, **kind)]
        for rank, own in enumerate(ranks):
            own.append(event(Input, rows=[rank]))
        found = judged(*ranks)
        assert named(found) == wanted
        for one in found.findings if words else ():
            assert ("equal before step 2" in one.what) == ("equal" in words)
            assert ("after DDP has wrapped" in one.mend) == ("after" in words)


def test_statistics_that_ranks_update_by_their_own_samples():
    for name, start, rates, wanted in (
        ("Codes.c", 1, (1, 1.1), "broken"),
        ("Codes.c", 0, (1, 1.1), "not judged"),  # it may be a sum that is printed
        ("Codes.c", 1, (1, 3), "held"),
        ("Codes.c", 1, (0, 1), "not judged"),
        ("copy Net.w", 1, (0, 1), "not judged"),
        ("f().c", 1, (0, 1), "held"),
    ):
        value = lambda r, n: [start * x + n * rates[r] for x in (1, 2, 3, 5)]  # noqa: B023, E731
        ranks = both(value, what="kept", names=[name])
        for own in ranks:
            own[0].moment = "first"
            own += states(*[[1.0]] * 12)
        assert law(judged(*ranks), 4) == wanted
    value = lambda r, n: [n * (x % 2 == r) for x in range(8)]  # noqa: E731
    ranks = both(value, what="kept", names=["Loss.table"])  # each writes its entries
    assert law(judged(*(x + states(*[[1.0]] * 12) for x in ranks)), 4) == "not judged"
    for when, sign in (([5, 2, 9, 4], -1), ([2, 4, 5, 9], -1), ([5, 2, 9, 4], 1)):
        row = lambda n: [[(n > x + r) * sign**x for x in (*when, 0)] for r in (0, 1)]  # noqa: B023, E731
        assert dealt([*map(row, range(12))]) == (when[0] > 2 and sign < 0)


class Part:
    """A (4, 4) weight of which each process has two rows, as with FSDP2."""

    def __init__(self, *rows):
        self.placements, self.shape, self.rows = ["S(0)"], (4, 4), torch.tensor(rows)

    def to_local(self):
        return self.rows


class Waves(torch.nn.Linear):
    """A layer with plain tensors, one of which it uses."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.wave, self.other = torch.rand(8), torch.rand(8)

    def forward(self, x):
        return self.turned(x)

    def turned(self, x):
        return x * self.wave


def test_shards_are_known_by_their_names_or_their_numbers(monkeypatch):
    network, weight = torch.nn.Module(), Part([1.0, 2, 3, 4], [5, 6, 7, 8])
    monkeypatch.setattr(network, "named_parameters", lambda: [("a.weight", weight)])
    monkeypatch.setattr(Moments.here, "networks", {network: True})
    rows = weight.rows.clone()
    assert cut({"a.weight": rows}) == cut([{"w": [rows, 1]}]) == ["a.weight"]
    assert cut({"module.a.weight": rows + 1}) and not cut([rows + 1])
    assert not cut({"a.weight": torch.ones(4, 4)})


def test_tensors_of_the_scripts_objects_are_found():
    own, found = Part([1.0] * 8), Objects()
    assert "Part.rows" in found.tensors({}) and not is_users(torch.nn.Linear)
    assert id(own.rows) and "Part.rows" not in found.tensors({id(own.rows): 0})
    own.rows = {"w": (own.rows, torch.arange(8.0).numpy())}
    assert {"Part.rows['w'][0]", "Part.rows['w'][1]"} <= {*found.tensors({})}
    layer = Waves(4, 2)
    found.search()
    names = {*found.tensors({id(layer.bias): 0})}
    assert {"layer Waves.wave", "Waves.other"} <= names
    ema = torch.nn.Linear(4, 2)  # an average of weights that never runs
    found.search()
    assert "copy Linear.weight" in found.tensors({})
    assert not [x for x in found.tensors({id(ema.bias): 0}) if "copy Linear" in x]


def test_which_weights_are_compared(monkeypatch):
    """Equal names have equal numbers, even if only one rank has freed an old network's weights."""
    old, new = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    monkeypatch.setattr(Moments.here, "names", {id(old): "w", id(new): "w"})
    watcher = Replicas()
    known(monkeypatch, old)
    assert [*watcher.held()] == ["w"]
    numbers = known(monkeypatch, old, new)
    assert [*watcher.held()] == ["w", "w #2"]
    del numbers[id(old)]
    assert [*watcher.held()] == ["w #2"]
    # Weights that the script updates itself
    network, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)  # without optimizer
    names = {id(x): name for name, x in network.named_parameters()}
    monkeypatch.setattr(Moments.here, "names", names)
    monkeypatch.setattr(Moments.here, "networks", {network: True, other: True})
    known(monkeypatch, network.bias)
    assert [*Replicas().held()] == ["bias", "weight"]
    found, watcher.others = written(monkeypatch), {id(other): (weakref.ref(other), "")}
    watcher.on_step(torch.optim.SGD([network.weight]), [network.weight], [])
    for step in (63, 64, 64):  # later samples of a network that no optimizer trains
        monkeypatch.setattr(recorder, "step", step)
        watcher.on_output(other, None, None)
    assert [one.moment for one in found].count("other") == 2
    other = torch.zeros(600)  # of a code book, most entries may be unused
    assert [*summed({"a": other.index_fill(0, torch.tensor(1), 5)})["a"]][6:] == [0, 5]
    for other, wanted in ((1, "weights_drift"), (2, "weights_differ")):
        first = states([1], moment="start"), states([other], moment="start")
        found = judged(first[0] + states([1]), first[1] + states([2]))
        assert [*named(found)] == [wanted]
    one, other = both(lambda r, n: [n + r * (n % 4 > 0)])  # equal again later
    assert named(judged(one, other)) == {"weights_drift": "note"}
    one += event(Loaded, 4), event(Loaded, 8)  # by a load alone
    assert named(judged(one, other)) == {"weights_drift": "RISK"}
    for count, wanted in ((99, "broken"), (100, "not judged")):
        one, other = both(lambda r, n: [r * (n > 0) * (12 - n)])  # later nearer
        sent = {"name": "all_reduce", "sent": f"{count} x float32"}
        one += [event(Call, n, **sent) for n in range(8)]
        assert law(judged(one, other + one[12:]), 4) == wanted


def test_tensors_are_matched_by_their_names_and_networks_by_their_tensors():
    known = {"moment": "step", "what": "weights", "names": [*"abc"], "each": 1}
    ranks = [[event(State, values=[1, 2, 3], **known)] for _ in range(2)]
    for rank, own in enumerate(ranks):  # the first two weights have been freed
        own += states([rank], moment="end", names=["a"])
    assert not judged(*ranks).findings
    given = {"moment": "validation", "what": "Net"}
    for kind, wanted in ((1, {"buffers_differ": "RISK"}), (2, {})):
        ranks = states([1], kind=1, **given), states([2], kind=kind, **given)
        assert named(judged(*ranks)) == wanted
        ranks[0].insert(0, states([3], kind=1, **given)[0])  # rank 0 validates one more
        assert not named(judged(*ranks))


def test_a_key_of_a_sum_is_read_in_a_validation(monkeypatch):
    found = written(monkeypatch)
    monkeypatch.setattr(recorder, "step", 99)
    monkeypatch.setattr(recorder, "rank", 0)

    def reduce(sums):  # pytest adds locals() to functions with assert
        Meeting().on_collective("all_reduce", (sums["p"],), {}, "a.py:1")

    for grads in (True, False):
        with torch.set_grad_enabled(grads):
            reduce({"p": torch.zeros(1)})
    assert [one.keys.get("keys of sums") for one in found] == [None, "p"]


@pytest.mark.parametrize("other", [1, 2])
def test_files_and_states_of_two_ranks(other):
    ranks = [[event(Opened, path="a.pt", saved=True, mark=x)] for x in (1, other)]
    assert named(judged(*ranks)) == ({"several_save": "WRONG"} if other > 1 else {})
    weights = [event(Restored, 2, what="weights")][2 - other :]  # or it was only read
    ranks = [event(Loaded, 1, place="a.py:3"), *weights], []
    assert named(judged(*ranks)) == ({"not_restored": "RISK"} if other > 1 else {})
    own = [event(Restored, 2, what=x) for x in ("weights", "optimizer")]
    own += [event(Loaded, time=-1.0), event(Step, 3, time=2.0 * other - 4)]
    own.append(event(Input, rows=[7, 7]))
    file = event(Opened, path="b", saved=True)
    assert (law(judged([file, *own], own, steps=0), 8) == "held") == (other < 2)
    saved = event(Saved, path="a.pt", wrapped=True)
    loads = event(Restored, wrapped=other > 1)
    assert ("ddp_keys" in named(judged([saved, loads], []))) == (other < 2)
    own.append(event(Seed, -1, generator="torch", state=7))  # all restore one state
    assert law(judged([file, *own], own, steps=0), 8) == "not judged"
    ranks = [[event(Opened, path="a", mark=x)] for x in (1, other)]  # renamed
    assert named(judged(*ranks)) == ({"several_write": "RISK"} if other > 1 else {})
    ranks = [[event(Opened, path="/a/sample.png", place="a.py:5")] for _ in range(2)]
    assert named(judged(*ranks)) == {"several_write": "RISK"}  # perhaps by a library
    ranks[1].append(event(Start, parent="b-1", host="b", environment={}))
    assert law(judged(ranks[0], []), 8) == "held"


def test_passes_of_a_skipped_or_repeated_step_are_not_lost(monkeypatch):
    """A scaler skips a step; L-BFGS runs the closure of a step several times."""
    weight, watcher = torch.nn.Parameter(torch.ones(1)), Passes()
    optimizer = torch.optim.SGD([weight], 0.1)
    for skips, left in ((True, {}), (False, {id(weight): [(1, weight)]})):
        watcher.local = {id(weight): [(1, weight)]}
        monkeypatch.setattr(recorder, "step", 0)
        call = lambda *_: recorder.__dict__.update(step=0 if skips else 1)  # noqa: B023, E731
        watcher.scaler_step(call, None, optimizer)
        assert watcher.local == left
    monkeypatch.setattr(Moments.here, "inner", optimizer)
    optimizer.found_inf = torch.ones(1)  # a fused optimizer skips the step itself
    Moments.here.begin_step(optimizer)
    assert Moments.here.inner is None
    found = written(monkeypatch)
    for number in (1, 2, 3):
        watcher.on_backward(weight)
        watcher.local = {id(weight): [(number, weight.detach())]}
        watcher.on_step(optimizer, [weight], [[1.0]])
        watcher.on_clear([weight])
    assert [one.lost for one in found] == [[], [], []]


def test_what_a_checkpoint_in_parts_holds(monkeypatch):
    """torch.distributed.checkpoint saves nested or flat states, and stores counts as tensors."""
    network, found = torch.nn.Linear(2, 2), written(monkeypatch)
    monkeypatch.setattr(Moments.here, "networks", {network: True})
    state = {"model": network.state_dict(), "epoch": torch.tensor(2)}
    for more in ({}, {"optim": {"param_groups.0.lr": 0.1}}):
        app = {"app": state | more}
        Checkpoints().save_parts(lambda *_, **__: None, app, checkpoint_id="a/run")
    assert [one.holds for one in found] == [[], ["optimizer"]]
    assert all(one.counts and one.whole == 2 for one in found)
    alone = torch.nn.BatchNorm1d(2).state_dict()
    assert Checkpoints().content(alone)["counts"] is False


def test_processes_without_a_group_train_alone():
    """The differences between the ranks are effects, and no law that compares ranks is held."""
    ranks = [[event(Opened, path="/a/b.pt", saved=True)] for _ in range(2)]
    job = made(*ranks)
    for one in job.processes:
        one.events = [x for x in one.events if not isinstance(x, Rank)]
    report = examine(job)
    assert named(report) == {"no_group": "WRONG"} and law(report, 9) == "broken"
    assert {law(report, n) for n in (1, 2, 3, 4, 5, 8)} == {"not judged"}


def test_the_page_of_a_right_job():
    """It is short, counts what was not judged, and the parts of a step add up."""
    job = made(*steps(MEAN), steps=40)
    for one in (x for p in job.processes for x in p.of(Step)[38:]):
        one.watched = False
    lines = page(job, examine(job)).splitlines()
    text = " ".join(" ".join(lines).split())
    assert len(lines) <= 30 and max(map(len, lines)) <= 80
    assert "38 optimizer steps watched (2 later ones only timed)" in text
    assert "No mistake was found: 2 of 10 laws held, 8 could not be judged" in text
    names = "data forward backward communication optimizer validation saving".split()
    spans = [(name, 0.0, 0.1 + 0.011 * n) for n, name in enumerate(names)]
    job = made([event(Spans, n, wall=1.0, spans=spans, calls={}) for n in range(9)])
    text = " ".join(page(job, examine(job)).split())
    shares = re.findall(r"(\d+)%", text.partition("A step on rank 0")[2])
    assert len(shares) == 8 and sum(map(int, shares)) == 100


def test_a_script_that_finds_no_gpu_is_told_of_cpu():
    for cuda, watched in ((False, False), (True, False), (False, True)):
        own = event(Failed, text="RuntimeError: no driver", cuda=cuda)
        job = made([own]) if watched else Job([Process(0, 1, [own])], status=1)
        words = " ".join(page(job, examine(job)).split())
        assert ("use doctor --cpu" in words) == (not cuda and not watched)
        assert "RuntimeError: no driver" in words and "GradScaler" not in words


def test_the_pages_that_explain_a_mistake_exist():
    pitfalls = (ROOT / "docs/pitfalls.md").read_text()
    for one in CHECKS.values():
        kind, _, number = one.read.partition(" ")
        there = {"pitfall": f"\n### {number}. " in pitfalls}
        there["lesson"] = [*ROOT.glob(f"tutorial/{number:0>2}_*/README.md")]
        assert there.get(kind, [*ROOT.glob(f"{one.read}*")]), one.name
        file = re.search(r"To read more:\s+(/\S+\.md)", explanation(one))
        assert file and Path(file[1]).exists(), one.name
    told = " ".join(explanation(CHECKS["wrong_number"]).split())  # it may be a RISK
    assert "(usually WRONG; law 7" in told and "A RISK is not a mistake if: " in told


def test_what_ranks_may_have_of_their_own():
    """Parts of a layer, stages of a pipeline, networks of their own, or training before DDP."""
    same = {"rates": [0.1]}

    def sums(count):
        return [event(Call, n, sent=f"{count} x a", name="reduce") for n in (1, 2)]

    for own, wanted in (
        (lambda rank: [], "WRONG"),
        (lambda rank: [event(Call, inside=["body"])], "WRONG"),
        (lambda rank: [event(Call, inside=["head"])], ""),
        (lambda rank: [event(Call, gathers=["head"])], ""),
        (lambda rank: [event(Call, gathers=["head", "body"])], "WRONG"),
        (lambda rank: [event(Saved, path=f"{rank}", names=["head"])], ""),
        (lambda rank: [event(Saved, path="a", names=["head"])], "WRONG"),
        (lambda rank: [event(Step, which=rank, rates=[0.1])], ""),
        (lambda rank: [event(Step, which=rank, rates=[0.1]), event(Sends)], ""),
        (lambda rank: [event(Sends, 8, count=5000)], ""),
        (lambda rank: [event(Sends, 8, count=3)], "WRONG"),
        (lambda rank: [event(Sends, 8, count=5000), event(Wraps)], "WRONG"),
        (lambda rank: [event(Wraps, 0)], "WRONG"),
        (lambda rank: [event(Wraps, 3 * rank)], ""),
        (lambda rank: sums(100), "RISK"),
        (lambda rank: sums(99), "WRONG"),
        (lambda rank: [event(Step, n, network=n // 2, **same) for n in range(9)], ""),
        (lambda rank: [event(Step, n, **same) for n in range(9)], "WRONG"),
    ):
        ranks = [own(0), own(1)]
        for rank, found in enumerate(ranks):
            values = [[1.0, 2.0 + rank * n] for n in range(1, 5)]
            found += states(*values, names=["body", "head"], each=1)
        found, state = judged(*ranks), "broken" if wanted else "not judged"
        assert named(found) == ({"weights_differ": wanted} if wanted else {})
        assert law(found, 4) == state


@pytest.mark.parametrize("scale, at, ddp", [(4, 1, 0), (8, 1, 0), (8, 2, 0), (8, 2, 1)])
def test_steps_of_ranks_that_do_not_belong_together(scale, at, ddp):
    """One rank's scaler skips a step, or the ranks take unequally many between collectives."""
    rows, wrong = [], scale == 8 and at == 1 + ddp
    for rate, own, step in ((1.0, 8, 1), (2.0, scale, at)):
        taken = [event(Step, n, rates=[rate], watched=n < 41) for n in (9, 41)]
        taken.append(event(Update, 9, passes=[one_pass(scale=own)]))
        rows.append([event(Call, step), *taken, *[event(Wraps)] * ddp])
    assert ("learning_rates_differ" in named(judged(*rows))) == wrong


def test_nothing_is_read_while_a_cuda_graph_is_recorded(monkeypatch):
    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    seen, owner = [], SimpleNamespace(call=abs)
    wrap(owner, "call", lambda call, x: seen.append(x))
    quiet(seen.append)(1)
    assert owner.call(-1) == 1 and not seen
    monkeypatch.setattr(torch.cuda, name, Mock(side_effect=RuntimeError))
    assert owner.call(-1) is None and seen == [-1]  # an earlier kernel has failed


def test_a_network_that_ddp_wraps_after_the_watched_steps():
    own = [event(Wraps, n, weights=[f"a ({n})"]) for n in (0, 9)]
    thawed = event(Wraps, weights=["a (9)"], frozen=["a"]), own[1]  # then not frozen
    own.append(event(Exit, 12))
    found = [(own, "after step 9"), ([own[0], own[2]], "")]
    for layouts, told in (*found, ([*thawed, own[2]], "after step 9")):
        report = judged(*([*x, *layouts] for x in steps(MEAN)))
        assert told in str(report.verdicts[4].doubts)
        assert not told or law(report, 5) != "held"


@pytest.mark.parametrize(
    ("name", "values", "now", "wanted"),
    [
        ("A.i", (5, 10), 0, "broken"),  # counts steps
        ("A.i", (5, 10), 10, "held"),
        ("A.images", (41, 81), 0, "not judged"),
        ("images", (40, 80), 0, "broken"),  # the file contains it
        ("best", (0.5, 0.5, 0.7), 0.0, "broken"),
        ("best", (0.7, 0.5), 9.0, "broken"),
        ("A.best", (0.5, 0.7), math.nan, "broken"),  # None again
        ("A.best", (0.5, 0.7, math.nan), math.nan, "held"),
        ("best", (0.7, 0.5), 0.5, "held"),
        ("A.batch", (5, 5), 0, "held"),
        ("loss", (0.9, 0.5), 2.0, "held"),
    ],
)
def test_numbers_that_a_resume_does_not_restore(name, values, now, wanted):
    rows = [(5 * n, {name: [x], "epoch": [n]}) for n, x in enumerate(values, 1)]
    own = {"moment": "saved", "path": "a.pt", "mark": 7, "stored": [40, 80]}
    own["networks"] = {"Net": [{"weight": (True, [1.0])}]}
    found = [event(Kept, n, counts=counts, **own) for n, counts in rows]
    own |= {"moment": "loaded", "counts": {name: [now], "epoch": [2]}}
    file, restored = event(Opened, path="a.pt"), event(Restored, 19, what="optimizer")
    found += [file, restored, event(Kept, 20, **own)]
    if name == "A.i":  # it begins again in each epoch
        again = event(Kept, 6, moment="next", counts={name: [0]})
        assert law(judged([*found, again], []), 8) == "held"
    assert law(judged(found, []), 8) == wanted


@pytest.mark.parametrize("now, later, held", [(9, 2, 0), (2, 2, 1), (9, 7, 1)])
def test_arrays_that_a_resume_does_not_restore(now, later, held):
    """An array that changes until the next pass belongs to one epoch."""
    own = {"path": "a.pt", "mark": 7, "networks": {"Net": [{"w": (True, [1.0])}]}}
    steps = zip((5, 6, 10, 11), "saved next saved next".split(), strict=True)
    values = [[float(x), 3.0] for x in (1, 1, 2, later, now)]
    found = [event(Opened, path="a.pt"), event(Restored, 19, what="optimizer")]
    for (n, moment), one in zip([*steps, (20, "loaded")], values, strict=True):
        arrays = {"EMA.shadow['w']": [one]}
        found.append(event(Kept, n, moment=moment, arrays=arrays, **own))
    found.sort(key=lambda one: one.time)
    assert law(judged(found, []), 8) == ("held" if held else "broken")


@pytest.mark.parametrize("now, n, broken", [(0.5, 9, 0), (0.0, 9, 1), (0.7, 1, 1)])
def test_statistics_that_a_resume_does_not_restore(now, n, broken):
    own = {"path": "a", "mark": 7, "networks": {"Net": [{"w": (True, [1.0])}]}}
    found = [event(Opened, path="a"), event(Restored, 19, what="optimizer")]
    for step, moment, x, count in ((5, "saved", 0.5, 9), (20, "loaded", now, n)):
        more = {"arrays": {"Norm.mean": [[x, x**2]]}, "counts": {"Norm.n": [count]}}
        found.append(event(Kept, step, moment=moment, **own, **more))
    assert law(judged(found, []), 8) == ("broken" if broken else "held")


@pytest.mark.parametrize("restored", [False, True])
def test_a_copy_of_weights_that_another_network_restores(restored):
    own = {"path": "a", "mark": 7}
    found = [event(Opened, path="a"), event(Restored, 19, what="optimizer")]
    for step, moment, x in ((5, "saved", 2.0), (20, "loaded", 9.0)):
        networks = {"Net": [{"w": (True, [1.0])}], "Copy": [{"w": (False, [x, 3.0])}]}
        networks["EMA"] = [{"ema.w": (False, [2.0, 3.0])}] * restored
        found.append(event(Kept, step, moment=moment, networks=networks, **own))
    assert law(judged(found, []), 8) == ("held" if restored else "broken")


def test_a_scheduler_that_is_made_again_in_the_same_line(monkeypatch):
    told, own = written(monkeypatch), Schedules()
    plans = [type("Plan", (), {"T_max": n, "last_epoch": n})() for n in (4, 8, 0)]
    own.made = [(weakref.ref(one), "a.py:3", 9) for one in plans]
    own.on_end()
    assert [one.planned for one in told] == [8]


def test_what_each_rank_learns_from_its_own_data():
    class Scaler:
        pass

    one = Scaler()
    one.mean_, one.names_, one.norm = numpy.array([1.0, 2.0]), numpy.array(["a"]), 3.0
    one.obs_std, one.loss_mean = torch.tensor([0.5]), 0.5
    found = fitted([one])
    assert found["Scaler.mean_"] == [1, 2] and found["Scaler.obs_std"] == [0.5]
    assert fitted([one]) == found  # also what is no number
    assert "Scaler.norm" not in found and "Scaler.loss_mean" in found
    assert not {"Scaler.loss_mean", "Scaler.mean_"} & {*fitted([one], {})}  # a meter's
    first, begun = (event(Fitted, values=x) for x in (found, {}))
    for mean, wanted in ((2.0, {}), (2.1, {"fits_differ": "RISK"})):
        own = event(Fitted, values={**found, "Scaler.mean_": [1.0, mean]})
        assert named(judged([first], [own])) == wanted
        assert named(judged([begun, first, first], [begun, own, own])) == wanted
        # Equal at first, learned since then
        assert named(judged([first, begun, first], [first, begun, own])) == wanted
        now, then = (event(Fitted, values={"network A.mu": [x]}) for x in (1, 2))
        assert not named(judged([now] * 3, [now, now, then]))  # perhaps a log
        later = event(Fitted, 1, values={})  # what changes does not count
        assert not named(judged([first], [own, later]))
