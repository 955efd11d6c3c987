"""Run three bugs that hang two processes; show where each waits, and how the wait ends.

python tutorial/11_hangs/hangs.py
"""

import faulthandler
import json
import linecache
import re
import tempfile
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

MESSAGES = r"Timed out \w+ \w+|Connection|Rank \d (is running .*?OpType=\w+|failed.*)"


def skipped_step(rank: int) -> None:
    """Rank 0 averages gradients three times, but rank 1 only twice."""
    for step in range(3):
        if rank == 0 or step != 1:  # rank 1 skips step 1, as after a NaN loss
            dist.all_reduce(torch.ones(5))
    dist.barrier()


def only_rank_0(rank: int) -> None:
    """Only rank 0 calls the all-reduce."""
    if rank == 0:
        dist.all_reduce(torch.ones(1))
    dist.barrier()


def other_order(rank: int) -> None:
    """Call the same two collectives in a different order on each rank."""
    if rank == 0:
        dist.all_reduce(torch.ones(1))
        dist.broadcast(torch.ones(3), src=0)
    else:
        dist.broadcast(torch.ones(3), src=0)
        dist.all_reduce(torch.ones(1))


def observe(mistake: Callable[[int], None], rank: int) -> str:
    """Run a buggy function; return where this process waits, and how the wait ends."""
    line, end = "nowhere", "no error"
    with tempfile.TemporaryFile("w+") as stack:
        faulthandler.dump_traceback_later(2, file=stack)  # prints the stack after 2 s
        try:
            mistake(rank)
        except RuntimeError as error:
            end = re.search(MESSAGES, str(error))[0] + " ..."
        faulthandler.cancel_dump_traceback_later()
        stack.seek(0)
        if frame := re.search(r'hangs.py", line (\d+)', stack.read()):
            line = linecache.getline(__file__, int(frame[1])).strip()
    last = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())["entries"][-1]
    record = f"number {last['collective_seq_id']}, {last['profiling_name']}"
    return f"  rank {rank} waits in: {line}\n    recorded: {record}\n    ends: {end}"


def main(rank: int, port: int) -> None:
    """Both processes run each buggy function; rank 0 prints what both observed."""
    for mistake in (skipped_step, only_rank_0, other_order):
        store = dist.PrefixStore(mistake.__name__, dist.TCPStore("127.0.0.1", port))
        timeout = timedelta(seconds=3 + 2 * rank)  # so that rank 0 gives up first
        dist.init_process_group("gloo", None, timeout, 2, rank, store)
        store.set(str(rank), observe(mistake, rank))
        reports = [store.get("0").decode(), store.get("1").decode()]
        if rank == 0:
            print(mistake.__name__, *reports, sep="\n")
        dist.destroy_process_group()


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(main, args=(store.port,), nprocs=2)
