"""Measure the network between a job's processes; start it with the job's launcher.

    torchrun --standalone --nproc-per-node=2 scripts/network.py

Rank 0 prints where each rank runs, the time and bandwidth of all-reduces (NCCL on GPUs,
Gloo on CPUs), how long a training step's all-reduces would take, and the slowest link.
A GB is 10^9 bytes.
"""

import argparse
import math
import os
import socket
from itertools import combinations, pairwise
from statistics import fmean, median
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

SIZES = [1024 * 4**power for power in range(10)]  # bytes: 1 KiB to 256 MiB
PAIR = 64 * 2**20  # bytes of the all-reduces between two hosts
BUCKET = 25 * 2**20  # bytes; DDP's default, bucket_cap_mb=25
SLOW = 0.6  # pairs slower than this share of the fastest pair have a slow link


def bandwidths(size: int, seconds: float, processes: int) -> tuple[float, float]:
    """Return an all-reduce's algorithm bandwidth and its bus bandwidth, in bytes/s.

    Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    return size / seconds, size / seconds * 2 * (processes - 1) / processes


def fit(times: dict[int, float]) -> tuple[float, float]:
    """Fit time = latency + size / bandwidth; return latency (s), bandwidth (bytes/s).

    `times` maps bytes to seconds. The fit minimizes the squared relative errors, so
    that small sizes count as much as large ones. The formula is from nccl-tests' page.
    """
    rows = [[1 / seconds, size / seconds] for size, seconds in times.items()]
    rows = torch.tensor(rows, dtype=torch.float64)
    solution = torch.linalg.lstsq(rows, torch.ones_like(rows[:, :1])).solution
    return solution[0].item(), 1 / solution[1].item()


def predict(parameters: float, latency: float, bandwidth: float) -> float:
    """Predict the seconds that a step's fp32 all-reduces take, from fit()'s results."""
    buckets = math.ceil(4 * parameters / BUCKET)
    return buckets * latency + 4 * parameters / bandwidth


def pairs_of(hosts: list[str]) -> list[tuple[str, str]]:
    """Return the pairs to measure: all pairs of up to 8 hosts, or else neighbours."""
    return [*(combinations(hosts, 2) if len(hosts) <= 8 else pairwise(hosts))]


def slowest_link(speeds: dict[tuple[str, str], float]) -> str:
    """Return a sentence about the slowest link, given each pair's speed in bytes/s."""
    name, limit = " - ".join(min(speeds, key=speeds.get)), SLOW * max(speeds.values())
    slow = [pair for pair, speed in speeds.items() if speed < limit]
    if not slow:
        return f"No link is clearly slower than the others (pairs: {len(speeds)})."
    common = set.intersection(*map(set, slow))
    if len(common) == 1:
        name = f"that of {common.pop()}, which is in all {len(slow)} slow pairs"
    return f"Slowest link: {name}."


def all_reduce_seconds(
    data: Tensor, ranks: list[int], group: dist.ProcessGroup | None = None
) -> float:
    """Return an all-reduce's median time in seconds, averaged over `ranks`.

    All ranks must call this function; ranks that are not in `ranks` only wait.
    """
    times = []
    for _ in range(21 if data.nbytes <= 2**20 else 6):
        if dist.get_rank() in ranks:
            if data.is_cuda:
                torch.cuda.synchronize()
            began = perf_counter()
            dist.all_reduce(data, group=group)
            if data.is_cuda:
                torch.cuda.synchronize()
            times.append(perf_counter() - began)
    of_ranks = [0.0] * dist.get_world_size()
    dist.all_gather_object(of_ranks, median(times[1:] or [0.0]))  # the first warms up
    return fmean(of_ranks[rank] for rank in ranks)


def main() -> None:
    """Measure the network and print on rank 0; every process runs this function."""
    usage = argparse.SUPPRESS  # shortens errors to one line
    parser = argparse.ArgumentParser(usage=usage, description=__doc__.split("\n\n")[0])
    text = "also predict for a model with this many parameters"
    parser.add_argument("--parameters", type=float, default=25.6e6, help=text)
    parameters = parser.parse_args().parameters
    if not 0 < parameters < math.inf:
        parser.error("argument --parameters: must be a positive number")
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        text = "torchrun --standalone --nproc-per-node=2 scripts/network.py"
        parser.error(f"start two or more processes with a launcher: {text}")
    host, processor, device = socket.gethostname(), "CPU", torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if device.index >= torch.cuda.device_count():
            parser.error(f"no GPU for LOCAL_RANK {device.index} on {host}")
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        processor = f"GPU {device.index}, {torch.cuda.get_device_name()}"
    else:
        dist.init_process_group("gloo")
    print_once = print if dist.get_rank() == 0 else lambda text: None
    places = [None] * dist.get_world_size()
    dist.all_gather_object(places, (host, processor))
    groups = {}  # the ranks of each host
    for rank, (host, processor) in enumerate(places):
        print_once(f"rank {rank}: {host}, {processor}")
        groups.setdefault(host, []).append(rank)

    everyone = [*range(len(places))]
    print_once(f"{'bytes':>11} {'ms':>10} {'algbw GB/s':>11} {'busbw GB/s':>11}")
    times = {}
    for size in SIZES:
        data = torch.zeros(size // 4, device=device)
        times[data.nbytes] = seconds = all_reduce_seconds(data, everyone)
        algbw, busbw = bandwidths(data.nbytes, seconds, len(everyone))
        columns = f"{seconds * 1e3:10.3f} {algbw / 1e9:11.3f} {busbw / 1e9:11.3f}"
        print_once(f"{data.nbytes:11,} {columns}")

    latency, bandwidth = fit(times)
    errors = [abs((latency + s / bandwidth) / t - 1) for s, t in times.items()]
    text = f"fit: {latency * 1e3:.3f} ms + bytes / {bandwidth / 1e9:.3f} GB/s"
    print_once(f"{text}, off by {median(errors):.0%} (median) to {max(errors):.0%}")
    for count, model in {parameters: "your model", 25.6e6: "ResNet-50"}.items():
        text = f"{model}, {count / 1e6:,.1f} million parameters, all-reduces per step:"
        print_once(f"{text} {predict(count, latency, bandwidth) * 1e3:,.1f} ms")

    if len(groups) == 1:
        groups = {f"rank {rank}": [rank] for rank in everyone}
    speeds, data = {}, torch.zeros(PAIR // 4, device=device)
    for one, other in pairs_of([*groups]):
        ranks = groups[one] + groups[other]
        seconds = all_reduce_seconds(data, ranks, dist.new_group(ranks))
        speeds[one, other] = bandwidths(data.nbytes, seconds, len(ranks))[1]
        print_once(f"{one} - {other}: busbw {speeds[one, other] / 1e9:.3f} GB/s")
    print_once(slowest_link(speeds))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
