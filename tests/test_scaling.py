"""The model of docs/scaling.md, its page and its figure; no time is asserted here."""

import json
import re
import sys

import pytest
import torch
import torch.distributed as dist
import torchvision
from conftest import ROOT, run

from benchmarks import scaling, scaling_expected, scaling_model
from benchmarks.scaling_model import MIB, Cluster, Link, buckets, fit, ring_seconds
from common.errors import UserError

SLOW = Link(alpha=1e-3, beta=1e9)


def test_the_ring_by_hand():
    # 6 messages of 1 ms, and 1.5 times 8 MB at 1 GB/s
    assert ring_seconds(4, 8e6, SLOW) == pytest.approx(6e-3 + 12e-3)
    assert ring_seconds(4, 8e6, SLOW, calls=3) == pytest.approx(18e-3 + 12e-3)
    assert ring_seconds(2, 8e6, SLOW) == pytest.approx(2e-3 + 8e-3)


@pytest.mark.parametrize("n", (2, 3, 4, 7))
def test_a_ring_that_is_played_through_sends_what_the_formula_says(n):
    """Every process passes a part on to its right neighbour, 2 (n - 1) times."""
    parts = [[float(rank * n + part) for part in range(n)] for rank in range(n)]
    expected = [sum(column) for column in zip(*parts, strict=True)]
    messages = 0
    for turn in range(2 * (n - 1)):
        sent = [(rank, (rank - turn) % n) for rank in range(n)]
        values = [parts[rank][part] for rank, part in sent]
        for (rank, part), value in zip(sent, values, strict=True):
            right = (rank + 1) % n
            parts[right][part] = value + (parts[right][part] if turn < n - 1 else 0)
        messages += 1
    assert parts == [expected] * n
    size = 1e6
    by_hand = messages * (SLOW.alpha + size / n / SLOW.beta)
    assert ring_seconds(n, size, SLOW) == pytest.approx(by_hand)


def hosts(**changes) -> Cluster:
    """Eight GPUs a host; a step of 100 ms, 100 MB in two calls."""
    fast, network = Link(1e-5, 1e11), Link(1e-4, 1e10)
    cluster = Cluster(0.1, 256, 100e6, 8, fast, network, bucket=1e9)
    return cluster._replace(**changes)


def test_one_gpu_pays_nothing():
    assert ring_seconds(1, 1e9, SLOW, calls=9) == 0
    assert hosts().all_reduce(1) == 0
    assert hosts().weak(1) == hosts().strong(1, 8192) == (1, 1)


def test_hosts_by_hand():
    # The first bucket and the rest
    inside = 2 * 14 * 1e-5 + 14 / 8 * 1e-3
    assert hosts().all_reduce(8) == pytest.approx(inside)
    assert hosts().all_reduce(4) == pytest.approx(2 * 6 * 1e-5 + 6 / 4 * 1e-3)
    between = 2 * 6 * 1e-4 + 6 / 4 * 1e-2
    assert hosts().all_reduce(32) == pytest.approx(inside + between)
    # A host with one GPU has nothing but its network
    assert hosts(gpus_per_host=1).all_reduce(4) == pytest.approx(between)
    with pytest.raises(ValueError, match="12 GPUs do not fill hosts of 8"):
        hosts().all_reduce(12)


def test_what_is_hidden():
    # The backward pass of a 90 ms step takes 60 ms
    assert scaling_model.step_seconds(0.09, 0.05) == pytest.approx((0.14, 0.09))
    assert scaling_model.step_seconds(0.09, 0.10) == pytest.approx((0.19, 0.13))
    assert scaling_model.efficiency(0.09, 0.09) == pytest.approx((0.5, 0.75))


def test_weak_and_strong():
    cluster = hosts()
    communication = cluster.all_reduce(64)
    assert cluster.weak(64).low == pytest.approx(0.1 / (0.1 + communication))
    # 2,048 images on 64 GPUs are 32 each, an eighth of 256
    strong = cluster.strong(64, 2048).low
    assert strong == pytest.approx(0.0125 / (0.0125 + communication))
    assert cluster.strong(64, 64 * 256) == pytest.approx(cluster.weak(64))


