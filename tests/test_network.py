"""The figures of scripts/network.py are consistent, and it names a slow link."""

import re
import sys
from itertools import combinations

import pytest
from cluster.hosts import hosts_missing
from conftest import run
from ranks import Ranks

from scripts import network

# The switch, host number 0, sends only 100 Mbit/s to the last of three hosts
HOSTS = """
export GLOO_SOCKET_IFNAME=eth0 CUDA_VISIBLE_DEVICES= net=network$$
trap 'for n in 0 1 2 3; do ip netns delete $net-$n; done' EXIT
ip netns add $net-0
ip -n $net-0 link add bridge up type bridge
for n in 1 2 3; do
    ip netns add $net-$n
    ip link add eth0 netns $net-$n type veth peer name eth$n netns $net-0
    ip -n $net-0 link set eth$n master bridge up
    ip -n $net-$n addr add 10.78.0.$n/24 dev eth0
    for link in lo eth0; do ip -n $net-$n link set $link up; done
done
tc -n $net-0 qdisc add dev eth3 root tbf rate 100mbit burst 256kb latency 1s
fewer="from scripts import network as n; n.SIZES, n.PAIR = n.SIZES[:6], 2**21; n.main()"
torchrun="torchrun --nnodes 3 --master-addr 10.78.0.1 --no-python --node-rank"
for n in 1 2 3; do
    job="hostname host$n; exec $torchrun $((n - 1)) python -c '$fewer'"
    timeout 120 ip netns exec $net-$n unshare --uts sh -c "$job" &
done
for job in $(jobs -p); do wait $job; done
"""
LINKS = {"": "No link is", "ab": "link: a - b.", "ad bd cd": "that of d,"}
WRONG = {"": "a launcher: torchrun ", "=x": "float value: 'x'", "=0": "be a positive"}
MISSING = hosts_missing()


def check(text, sizes, count):
    """Check the output of `count` processes."""
    rows = re.findall(r"^ *([\d,]+) +([\d.]+) +([\d.]+) +([\d.]+)$", text, re.M)
    rows = [[float(word.replace(",", "")) for word in row] for row in rows]
    assert [row[0] for row in rows] == sizes
    for size, ms, algbw, busbw in rows:
        assert algbw == pytest.approx(size / ms / 1e6, rel=0.01, abs=6e-4)
        assert busbw == pytest.approx(algbw * 2 * (count - 1) / count, abs=1.3e-3)
    latency, bandwidth = network.fit({size: ms / 1e3 for size, ms, _, _ in rows})
    for millions, ms in re.findall(r" ([\d.]+) million .*: (.*) ms", text):
        seconds = network.predict(float(millions) * 1e6, latency, bandwidth)
        assert float(ms.replace(",", "")) == pytest.approx(1e3 * seconds, rel=0.02)


def measured(sizes):
    """Run the program as one process of a launcher."""
    network.SIZES, sys.argv[:] = sizes, ["network.py", "--parameters=7e6"]
    network.main()


def test_two_processes_measure_and_predict(tmp_path):
    """To save time, the test uses no launcher, and omits the largest sizes."""
    sizes = network.SIZES[:8]
    assert sizes == [2**n for n in range(10, 25, 2)]
    with Ranks(tmp_path, 2, measured, sizes=sizes) as ranks:
        ranks.results()
        check(ranks.log(0), [*sizes], 2)
        assert "your model, 7.0 million" in ranks.log(0) and not ranks.log(1)
        assert "ResNet-50, " in ranks.log(0)


def test_fit_busbw_and_prediction_of_a_known_network():
    times = {size: 2e-4 + size / 3e9 for size in network.SIZES}
    assert network.fit(times) == pytest.approx((2e-4, 3e9))
    assert network.bandwidths(8000, 2, 4) == (4000, 6000)
    assert network.predict(25.6e6, 1, 1e9) == pytest.approx(4.1024)  # 4 buckets


@pytest.mark.parametrize("slow", LINKS)
def test_a_link_is_named_if_it_is_clearly_slower(slow):
    speeds = dict.fromkeys(combinations("abcd", 2), 9e8) | {("a", "c"): 8e8}
    speeds |= {(one, other): 5e8 for one, other in slow.split()}
    assert LINKS[slow] in network.slowest_link(speeds)


@pytest.mark.parametrize("value", WRONG)
def test_wrong_input_is_one_line(value, monkeypatch, capsys):
    flags = [f"--parameters{value}"] if value else []
    monkeypatch.setattr(sys, "argv", ["network.py", *flags])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit, match="2"):
        network.main()
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and not printed.out
    assert printed.err.startswith("network.py: error: ") and WRONG[value] in printed.err


@pytest.mark.cluster
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_the_host_with_a_slow_link_is_named():
    ended = run("bash", "-ec", HOSTS)
    assert ended.returncode == 0, ended.stderr
    check(ended.stdout, network.SIZES[:6], 3)
    assert "rank 2: host3, CPU" in ended.stdout and "that of host3," in ended.stdout
