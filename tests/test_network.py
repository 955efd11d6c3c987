"""The figures of scripts/network.py are consistent, and it names a slow link."""

import os
import re
import sys
from itertools import combinations, pairwise

import pytest
from ranks import Ranks

from scripts import network

LINKS = {"": "No link is", "ab": "link: a - b.", "ad bd cd": "that of d,"}
WRONG = {"": "a launcher: torchrun ", "=x": "float value: 'x'", "=0": "be a positive"}


def measured(sizes):
    """Run the program as one of a launcher's processes; return its all-reduces' bytes and seconds."""
    network.SIZES, network.PAIR = sizes, sizes[-1]
    sys.argv[:] = ["network.py", "--parameters=7e6"]
    network.socket.gethostname = lambda: "aabc"[int(os.environ["RANK"])]
    measure, found = network.all_reduce_seconds, []

    def noted(data, ranks, group=None):
        found.append((data.nbytes, ranks, measure(data, ranks, group)))
        return found[-1][-1]

    network.all_reduce_seconds = noted
    network.main()
    return found


def test_four_processes_of_three_hosts_measure_and_predict(tmp_path):
    """To save time, the test uses no launcher, and omits the largest sizes."""
    sizes = network.SIZES[:8]
    assert sizes == [2**n for n in range(10, 25, 2)]
    with Ranks(tmp_path, 4, measured, sizes=sizes) as ranks:
        found, *_ = ranks.results()
        text = ranks.log(0)
        assert not ranks.log(1)
    pairs = {"a - b": [0, 1, 2], "a - c": [0, 1, 3], "b - c": [2, 3]}
    assert [size for size, *_ in found] == [*sizes, *[sizes[-1]] * 3]
    assert [ranks for _, ranks, _ in found] == [[0, 1, 2, 3]] * 8 + [*pairs.values()]
    for (size, ranks, seconds), pair in zip(found, [None] * 8 + [*pairs], strict=True):
        algbw = size / seconds / 1e9
        busbw = algbw * 2 * (len(ranks) - 1) / len(ranks)
        row = f"{size:11,} {seconds * 1e3:10.3f} {algbw:11.3f} {busbw:11.3f}\n"
        assert (f"{pair}: busbw {busbw:.3f} GB/s\n" if pair else row) in text
    latency, bandwidth = network.fit({size: took for size, _, took in found[:8]})
    predicted = re.findall(r"(\w+), ([\d.]+) million .*: (.*) ms", text)
    assert [name for name, *_ in predicted] == ["model", "50"]
    for _, millions, ms in predicted:
        seconds = network.predict(float(millions) * 1e6, latency, bandwidth)
        assert float(ms.replace(",", "")) == pytest.approx(1e3 * seconds, rel=0.02)
    assert "rank 2: b, CPU\n" in text


def test_fit_busbw_and_prediction_of_a_known_network():
    times = {size: 2e-4 + size / 3e9 for size in network.SIZES}
    assert network.fit(times) == pytest.approx((2e-4, 3e9))
    assert network.bandwidths(8000, 2, 4) == (4000, 6000)
    assert network.predict(25.6e6, 1, 1e9) == pytest.approx(4.1024)  # 4 buckets


def test_a_link_is_named_if_it_is_clearly_slower():
    for slow, words in LINKS.items():
        speeds = dict.fromkeys(combinations("abcd", 2), 9e8) | {("a", "c"): 8e8}
        speeds |= {(one, other): 5e8 for one, other in slow.split()}
        assert words in network.slowest_link(speeds)
    hosts = [f"host{n}" for n in range(40)]
    assert network.pairs_of(hosts) == [*pairwise(hosts)]


@pytest.mark.parametrize("value", WRONG)
def test_wrong_input_is_one_line(value, monkeypatch, capsys):
    flags = [f"--parameters{value}"] if value else []
    monkeypatch.setattr(sys, "argv", ["network.py", *flags])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit, match="2"):
        network.main()
    out, err = capsys.readouterr()
    assert not out and re.fullmatch(f"network.py: error: .*{WRONG[value]}.*\n", err)
