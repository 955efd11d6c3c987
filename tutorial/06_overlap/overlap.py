"""Does DDP send some gradients while it computes others, over a simulated slow link?

python tutorial/06_overlap/overlap.py [FILE.json]    # {form: [[what, began, ended]]}
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter, sleep

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

LAYERS, WIDTH, SAMPLES, LINK = 6, 512, 2048, 40e6  # LINK: bytes per second


def one_step(megabytes: int) -> list[tuple[str, float, float]]:
    """Return the parts of the fastest of four steps as (what, began_ms, ended_ms)."""

    def mark(what: str) -> None:
        nonlocal last
        spans.append((what, last, last := perf_counter()))

    def carry(bucket: torch.Tensor, arrived: torch.futures.Future) -> None:
        began = perf_counter()
        dist.all_reduce(bucket)
        sleep(max(0, began + bucket.nbytes / LINK - perf_counter()))  # uses no CPU
        spans.append(("send", began, perf_counter()))
        arrived.set_result(bucket / dist.get_world_size())

    def slow_link(link, bucket):
        link.submit(carry, bucket.buffer(), arrived := torch.futures.Future())
        return arrived  # backward() waits for this future

    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = DDP(nn.Sequential(*layers), bucket_cap_mb=megabytes)
    model.register_comm_hook(ThreadPoolExecutor(1), slow_link)  # one bucket at a time
    for layer in layers:
        layer.weight.register_post_accumulate_grad_hook(lambda _: mark("backward"))
    x, steps = torch.randn(SAMPLES, WIDTH), []
    for _ in range(6):
        model.zero_grad()
        last, spans = perf_counter(), []
        loss = model(x).square().mean()
        mark("forward")
        loss.backward()
        last = perf_counter()
        torch.optim.SGD(model.parameters(), lr=0.01).step()
        mark("optimizer")
        steps.append(spans)
    spans = min(steps[2:], key=lambda spans: spans[-1][2] - spans[0][1])
    return [(w, *(1000 * (t - spans[0][1]) for t in times)) for w, *times in spans]


def main(rank: int, port: int, file: str | None) -> None:
    """Both processes run this function; rank 0 prints the results."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    forms = {"buckets of one layer": one_step(1), "one bucket": one_step(1000)}
    for form, spans in forms.items() if rank == 0 else ():
        sends = [began for what, began, _ in spans if what == "send"]
        computed = max(ended for what, _, ended in spans if what == "backward")
        when = "before" if sends[0] < computed else "after"
        print(f"{form}: {len(sends)} sent, the first {when} all gradients were ready")
        print(f"{form}: a step takes {spans[-1][2]:.0f} ms", file=sys.stderr)
    if rank == 0 and file:
        Path(file).write_text(json.dumps(forms))
    dist.destroy_process_group()


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(main, args=(store.port, *(sys.argv[1:] or [None])), nprocs=2)
