"""The scripts' CUDA code runs on simulated GPUs (pretend_cuda.py); tests/gpu needs real GPUs."""

import functools
import json
import os
import sys
from collections import Counter
from importlib.util import find_spec
from types import SimpleNamespace

import pretend_cuda
import pytest
import torch
from conftest import run
from played import ROOT, Played, free_port
from ranks import NETS
from torch.utils._pytree import tree_leaves

import common.model

FLAGS = "-b 16 --epochs 1 --max-steps 3 --image-size 32 --warmup-epochs 0 --print-interval 2"
PRECISION = {1: "bf16", 2: "fp32", 4: "fp16"}  # processes: precision
HOROVOD = "import horovod.torch as hvd, sys, test_cuda; hvd.nccl_built = lambda: True;"
HOROVOD += "test_cuda.train({}, *sys.argv[1:5], sys.argv[5:])"


def train(place: dict, gpus, folder, script: str, net: str, flags: list) -> None:
    """Run a script as a launcher would, with the variables in `place`."""
    if os.environ.get("HOROVOD_SIZE") == "2":  # as with a machine for each process
        own = {"LOCAL_RANK": "0", "LOCAL_SIZE": "1", "CROSS_SIZE": "2"}
        own["CROSS_RANK"] = os.environ["HOROVOD_RANK"]
        place = {f"HOROVOD_{name}": value for name, value in own.items()}
    os.environ.update(place)
    os.sched_getaffinity = lambda _: range(4)
    if "EMPTY_APEX" in place:
        amp = SimpleNamespace(initialize=lambda *both, opt_level: both)
        sys.modules["apex"] = SimpleNamespace(amp=amp)
        sys.modules["apex.parallel"] = SimpleNamespace(DistributedDataParallel=wrap)
    common.model.build_model = lambda *_: torch.manual_seed(0) and NETS[net](10)
    pretend_cuda.run(int(gpus), folder, str(ROOT / f"{script}.py"), flags)


def wrap(model) -> None:
    """End the run where Apex's DDP, which ignores strides, would wrap the model."""
    sys.exit(f"contiguous: {all(one.is_contiguous() for one in model.parameters())}")


