"""Record traces of DDP's training steps, with a link that delays two of six buckets.

python tutorial/14_step_cost/step_cost_trace.py [FOLDER]    # FOLDER/rank0.json ...
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from time import sleep

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import _ExperimentalConfig, profile, record_function, schedule

LAYERS, WIDTH, SAMPLES, WARMUP, STEPS = 6, 512, 4096, 3, 5
DELAYED, DELAY = (0, 5), 200  # buckets of each step, and milliseconds for each


def slow_link(threads: ThreadPoolExecutor, bucket: dist.GradBucket):
    """Average a bucket over a slow link. DDP calls this function for each bucket."""

    def carry(arrived: torch.futures.Future) -> None:  # in its own thread
        work.wait()
        if bucket.index() in DELAYED:
            with record_function("link"):  # the name in the trace
                sleep(DELAY / 1000)  # uses no CPU
        arrived.set_result(bucket.buffer() / dist.get_world_size())

    work = dist.all_reduce(bucket.buffer(), async_op=True)
    threads.submit(carry, arrived := torch.futures.Future())
    return arrived


def train(file: Path) -> None:
    """Train a model and write a trace of the last steps to `file`."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = DDP(nn.Sequential(*layers), bucket_cap_mb=1)  # a bucket for each layer
    model.register_comm_hook(ThreadPoolExecutor(LAYERS), slow_link)
    x = torch.randn(SAMPLES, WIDTH)
    with profile(
        schedule=schedule(wait=0, warmup=WARMUP, active=STEPS),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(file)),
        experimental_config=_ExperimentalConfig(profile_all_threads=True),
        acc_events=True,
    ) as profiler:
        for _ in range(WARMUP + STEPS):
            model.zero_grad()
            model(x).square().mean().backward()
            profiler.step()  # a new step begins


def main(rank: int, port: int, folder: str | None) -> None:
    """Record a trace in each process; rank 0 prints what its trace contains."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    with TemporaryDirectory() as temporary:
        train(file := Path(temporary, "trace.json"))
        events = json.loads(file.read_text())["traceEvents"]
    names, last = [event["name"] for event in events], LAYERS - 1 in DELAYED
    for name in ("gloo:all_reduce", "link") if rank == 0 else ():
        print(f"{name}: {names.count(name) / STEPS:g} events per step")
    if rank == 0:
        print(f"delay after the last gradient: {DELAY if last else 0} ms")
    if folder:  # keep the file small: drop events below 0.1 ms
        keys = ("ph", "cat", "name", "pid", "tid", "ts", "dur")
        long = [event for event in events if event.get("dur", 0) > 100]
        lines = ",\n".join(json.dumps({k: event[k] for k in keys}) for event in long)
        Path(folder, f"rank{rank}.json").write_text(f'{{"traceEvents": [{lines}]}}\n')
    dist.destroy_process_group()


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(main, args=(store.port, *(sys.argv[1:] or [None])), nprocs=2)