@pytest.mark.parametrize("name", ("resnet18", "resnet50"))
def test_buckets_are_those_of_ddp(name):
    parameters = list(torchvision.models.get_model(name).parameters())
    limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * MIB]
    assigned, _ = dist._compute_bucket_assignment_by_size(
        parameters[::-1], limits, [False] * len(parameters)
    )
    assert buckets(sum(4 * one.numel() for one in parameters)) == len(assigned)


def test_buckets_by_hand():
    sizes = (1, MIB, MIB + 1, 26 * MIB, 26 * MIB + 1)
    assert [buckets(size) for size in sizes] == [1, 1, 2, 2, 3]


@pytest.mark.parametrize("processes", (2, 3, 16))
def test_fit_finds_the_link_that_made_the_data(processes):
    sizes = list(scaling.SIZES)
    exact = [ring_seconds(processes, size, SLOW) for size in sizes]
    assert fit(processes, sizes, exact) == pytest.approx(SLOW)
    torch.manual_seed(0)
    noise = (1 + 0.02 * torch.randn(len(sizes))).tolist()
    seconds = [one * factor for one, factor in zip(exact, noise, strict=True)]
    assert fit(processes, sizes, seconds) == pytest.approx(SLOW, rel=0.1)


def made_report(hidden: bool) -> dict:
    """A machine that follows the model to the letter."""
    size, rounds = 100 * MIB, (1.0, 1.1, 0.9)
    seconds = {}
    for number in range(1, scaling.PROCESSES + 1):
        compute = 0.3 * number
        ring = ring_seconds(number, size, SLOW, buckets(size))
        step = scaling_model.step_seconds(compute, ring)[hidden]
        for what, value in (
            (scaling.COMPUTE, compute),
            (scaling.STEP, step),
        ):
            # A slow round is slow in its computation alone
            drift = [(one - 1) * compute for one in rounds]
            seconds[scaling.named(what, number)] = [value + more for more in drift]
        for one in (*scaling.SIZES, size):
            name = scaling.named(scaling.all_reduce_name(one), number)
            seconds[name] = [ring_seconds(number, one, SLOW)] * len(rounds)
    return {"gradient_bytes": size, "seconds": seconds}


def test_a_machine_that_follows_the_model_shows_no_error():
    report = made_report(hidden=False)
    assert scaling.fitted(report) == pytest.approx(SLOW)
    rows = scaling.checked(report)
    assert list(rows) == [1, 2, 3, 4]
    for row in rows.values():
        error = row["nothing hidden"]["error"]
        assert error == pytest.approx({"median": 0, "low": 0, "high": 0})
    assert rows[2]["all hidden"]["error"]["median"] < -0.1
    hidden = scaling.checked(made_report(hidden=True))
    assert hidden[4]["all hidden"]["error"]["median"] == pytest.approx(0)
    assert hidden[4]["nothing hidden"]["error"]["median"] > 0.1


def test_published_cases_by_hand():
    row, name = scaling_expected.compared, "[case](source)"
    case = next(
        one for one in scaling_expected.PUBLISHED if "VGG-16, P100, 1" in one[0]
    )
    step = 64 / 154
    # 10 buffers of 64 MiB; 3 + 3 messages in a host of 4, 127 + 127 between 128 hosts
    size = 4 * 138.36e6
    communication = 10 * (6 * 5.7e-6 + 254 * 14e-6)
    communication += 6 / 4 * size / 12e9 + 254 / 128 * size / 3.125e9
    low, high = case[-1].weak(512)
    assert low == pytest.approx(step / (step + communication))
    assert high == pytest.approx(step / (step / 3 + communication))
    for efficiency, off in ((low, "inside"), (low - 0.1, "+10 points")):
        found = row("case", "source", 512, 1, efficiency, case[-1])
        assert found["measured by others"] == name and found["off"] == off
    assert row("case", "source", 512, 1, high + 0.05, case[-1])["off"] == "-5 points"


PAGE = (ROOT / "docs" / "scaling.md").read_text()


