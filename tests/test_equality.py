"""Count what a step sends, and test processes that horovodrun starts."""

import json
import os
import sys

import pytest
import torch
from conftest import ROOT, run
from played import free_port
from ranks import recorded, results, run_ranks, small

FLAGS = "--image-size 32 --precision fp32 --min-crop 0.5 --print-interval 4".split()
HOROVOD = "horovod_distributed"


def horovod_ranks(folder, world_size, task, seconds=180, **arguments):
    """Like run_ranks, for Horovod, whose processes horovodrun has to start."""
    folder.mkdir(parents=True, exist_ok=True)
    arguments = json.dumps({"folder": str(folder), **arguments}, default=str)
    command = ("horovodrun", "-np", world_size, "-H", f"localhost:{world_size}")
    probe = (sys.executable, ROOT / "tests" / "ranks.py", task.__name__, arguments)
    path = f"{ROOT}:{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}"
    variables = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    ended = run(*command, "--gloo", *probe, timeout=seconds, **variables)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return results(folder)


def start(name):
    return horovod_ranks if name == HOROVOD else run_ranks


NAMES = ["distributed", "multiprocessing_distributed"]
NAMES += [pytest.param(HOROVOD, marks=pytest.mark.horovod)]


@pytest.mark.parametrize("name", NAMES)
def test_a_step_sends_its_gradients_once(tmp_path, digits, name):
    """It sends four or two bytes per weight, however many micro-batches there are."""
    flags = ["--data", digits, *FLAGS, "-b", 48, "--max-steps", 2, "--epochs", 1]
    more = [[], ["--accumulate", 4]]
    more.append(["--compress-gradients", "fp16", "--accumulate", 2])
    if name != HOROVOD:  # Horovod compresses only to fp16
        more.append(["--compress-gradients", "bf16"])
    runs = []
    for number, others in enumerate(more):
        own = [*flags, *others, "-j", 0, "--output", tmp_path / str(number)]
        runs.append(("small", list(map(str, own)), None, free_port()))
    options = {"name": name, "runs": runs, "counted": True}
    ranks = start(name)(tmp_path, 2, recorded, **options)
    whole, parts, *halves = ranks[0]
    assert [run["sent"] for run in ranks[0]] == [run["sent"] for run in ranks[1]]
    assert sum(whole["sent"]) == 2 * 4 * sum(w.numel() for w in small(10).parameters())
    assert parts["sent"] == whole["sent"]
    for half in halves:
        assert half["sent"] == [size // 2 for size in whole["sent"]]
    torch.manual_seed(0)
    ends = small(10).state_dict(), *(run["weights"] for run in ranks[0])
    first, whole, parts, *halves = (
        torch.cat([weight.flatten() for weight in end.values()]) for end in ends
    )
    moved = (whole - first).abs().max()
    assert 0 < (parts - whole).abs().max() < 1e-4 * moved
    for half in halves:  # bf16 has 8 bits
        assert 0 < (half - whole).abs().max() < 0.05 * moved
