"""doctor judges laws 1, 2, 3, 7, 9 and 10 by events like those that a job records."""

import os
import random
import sys
import weakref
from array import array
from dataclasses import replace
from itertools import product
from math import inf
from operator import add
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, run
from test_doctor_steps import event, judged, known, law, made, one_pass, written

from doctor.draws import Drawn, Draws, Made, Order, Own, shuffled
from doctor.event import Exit, Failed, Rank
from doctor.job import read
from doctor.law import examine
from doctor.laws.carried import Kept
from doctor.laws.losses import Term
from doctor.laws.meeting import Call, Meeting, given
from doctor.laws.modes import Validation
from doctor.laws.passes import Update
from doctor.laws.printed import OTHER
from doctor.laws.randomness import Draw, Seed
from doctor.laws.ranks import Facts, Measured
from doctor.laws.ranks import measured as statistics
from doctor.laws.samples import Divided
from doctor.laws.targets import Contrast, Negatives, first_candidate
from doctor.laws.time import Spans
from doctor.loaders import Batch, Epoch, EpochEnd, Loaders, Pass, leaves
from doctor.moments import Step
from doctor.neighbours import Input, Inputs, Targets
from doctor.numbers import numbers, results
from doctor.objects import indices, joins, variables
from doctor.reads import Feed
from doctor.record import recorder
from doctor.results import Measured as Result
from doctor.results import Printed, Results, Scored
from doctor.sample import hashes, rows_of
from doctor.signature import signature
from doctor.watcher import watch

PASS = {"loader": 0, "epoch": 0}
HALVES = [*range(0, 64, 2)], [*range(1, 64, 2)]


def report(*ranks, steps=20, **step):
    """Examine a job with these events of each rank, which takes steps after them."""
    return judged(*ranks, steps=steps, place="a.py:10", **step)


def named(found):
    """Return the names of the checks that a report names, without notes."""
    return {one.check for one in found.findings if one.level in ("WRONG", "RISK")}


def each(kind, ranks):
    """Return all ranks' events of one kind."""
    return [one for own in ranks for one in own if isinstance(one, kind)]