def places(world_size: int, machines: int) -> list[dict]:
    """Return the variables of processes that a launcher starts on the machines in turn."""
    names = "MASTER_ADDR MASTER_PORT WORLD_SIZE LOCAL_WORLD_SIZE RANK LOCAL_RANK"
    job = "127.0.0.1", free_port(), world_size, world_size // machines
    ranks = [(*job, rank, rank // machines) for rank in range(world_size)]
    return [dict(zip(names.split(), map(str, rank), strict=True)) for rank in ranks]


def start(folder, script, gpus, processes, net="norm", status=0):
    """Run a script in processes, each with its own variables and flags.

    Return each training process's calls, by GPU, and everything that was printed.
    """
    with Played(folder) as played:
        for place, flags in processes:
            played.start(train, place, gpus, str(folder), script, net, flags)
        assert set(played.end(240)) == {status}, played.text()
    return calls_in(folder), played.text()


def calls_in(folder):
    """Return each training process's calls, as (name, arguments, options, cudnn.benchmark)."""
    found = [[*map(json.loads, open(file))] for file in folder.glob("*.calls")]
    found.sort(key=lambda calls: named(calls, "set_device"))
    return [calls for calls in found if named(calls, "GradScaler")]


def named(calls, name):
    return [call[1:] for call in calls if call[0] == name]


def flags_of(data, output, *flags):
    return ["--data", data, *FLAGS.split(), "--workers=1", "--output", output, *flags]


def came_to(output):
    content = torch.load(output / "checkpoint.pt", weights_only=True)
    losses = [one["val_loss"] for one in content.pop("records")]
    leaves = tree_leaves([{**content, "recipe": ""}, losses])  # without times and flags
    return [leaf.tolist() if torch.is_tensor(leaf) else leaf for leaf in leaves]


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory, digits):
    """Return the results of distributed.py on the CPU with this number of processes."""

    @functools.cache
    def of(world_size, net="norm"):
        folder = tmp_path_factory.mktemp("cpu")
        flags = flags_of(digits, folder / "run", "--precision", PRECISION[world_size])
        processes = [(place, flags) for place in places(world_size, 1)]
        assert start(folder, "distributed", 0, processes, net)[0] == []
        return came_to(folder / "run")

    return of


def check_launch(calls, gpu):
    """Check that a process uses its own GPU from its first call."""
    names, device = [call[0] for call in calls], f"cuda:{gpu}"
    assert named(calls, "set_device") == [[[device], {}, True]]
    assert named(calls, "set_float32_matmul_precision") == [[["high"], {}, True]]
    order = ["set_device", "init_process_group", "DataLoader", "GradScaler"]
    order = [name for name in order if name in names]
    assert sorted(order, key=names.index) == order
    for backend, options, benchmark in named(calls, "init_process_group"):
        assert (*backend, options["device_id"], benchmark) == ("nccl", device, True)
    assert all(options["pin_memory"] for _, options, _ in named(calls, "DataLoader"))


def check_training(calls, gpu, precision):
    """Check the calls of one process that trained and validated for one epoch."""
    names = [call[0] for call in calls]
    # Images and labels of 3 training and 23 validation batches, without the scaler's copies
    copies = [call for call in named(calls, "to") if "device" not in call[1]]
    assert copies == 52 * [[[f"cuda:{gpu}"], {"non_blocking": True}, True]]
    scaled, cast = precision == "fp16", precision != "fp32"
    assert named(calls, "GradScaler") == [[["cuda"], {"enabled": scaled}, True]]
    wrapped = [options for _, options, _ in named(calls, "DistributedDataParallel")]
    assert wrapped in ([], [{"gradient_as_bucket_view": True}])  # [] is Horovod's
    # The DDP model neither validates nor broadcasts buffers
    assert named(calls, "forward") == 3 * len(wrapped) * [[[False], {}, True]]
    dtype = str(common.model.PRECISIONS[precision])
    assert named(calls, "autocast") == 26 * [[["cuda", dtype], {"enabled": cast}, True]]
    # The host waits after loading, at two print intervals and after validation; the scaler checks
    # for infinite gradients in 3 steps, and rank 0 saves its state
    waits = Counter(name for name in names if name in pretend_cuda.WAITS)
    assert waits.pop("item", 0) in ((3, 5) if scaled else (0,))
    assert waits == {"nonzero": 1, "tolist": 1, "cpu": 3}


@pytest.mark.parametrize("world_size", (1, 2, 4))
@pytest.mark.parametrize("script", ("distributed", "multiprocessing_distributed"))
def test_ddp_has_the_bits_of_the_cpu(script, world_size, digits, on_the_cpu, tmp_path):
    """Results equal those on the CPU; with four processes, ranks alternate between two machines."""
    machines, precision = world_size // 2 or 1, PRECISION[world_size]
    chosen = ["--precision", precision] * (world_size > 1)  # default: bf16
    chosen += ["--sync-bn"] * (world_size == 4)  # its communication is not simulated
    flags = flags_of(digits, tmp_path / "run", *chosen)
    processes = [(place, flags) for place in places(world_size, machines)]
    if machines > 1:
        flags.remove("--workers=1")  # by default, one loader process per core
    if script != "distributed":  # by default, the script starts a process per GPU
        several = ["--nnodes", 2, "--dist-url", f"tcp://127.0.0.1:{free_port()}"]
        flags += several * (machines > 1)
        processes = [({}, [*flags, "--node-rank", node]) for node in range(machines)]
    calls, printed = start(tmp_path, script, world_size // machines, processes)
    gpus = world_size // machines
    name = f" {precision}, {world_size} x simulated GPU ({gpus} visible)\n"
    assert name in printed
    assert came_to(tmp_path / "run") == on_the_cpu(world_size)
    assert len(calls) == world_size
    native = [[[], {"including_emulation": False}, True]] * (world_size == 1)
    for number, one in enumerate(calls):
        assert len(named(one, "convert_sync_batchnorm")) == (world_size == 4)
        assert named(one, "is_bf16_supported") == native
        assert {x["num_workers"] for _, x, _ in named(one, "DataLoader")} == {machines}
        check_launch(one, number // machines)
        check_training(one, number // machines, precision)


@pytest.mark.horovod
@pytest.mark.parametrize("world_size", (2, pytest.param(4, marks=pytest.mark.full)))
def test_horovod(world_size, digits, on_the_cpu, tmp_path):
    """Two processes have a machine each; four add up gradients in a different order from DDP."""
    flags = flags_of(digits, tmp_path / "run", "--precision", PRECISION[world_size])
    words = ("horovodrun", "--gloo", "-np", world_size, sys.executable, "-c", HOROVOD)
    words += (world_size, tmp_path, "horovod_distributed", "norm", *flags, "-j", 0)
    ended = run(*words, timeout=240, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    assert ended.returncode == 0, ended.stderr
    check_numbers(tmp_path / "run", on_the_cpu(world_size), world_size < 4)
    assert len(calls_in(tmp_path)) == world_size
    for number, one in enumerate(calls_in(tmp_path)):
        gpu = number * (world_size > 2)
        check_launch(one, gpu)
        check_training(one, gpu, PRECISION[world_size])


def check_numbers(output, expected, exactly):
    """Raise an AssertionError if results differ (unless `exactly`, by more than rounding)."""
    runs = [came_to(output), expected]
    assert runs[0] == runs[1] or not exactly
    floats = [[x for x in tree_leaves(run) if isinstance(x, float)] for run in runs]
    torch.testing.assert_close(*map(torch.tensor, floats), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("gpus", (1, 2, 4))
def test_dataparallel(gpus, digits, on_the_cpu, tmp_path):
    """With several GPUs, nn.DataParallel adds up gradients in a different order from DDP."""
    net, like = ("norm", 1) if gpus == 1 else ("small", 2)
    processes = [({}, flags_of(digits, tmp_path / "run"))]
    [calls], printed = start(tmp_path / "1", "dataparallel", gpus, processes, net)
    assert f" {PRECISION[like]}, 1 x simulated GPU ({gpus} visible)\n" in printed
    check_numbers(tmp_path / "run", on_the_cpu(like, net), gpus == 1)
    assert len(named(calls, "DataParallel")) == (gpus > 1)
    assert len(named(calls, "forward")) == 26 * (gpus > 1)  # 23 of them in validation
    copies = named(calls, "to")
    assert {(*to, benchmark) for to, _, benchmark in copies} == {("cuda:0", gpus == 1)}
    for flag in ("--precision bf16", "--compile") if gpus > 1 else ():
        processes = [({}, flags_of(digits, tmp_path / "new", *flag.split()))]
        failed = start(tmp_path / flag, "dataparallel", gpus, processes, status=2)[1]
        assert failed.startswith(f"dataparallel.py: error: {flag}: nn.DataParallel's")
        assert failed.count("\n") == 1
    half = [({}, flags_of(digits, tmp_path / "fp16", "--precision", "fp16"))]
    assert ", fp16, " in start(tmp_path / "half", "dataparallel", gpus, half, net)[1]


@pytest.mark.skipif(find_spec("apex") is not None, reason="Apex is installed")
def test_apex_is_refused_or_ends_at_its_ddp(digits, tmp_path):
    """Without Apex, the script can run only until it wraps the model, which must be contiguous."""
    place, flags = places(1, 1)[0], flags_of(digits, tmp_path / "run")
    for gpus, reason in enumerate((" needs a CUDA GPU", "'s amp or DDP is missing")):
        how = tmp_path / str(gpus), "apex_distributed", gpus, [(place, flags)]
        printed = start(*how, status=2)[1]
        assert printed.startswith(f"apex_distributed.py: error: Apex{reason}")
        assert printed.count("\n") == 1
    place |= {"LOCAL_RANK": "1", "EMPTY_APEX": "yes"}
    [calls], printed = start(tmp_path / "2", how[1], 2, [(place, flags)], status=1)
    assert "contiguous: True" in printed
    check_launch(calls, 1)
