"""Small parts of common/ and launch/."""

import itertools
import json
import os
import sys
import warnings
from argparse import Namespace
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
from ranks import parse
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torchvision.models import WeightsEnum

from common.device import machine_cores, select_device
from common.errors import ImageError, UserError
from common.log import Log
from common.model import build_model
from common.schedule import build_scheduler
from launch.check import set_threads
from launch.exits import LOST_PROCESS, Stopped, exit_status
from launch.ranks import ranks_from_environment
from launch.spawn import check_spawn_flags, rendezvous
from launch.torchrun import root_cause

CPU = torch.device("cpu")


TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
SLURM = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}
SLURM |= {"SLURM_NTASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}
SLURM |= {"MASTER_ADDR": "first", "MASTER_PORT": "29500"}


def test_ranks():
    for variables, expected in (
        (TORCHRUN, (5, 1, 8, 4)),
        (SLURM, (5, 1, 6, 2)),
        ({**SLURM, **TORCHRUN}, (5, 1, 8, 4)),
        ({}, "start this script with a launcher, for example torchrun"),
        ({**TORCHRUN, "WORLD_SIZE": ""}, "not set: WORLD_SIZE"),
        ({**SLURM, "MASTER_PORT": ""}, "slurm.sbatch .not set: MASTER_PORT"),
    ):
        if isinstance(expected, tuple):
            assert ranks_from_environment(variables) == expected
        else:
            with pytest.raises(UserError, match=expected):
                ranks_from_environment(variables)


def test_where_spawned_processes_meet(monkeypatch):
    """On one machine a file, and nothing listens but on loopback."""
    monkeypatch.setattr(os, "environ", {})
    with rendezvous(Namespace(dist_url=None, nnodes=1)) as url:
        assert url.startswith("file:///")
        folder = os.path.dirname(url.removeprefix("file://"))
        assert os.path.isabs(folder) and os.listdir(folder) == []
    assert not os.path.exists(folder)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"


def test_machines_of_spawned_processes():
    def check(count, rank, url):
        args = Namespace(nprocs=None, nnodes=count, node_rank=rank, dist_url=url)
        args.device = "cpu"
        check_spawn_flags(args)
        return args.nprocs

    assert check(2, 1, "tcp://h:9") == 2
    for *place, message in (
        (2, 1, None, "--nnodes N needs --dist-url and a --node-rank from 0 to N - 1"),
        (2, 2, "tcp://h:9", "from 0 to N - 1"),
        (1, 0, "tcp://h:99999", "tcp://h:99999 is not of the form HOST:PORT"),
    ):
        with pytest.raises(UserError, match=message):
            check(*place)


def test_the_process_that_failed_first():
    for *ended, status in (
        # By rank, exit status and second; torchrun ends the processes that are left
        ((1, 5), (-9, 5), -9),  # killed, and lost by the other
        ((1, 5), (2, 6), 2),  # an image that one cannot read
        ((1, 5), (-9, 35), 1),  # hung, until torchrun killed it
        ((143, 5), (1, 5), 1),  # one could not save
    ):
        failures = {}
        for rank, (exitcode, second) in enumerate(ended):
            failures[rank] = ProcessFailure(rank, 1, exitcode, "")
            failures[rank].timestamp = second
        assert root_cause(failures)[1].exitcode == status


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_cannot_be_used_is_reported_once(monkeypatch, capsys):
    """With a GPU's device file but no driver that PyTorch can use."""
    assert select_device("auto").type == "cpu" and capsys.readouterr().err == ""
    monkeypatch.setattr("common.device.glob.glob", lambda pattern: ["/dev/nvidia0"])
    assert select_device("auto").type == "cpu"
    warning = capsys.readouterr().err
    assert warning.startswith("warning: a GPU is present, but ")
    assert warning.endswith("; training on the CPU\n") and warning.count("\n") == 1
    select_device("auto", local_rank=1)
    assert capsys.readouterr().err == ""
    with pytest.raises(UserError, match="--device cuda: a GPU is present, but"):
        select_device("cuda")


def test_cores_of_a_job(tmp_path, monkeypatch):
    for slurm, affinity, quota, expected in (
        ("8", 2, "max 100000", 8),  # srun binds each of four tasks to its own share
        ("", 32, "550000 100000", 6),
        ("32", 32, "50000 100000", 1),
    ):
        monkeypatch.setenv("SLURM_CPUS_ON_NODE", slurm)
        monkeypatch.setattr(os, "sched_getaffinity", Mock(return_value=range(affinity)))
        (tmp_path / "sys/fs/cgroup").mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/fs/cgroup/cpu.max").write_text(quota + "\n")
        assert machine_cores(tmp_path) == expected
        assert machine_cores(tmp_path / "nowhere") == int(slurm or affinity)
        monkeypatch.setattr("launch.check.machine_cores", Mock(return_value=expected))
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        set_threads(2)
        set_threads(1)  # leaves what is set
        assert os.environ["OMP_NUM_THREADS"] == str(max(1, expected // 2))


def test_what_libraries_report_of_a_lost_process():
    for message in (
        "The client socket has timed out after 600000ms while trying to connect to (a, 1)",
        "[Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)",
        "Some NCCL operations have failed or timed out. Due to the asynchronous nature",
        "NCCL communicator was aborted on rank 3",
        "ncclRemoteError: A call failed possibly due to a network error",
        "Horovod has been shut down. This was caused by an exception on one of the ranks",
        "Call to connect to 10.0.0.2<40000> failed : No route to host",
    ):
        assert LOST_PROCESS.search(message), message


LOST = RuntimeError(
    "[/a/b/pair.cc:561] Connection closed by peer [127.0.0.1]:1. This is typically "
    "caused by a remote worker crashing. GLHF"
)
FULL = RuntimeError(
    "Caught RuntimeError in DataLoader worker process 0.\nRuntimeError: unable to "
    "allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)"
)
NCCL = "NCCL error in: a.cpp:1, unhandled system error\nncclSystemError: System call\n"
FULL_NCCL = RuntimeError(f"{NCCL}/dev/shm/nccl-a (size 9): No space left on device")


@pytest.mark.parametrize(
    "error, local_rank, status, line",
    [
        (UserError("no\nsuch folder"), 0, 2, "error: no such folder"),
        (UserError("no"), 1, 2, ""),
        (ImageError("bad picture"), 1, 2, "error: bad picture"),
        (Stopped("epoch 2"), 0, 143, "stopped after epoch 2 and saved"),
        (Stopped("epoch 2"), 1, 143, ""),
        (KeyboardInterrupt(), 0, 130, ""),
        (LOST, 1, 1, " lost another process: Connection closed by peer [127.0.0.1]:1."),
        (RuntimeError("DataLoader worker (pid 7) is killed"), 1, 1, "lost another"),
        (ConnectionResetError(104, "Connection reset by peer"), 1, 1, "another"),
        (RuntimeError("EADDRINUSE port: 29500"), 0, 2, "port 29500 is in use"),
        (FULL, 1, 2, "/dev/shm is full: make it larger (docker run"),
        (FULL_NCCL, 1, 2, "/dev/shm is full"),
        (RuntimeError(NCCL + "Too many open files"), 0, 1, "Traceback"),
        (RuntimeError("shape mismatch"), 0, 1, "Traceback"),
        (RuntimeError("CUDA error: the launch timed out and was"), 0, 1, "Traceback"),
        (RuntimeError("Caught RuntimeError in DataLoader worker"), 1, 1, "Traceback"),
    ],
    ids=str,
)
def test_exit_status(error, local_rank, status, line, monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    children = []
    monkeypatch.setattr("launch.exits.end_children", lambda: children.append("ended"))
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended, exit_status():
        raise error
    assert ended.value.code == status and children == ["ended"]
    printed = capsys.readouterr().err
    assert line in printed
    if line != "Traceback":
        assert printed.count("\n") == bool(line)


def test_defaults_are_those_of_the_recipe():
    """The others are in test_reference.py."""
    args = parse("--data", "x")
    assert (args.arch, args.epochs, args.global_batch_size) == ("resnet18", 90, 256)
    assert args.workers == min(machine_cores(), 16)
    assert args.timeout == timedelta(minutes=10)
    args = parse("--data", "x", "-j", 0, "--timeout-seconds", 5)
    assert (args.workers, args.timeout) == (0, timedelta(seconds=5))


X = ("--data", "x")


def test_bad_flags_end_with_status_2_and_one_line(capsys, monkeypatch):
    for flags, message in (
        ((*X, "--epoch", "3"), "unrecognized arguments: --epoch 3"),
        ((), "give either --data DIR or --synthetic"),
        ((*X, "--arch", "resnet19"), "torchvision has no model resnet19"),
        ((*X, "-b", "0"), "0 is not >= 1"),
        ((*X, "--epochs", "many"), "invalid int value: 'many'"),
        ((*X, "--lr", "nan"), "nan is not >= 0"),
        ((*X, "--min-crop", "1.5"), "1.5 is not >= 1e-06 and <= 1"),
        ((*X, "--evaluate"), "--evaluate needs --resume auto|PATH or --pretrained"),
    ):
        for rank in (0, 1):
            monkeypatch.setenv("LOCAL_RANK", str(rank))
            with pytest.raises(SystemExit) as end:
                parse(*flags)
            assert end.value.code == 2
            error = capsys.readouterr().err
            assert error.count("\n") == (rank == 0) and (rank or message in error)


def make_log(*flags, rank=0, epoch=0, step=0, workers=0):
    args = parse(*flags, "--precision", "fp32", "--epochs", 9)
    state = Namespace(epoch=epoch, step=step, arch="resnet18", records=[])
    state.optimizer = Namespace(param_groups=[{"initial_lr": 0.4}])
    return Log(args, state, CPU, rank, 2, workers)


@pytest.fixture
def clock(monkeypatch):
    """A second passes between two looks at the clock."""
    clock = Namespace(monotonic=lambda: clock.now, now=0.0)
    clock.perf_counter = itertools.count().__next__
    monkeypatch.setattr("common.log.time", clock)
    return clock


def recent(images):
    return {"loss": 0.5, "top1": 10.0, "top5": 20.0, "images": images, "stop": False}


def test_speeds_leave_out_what_loaders_prepared(clock):
    """Two batches of each loader process, over intervals and over an epoch's end."""
    log, epochs = make_log("--data", "x", workers=6), []
    for intervals in (
        ((5, 100, 0.0), (10, 100, 0.0)),
        ((5, 100, 0.5), (10, 70, 0.25)),
        ((5, 30, 0.0), (7, 30, 0.0)),
    ):
        log.start_epoch(10)
        for step, images, wait in intervals:
            log.interval(step, recent(images), wait)
        epochs.append(log.figures())
    assert [figures["warmup_steps"] for figures in epochs] == [10, 5, 0]
    assert [figures["images_per_second"] for figures in epochs] == [None, 70, 30]
    assert [figures["data_wait_share"] for figures in epochs] == [None, 0.25, 0]
    assert epochs[2]["step_milliseconds"] == 350  # of steps of 200 and of 500
    assert epochs[2]["seconds"] == 2
    assert make_log("--synthetic", workers=6).cold_steps == 1  # no loader processes


@pytest.mark.parametrize("rank, terminal", [(0, False), (0, True), (1, False)])
def test_progress_is_shown_by_rank_0(rank, terminal, clock, monkeypatch, capsys):
    """A line every 30 seconds, or a bar; the epoch is resumed after step 4."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    log = make_log("--data", "x", rank=rank, epoch=1, step=4)
    log.start_epoch(20)
    for step, clock.now in ((6, 100), (9, 110), (12, 131)):
        log.interval(step, recent(64), 0.25)
    text = "loss 0.5000, top-1 10.00 %, top-5 20.00 %, 64 images/s, waited for data 25%"
    lines = [f"epoch 2/9, step {step}/20: {text}" for step in (6, 12)]
    shown = capsys.readouterr().out.splitlines()
    assert shown == (lines if rank == 0 and not terminal else [])
    assert log.bar.disable == (not terminal)
    assert (log.figures()["first_step"], log.figures()["warmup_steps"]) == (4, 2)


def test_a_run_begins_with_what_it_is(capsys):
    for flags, epoch, step, printed in (
        (("--synthetic",), 0, 0, ""),
        (("--synthetic",), 1, 3, "after step 3 (image 1536 of the epoch)\n"),
        (("--synthetic",), 9, 0, "already complete: 9 of 9 epochs\n"),
        (("--synthetic", "--evaluate", "--resume", "auto"), 9, 0, ""),
    ):
        log = make_log(*flags, "-b", 512, epoch=epoch, step=step)
        log.start(10, 256)
        text = capsys.readouterr().out
        assert text.endswith(printed) and text.count("\n") == 2 + bool(printed)
        assert "2 processes" in text and "learning rate 0.4\n" in text
        for size in (15, 16):
            log.start(10, size)
            noted = (
                "note: each process computes only 15 images" in capsys.readouterr().out
            )
            assert noted == (size == 15 and not log.args.evaluate)


def test_the_report_has_medians_of_whole_epochs(tmp_path):
    """The first epoch pays for start-up; a resumed one is not whole."""
    measured = ("seconds", "images_per_second", "step_milliseconds", "data_wait_share")

    def report(*epochs):
        log = make_log("--synthetic", "--seed", 7, "--output", tmp_path)
        for first_step, value, top1 in epochs:
            record = {"first_step": first_step, "val_top1": top1}
            log.state.records.append({**record, **dict.fromkeys(measured, value)})
        log.write_report()
        return json.loads((tmp_path / "report.json").read_text())

    found = report((0, 9, 50), (0, 2, 70), (7, 100, 60), (0, 4, 65))
    assert {found[name] for name in measured} == {3}
    assert (found["val_top1"], found["best_val_top1"]) == (65, 70)
    assert (found["world_size"], found["seed"], found["epochs"]) == (2, 7, 4)
    assert found["torch"] == torch.__version__ and found["device"] == "cpu"
    assert report((0, 9, 50), (7, 1, 50))["seconds"] == 5
    assert report()["seconds"] is None


def test_a_first_step_that_overflows_warns_of_nothing():
    """GradScaler leaves it out, where loss scaling begins too high by design."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_scheduler(parse("--data", "x"), optimizer, 10).step()


def test_a_model_that_cannot_be_built_is_one_line(monkeypatch):
    for flags, problem in (
        ("--arch vit_b_16 --image-size 30", "Input shape indivisible by patch size!"),
        ("--arch maxvit_t --image-size 225", "is not divisible by partition size"),
        ("--pretrained", "'num_classes' expected value 1000 but got 10 "),
        ("--pretrained --arch vit_b_16 --image-size 192", "'image_size' expected"),
        ("--pretrained --arch maxvit_t --image-size 448", "'input_size' expected"),
        ("--pretrained --arch inception_v3", "no network"),
    ):
        offline = Mock(side_effect=OSError("no network"))
        monkeypatch.setattr(WeightsEnum, "get_state_dict", offline)
        classes = range(10 if flags == "--pretrained" else 1000)
        with pytest.raises(UserError, match=f"--arch .*{problem}"):
            build_model(
                parse("--data", "x", *flags.split()), Namespace(classes=classes)
            )


@pytest.mark.parametrize("pretrained", ([], ["--pretrained"]))
@pytest.mark.parametrize("arch", ("googlenet", "inception_v3", "vit_b_32", "maxvit_t"))
def test_a_model_has_one_output(arch, pretrained, monkeypatch):
    """And no other network where its weights come from torchvision."""
    monkeypatch.setattr(WeightsEnum, "get_state_dict", lambda *_, **__: {})
    monkeypatch.setattr(nn.Module, "load_state_dict", lambda *_: None)
    with torch.device("meta"):
        args = parse("--data", "x", "--arch", arch, *pretrained)
        model = build_model(args, Namespace(classes=range(1000))).train()
        images = torch.empty(2, 3, args.image_size, args.image_size)
        assert model(images).shape == (2, 1000)
