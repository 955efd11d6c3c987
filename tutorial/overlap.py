"""When are the gradients averaged: during the backward pass, or after it?

python tutorial/overlap.py [FILE.json]    # the times go into FILE, for a picture
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile, record_function

LAYERS, WIDTH = 6, 768
PARTS = ("forward", "backward", "optimizer", "AddmmBackward0", "gloo:all_reduce")
Span = tuple[str, float, float]  # what, began, ended; in milliseconds


def one_step(bucket_megabytes: int) -> list[Span]:
    """Profile one training step of six equal layers."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = DDP(nn.Sequential(*layers), bucket_cap_mb=bucket_megabytes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(512, WIDTH)
    for _ in range(4):  # the last one counts: the first are slower, and rebuild buckets
        optimizer.zero_grad()
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            with record_function("forward"):
                loss = model(x).square().mean()
            with record_function("backward"):
                loss.backward()
            with record_function("optimizer"):
                optimizer.step()
    events = [event for event in trace.events() if event.name in PARTS]
    zero = min(event.time_range.start for event in events)
    return [
        (e.name, (e.time_range.start - zero) / 1000, (e.time_range.end - zero) / 1000)
        for e in events
    ]


def main(rank: int, port: int, file: str | None) -> None:
    """Both processes run this function; rank 0 says what it saw."""
    os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler says much on stderr
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    steps = {"buckets of one layer": one_step(1), "one bucket": one_step(1000)}
    for title, spans in steps.items():
        computed = max(end for what, _, end in spans if what == "AddmmBackward0")
        begun = [begin for what, begin, _ in spans if what == "gloo:all_reduce"]
        early = "some" if min(begun) < computed else "none"
        if rank == 0:
            print(f"{title}: all-reduces {len(begun)}")
            print(f"  begun before the last gradient was computed: {early}")
    if rank == 0 and file:
        Path(file).write_text(json.dumps(steps))
    dist.destroy_process_group()


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(main, args=(store.port, *(sys.argv[1:] or [None])), nprocs=2)
