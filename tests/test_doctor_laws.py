"""doctor's laws, judged on events as a job's processes record them.

Each kind of fault in the laws 1, 2, 3, 7, 9 and 10 has a test: a wrong job is named, and
a law is not held on evidence that the mistake leaves as it is.
"""

import random
from array import array

import pytest
import torch
from conftest import ROOT, run

import doctor.laws  # noqa: F401  its checks
from doctor.draws import Drawn, Own
from doctor.event import Exit, Rank
from doctor.job import Job, Process
from doctor.law import examine
from doctor.laws.meeting import Call
from doctor.laws.printed import OTHER
from doctor.laws.randomness import Draw, Seed
from doctor.laws.ranks import Measured
from doctor.loaders import Batch, Epoch, EpochEnd
from doctor.moments import Step
from doctor.neighbours import Input
from doctor.numbers import numbers
from doctor.reads import Feed
from doctor.results import Measured as Result
from doctor.results import Printed
from doctor.sample import hashes, positions
from doctor.spans import Spans

STEP = {"optimizer": 0, "which": 0, "sharded": False, "rates": [], "threads": 1}
STEP |= {"loader": None, "epoch": None, "place": "a.py:10"}
PASS = {"loader": 0, "epoch": 0}
FED = {"divides": True, "shuffles": True, "repeats": False, "sampler": {}, "workers": 0}
FED |= {"data": {}, "part": None}
OPENED = {"type": "D", "length": None, "batch": None, "place": "a.py:9"}


def report(*ranks, steps=20, **step):
    """Examine a job with these events of each rank, which takes steps after them."""
    processes = []
    for rank, events in enumerate(ranks):
        every = [Rank(own=rank, world_size=len(ranks)), *events]
        for number in range(steps):
            every.append(Step(**STEP | step, step=number))
        every.append(Exit(watched=steps))
        for one in every:
            one.rank = rank
        processes.append(Process(rank, len(ranks), every))
    return examine(Job(processes, status=0))


def named(found):
    """Return the names of the checks that a report names, without notes."""
    return {one.check for one in found.findings if one.level in ("WRONG", "RISK")}


def state(found, law):
    """Return what a report says about a law."""
    return next(one for one in found.verdicts if one.law.number == law)


