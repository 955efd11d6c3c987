"""From one trace per process, compute how long training steps wait for communication.

python tutorial/14_step_cost/step_cost_exposed.py [RANK0.json RANK1.json ...]
"""

import json
import sys
from pathlib import Path
from statistics import median

RECORDED = sorted(Path("tutorial/14_step_cost/output").glob("rank*.json"))


def kind(event: dict, main_thread: int, on_gpu: bool) -> str | None:
    """Return whether an event is "computing", "communication" or neither (None)."""
    name = event["name"]
    if on_gpu and event["cat"] != "kernel":
        return None  # the CPU only starts kernels
    if name.startswith("nccl") or name in ("gloo:all_reduce", "link"):
        return "communication"
    computes = name.startswith("aten::") and event["tid"] == main_thread
    return "computing" if on_gpu or computes else None


def total(spans: list[tuple[float, float]]) -> float:
    """Return the time that is covered by at least one of the spans (began, ended)."""
    found = until = 0
    for began, ended in sorted(spans):
        found += max(0, ended - max(began, until))
        until = max(until, ended)
    return found


def steps(trace: Path) -> list[list[float]]:
    """Return four times per step in ms: total, computing, communication, exposed."""
    events = json.loads(trace.read_text())["traceEvents"]
    events = [event for event in events if event.get("ph") == "X"]  # with a duration
    names = [(event["name"], event["cat"]) for event in events]
    found, on_gpu = [], any(category == "kernel" for _, category in names)
    for step, (name, category) in zip(events, names, strict=True):
        if not name.startswith("ProfilerStep#") or category != "user_annotation":
            continue
        spans = {"computing": [], "communication": [], None: []}
        for event in events:
            began = event["ts"] - step["ts"]
            if 0 <= began < step["dur"]:
                span = (began, min(began + event["dur"], step["dur"]))
                spans[kind(event, step["tid"], on_gpu)].append(span)
        computing, communication = spans["computing"], spans["communication"]
        exposed = total(computing + communication) - total(computing)
        times = step["dur"], total(computing), total(communication), exposed
        found.append([microseconds / 1000 for microseconds in times])
    return found


if __name__ == "__main__":
    ranks = [steps(trace) for trace in map(Path, sys.argv[1:] or RECORDED)]
    print("milliseconds      all  computing  communication  exposed")
    smallest = []
    for number, rows in enumerate(zip(*ranks, strict=True), 1):
        for rank, row in enumerate(rows):
            print(
                f"step {number}, rank {rank}",
                "{:6.1f} {:10.1f} {:14.1f} {:8.1f}".format(*row),
            )
        smallest.append(min(row[-1] for row in rows))
    print(f"the smaller exposed time of each step, median: {median(smallest):.1f} ms")
