"""Measure at which batch size communication takes as long as computation.

python tutorial/15_network/network_crossing.py
"""

import sys
from contextlib import nullcontext
from itertools import pairwise
from statistics import median
from time import perf_counter, process_time, sleep

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

LAYERS, WIDTH, LINK = 8, 512, 100e6  # LINK: bytes per second
BATCHES, ROUNDS = [64, 128, 256, 512, 1024], 9


def slow_link(took: list[float], bucket):
    """All-reduce a bucket as slowly as the link would; append the seconds to `took`."""
    began, gradients = perf_counter(), bucket.buffer()
    dist.all_reduce(gradients)
    sleep(max(0, began + gradients.nbytes / LINK - perf_counter()))  # uses no CPU
    took.append(perf_counter() - began)
    arrived = torch.futures.Future()
    arrived.set_result(gradients / dist.get_world_size())
    return arrived


def report(size: int, rows: list[list[float]]) -> str:
    """Return the times, and the predicted and measured crossing points, as text."""
    predicted, found = rows[-1][0] / rows[-1][1] * size / LINK, float("nan")
    text = "samples, ms of computing, ms of communication\n"
    for n, _, computing, sending in rows:
        text += f"{n:7} {computing * 1e3:16.1f} {sending * 1e3:20.1f}\n"
    for (low, _, *one), (high, _, *other) in pairwise(rows):
        a, b = (computing - sending for computing, sending in (one, other))
        if a < 0 <= b:  # computing takes less time at `low`, and more at `high`
            found = low + (high - low) * a / (a - b)
    text += f"crossing: predicted {predicted:.0f}, measured {found:.0f} samples"
    return f"{text} ({predicted / found - 1:+.0%})\n"


def main(rank: int, port: int) -> None:
    """Measure steps in both processes; rank 0 prints the report."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = DDP(nn.Sequential(*layers), bucket_cap_mb=100)  # one bucket: no overlap
    model.register_comm_hook(took := [], slow_link)
    size = sum(weight.nbytes for weight in model.parameters())
    if rank == 0:
        print(f"{size:,} bytes of gradients, {size / LINK * 1e3:.1f} ms on the link")
    kinds = model.no_sync, nullcontext
    seconds = {}  # of the CPU, so that other programs do not count
    for _ in range(ROUNDS + 1):
        for batch in BATCHES:
            for kind in kinds:
                x, began = torch.randn(batch, WIDTH), process_time()
                with kind():
                    model(x).square().mean().backward()
                seconds.setdefault((batch, kind), []).append(process_time() - began)
    rows = []  # without the first round, which warms up
    for number, n in enumerate(BATCHES, len(BATCHES)):
        alone, together = (median(seconds[n, kind][1:]) for kind in kinds)
        rows.append([n, alone, together, median(took[number :: len(BATCHES)])])
    dist.destroy_process_group()
    if rank == 0:
        print(report(size, rows), end="", file=sys.stderr)


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(main, args=(store.port,), nprocs=2)