def fed(samples, epochs=1, stream=False, ids=False, sampler="DistributedSampler"):
    """Return the events of a rank that reads these samples, eight in each batch."""
    found = []
    for epoch in range(epochs):
        own = {"loader": 0, "epoch": epoch}
        kind = {"sampler": sampler, "samples": 64, "stream": stream}
        repeats = sampler == "WeightedRandomSampler"
        feed = Feed(
            **own, **FED | {"divides": not (stream or repeats), "repeats": repeats}
        )
        found += [Epoch(**own, **OPENED, **kind), feed]
        read = samples[epoch] if isinstance(samples[0], list) else samples
        for number in range(len(read) // 8):
            rows = array("q", read[8 * number : 8 * number + 8])
            parts = {"indices": None if stream else rows, "labels": None, "rows": rows}
            batch = Batch(**own, number=number, **parts, ids=rows if ids else None)
            found += [batch, Step(**STEP | own)]
        count = len(read) // 8
        found.append(EpochEnd(**own, whole=True, batches=count, steps=count))
    return found


def test_hashes_do_not_read_one_column():
    images = torch.zeros(32, 28, 28)
    images[:, 8:20, 8:20] = torch.rand(32, 12, 12)
    assert len({*hashes(images)}) == 32 and hashes(images) == hashes(images.clone())
    assert len({one % 28 for one in positions(784, 64)}) > 20


def test_samples_are_counted_in_epochs_of_training_only():
    """A pass without steps, such as the accuracy of the training samples, is none."""
    own = [fed([*range(n, 64, 2)], 2) for n in (0, 1)]
    later = [[one for one in x if getattr(one, "epoch", 0) == 1] for x in own]
    own = [[x for x in one if not isinstance(x, Step) or not x.epoch] for one in own]
    for one in (x for rows in later for x in rows if isinstance(x, EpochEnd)):
        one.steps = 0
    found = report(*own, steps=0)
    held = ["epoch 0: 64 samples read, 64 distinct of 64"]
    assert state(found, 1).evidence == held
    found = report(fed([*range(48)]), fed([*range(16, 64)]), steps=0)
    assert named(found) == {"left_out"} and ": 24 on several" in found.findings[0].what


def test_a_stream_is_not_held_and_its_lost_samples_are_named():
    halves = [*range(0, 64, 2)], [*range(1, 64, 2)]
    orders = [[one, one[::-1]] for one in halves]
    found = report(*(fed(one, 2, stream=True, ids=True) for one in orders), steps=0)
    assert state(found, 1).state == "not judged"
    lost = [[one[:16], one[8:24], one[16:]] for one in halves]
    found = report(*(fed(one, 3, stream=True, ids=True) for one in lost), steps=0)
    assert named(found) == {"left_out"}, found.findings
    assert "32 distinct ones of 64 that all epochs have" in found.findings[0].what


@pytest.mark.parametrize(
    ("kind", "advice"),
    [("stream", "Yield only each"), ("WeightedRandomSampler", "Seed the sampler's")],
)
def test_the_advice_fits_the_loader(kind, advice):
    flags = {"stream": True} if kind == "stream" else {"sampler": kind}
    found = report(*[fed([*range(64)], **flags)] * 2, steps=0)
    assert named(found) == {"same_samples"}
    assert found.findings[0].mend.startswith(advice)


def loop(order, noise=0.1, batch=12):
    """Return the events of a rank that reads rows of a table without a DataLoader."""
    table = random.Random(1)
    rows = [[table.random() for _ in range(12)] for _ in range(480)]
    found, draws = [], random.Random(order[0])
    for step in range(len(order) // batch):
        own = order[batch * step : batch * step + batch]
        few = [[x + noise * draws.random() for x in rows[i]] for i in own]
        keys = array("q", [hash(str(one)) // 9 for one in few])
        given = {
            "network": 0,
            "rows": keys,
            "loaded": False,
            "few": few,
            "whole": False,
        }
        found.append(Input(**given, step=step))
    return found


def test_samples_of_a_loop_are_known_by_their_neighbours():
    """Noise makes all contents distinct."""

    def order(seed):
        return random.Random(seed).sample(range(480), 480)

    found = report(*(loop(order(1)[rank::2]) for rank in (0, 1)))
    assert not named(found) and state(found, 1).state == "not judged"
    found = report(*(loop(order(rank)[rank::2]) for rank in (0, 1)))
    assert named(found) == {"left_out"}, found.findings


def test_a_rank_with_longer_inputs_is_named():
    draws = random.Random(0)

    def rows(rank, longer):
        sizes = [draws.randint(8, 30) for _ in range(30)]
        name = "length of input 1 of the network"
        values = [
            Measured(loader=None, values={name: n + longer}, step=k)
            for k, n in enumerate(sizes)
        ]
        return values + loop([*range(rank, 480, 2)], batch=8)

    assert "ranks_differ" not in named(report(rows(0, 0), rows(1, 0)))
    assert "ranks_differ" in named(report(rows(0, 0), rows(1, 25)))


def drawn(seed, count=20):
    line = {"name": "rand", "place": "a.py:5", "number": 0, "size": 8}
    draws = random.Random(seed)
    return [
        Drawn(**line, value=draws.getrandbits(40), whole=False, step=k)
        for k in range(count)
    ]


def test_equal_draws_are_named_and_own_generators_forbid_held():
    often = drawn(0)[:16] + drawn(1)[16:]
    assert named(report(drawn(0), often)) == {"same_noise"}
    assert state(report(drawn(0), drawn(1)), 3).state == "held"
    scans = [Own(states=[1, 7]), Own(states=[2, 7]), Own(states=[3, 7])]
    found = report(drawn(0) + scans, drawn(1) + scans)
    assert state(found, 3).state == "not judged"


def test_the_origin_of_equal_states_is_named():
    """A resume that restores rank 0's state makes the last draws equal."""

    def rank(number):
        states = [k if k > 11 else (k, number) for k in range(20)]
        draw = {"where": "forward", "number": 0, "count": 9, "drops": True}
        seed = Seed(generator="torch", call="torch.set_rng_state()", place="a.py:3")
        return [
            seed,
            *(
                Draw(**draw, states={"torch": hash(x)}, step=k, time=k + 1)
                for k, x in enumerate(states)
            ),
        ]

    found = report(rank(0), rank(1))
    assert named(found) == {"same_dropout"}
    assert "since torch.set_rng_state()" in found.findings[0].what
    assert found.findings[0].mend.startswith("Save each rank's own state")


@pytest.mark.parametrize(
    ("text", "kind", "value", "count"),
    [
        ("63 of 76 right", "accuracy", 63, 76),
        ("acc: 0.83 (63/76)", "accuracy", 0.83, None),
        ("val err 12.5%", "error", 12.5, None),
    ],
)
def test_accuracies_are_read_from_text(text, kind, value, count):
    first = next(numbers(text))
    assert (first.kind, first.value, first.count) == (kind, value, count)


def validated(line, **more):
    """Return a rank's validation of 40 samples, of which 30 are right, and its print."""
    guesses = [k % 4 for k in range(40)]
    own = {"what": "hits", "source": 0, **PASS, "number": 0, "trains": False}
    hits = array("d", [float(k < 30) for k in range(40)])
    one = Result(
        **own,
        after=0,
        at=1.0,
        values=hits,
        weights=array("d", [1.0] * 40),
        guesses=array("q", guesses),
        time=1.0,
        **more,
    )
    pairs = {
        "values": array("d", guesses),
        "weights": array("d", guesses[20:] + [1.0] * 20),
    }
    other = Result(**own | {"what": "pairs"}, after=0, at=2.0, time=2.0, **pairs)
    return [one, other, Printed(text=line, place="a.py:8", time=3.0)]


def test_printed_accuracies_are_recomputed():
    assert state(report(validated("acc 0.7500"), steps=0), 7).state == "held"
    found = report(validated("acc 0.7500, mIoU 0.3312"), steps=0)
    assert state(found, 7).state == "not judged" and not named(found)
    found = report(validated("acc 0.6250"), steps=0)
    assert named(found) == {"wrong_accuracy"}
    assert "labels of other samples" in found.findings[0].what
    found = report(validated("acc 0.8000", skipped=10), steps=0)
    assert "ignored targets" in found.findings[0].what
    assert not OTHER.search("precision bf16, map-style") and OTHER.search("F1 0.91")


def test_collectives_get_the_same_thing_on_all_ranks():
    def rank(names, values):
        given = {"name": "all_reduce", "sent": "1 x float32", "place": "a.py:4"}
        pairs = [*zip(names, values, strict=True)]
        return [
            Call(**given, weight=x, value=y, step=k) for k in range(3) for x, y in pairs
        ]

    plain, no = ["", "", ""], [None] * 3
    right = report(rank(plain, [1.0, 50.0, 900.0]), rank(plain, [1.1, 46.0, 870.0]))
    assert not named(right) and state(right, 9).state == "held"
    swapped = report(rank(plain, [1.0, 50.0, 900.0]), rank(plain, [870.0, 1.1, 46.0]))
    assert named(swapped) == {"collectives_differ"}
    heads = report(rank(["a", "b", "c"], no), rank(["b", "a", "c"], no))
    assert named(heads) == {"collectives_differ"}


@pytest.mark.parametrize("wall", [0.005, 0.2])
def test_short_steps_are_not_slow(wall):
    own = {"watched": False, "queued": 0.0, "calls": {}, "missing": 0}
    rows = [
        Spans(**own, wall=wall, spans=[("data", 0.0, 0.6 * wall)]) for _ in range(9)
    ]
    found = report(rows, rows)
    assert {x.check for x in found.findings} == {*["bottleneck"] * (wall > 0.05)}


COMPILED = """
import torch
@torch.jit.script
def script(x):
    return x + torch.rand(3) + torch.tensor([1.0, 2.0, 3.0])
print(script(torch.ones(3)).shape, torch.tensor([torch.ones(3).sum(), 4]))
draw = torch.compile(lambda x: x + torch.rand(3), backend="eager", fullgraph=True)
print(draw(torch.ones(3)).shape)
"""


@pytest.mark.full
def test_compilers_know_the_functions_that_doctor_watches(tmp_path):
    (tmp_path / "compiled.py").write_text(COMPILED)
    hook = {"PYTHONPATH": str(ROOT / "doctor/hook"), "DOCTOR_FOLDER": str(tmp_path)}
    ended = run("python", str(tmp_path / "compiled.py"), **hook)
    assert ended.returncode == 0 and ended.stdout.count("[3]") == 2, ended.stderr
