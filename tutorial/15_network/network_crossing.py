"""Measure at which batch per process communication takes as long as computing.

python tutorial/15_network/network_crossing.py [FILE.json]    # saves the measurements
"""

import json
import sys
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

LAYERS, WIDTH, LINK = 8, 512, 200e6  # LINK: bytes per second
BATCHES, ROUNDS = [32, 64, 128, 256, 512], 21


def slow_link(_, bucket):
    """All-reduce a bucket, but not faster than the link would."""
    began, gradients = perf_counter(), bucket.buffer()
    dist.all_reduce(gradients)
    sleep(max(0, began + gradients.nbytes / LINK - perf_counter()))  # uses no CPU
    arrived = torch.futures.Future()
    arrived.set_result(gradients / dist.get_world_size())
    return arrived


def report(size: int, rows: list[list[float]]) -> str:
    """Return the predicted and the measured crossing."""
    predicted, found = rows[-1][0] / rows[-1][1] * size / LINK, float("nan")
    text = "samples  computing  communication\n"
    for n, alone, step in rows:
        text += f"{n:7} {alone * 1e3:7.1f} ms {(step - alone) * 1e3:11.1f} ms\n"
    for (low, *one), (high, *other) in pairwise(rows):
        a, b = (2 * alone - step for alone, step in (one, other))
        if a < 0 <= b:  # computing takes less time at `low`, and more at `high`
            found = low + (high - low) * a / (a - b)
    text += f"crossing: predicted {predicted:.0f}, measured {found:.0f} samples"
    return f"{text} ({predicted / found - 1:+.0%})\n"


def main(rank: int, port: int, file: str | None) -> None:
    """Both processes run this function; rank 0 reports."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = DDP(nn.Sequential(*layers), bucket_cap_mb=100)  # one bucket: no overlap
    model.register_comm_hook(None, slow_link)
    size = sum(weight.nbytes for weight in model.parameters())
    if rank == 0:
        print(f"{size:,} bytes of gradients, {size / LINK * 1e3:.1f} ms on the link")
    times = {}
    for _ in range(ROUNDS + 1):  # the first round warms up
        for batch in BATCHES:
            for context in (model.no_sync, nullcontext):
                dist.barrier()
                began = perf_counter()
                with context():
                    model(torch.randn(batch, WIDTH)).square().mean().backward()
                dist.barrier()  # both kinds of step wait for the slower process
                times.setdefault((batch, context), []).append(perf_counter() - began)
    medians = {kind: median(took[1:]) for kind, took in times.items()}
    rows = [[n, medians[n, model.no_sync], medians[n, nullcontext]] for n in BATCHES]
    dist.destroy_process_group()
    if rank == 0:
        print(report(size, rows), end="", file=sys.stderr)
        if file:
            Path(file).write_text(json.dumps({"size": size, "rows": rows}))


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(main, args=(store.port, *(sys.argv[1:] or [None])), nprocs=2)
