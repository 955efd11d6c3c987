"""The scripts' CUDA lines, run on pretended GPUs (pretend_cuda.py): no GPU is needed.

tests/gpu is for machines that have GPUs.
"""

import functools
import json
import os
import sys

import pretend_cuda
import pytest
import torch
from played import ROOT, Played, free_port
from torch import nn
from torch.utils._pytree import tree_leaves

import common.model

FLAGS = "-b 16 --max-steps 3 --image-size 32 --warmup-epochs 0 --print-interval 2 -j 1 --epochs 1"
PRECISION = {1: "bf16", 2: "fp32", 4: "fp16"}  # of the runs with this many processes
HOROVOD = """
import os, sys, horovod.torch, test_cuda
horovod.torch.nccl_built = lambda: True
test_cuda.train({}, *sys.argv[1:5], sys.argv[5:])
"""


def build(net: str, args, classes) -> nn.Module:
    """Batch norm and dropout, or neither, so that only the order of sums can differ."""
    torch.manual_seed(args.seed)
    extra = (nn.BatchNorm2d(8), nn.Dropout(0.4)) if net == "full" else ()
    pool = nn.AdaptiveAvgPool2d(2), nn.Flatten()
    layers = nn.Conv2d(3, 8, 5, stride=3), *extra, nn.GELU(), *pool
    return nn.Sequential(*layers, nn.Linear(32, len(classes)))


def train(place: dict, gpus, folder, script: str, net: str, flags: list) -> None:
    """Run a script as a launcher would that has set the variables in `place`."""
    os.environ.update(place)
    common.model.build_model = functools.partial(build, net)
    pretend_cuda.run(int(gpus), folder, str(ROOT / f"{script}.py"), flags)


