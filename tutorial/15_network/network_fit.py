"""Fit the latency and bandwidth of all-reduces, and predict a training step's time.

python tutorial/15_network/network_fit.py [FILE.json]    # saves the measurements
"""

import json
import sys
from pathlib import Path
from statistics import mean
from time import perf_counter

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

SIZES = [4**power for power in range(5, 12)]  # bytes: 1 KiB to 4 MiB
ROUNDS, REPEATS = 31, 16


def seconds(tensors: list[torch.Tensor]) -> float:
    """Return the seconds that it takes to all-reduce the tensors one by one."""
    dist.barrier()  # otherwise, the time includes waiting for the other process
    began = perf_counter()
    for tensor in tensors:
        dist.all_reduce(tensor)
    return perf_counter() - began


def fit(times: dict[int, float]) -> tuple[float, float]:
    """Return the latency (s) and bandwidth (bytes/s) that minimize relative errors."""
    rows = torch.tensor([[1 / t, n / t] for n, t in times.items()], dtype=torch.double)
    latency, per_byte = torch.linalg.lstsq(rows, torch.ones_like(rows[:, 0])).solution
    return latency.item(), 1 / per_byte.item()


def report(measured: dict[str, dict]) -> str:
    """Return the fit, and the predicted and measured times of a step, as text."""
    (latency, bandwidth), sizes = measured["fit"], measured["sizes"].items()
    off = max(abs((latency + int(n) / bandwidth) / took - 1) for n, took in sizes)
    text = f"latency {latency * 1e3:.2f} ms, bandwidth {bandwidth / 1e9:.2f} GB/s"
    text += f", off by up to {off:.0%}{', a poor fit' * (off > 0.2)}\n"
    for name, (all_reduces, size, took) in measured["steps"].items():
        a, b = 1e3 * (all_reduces * latency + size / bandwidth), 1e3 * took
        text += f"{name}: predicted {a:.1f}, measured {b:.1f} ms ({a / b - 1:+.0%})\n"
    return text


def main(rank: int, port: int, file: str | None) -> None:
    """Measure all-reduces in both processes; rank 0 prints the report."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    times = {}
    for _ in range(ROUNDS):
        for size in SIZES:
            took = seconds([torch.zeros(size // 4)] * REPEATS) / REPEATS
            times.setdefault(size, []).append(took)
        loss = model(torch.randn(64, 512)).square().mean()
        each = torch.autograd.grad(loss, list(model.parameters()))
        flat = torch.cat([gradient.flatten() for gradient in each])
        steps = {"each gradient": each, "2 MiB": flat.split(2**19), "all": [flat]}
        for name, parts in steps.items():
            times.setdefault(name, []).append(seconds(parts))
    sizes = {size: mean(times[size]) for size in SIZES}
    sent = {n: (len(p), flat.nbytes, mean(times[n])) for n, p in steps.items()}
    measured = {"sizes": sizes, "steps": sent, "fit": fit(sizes)}
    dist.destroy_process_group()
    if rank == 0:
        for name, (all_reduces, size, _) in measured["steps"].items():
            print(f"{name}: {all_reduces} x all_reduce, {size:,} bytes")
        print(report(measured), end="", file=sys.stderr)
    if rank == 0 and file:
        Path(file).write_text(json.dumps(measured, indent=1))


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(main, args=(store.port, *(sys.argv[1:] or [None])), nprocs=2)