def test_tables_and_figure_are_those_of_the_model():
    file = ROOT / "results" / "scaling_expected.json"
    assert json.loads(file.read_text()) == scaling_expected.tables()
    svg = scaling_expected.FIGURE.read_text()
    assert svg == scaling_expected.drawn()
    assert "prefers-color-scheme: dark" in svg and svg.count("<polyline") == 12
    report = json.loads((ROOT / "results" / "scaling.json").read_text())
    assert report["check"] == scaling.rows(report)
    assert report["argv"][2] == "benchmarks.scaling" and report["commit"]
    assert len(report["seconds"][scaling.named(scaling.STEP, 4)]) == report["rounds"]


def test_the_words_of_the_page_are_those_of_the_model():
    """What stands above the tables is written by hand."""
    words = " ".join(PAGE.partition("![")[0].split())
    hosts, slow = scaling_expected.a100(100), scaling_expected.a100(25)
    batch = scaling_expected.GLOBAL_BATCH
    amp, tf32 = (8 * case[4] for case in scaling_expected.PUBLISHED[1::-1])
    best = max(scaling.GPUS, key=lambda gpus: gpus * hosts.strong(gpus, batch).low)
    at_best, at_end = (
        scaling.times(hosts.strong(gpus, batch), gpus) for gpus in (best, 1024)
    )
    for sentence in (
        f"takes {hosts.all_reduce(8) * 1e3:.0f} ms of a step of {hosts.step * 1e3:.0f} ms",
        f"would leave {scaling.times(hosts.weak(8), 8)} times",
        f"measured {amp:.1f}, and {tf32:.1f} in TF32",
        f"says {scaling.times(hosts.weak(1024), 1024)} times with 100 Gbit/s a host",
        f"{scaling.times(slow.weak(1024), 1024)} with 25",
        f"{256 * 1024:,} images a step",
        f"With {batch:,} images a step:** {at_best} times on {best} GPUs, {at_end} on",
    ):
        assert sentence in words, sentence


def test_links_of_the_page_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", PAGE)
    assert len(links) > 10
    for link in links:
        assert link.startswith("https://") or (ROOT / "docs" / link).exists(), link


def test_a_table_for_your_own_gpus(monkeypatch, capsys):
    flags = "--step-milliseconds 100 --parameters 25e6 --gpus-per-host 4"
    flags += " --network-gigabits 80 --network-microseconds 100 --gradient-bytes 4"
    monkeypatch.setattr(sys, "argv", ["scaling.py", *flags.split()])
    scaling.main()
    lines = capsys.readouterr().out.splitlines()
    gpus = [int(line.split()[0]) for line in lines[2:]]
    assert gpus == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    # 100 MB through two hosts' 10 GB/s, 5 buckets of 2 messages of 0.1 ms, and the host
    inside = ring_seconds(4, 100e6, Link(3.4e-6, 235e9), 5)
    by_hand = inside + 100e6 / 10e9 + 5 * 2 * 100e-6
    assert f" {by_hand * 1e3:.1f} ms " in lines[5] and lines[5].split()[0] == "8"
    low = 8 * 100 / (100 + by_hand * 1e3)
    assert f"{low:.1f} to 8.0" in lines[5]


@pytest.mark.parametrize(
    "flags, problem",
    (
        ("--step-milliseconds 0", "--step-milliseconds"),
        ("--step-milliseconds 100 --network-gigabits 0", "--network-gigabits"),
        ("--step-milliseconds 100 --gpus-per-host 2.5", "--gpus-per-host"),
        ("--parameters 1e6", "needs --step-milliseconds"),
        ("0", "ROUNDS"),
        ("--gpus 8", "--gpus"),
    ),
)
def test_bad_input_is_one_line(flags, problem, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["scaling.py", *flags.split()])
    monkeypatch.setattr(scaling, "measure", lambda rounds: pytest.fail("it measures"))
    with pytest.raises(UserError, match=problem) as error:
        scaling.main()
    assert "\n" not in str(error.value)


def test_bad_input_ends_with_status_2():
    ended = run(sys.executable, "-m", "benchmarks.scaling", "--step-milliseconds", "x")
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