def places(world_size: int, machines: int) -> list[dict]:
    """Variables of the processes, which a launcher spreads over the machines in turn."""
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job["WORLD_SIZE"] = str(world_size)
    return [
        {**job, "RANK": str(rank), "LOCAL_RANK": str(rank // machines)}
        for rank in range(world_size)
    ]


def flags_of(digits, output, *flags):
    return ["--data", digits, *FLAGS.split(), "--output", output, *flags]


def start(folder, script, gpus, processes, net="full", status=0):
    """Run a script in processes, of which each has variables and flags.

    Returns each training process's calls, and what all printed.
    """
    with Played(folder) as played:
        for place, flags in processes:
            played.start(train, place, gpus, str(folder), script, net, flags)
        assert set(played.end(240)) == {status}, played.text()
    return calls_in(folder), played.text()


def calls_in(folder):
    """The calls of each training process: name, arguments, options, cudnn.benchmark."""
    found = [list(map(json.loads, open(file))) for file in folder.glob("*.calls")]
    return [calls for calls in found if named(calls, "GradScaler")]


def named(calls, name):
    return [call[1:] for call in calls if call[0] == name]


def came_to(output):
    """All that a run computed and saved, without times and memory."""
    content = torch.load(output / "checkpoint.pt", weights_only=True)
    for record in content["records"]:
        for name in ("seconds", "images_per_second", "data_wait", "peak_memory_mib"):
            del record[name]
    leaves = tree_leaves(content)
    return [leaf.tolist() if torch.is_tensor(leaf) else leaf for leaf in leaves]


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory, digits):
    """What distributed.py comes to on the CPU with a number of processes."""

    @functools.cache
    def of(world_size, net="full"):
        folder = tmp_path_factory.mktemp("cpu")
        flags = flags_of(digits, folder / "run", "--precision", PRECISION[world_size])
        processes = [(place, flags) for place in places(world_size, 1)]
        assert start(folder, "distributed", 0, processes, net)[0] == []
        return came_to(folder / "run")

    return of


def check_calls(calls, world_size, gpu, over_nccl=True):
    """Of a process that has trained and validated one epoch on its GPU."""
    device, names = f"cuda:{gpu}", [call[0] for call in calls]
    assert named(calls, "set_device") == [[[device], {}, False]]
    if over_nccl:
        [[backend], options, benchmark] = named(calls, "init_process_group")[0]
        assert [backend, options["device_id"], benchmark] == ["nccl", device, True]
        order = ("set_device", "init_process_group", "to", "DistributedDataParallel")
        assert sorted(order, key=names.index) == list(order)
        assert named(calls, "DistributedDataParallel")[0][1]["device_ids"] == [gpu]
    assert all(options["pin_memory"] for _, options, _ in named(calls, "DataLoader"))
    copies = named(calls, "to")  # of images and labels, in 3 steps and in validation
    assert copies == len(copies) * [[[device], {"non_blocking": True}, True]]
    assert len(copies) - 6 in (2 * -(-359 // 16), 2 * -(-359 // 16) + 2)
    name, scaled = PRECISION[world_size], PRECISION[world_size] == "fp16"
    assert named(calls, "GradScaler") == [[["cuda"], {"enabled": scaled}, True]]
    casts = ["cuda", str(common.model.PRECISIONS[name])], {"enabled": name != "fp32"}
    assert all(call[:2] == [*casts] for call in named(calls, "autocast"))
    # The host waits after loading, at two print intervals and at the end of validation;
    # the scaler looks for infinite gradients in every step
    waits = {one: names.count(one) for one in pretend_cuda.WAITS & set(names)}
    expected = {"nonzero": 1, "tolist": 1, "cpu": 3} | ({"item": 3} if scaled else {})
    assert waits == expected


@pytest.mark.parametrize("world_size", (1, 2, 4))
def test_distributed(world_size, digits, on_the_cpu, tmp_path):
    """Four processes are on two machines; local rank 0 of both comes first."""
    machines = world_size // 2 or 1
    gpus = world_size // machines
    chosen = ["--precision", PRECISION[world_size]] * (world_size > 1)  # bf16 is chosen
    flags = flags_of(digits, tmp_path / "run", *chosen)
    processes = [(place, flags) for place in places(world_size, machines)]
    calls, printed = start(tmp_path / "1", "distributed", gpus, processes)
    assert f"{PRECISION[world_size]}, {world_size} x cuda" in printed
    assert came_to(tmp_path / "run") == on_the_cpu(world_size)
    calls.sort(key=lambda one: named(one, "set_device"))
    for place, one in zip(processes, calls, strict=True):
        check_calls(one, world_size, int(place[0]["LOCAL_RANK"]))


@pytest.mark.parametrize("world_size", (1, 2, 4))
def test_multiprocessing(world_size, digits, on_the_cpu, tmp_path):
    """Four processes are on two machines."""
    machines = world_size // 2 or 1
    flags = flags_of(digits, tmp_path / "run", "--precision", PRECISION[world_size])
    more = ["--nnodes", machines, "--dist-url", f"tcp://127.0.0.1:{free_port()}"]
    more *= machines > 1  # by default, a process for each GPU
    processes = [
        ({}, [*flags, *more, "--node-rank", rank]) for rank in range(machines)
    ]
    gpus = world_size // machines
    calls, _ = start(tmp_path / "1", "multiprocessing_distributed", gpus, processes)
    assert came_to(tmp_path / "run") == on_the_cpu(world_size)
    calls.sort(key=lambda one: named(one, "set_device"))
    for number, one in enumerate(calls):
        check_calls(one, world_size, number // machines)
    assert len(calls) == world_size


@pytest.mark.horovod
@pytest.mark.parametrize("hosts, gpus", [("localhost:1", 1), ("localhost:2", 2), ("localhost:2,127.0.0.1:2", 2)])
def test_horovod(hosts, gpus, digits, on_the_cpu, tmp_path):
    from conftest import run
    world_size = sum(int(host[-1]) for host in hosts.split(","))
    flags = flags_of(digits, tmp_path / "run", "--precision", PRECISION[world_size])
    words = ("horovodrun", "--gloo", "-np", world_size, "-H", hosts, sys.executable)
    words += ("-c", HOROVOD, gpus, tmp_path, "horovod_distributed", "full", *flags)
    path = f"{ROOT}:{ROOT / 'tests'}"
    ended = run(*words, timeout=240, PYTHONPATH=path)
    assert ended.returncode == 0, ended.stderr
    calls = calls_in(tmp_path)
    print(len(calls))
    for c in calls: print(named(c, "set_device"))
    if world_size < 4: 
        assert came_to(tmp_path / "run") == on_the_cpu(world_size)