def fed(order, epochs=1, stream=False, whole=9, **more):
    """Return the events of a rank that reads batches of eight, and `whole` epochs to their ends."""
    opened = {"sampler": "DistributedSampler", "samples": 64, "stream": stream} | more
    found, repeats = [], opened["sampler"] == "WeightedRandomSampler"
    feed = {"divides": not (stream or repeats), "shuffles": True, "repeats": repeats}
    for epoch in range(epochs):
        own = {"loader": 0, "epoch": epoch}
        found += [event(Epoch, **own, **opened, type="D"), event(Feed, **own, **feed)]
        read = order[epoch] if isinstance(order[0], list) else order
        for number in range(count := len(read) // 8):
            rows = array("q", read[8 * number : 8 * number + 8])
            batch = event(Batch, **own, number=number, rows=rows)
            batch.indices = None if stream else rows
            found += [batch, event(Step, **own, place="a.py:10", watched=True)]
        found.append(EpochEnd(**own, whole=epoch < whole, batches=count, steps=count))
    return found


def test_hashes_do_not_read_one_column():
    images = torch.zeros(32, 28, 28)
    images[:, 8:20, 8:20] = torch.rand(32, 12, 12)
    assert len({*hashes(images)}) == 32 and hashes(images) == hashes(images.clone())
    assert rows_of(leaves([images, torch.eye(200).to_sparse()])) == rows_of([images])
    masks = torch.rand(64, 16).argsort(1) < 8
    assert len({*hashes(masks)}) == len({*map(tuple, masks.tolist())})
    soft = [torch.eye(48, 96).roll(48 * rank, 1) for rank in (0, 1)]  # soft targets
    assert len({float(statistics("a", x, 9999)["mean of a"]) for x in soft}) == 1


def test_how_samples_are_counted():
    """A pass without steps, which only measures training accuracy, is not an epoch."""
    own = [fed(one, 2) for one in HALVES]
    own = [[x for x in one if not isinstance(x, Step) or not x.epoch] for one in own]
    for one in each(EpochEnd, own):
        one.steps *= not one.epoch
    found = report(*own, steps=0)
    assert found.verdicts[0].evidence == ["epoch 0: 64 samples read, 64 distinct of 64"]
    found = report(fed([*range(48)]), fed([*range(16, 64)]), steps=0)
    assert named(found) == {"left_out"} and ": 24 on several" in found.findings[0].what
    ranks = [fed([x, x[::-1]], 2) for x in HALVES]
    for one in each(Epoch, ranks):  # the sampler does not know that the dataset grows
        one.samples += 32 * one.epoch
    assert named(report(*ranks, steps=0)) == {"left_out"}
    same = fed([*range(64)]) + [Divided(how="parallelize_module()")]
    assert law(report(same, same, steps=0), 1) == "not judged"


CUT, EARLY, LAPS = {"whole": 1}, {"whole": 0}, {"whole": 0, "sampler": "Own"}


def test_the_samples_of_all_epochs():
    for epochs, more, wanted, told in (
        # A resume reads the rest of an epoch, or its first part again
        (lambda x: [x[::-1], x[:16], x[16:]], CUT, "held", ""),
        (lambda x: [x[::-1], x[:16], x[:16]], CUT, "left_out", "which a resume splits"),
        # A pass that never ends is judged by its first lap
        (lambda x: [x + [n ^ 1 for n in x]], LAPS, "held", "4 batches of epoch 0"),
        (lambda x: [HALVES[0] * 2], LAPS, "same_samples", ""),
        # A pass that begins in each step reads the next batch, or the first one again
        (lambda x: [x[n : n + 8] for n in (0, 8, 16, 24)], EARLY, "not judged", ""),
        (lambda x: [x[:8]] * 4, EARLY, "left_out", ""),
        # A stream
        (lambda x: [x, x[::-1]], {"stream": True}, "not judged", ""),
        (lambda x: [x[:16], x[8:24], x[16:]], {"stream": True}, "left_out", "32 disti"),
    ):
        ranks = [fed(own, len(own), **more) for own in map(epochs, HALVES)]
        broken = law(found := report(*ranks, steps=0), 1) == "broken"
        assert [*named(found)] == [wanted] if broken else law(found, 1) == wanted
        assert told in f"{found.findings} {found.verdicts[0].evidence}"


def test_what_only_the_last_rank_does_is_named():
    ranks = [fed([*range(n, 120, 3)]) for n in range(3)]
    assert not report(*ranks, steps=0).findings
    found = report(*ranks[:2], fed([*range(2, 98, 3)]), steps=0)
    assert "batch_counts_differ" in named(found)
    own = fed([*range(64)]), fed([*range(64, 112)])  # the second rank then has no data
    for one in (job := made(*own, steps=0)).of(Exit):
        one.step = 8
    assert not named(examine(job))
    failed = Failed(text="ValueError: no", place="a.py:11", path="")
    (found,) = report(*ranks[:2], [*ranks[2], failed], steps=0).findings
    assert (found.check, found.place) == ("ends_with_an_error", "a.py:11")
    assert "rank 2 ends with ValueError: no" in found.what


@pytest.mark.parametrize("first, stride", [(0, 1), (1, 1), (900, 1), (0, 2)])
def test_windows_of_a_series_may_have_equal_indices(first, stride):
    ranks, own = [fed(x) for x in HALVES], {"loader": 1, "epoch": 0}
    for one in each(Feed, ranks):
        one.fields, one.data = {"D.first": 0}, signature(SimpleNamespace(at=range(9)))
    parts = {"data": signature(SimpleNamespace(at=range(0, 9 * stride, stride)))}
    parts |= {"fields": {"D.first": first}, "part": [5, 6]}
    for rank in ranks:
        rank.append(event(Batch, **own, indices=array("q", [5, 6])))
        rank += [event(Epoch, **own), event(Validation, 9, **own)]
        rank.append(event(Feed, **own, **parts))
    found = named(report(*ranks, steps=0))
    assert ("trained_on_validation" in found) == (max(first, stride) == 1)


def test_samples_whose_contents_differ():
    """Padding may cut the longest samples of a batch, which differ from epoch to epoch."""
    for names, count, epochs in ((1, 0, 4), (1, 64, 4), (0, 5, 1), (0, 5, 4)):
        ranks = [fed([*x, *x], epochs=4) for x in (HALVES, HALVES[::-1])]
        for one in each(Feed, ranks):
            one.data = {"names": (64, 1, 1, 0)} if names else {}
        for rank, own in enumerate(ranks):
            for one in each(Batch, [own]):
                shift = 99 * (rank and one.epoch < epochs)
                one.rows = array("q", [x + shift * (x < count) for x in one.rows])
        wanted = {"datasets_differ"} if count and epochs == 4 else set()
        assert named(report(*ranks, steps=0)) == wanted


def test_what_networks_get_and_what_is_drawn_for_it():
    """A permutation of all samples, or new generators, may be equal on all ranks on purpose."""
    ranks = [loop([*range(n, 480, 2)]) for n in (0, 1)]
    noisy = [own + drawn(n) for n, own in enumerate(ranks)]
    assert law(report(*noisy), 3) == "held"
    made = [Made(state=k, place="a.py:6", step=k) for k in range(20)]
    assert law(report(*(own + made for own in noisy)), 3) == "not judged"
    for size, wanted in ((12, "broken"), (240, "not judged")):
        alike = drawn(0, size=size, whole=True, permutes=True)
        assert law(report(*(own + alike for own in ranks)), 3) == wanted
    for distinct, first in ((True, 0), (True, 9), (True, 15), (False, 0)):
        for one in each(Input, noisy):  # the same ones from a later step on
            one.arguments = {2: (one.step if one.step >= first else id(one), distinct)}
        state = "held" if first > 12 else "broken" if distinct else "not judged"
        assert law(report(*noisy), 3) == state
    found = report(*[loop([*range(480)]) + drawn(0)] * 2)
    assert {"same_samples", "same_inputs"} <= named(found)


def test_numbers_that_another_rank_draws_at_another_time():
    def seeded(*ranks):
        def seed(n, x):
            return event(Seed, n, call=f"seed({x})", generator="numpy", place="a.py:4")

        return report(*([*map(seed, range(20), own)] for own in ranks))

    (found,) = seeded(range(20), range(1, 21)).findings
    told = "19 times on ranks 0 and 1, 1 steps apart"
    assert found.check == "shifted_numbers" and told in found.what
    samples = [random.Random(n).sample(range(20), 20) for n in (0, 1)]
    joint, apart = [range(20)] * 2, [range(0, 40, 2), range(1, 41, 2)]
    for ranks in (samples, joint, apart):
        assert "shifted_numbers" not in named(seeded(*ranks))


@pytest.mark.parametrize("code", ["cat(x)[: n]", "stack(x)[: n]", "cat(x)"])
def test_results_that_are_joined_rank_by_rank(tmp_path, code):
    (file := tmp_path / "a.py").write_text(f"\nrows = {code}\n")
    own = {"loader": 1, "epoch": 0}
    call = {"name": "all_gather", "sent": "12 x float32", "joins": joins(f"{file}:1")}
    for calls, step in ((1, 2), (2, 2), (1, 1)):  # also of the labels; parts in a row
        found = [event(Feed, **own, divides=True)] + [event(Call, 9, **call)] * calls
        rows = [array("q", [x, x + step]) for x in (0, 4)]
        found += [event(Batch, 9, **own, indices=x) for x in rows]
        wanted = code == "cat(x)[: n]" and calls + step == 3
        assert ("order_of_ranks" in named(report(found, found))) == wanted


@pytest.mark.parametrize("first, one", [(0, 0), (0, 7), (16, 7)])
def test_targets_of_all_ranks_candidates_depend_on_the_rank(first, one):
    own = {"count": 16, "candidate": one}
    ranks = [
        [event(Contrast, k, first=n, **own) for k in range(20)] for n in (0, first)
    ]
    found = report(*ranks)
    assert named(found) == ({"same_targets"} if one > first else set())
    assert ("own candidates" in str(found.verdicts[1])) == (one == first == 0)


@pytest.mark.parametrize("avoids", [[0, 1], [0], []])
def test_negatives_avoid_the_positives_of_all_ranks(avoids, monkeypatch):
    """In the last case, they are drawn from all items."""
    ranks, draws = [], random.Random(0)
    sets = [{(n % 40, draws.randrange(60)) for n in range(400)} for _ in range(2)]
    for rank, pairs in enumerate(sets):
        own, found = (
            set().union(*(sets[rank - n] for n in avoids)),
            written(monkeypatch),
        )
        rows = [(*x, draws.randrange(60)) for x in pairs for _ in range(9)]
        rows = torch.tensor([x for x in rows if (x[0], x[2]) not in own])
        Negatives.here.read([rows[:, 0], rows[:, 1:]], 0)
        Negatives.here.read([rows.float(), rows[:, :2]], 0)
        ranks.append(fed([*range(rank, 64, 2)]) + found)
    wanted = {"other_positives"} if avoids == [0] else set()
    assert len(found) == 1 and named(report(*ranks)) == wanted


@pytest.mark.parametrize("carries, stride", [(True, 2), (True, 1), (False, 2)])
def test_a_state_goes_from_one_window_to_the_next(carries, stride, monkeypatch):
    watcher, found = Inputs(), written(monkeypatch)
    for n in range(8):
        state = torch.full((1, 4), n + carries)
        watcher.on_input(None, [torch.rand(9, 4), state])
        watcher.on_output(None, (torch.rand(9), torch.full((1, 4), n + 2.0)), None)
    ranks = [fed([*range(rank, 512, 2)]) for rank in (0, 1)]
    for rank, own in enumerate(ranks):
        own += found
        for n, one in enumerate(each(Batch, [own])):
            one.index = rank + stride * n
    found = named(report(*ranks, steps=0))
    assert ("state_skips" in found) == (carries and stride == 2)


def test_the_first_candidate_of_a_product():
    one = torch.ones(2, 2, requires_grad=True)
    scores = one.sum().exp() * torch.inner(one, one) / 2
    assert first_candidate(scores) and not first_candidate(scores.roll(1, 1))


def measured(values, **more):
    """Return what a rank measures in each step."""
    return [event(Measured, n, values=one, **more) for n, one in enumerate(values)]


def test_settings_are_compared_by_name():
    """The comparison works even if one rank makes more passes per step than another."""

    def rank(value, *types):
        values = [{"ignore_index of a": value}, *({"input types": x} for x in types)]
        return [event(Facts, n // 3, values=x) for n, x in enumerate(values * 9)]

    first = rank("0", "int64", "float32")
    assert not named(report(first, rank("0", "float32")))
    assert named(report(first, rank("1", "float32"))) == {"settings_differ"}


def test_a_forked_process_does_not_free_a_tensor_which_is_an_error_in_cuda(monkeypatch):
    monkeypatch.setattr(Loaders.here, "current", torch.ones(1))
    left = weakref.ref(Loaders.here.current)
    if not (child := os.fork()):
        os._exit(Loaders.here.current is not None or left() is None)
    assert os.waitpid(child, 0)[1] == 0


def loop(order, noise=0.1):
    """Return the events of a rank that reads a table's rows without a DataLoader."""
    table = random.Random(1)
    rows = [[table.random() for _ in range(12)] for _ in range(640)]
    found, draws = [], random.Random(order[0])
    for step in range(len(order) // 12):
        own = order[12 * step : 12 * step + 12]
        few = [[x + noise * draws.random() for x in rows[i]] for i in own]
        keys = array("q", [hash(str(one)) // 9 for one in few])
        ids = array("q", own) if noise else None
        found.append(event(Input, step, rows=keys, indices=ids))
        values = array("d", [round(9 * rows[i][0]) for i in own])
        found += [Targets(count=12, values=values, step=step)] * (noise > 0)
    return found


ORDERS = [random.Random(seed).sample(range(480), 480) for seed in range(3)]
FIRST, SECOND, THIRD = ([one[rank::2] for rank in (0, 1)] for one in ORDERS)
EVEN, ODD = ([*range(n, 240, 2)] for n in (0, 1))
NEXT = [[ORDERS[0][n + n // 12 * 12 + k] for n in range(228)] for k in (0, 3)]
AGAIN = [[one[n + (n % 6 == 0)] for n in range(480)] for one in ORDERS[:2]]


def test_the_samples_of_a_loop():
    for ranks, noise, wanted, words in (
        # Noise makes all contents distinct, but a variable holds the indices
        (FIRST, 0.1, set(), ""),
        ([FIRST[0], SECOND[1]], 0.1, {"left_out"}, ""),
        # Two epochs; in the last of them, the ranks exchange their files
        (map(add, FIRST, SECOND), 0, set(), ""),
        (map(add, FIRST, [SECOND[0], THIRD[1]]), 0, {"left_out"}, ""),
        ([EVEN + EVEN, ODD + ODD], 0, set(), ""),
        ([EVEN + EVEN, ODD + EVEN], 0, {"same_samples"}, "steps 11 to 20, 10 of 10"),
        ([[*range(240)], [*range(120, 240), *range(120)]], 0, set(), ""),
        (
            [FIRST[0] + FIRST[1][:180], FIRST[1] + SECOND[0][:180]],
            0,
            {"left_out"},
            "35",
        ),
        (AGAIN, 0, set(), "several times"),  # in a batch
        # The same order from another position: one batch, 3 samples, 5 batches
        ([ORDERS[0][:240], ORDERS[0][12:252]], 0, {"left_out"}, "sample 13 of a"),
        (NEXT, 0, {"left_out"}, "sample 4 of a"),
        ([[n // 4 for n in range(240)]] * 2, 0, {"same_samples"}, ""),
        ([ORDERS[0][:240], ORDERS[0][60:300]], 0, set(), "may draw its samples"),
    ):
        found = report(*(loop(own, noise) for own in ranks))
        assert named(found) == wanted and law(found, 1) != "held"
        assert words in f"{found.findings} {found.verdicts[0].not_judged}"


def test_equal_inputs_with_other_smaller_inputs_are_no_samples():
    for wide, wanted in ((True, set()), (False, {"same_samples"})):  # as of times
        ranks = [loop([*range(240)], 0) for _ in range(2)]
        for n, own in enumerate(ranks):
            for one in each(Input, [own]):
                one.arguments = {2: (n, True, wide)}
        assert named(report(*ranks)) == wanted


def test_the_orders_that_a_loop_draws():
    """Each rank reads 12 samples per step. Doctor watches 40 steps."""
    for size, orders, last, wanted in (
        (480, [(7, 7), (7, 7)], 20, {"same_order"}),
        (480, [(7, 8), (8, 9)], 20, {"left_out"}),
        (240, [(7, 8), (8, 9)], 20, set()),  # a rank may shuffle its own samples
        (1440, [(7, 8), (8, 9)], 60, {"left_out"}),
        (1440, [(7, 8), (8, 9)], 63, set()),
    ):
        ranks = [loop(ORDERS[0][n::2] * 2, noise=0) for n in (0, 1)]
        for own, values in zip(ranks, orders, strict=True):
            for n, x in enumerate(values):
                own.append(event(Order, last * n, place="a.py:5", size=size, value=x))
        assert named(report(*ranks, steps=40)) == wanted


def test_each_lines_first_order_after_the_watch_is_recorded(monkeypatch):
    found, draws = written(monkeypatch), Draws()
    for step in (5, 6, 41, 45):
        monkeypatch.setattr(recorder, "step", step)
        draws.order(lambda x: x, [*range(9)])
    assert len(found) == 3


def test_all_ranks_restore_one_state_after_the_watch():
    """Not if only own generators differed, or none before, or if no step follows."""
    for case in ("0598", "1598", "0698", "0588", "0590"):
        own, other, end, at = map(int, case)
        seeds = [event(Seed, at, generator="torch", state=x) for x in (5, other)]
        job = made(*([*drawn(n, own=own), x] for n, x in enumerate(seeds)))
        for one in job.of(Exit):
            one.step = end
        assert ("same_random_numbers" in named(examine(job))) == (case == "0598")


@pytest.mark.parametrize(("parts", "wanted"), [(12, {"left_out"}), (11, set())])
def test_ranks_that_read_some_of_the_files_of_their_own_orders(parts, wanted):
    """Each rank reads 120 samples per draw: all 10 in each of 12 of the 24 files."""
    ranks = [loop([*range(n, 480, 2)], 0) for n in (0, 1)]
    for n, own in enumerate(ranks):
        for step in (0, 10):
            own.append(event(Order, step, place="a.py:5", size=24, value=step + n))
            file = {"place": "a.py:7", "size": 10, "time": step + 0.5}
            own += [event(Order, step, **file) for _ in range(parts)]
    assert named(report(*ranks)) == wanted


@pytest.mark.parametrize("calls", [1, 2])
def test_equal_rollouts_come_from_equal_generators(calls):
    """A network that runs once without gradients before a step may be a teacher."""
    own = loop([*range(240)], 0)
    for step in range(20):
        own += [event(Result, step, what="seen", after=step)] * calls
        own.append(event(Made, step, place="a.py:4", state=step))
    found = report(own, own)
    assert named(found) == {"same_random_numbers" if calls > 1 else "same_samples"}
    assert found.findings[0].place == ("a.py:4" if calls > 1 else "a.py:10")


def test_samplers_that_repeat_samples():
    found = report(*[fed([*range(64)], sampler="WeightedRandomSampler")] * 2, steps=0)
    assert found.findings[0].mend.startswith("Seed the sampler's")
    ranks = [fed([*range(64)], sampler="Own") for _ in range(2)]
    for one in each(Feed, ranks):
        one.sampler = {"num_repeats": 2}  # as for repeated augmentation
    assert not named(report(*ranks, steps=0))


@pytest.mark.parametrize("size, noise", [(4, 0), (8, 0), (8, 99)])
def test_ranks_that_take_parts_of_the_same_batches(size, noise):
    ranks = [fed([*range(64)]) for _ in range(2)]
    for (rank, own), n in product(enumerate(ranks), range(8)):
        rows = [8 * n + (size * rank + k) % 8 + noise * rank for k in range(size)]
        own.append(event(Input, n, rows=rows))
    assert law(report(*ranks, steps=0), 1) == ("not judged" if size < 8 else "broken")


def test_persistent_workers_keep_the_epoch():
    """Augmentation changes the samples, but their labels are in the same order in each epoch."""
    labels = array("q", random.Random(0).choices(range(5), k=128))
    for kept, wanted in ((0, {"same_order"}), (1, set())):
        ranks = [fed([*range(128 * n, 128 * n + 128)], 2, stream=True) for n in (0, 1)]
        for one in each(Batch, ranks):
            one.rows = array("q", [x + 1000 * one.epoch for x in one.rows])
            one.marks = labels[8 * one.number :][:8]
        for one in each(Feed, ranks):
            one.fields = {"D.epoch": one.epoch}
        draw = {"loader": 0, "epoch": 1, "worker": 0, "fields": {"D.epoch": kept}}
        draw = event(Draw, where="fetch", **draw)
        found = report(*([*own, draw] for own in ranks), steps=0)
        assert named(found) == wanted


def test_a_few_batches_of_later_epochs_have_contents(monkeypatch):
    found = written(monkeypatch)
    monkeypatch.setattr(recorder, "step", 99)
    for count, before in ((7, 63), (8, 0), (7, 64)):
        loaders = Loaders()
        loaders.late = before
        loaders.read(Pass(0, 1, batches=count), [], [0, 1], torch.ones(2, 3), 0.0)
    assert [bool(one.rows) for one in found] == [True, False, False]


@pytest.mark.parametrize("acts", [True, False])
def test_ranks_go_their_own_way_in_reinforcement_learning(acts):
    ranks = [loop([*range(rank, 480, 2)]) for rank in (0, 1)]
    for rank, own in enumerate(ranks):
        seen = array("q", [x for one in each(Input, [own]) for x in one.rows])
        own.append(event(Result, what="seen", guesses=seen[: len(seen) * acts]))
        length = "length of input 1 of the network"
        own += measured([{length: n % 7 + 25 * rank} for n in range(30)])
    assert ("ranks_differ" in named(report(*ranks))) != acts


@pytest.mark.parametrize("sizes", [(8, 8), (8, 4)])
def test_ranks_with_unequal_shares_may_weight_their_losses(sizes):
    ranks, draws = [fed([*range(rank, 480, 2)]) for rank in (0, 1)], random.Random(0)
    for rank, own in enumerate(ranks):
        rows = [array("q", range(sizes[rank])) for _ in range(30)]
        own += [event(Input, n, rows=x, loaded=True) for n, x in enumerate(rows)]
        own += measured([{"loss of a": 1 + rank + draws.random()} for _ in range(30)])
    wanted = {"ranks_differ"} if sizes == (8, 8) else set()
    assert named(report(*ranks, steps=0)) == wanted


def test_inputs_and_labels_that_differ_between_the_ranks():
    """Targets that are not from the batch may be positions, which depend on the rank."""
    length, draws = "length of input 1 of the network", random.Random(0)

    def constant(tensor, spread):
        return lambda rank: {f"mean of {tensor}": rank, f"spread of {tensor}": spread}

    for loader, values, apart in (
        (None, lambda rank: {length: draws.randint(8, 30)}, False),
        (None, lambda rank: {length: draws.randint(8, 30) + 25 * rank}, True),
        (0, constant("tensor 2 of the batch", 2), True),
        (None, constant("targets of a", 2), False),
        (None, constant("targets of a", 0), True),
    ):
        ranks = [fed([*range(rank, 480, 2)]) for rank in (0, 1)]
        for rank, own in enumerate(ranks):
            own += measured([values(rank) for _ in range(30)], loader=loader)
            own += measured([{"loss of a": draws.random()} for _ in range(30)])
        assert named(report(*ranks, steps=0)) == ({"ranks_differ"} if apart else set())


@pytest.mark.parametrize("right", [True, False])
def test_what_comes_again_on_each_rank_is_no_sample(right):
    """Such as discrete states; a graph, of which each rank uses other nodes in each step."""
    wanted = set() if right else {"same_samples"}
    states = [random.Random(seed).choices(range(400), k=320) for seed in (1, 2)]
    ranks = [fed(one if right else [*range(320)], stream=True) for one in states]
    assert named(report(*ranks, steps=0)) == wanted
    graph = loop([*range(12)] * 40 if right else [*range(480)], 0)
    assert named(report(graph, graph)) == wanted
    targets = [array("d", [rank * right] * 12) for rank in (0, 1)]
    ranks = [[Targets(count=12, values=x, step=n) for n in range(40)] for x in targets]
    assert named(report(*(loop([*range(480)], 0) + x for x in ranks))) == wanted


def drawn(seed, count=20, **more):
    draws, line = random.Random(seed), {"name": "rand", "place": "a.py:5", "size": 8}
    line |= more
    return [event(Drawn, k, **line, value=draws.getrandbits(40)) for k in range(count)]


def test_equal_draws_are_named_and_own_generators_forbid_held():
    often = drawn(0)[:16] + drawn(1)[16:]
    assert named(report(drawn(0), often)) == {"same_random_numbers"}
    trained = [event(Input, 30, rows=array("q", range(16)))]  # after these draws
    assert law(report(drawn(0) + trained, often + trained), 3) == "not judged"
    assert law(report(drawn(0), drawn(1)), 3) == "held"
    scans = [Own(states=[n, 7]) for n in (1, 2, 3)]
    assert law(report(drawn(0) + scans, drawn(1) + scans), 3) == "not judged"
    for shift in (0, 1, 5):
        rows = [[[n, *range(n + k, n + k + 5)] for n in (100, 200)] for k in (0, shift)]
        ranks = [[Own(states=one, step=3) for one in own] for own in rows]
        assert ("same_random_numbers" in named(report(*ranks))) == (shift < 5)


@pytest.mark.parametrize("count", [2, 3, 12])
def test_draws_that_are_equal_from_a_later_step_on(count):
    step, ranks = 40 - count, []
    seed = Seed(generator="torch", call="torch.manual_seed(7)", place="a.py:3")
    for rank in (0, 1):
        later = [replace(x, step=step + x.step) for x in drawn(2, count)]
        ranks.append([*drawn(rank, step), seed, *later])
    found = report(*ranks)
    assert law(found, 3) == ("held" if count < 3 else "broken")
    for one in found.findings:
        text = f"in {count} of 40 steps, torch.rand() gives"
        assert one.what.startswith(text) and one.place == "a.py:3"


def test_the_origin_of_equal_states_is_named():
    """A resumed run restores rank 0's state; Lightning sets a seed, and restores this state."""

    def rank(number, *calls):
        draw = {"where": "forward", "count": 9, "drops": True, "place": "a.py:8"}
        found = [Seed(generator="torch", call=x[2:], place=x[0]) for x in calls]
        for k in range(20):
            states = {"torch": k if k > 11 else hash((k, number))}
            found.append(event(Draw, k, **draw, states=states, time=k + 1))
        return found

    seed, state = "2 seed(7)", "2 torch.set_rng_state()"
    for calls in ([], [state], [seed, state], ["1 seed(7)", state, state]):
        found = report(rank(0, *calls), rank(1, *calls))
        assert named(found) == {"same_random_numbers"}
        one, saved = found.findings[0], bool(calls) and seed not in calls
        assert one.place == ("2" if calls else "a.py:8")
        assert ("set_rng_state()" in one.what) == one.mend.startswith("Save") == saved


def test_accuracies_and_what_they_belong_to_are_read_from_text():
    for text, *wanted in (
        ("63 of 76 right", "accuracy", 63, 76),
        ("acc: 0.83 (63/76)", "accuracy", 0.83, None),
        ("obj 1.2x top1_err=12.5%", "error", 12.5, None),
        ("Acc@1  60.00 ( 50.00)", "accuracy", 50, None),
    ):
        first = next(numbers(text))
        assert [first.kind, first.value, first.count] == wanted
    for text, splits in (
        ("Train/Val Loss 0.5 0.6, acc: 0.7/0.8", "any any any any"),
        ("loss 0.5, acc 0.8, val loss 0.6, best val acc 0.9", "any  val val"),
    ):
        assert " ".join(one.split for one in results(text)) == splits


def test_comparisons_do_not_wait_for_a_gpu(monkeypatch):
    """Only read() decides which comparison of an output has its predicted classes."""
    watcher, classes, found = Results(), torch.arange(40), written(monkeypatch)
    with torch.no_grad():
        for output, one in enumerate((classes, classes + 1, classes)):
            watcher.guesses, watcher.tries, watcher.source = [classes], 0, "net"
            watcher.outputs = output
            for labels in (one, classes.clone()):
                watcher.equal(torch.eq, one, labels)
    assert not found
    watcher.read()
    assert [sum(one.values) for one in found if one.what == "hits"] == [40, 0, 40]


@pytest.mark.parametrize("turned", [False, True])
def test_top_k_accuracies_of_a_loop(turned, monkeypatch):
    watcher, found, labels = Results(), written(monkeypatch), torch.arange(40) % 7
    scores = torch.rand(40, 7, generator=torch.Generator().manual_seed(0))
    best, targets = scores.topk(3).indices, labels[:, None]
    if turned:
        best, targets = best.t(), labels.view(1, -1).expand(3, 40)
    with torch.no_grad():
        watcher.on_output(torch.nn.Identity(), scores, None)
        right = watcher.equal(torch.eq, best, targets).sum() / 40
    watcher.read()
    for k, share, wanted in ((3, right, "held"), (2, 1.0, "not"), (4, right, "not")):
        own = [*found, line(f"prec@{k} {share:.4f}", inf)]
        assert law(report(own, steps=0), 7).startswith(wanted)


def line(text, time=3.0, step=0):
    """Return a printed line."""
    return event(Printed, step, text=text, place="a.py:8", time=time)


def sums(what, values=(), weights=None, at=1.0, **more):
    """Return the sums that doctor computes from one batch at this time."""
    weights = array("d", [1.0] * len(values) if weights is None else weights)
    more = {"values": array("d", values), "weights": weights} | more
    return event(Result, what=what, at=at, time=at, **more)


def validated(text, **more):
    """Return the events of a rank that validates 40 samples, 30 correctly, and prints a result."""
    guesses = array("q", [k % 4 for k in range(40)])
    own = {**PASS, "number": 0, "guesses": guesses}
    hits = sums("hits", [k < 30 for k in range(40)], **own, **more)
    pairs = sums("pairs", guesses, [*guesses[20:], *[1.0] * 20], 2.0, **own)
    return [hits, pairs, line(text)]


def test_printed_accuracies_are_recomputed():
    assert law(report(validated("acc 0.7500"), steps=0), 7) == "held"
    found = report(validated("acc 0.7500, mIoU 0.3312"), steps=0)
    assert law(found, 7) == "not judged" and not named(found)
    for other, wanted in ((0.3, "held"), (0.4, "not judged")):
        one, two = (f"acc 0.7500, kappa {x}, lr {x / 3} in {x} s" for x in (0.3, other))
        assert law(report([*validated(one), line(two)], steps=0), 7) == wanted
    found = report(validated("acc 0.6250"), steps=0)
    assert named(found) == {"wrong_number"}
    assert "labels of other samples" in found.findings[0].what
    first, _, text = validated("acc 0.6200")  # 31 of 50, of two loaders
    other = sums("hits", [1.0, *[0.0] * 9], loader=1, epoch=0, guesses=first.guesses)
    assert law(report([first, other, text], steps=0), 7) == "held"
    assert OTHER.search("loss 0.312, R@1 78.50") and OTHER.search("recall@10: 0.5")
    assert not OTHER.search("precision bf16, map-style") and OTHER.search("F1 0.91")


@pytest.mark.parametrize("divisor", [1, 5, 8])
def test_losses_that_are_off_by_a_batchs_size_are_named(divisor):
    given = {"names": ["v"], "each": 1, "used": [1.0], "local": [[1.0]]}
    events = [event(Update, **given, passes=[one_pass()])]
    events += [event(Epoch, **PASS, samples=16)]
    for epoch, losses in enumerate([(0.3, 0.5), (0.4, 0.6)]):
        own = {"loader": 0, "epoch": epoch}
        for number, loss in enumerate(losses):
            given = {"number": number, **own}
            events += [event(Batch, **given, indices=array("q", range(8)))]
            events += [sums("root", [loss], at=epoch, trains=True, **given)]
        end = {"whole": True, "batches": 2, "steps": 2, "time": epoch + 0.1}
        text = f"recon {sum(losses) / 2 / divisor:.4f}"
        events += [event(EpochEnd, **own, **end), line(text, epoch + 0.2)]
    found = report(events, steps=0)
    assert named(found) == ({"wrong_number"} if divisor == 8 else set())


@pytest.mark.parametrize("how", ["", "eval", "twice", "training data"])
def test_a_result_of_a_network_in_training_mode(how):
    rows = array("q", [*range(40)] * (1 + (how == "twice")))
    hits, _, text = validated("acc 0.7500", training=how != "eval")
    hits = replace(hits, loader=None, epoch=None)
    fed = event(Input, rows=array("q", range(30, 38) if "data" in how else [77] * 8))
    found = report([fed, sums("seen", guesses=rows), hits, text], steps=0)
    assert named(found) == (set() if how else {"printed_in_training_mode"})


def test_the_mode_of_a_network_is_recorded(monkeypatch):
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
    watcher, weights = Results(), [network[0].weight]
    for own, mode in ((weights, True), (weights, False), ([], True)):
        known(monkeypatch, *own)
        with torch.no_grad():
            watcher.on_output(network.train(mode), torch.ones(4, 2), None)
            watcher.on_input(network, [torch.ones(4, 2), torch.ones(9, 9)])  # a mask
        assert watcher.training == (own == weights and mode)
    assert len(watcher.waiting[-1][0]["guesses"]) == 4


def test_passes_over_equal_inputs_are_judged_apart():
    """Without a loader, the script validates twice, and restores the best weights in between."""
    events = []
    for at, right in ((0.0, 30), (2.0, 35)):
        hits = sums("hits", [k < right for k in range(40)], at=at + 0.5, after=3)
        events += [sums("seen", at=at, after=3, guesses=array("q", range(40))), hits]
        events.append(line(f"acc {right / 40:.4f}", at + 1, step=3))
    assert law(report(events, steps=0), 7) == "held"


def test_gradients_are_no_sums(monkeypatch):
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
    weights[0].grad, weights[1].grad = torch.ones(3), torch.ones(3).to_sparse()
    known(monkeypatch, *weights)
    owner = Meeting().owner
    assert not (owner(torch.ones(3)) or owner(weights[1].grad))
    weights[2].grad = torch.ones(3)  # in the same backward pass
    assert owner(weights[0].grad.view(3)) and owner(weights[2].grad)
    stale, weights[2].grad = weights[2].grad, None
    assert not owner(stale)
    assert given([weights[2].detach(), 3]) == ["weight 3 of shape (3,)"]
    assert given([weights[2].detach().clone()]) == []


def calls(values, field="value", **more):
    """Return the calls of a collective in which a field has these values."""
    given = {"name": "all_reduce", "sent": "1 x float32", "place": "a.py:4"} | more
    return [event(Call, n // 3, **given, **{field: x}) for n, x in enumerate(values)]


def reduced(size):
    """Return a function that returns a rank's call in a step, which sums its metrics."""
    sent = f"{size} x float64"
    return lambda rank, n: calls([size * (0.5 + n / 10, 0.4)[rank]], step=n, sent=sent)


def scored(*ranks):
    """Return a function that returns a rank's scores in a step: their values and labels."""
    given = {"name": "f1_score", "place": "a.py:4", "count": 9, "time": 0.5}
    return lambda rank, n: [
        event(Scored, n, value=value + n / 20, truth=truth, passes=passes, **given)
        for passes, (value, truth) in enumerate(ranks[rank])
    ]


def evaluated(shift):
    """Return a function that returns the samples that a rank evaluates in a step."""
    rows = [array("q", range(shift * rank, shift * rank + 40)) for rank in (0, 1)]
    return lambda rank, n: [sums("seen", at=0.1, after=n, guesses=rows[rank])]


def test_metrics_of_parts_of_the_data():
    """A mean IoU may be a mean over samples, unless each rank has one IoU per class."""
    for events, words, printed, wanted in (
        (reduced(4), "mIoU", 0.45, "mean of"),
        (reduced(4), "mIoU", 0.46, ""),
        (reduced(1), "mIoU", 0.45, ""),  # perhaps a mean over samples
        (reduced(1), "AUC", 0.45, "mean of"),
        (reduced(4), "norm", 0.45, ""),
        (scored([(0.5, 1), (0.9, 2)], [(0.6, 3)]), "val F1", 0.7, "mean of f1_score()"),
        (scored([(0.5, 1), (0.9, 2)], [(0.6, 3)]), "val F1", 0.82, ""),
        (scored([(0.5, 1)], [(0.9, 3)]), "val F1", 0.7, "mean of f1_score() over"),
        (scored([(0.5, 1)], [(0.9, 3)]), "val F1", 0.5, "its own samples only"),
        (scored([(0.5, 1)], [(0.9, 1)]), "val F1", 0.5, ""),  # as if of all samples
        (scored([(0.7, 1)], []), "val F1", 0.7, ""),
        (evaluated(40), "val MAE", 0.1, "its own 40 samples only"),
        (evaluated(0), "val MAE", 0.1, ""),  # all ranks evaluate all samples
        (evaluated(40), "reduced val MAE", 0.1, ""),  # it has received other sums
        (evaluated(40), "val MAE of rank 0", 0.1, ""),
        (evaluated(40), "train MAE", 0.1, ""),
        (evaluated(40), "reward", 0.1, ""),
    ):
        ranks = [[x for n in range(3) for x in events(rank, n)] for rank in (0, 1)]
        for n in range(3):
            ranks[0].append(line(f"{words} {printed + n / 20:.4f}", 1.0, n))
            ranks[0][-1].exchanged = 0.5 * words.startswith("reduced")
        found = report(*ranks)
        assert named(found) == ({"partial_metric"} if wanted else set())
        assert wanted in str(found.findings)


def test_results_of_metrics_are_recorded(monkeypatch):
    found, metrics = written(monkeypatch), SimpleNamespace(__name__="metrics", int=int)
    metrics.f1 = lambda y_true, y_pred, average="": 0.5
    metrics.rand = lambda labels_true, labels_pred: 0.5
    watch(metrics)
    for truth in ([1, 0, 0], [0, 0, 1], [1, 1, 0]):
        assert metrics.f1(y_pred=[1, 1, 1], y_true=truth) == metrics.rand([1], [1])
    assert metrics.f1([1], [1], average="samples") == 0.5
    assert [(one.name, one.count, one.value) for one in found] == [("f1", 3, 0.5)] * 3
    assert found[0].truth == found[1].truth != found[2].truth


def test_a_printed_loss_that_has_been_divided():
    """The graph shows the last divisor of a loss, but not how the loss was averaged."""
    for outer, local, printed, wanted in (
        ([0.5], [[1.0, 1.0]] * 2, "0.3", "broken"),
        ([0.5], [[1.0, 1.0]] * 2, "0.6", "held"),
        ([0.5], [[1.0, 0.0], [0.0, 1.0]], "0.3", "held"),  # losses of two networks
        ([], [[1.0, 1.0]] * 2, "0.3", "not judged"),
    ):
        entry = one_pass([tuple(Term(0.1, ""))], outer=outer, loader=None, epoch=None)
        given = {"names": ["v", "w"], "each": 1, "used": [1.0, 1.0], "local": local}
        events = [event(Epoch, **PASS, samples=9)]
        events += [event(Update, **given, passes=[entry] * 2)]
        events += [sums("root", [0.3], **PASS, number=0, trains=True)]
        events += [sums("loss", [0.5], at=2.0, source=1, after=1)]
        events += [event(Step, **PASS, watched=True)]
        events += [EpochEnd(**PASS, whole=True, batches=1, steps=1)]
        text = f"loss {printed}000 val_loss 0.5000"
        events += [line(text, time, step=1) for time in (3.0, 4.0)]
        assert law(report(events, steps=0), 7) == wanted


def test_a_rank_that_fails_because_the_other_one_leaves_the_loop():
    """A library ends rank 0, without a Python error, while rank 1 is in backward()."""
    for step in (3, 4):
        failed = event(Failed, step, text="Connection closed by peer", place="a.py:7")
        job = made([event(Call, 3, name="all_reduce")], [failed], steps=0)
        job.processes[0].events.pop()  # its Exit
        (found,) = examine(job).findings
        assert ("does not and is at a.py:7 instead" in found.what) == (step == 3)


@pytest.mark.parametrize("other", ["bac", "abd"])
def test_a_loop_over_names_has_one_order_on_all_ranks(other):
    both = 2 * "abc", 2 * other  # two loops, such as for training and validation
    ranks = [calls([{"k": x} for x in keys], "keys") for keys in both]
    for one in each(Call, ranks):
        one.step = 0
    found = report(*ranks)
    assert named(found) == ({"collectives_differ"} if other == "bac" else set())
    assert all(": a on rank 0, b on rank 1" in one.what for one in found.findings)
    for n, one in enumerate(each(Call, ranks)):
        one.passes = n % 3
    assert not named(report(*ranks))
    ranks = [calls([{"names": "\n".join(keys)}], "keys") for keys in both]  # one stack
    assert len(named(report(*ranks))) == (other == "bac")


@pytest.mark.parametrize("names", ["abab", "baab", "bbbb", "cdcd"])
def test_one_call_sums_the_gradient_of_one_weight(names):
    found = report(calls("abab", "weight"), calls(names, "weight"))
    assert named(found) == ({"collectives_differ"} if names[0] == "b" else set())
    for one in found.findings:
        assert "call 1 sums the gradient of a on rank 0, b on rank 1" in one.what
        assert one.mend.startswith("Use" if names == "baab" else "Sum zeros")


def test_the_indices_and_strings_around_a_call():
    seen, kept = [], []

    def step(positions, labels, few):  # pytest adds locals() to functions with assert
        return indices(sys._getframe(), 8)

    def reduce(key):
        seen.append(variables(sys._getframe(1), torch.zeros(1)))

    def loop():
        for name in ("a", "b", "x" * 99):
            reduce(name)

    def careful(first):
        kept.append(locals())
        second = "b"
        reduce(second)

    for few in ([3, 1, 4, 15, 9, 2, 6, 5], []):
        found = step(torch.arange(8), [17] * 8, torch.tensor(few))
        assert [*(found or ())] == few
    assert shuffled([[3, 0], [2, 1]]) == (4, [3, 0, 2, 1])  # batches of indices
    assert shuffled([(0, 7), (1, 7)])[0] == 2 and shuffled([Path()])[0] == 0

    loop()
    careful("a")
    assert [one.get("name") for one in seen] == ["a", "b", None, None]
    assert "second" not in kept[0]
    assert ("second" in seen[3]) == (sys.version_info >= (3, 13))


@pytest.mark.parametrize("start, size", [(2, 8), (4, 8), (6, 8), (7, 8), (2, 4)])
def test_a_resume_must_not_read_again_what_was_read(start, size):
    kept = {"path": "a.pt", "mark": 1, "counts": {}, "moment": "loaded"}
    own = fed(HALVES[0], whole=0, samples=128, length=size)
    later = fed([*range(16 * start, 128, 2)], whole=0, samples=128, length=8 - start)
    later[3:3] = event(Rank, world_size=1 + start // 7), event(Kept, **kept)
    found = report([*own, event(Kept, **kept | {"moment": "saved"}), *later], steps=0)
    assert ("read_again" in named(found)) == (start in (2, 6) and size == 8)


def test_short_steps_are_not_slow():
    for wall, wanted in ((0.005, []), (0.2, ["bottleneck"] * 2)):
        spans = [("data", 0.0, 0.4 * wall), ("backward", 0.0, 0.001)]
        rows = [event(Spans, wall=wall, spans=spans) for _ in range(9)]
        assert [x.check for x in report(rows, rows).findings] == wanted
    for often, wanted in ((1, []), (9, ["bottleneck"])):  # the first call connects
        work = {"wall": 1.0, "spans": [("backward", 0.0, 1.0)]}
        rows = [event(Spans, calls={"gather()": 0.9}, **work)] * often
        rows = [event(Spans, **work)] * 9 + rows
        assert [x.check for x in report(rows, rows).findings] == wanted


ALONE = """
import contextlib, gc, sys, weakref, torch
with torch.device("meta"):
    assert torch.rand(2).is_meta and torch.tensor([1]).is_meta
@torch.jit.script
def draw(x): return x + torch.rand(3)
class Order(list):
    pass
order, net, x = Order(range(8)), torch.nn.Linear(4, 4), torch.randn(8, 4)
optimizer, gone = torch.optim.SGD(net.parameters(), 0.1), weakref.ref(net)
data, chosen = torch.utils.data.Subset(x, order), weakref.ref(order)
next(iter(torch.utils.data.DataLoader(data, 4)))
dist = torch.distributed
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.P2POp(dist.isend, x, 0)
torch.save([net.state_dict(), optimizer.state_dict()], __file__ + ".pt")
for _ in range(70):
    net(x).sum().backward()
    optimizer.step()
    print("\\rloss 0.5" + 99 * " ", end="")
here, look = sys.modules["_doctor.moments"].Moments.here, torch.nn.Module()
look.forward = lambda x: (x and look(x - 1)) + here.depth + 9 * len(look._forward_hooks)
for number, total in ((2, 6), (None, 0), (1, 3)):
    with contextlib.suppress(TypeError):
        assert look(number) == total
    assert here.depth == 0
del net, optimizer, data, order
gc.collect()
assert gone() is None and chosen() is None
assert len(sys.modules["_doctor.results"].Results.here.line) < 200
assert "Own" in {one.__name__ for one in sys.modules["_doctor.record"].recorder.written}
"""
NESTED = """
import numpy, torch
class Crop(torch.nn.Module):
    def forward(self, x):
        return x + torch.rand(4)
class Data(list):
    crop = Crop()
    def __getitem__(self, index):
        return self.crop(torch.ones(4))
class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight
    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            return None, *torch.autograd.grad(x @ weight, [weight], gradient)
numpy.random.default_rng(0).permutation(9)
net, loss = torch.nn.Linear(4, 4), torch.nn.MSELoss()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
net.forward = lambda x: Again.apply(x, net.weight) + net.bias
for x in torch.utils.data.DataLoader(Data(range(8)), 4):
    optimizer.zero_grad()
    loss(net(x), torch.ones(4, 4)).backward()
    optimizer.step()
"""


def watched(folder, script):
    """Run a script as a watched process, and return what it has recorded."""
    (folder / "a.py").write_text(script)
    hook = {"PYTHONPATH": str(ROOT / "doctor/hook"), "DOCTOR_FOLDER": str(folder)}
    ended = run("python", str(folder / "a.py"), **hook, RANK="0", WORLD_SIZE="1")
    assert ended.returncode == 0, ended.stderr
    return read(folder).processes


def test_a_watched_process_is_left_alone(tmp_path):
    """doctor keeps a default device, lets networks be freed, and does not disturb TorchScript."""
    assert watched(tmp_path, ALONE)


def test_modules_in_a_data_set_and_gradients_inside_a_backward_pass(tmp_path):
    """Neither a crop nor a loss is a network; a checkpointed gradient counts once."""
    (process,) = watched(tmp_path, NESTED)
    assert [one.where for one in process.of(Draw)] == ["fetch", "fetch"]
    assert len(process.of(Input)) == 2 and len(process.of(Order)) == 1
    for one in process.of(Update):
        assert one.local[0] == pytest.approx(one.used)
