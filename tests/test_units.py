"""Small parts of common/."""

import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from datetime import timedelta

import pytest
import torch
from common.launch import Watchdog, ranks_from_environment, rendezvous
from common.progress import Progress
from common.report import print_epoch, print_start, summarise
from conftest import ROOT, environment, run
from ranks import Ranks, download, free_port
from torch import nn
from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torchvision.models import WeightsEnum, get_model_builder

from common import model
from common.arguments import build_parser, parse_arguments
from common.device import check_devices, processes_per_machine, select_device
from common.errors import LOST_PROCESS, ImageError, MissingMachine, Stopped, UserError
from common.meters import Averages, EpochTimer, Meter, averages, percentile
from common.model import (
    AutocastModel,
    InMemoryOrder,
    architectures,
    build_model,
    check_image_size,
    contiguous_view,
)
from common.schedule import learning_rate_factor, scaled_learning_rate
from common.seeding import seed_augmentation, seed_from, seed_step
from launch.check import restart_flags
from launch.machines import (
    Machines,
    _wait_for_all,
    check_address,
    machines_from_environment,
    meet,
    slots_of_hosts,
)
from launch.torchrun import root_cause

CPU = torch.device("cpu")


# --- ranks -------------------------------------------------------------------------------

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}


def test_ranks_from_torchrun():
    assert ranks_from_environment(TORCHRUN) == (5, 1, 8, 4)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"RANK": None},
            "a launcher has to start this script, for example torchrun .*no RANK in the environment",
        ),
        ({"RANK": "one"}, "have to be numbers: RANK=one"),
        ({"RANK": "8"}, "contradict each other: RANK=8"),
        ({"LOCAL_RANK": "4"}, "contradict each other"),
        ({"LOCAL_WORLD_SIZE": "9"}, "contradict each other"),
    ],
)
def test_bad_ranks_are_refused(change, message):
    values = {
        name: value
        for name, value in {**TORCHRUN, **change}.items()
        if value is not None
    }
    with pytest.raises(UserError, match=message):
        ranks_from_environment(values)


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "MASTER_ADDR": "first",
    "MASTER_PORT": "29500",
}


def changed(values, change):
    return {n: v for n, v in {**values, **change}.items() if v is not None}


@pytest.mark.parametrize(
    "change, expected",
    [
        ({}, (5, 1, 6, 2)),
        ({"SLURM_STEP_TASKS_PER_NODE": "3,1,2"}, (5, 1, 6, 2)),
        ({"SLURM_STEP_TASKS_PER_NODE": "1,3,2(x1)"}, (5, 1, 6, 2)),
        (
            {"SLURM_STEP_TASKS_PER_NODE": None, "SLURM_NTASKS_PER_NODE": "2"},
            (5, 1, 6, 2),
        ),
        ({"WORLD_SIZE": "6", "RANK": "5"}, (5, 1, 6, 2)),  # exported by hand, rightly
        (TORCHRUN, (5, 1, 8, 4)),  # torchrun under srun
    ],
)
def test_ranks_from_slurm(change, expected):
    assert ranks_from_environment(changed(SLURM, change)) == expected


@pytest.mark.parametrize(
    "change, message",
    [
        ({"SLURM_STEP_ID": None}, "has to start this script, for example srun or "),
        ({"SLURM_PROCID": "x"}, "have to be numbers: SLURM_PROCID=x"),
        ({"SLURM_PROCID": None}, "have to be numbers: SLURM_PROCID=,"),
        ({"SLURM_PROCID": "6"}, "SLURM_PROCID=6 contradicts SLURM_NTASKS=6"),
        (
            {"SLURM_NTASKS": "8"},
            r"SLURM_NTASKS=8 contradicts SLURM_STEP_TASKS_PER_NODE=2\(x3\)",
        ),
        (
            {"SLURM_NODEID": "3"},
            r"SLURM_NODEID=3 contradicts SLURM_STEP_TASKS_PER_NODE=2\(x3\)",
        ),
        (
            {"SLURM_LOCALID": "2"},
            r"SLURM_LOCALID=2 contradicts SLURM_STEP_TASKS_PER_NODE=2\(x3\)",
        ),
        (
            {"SLURM_STEP_TASKS_PER_NODE": None, "SLURM_NTASKS_PER_NODE": "4"},
            "SLURM_NTASKS=6 contradicts SLURM_NTASKS_PER_NODE=4",
        ),
        ({"SLURM_STEP_TASKS_PER_NODE": "2x3"}, "=2x3 is not of the form"),
        ({"WORLD_SIZE": "8"}, "WORLD_SIZE=8 contradicts SLURM_NTASKS=6"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK=0 contradicts SLURM_LOCALID=1"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR say.* not where rank 0 listens"),
    ],
)
def test_bad_ranks_from_slurm_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        ranks_from_environment(changed(SLURM, change))


# --- machines ----------------------------------------------------------------------------

ENDPOINT = {"NNODES": "2", "RDZV_ENDPOINT": "first:29400"}
NUMBERED = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "first"}


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({}, (1, 0, None, 0, 45)),
        ({"NNODES": "", "NODE_RANK": "", "MASTER_ADDR": "x"}, (1, 0, None, 0, 45)),
        ({"NNODES": "1", "RDZV_ENDPOINT": "first"}, (1, 0, None, 0, 45)),
        ({"MAX_RESTARTS": "3"}, (1, 0, None, 3, 45)),
        (ENDPOINT, (2, None, "first:29400", 0, 45)),
        ({**ENDPOINT, "RDZV_ENDPOINT": "first"}, (2, None, "first:29400", 0, 45)),
        ({**ENDPOINT, "MAX_RESTARTS": "1"}, (2, None, "first:29400", 1, 45)),
        (NUMBERED, (2, 1, "first:29500", 0, 45)),
        (
            {**NUMBERED, "MASTER_PORT": "7000", "JOIN_SECONDS": "9"},
            (2, 1, "first:7000", 0, 9),
        ),
    ],
)
def test_machines(environment, expected):
    assert machines_from_environment(environment) == expected


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"NNODES": "two"}, "NNODES=two is no whole number from 1 on"),
        ({"NNODES": "0"}, "NNODES=0 is no whole number from 1 on"),
        ({"NNODES": "2"}, "NNODES=2 needs either RDZV_ENDPOINT=HOST:PORT"),
        ({**ENDPOINT, **NUMBERED}, "NNODES=2 needs either"),
        ({**NUMBERED, "NODE_RANK": "2"}, "NODE_RANK=2 has to be below NNODES=2"),
        ({**NUMBERED, "NODE_RANK": "-1"}, "NODE_RANK=-1 is no whole number"),
        ({**NUMBERED, "MASTER_ADDR": ""}, "MASTER_ADDR= with MASTER_PORT=29500 is no"),
        (
            {**NUMBERED, "MASTER_PORT": "99999"},
            "with MASTER_PORT=99999 is no HOST:PORT",
        ),
        ({**ENDPOINT, "RDZV_ENDPOINT": ":29400"}, "RDZV_ENDPOINT=:29400 is no HOST"),
        ({**NUMBERED, "MASTER_PORT": "99999"}, "is no HOST:PORT to meet at"),
        ({**NUMBERED, "MAX_RESTARTS": "1"}, "needs RDZV_ENDPOINT"),
        ({**ENDPOINT, "RDZV_ENDPOINT": "first:x"}, "RDZV_ENDPOINT=first:x is no"),
        ({"RDZV_ENDPOINT": "first"}, "RDZV_ENDPOINT=first needs NNODES"),
        ({"MAX_RESTARTS": "many"}, "MAX_RESTARTS=many is no whole number from 0"),
    ],
)
def test_bad_machines_are_refused(environment, message):
    with pytest.raises(UserError, match=message):
        machines_from_environment(environment)


def test_what_may_be_started_again_resumes_what_it_saved():
    for flags, added in (
        ((), ["--resume", "auto"]),
        (("--resume", "auto"), []),
        (("--evaluate", "--pretrained"), []),
    ):
        assert restart_flags(parse("--data", "x", *flags)) == added
    with pytest.raises(UserError, match="not with --resume a.pt"):
        restart_flags(parse("--data", "x", "--resume", "a.pt"))


def test_slots_of_hosts():
    assert slots_of_hosts("a:4,b:2") == {"a": 4, "b": 2}
    for wrong in ("a", "a:4,", "a:x", "a:0", "a:1,a:1", ":4"):
        with pytest.raises(UserError, match="not of the form a:4,b:4"):
            slots_of_hosts(wrong)


def test_addresses_of_rank_0():
    assert check_address("tcp://far.away:29500", 1) == ("far.away", 29500)
    for wrong in ("29500", "tcp://h:abc", "tcp://h:99999", "http://h:1"):
        with pytest.raises(UserError, match="not of the form tcp://HOST:PORT"):
            check_address(wrong, 0)


def test_on_one_machine_the_rendezvous_is_a_file(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    url = rendezvous(Namespace(dist_url=None), None)
    assert url.startswith("file:///") and not os.path.exists(url[7:])
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"


def come(facts, seconds, count=2):
    """Threads that meet as machines do, over PyTorch's store; what each said."""
    machines = Machines(count, None, f"127.0.0.1:{free_port()}", 0, seconds)
    said = {}

    def one(number):
        mine = machines._replace(rank=number)
        try:
            store = meet(TCPStore, mine, facts[number])
            time.sleep(1)  # the others still read
            said[number] = store is not None
        except UserError as error:
            said[number] = str(error)

    threads = [threading.Thread(target=one, args=(n,)) for n in range(len(facts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [said[number] for number in range(len(facts))]


def test_machines_that_were_started_alike_meet():
    assert come([{"NNODES": 2, "NODE_RANK": n} for n in (0, 1)], 20) == [True, True]


def test_machines_say_what_differs():
    host = socket.gethostname()
    for said in come([{"NPROC": 4}, {"NPROC": 8}], 20):
        assert said.startswith("NPROC differs: ") and said.count(host) == 2
    for said in come([{"NODE_RANK": 1}, {"NODE_RANK": 1}], 20):
        assert said == f"NODE_RANK=1 on {host} and on {host}"


def test_machines_say_who_is_missing():
    (said,) = come([{"NODE_RANK": 0}], 1, count=3)
    assert "1 of 3 machines came to 127.0.0.1:" in said
    assert said.endswith(f"{socket.gethostname()}; NODE_RANK 1, 2 missing")
    first, second = [
        Machines(2, 1, f"127.0.0.1:{free_port()}", 0, 1),
        Machines(2, 1, "no-such-host.invalid:29400", 0, 1),
    ]
    for machines in (first, second):
        text = f"could not reach {machines.address}"
        with pytest.raises(MissingMachine, match=text):
            meet(TCPStore, machines, {})


@pytest.mark.parametrize(
    "ended, status",
    [
        # By rank, exit status and second; torchrun ends those that are left
        ([(0, 1, 5), (1, -9, 5)], -9),  # killed, and lost by the other
        ([(1, 2, 5), (0, -15, 5)], 2),  # bad input, before signals are handled
        ([(0, 1, 5), (1, 2, 6)], 2),  # an image that one cannot read
        ([(0, 1, 5), (1, -9, 35)], 1),  # hung, until torchrun killed it
        ([(0, 143, 5), (1, 143, 5)], 143),  # stopped
        ([(0, 143, 5), (1, 1, 5)], 1),  # one of them could not
        ([(0, 1, 5), (1, 134, 5)], 134),  # aborted by a library
    ],
)
def test_the_process_that_failed_by_itself(ended, status):
    failures = {}
    for rank, exitcode, second in ended:
        failures[rank] = ProcessFailure(rank, 1, exitcode, "")
        failures[rank].timestamp = second
    assert root_cause(failures)[1].exitcode == status


def test_machines_compare_pytorch(monkeypatch):
    clock = Namespace(monotonic=time.monotonic, sleep=lambda _: None)
    monkeypatch.setattr("launch.machines.time", clock)
    store, machines = HashStore(), Machines(2, None, "first:29400", 0, 45)
    with pytest.raises(MissingMachine, match="1 of 2 machines came"):
        _wait_for_all(store, machines, {}, time.monotonic() - 1)
    right = torch.__version__
    monkeypatch.setattr(torch, "__version__", "1.0")
    with pytest.raises(UserError, match=f"PyTorch differs: {re.escape(right)} on"):
        _wait_for_all(store, machines, {}, time.monotonic() + 9)


def test_the_last_machine_may_come_at_the_last_moment():
    """All that are there go on, or the last one would wait for nobody."""
    store, late = HashStore(), time.monotonic() - 1
    machines = Machines(2, None, "first:29400", 0, 45)
    with pytest.raises(MissingMachine, match="1 of 2 machines came"):
        _wait_for_all(store, machines, {"NODE_RANK": 0}, late)
    _wait_for_all(store, machines, {"NODE_RANK": 1}, late)


def test_a_port_of_another_program_is_not_waited_at_for_ever():
    """It accepts, and never answers; the store's own timeout does not end that."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UserError, match=f"{address}, where nothing answered as ma"):
            meet(TCPStore, Machines(2, 1, address, 0, 2), {})


def test_signals_are_remembered():
    assert set(Watchdog.SIGNALS) == {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}
    before = {number: signal.getsignal(number) for number in Watchdog.SIGNALS}
    try:
        for number in Watchdog.SIGNALS:
            watchdog = Watchdog(timedelta(days=1))  # its thread outlives this test
            assert not watchdog.stop_requested
            os.kill(os.getpid(), number)
            assert watchdog.stop_requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- devices -----------------------------------------------------------------------------


def test_more_processes_than_gpus_are_refused_unless_they_share(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_devices("auto", 2, None)
    check_devices("auto", 3, "gloo")
    check_devices("cpu", 3, None)
    with pytest.raises(
        UserError, match="3 processes for 2 GPUs: start one process per GPU"
    ):
        check_devices("auto", 3, None)
    assert processes_per_machine("auto") == 2 and processes_per_machine("cpu") == 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert processes_per_machine("auto") == 8
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # driver too old
    assert processes_per_machine("auto") == 2
    with pytest.raises(UserError, match="--backend nccl: "):
        check_devices("auto", 2, "nccl")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_cannot_be_used_is_said_aloud(monkeypatch, capsys):
    """With a GPU's device file but no driver that PyTorch can use."""
    assert select_device("auto").type == "cpu" and capsys.readouterr().err == ""
    monkeypatch.setattr("common.device.glob.glob", lambda pattern: ["/dev/nvidia0"])
    assert select_device("auto").type == "cpu"
    warning = capsys.readouterr().err
    assert warning.startswith("warning: a GPU is present, but PyTorch cannot use it: ")
    assert warning.endswith("; training on the CPU\n") and warning.count("\n") == 1
    select_device("auto", local_rank=1)
    assert capsys.readouterr().err == ""
    with pytest.raises(UserError, match="--device cuda: a GPU is present, but"):
        select_device("cuda")


# --- how a script ends -------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer",
        "Timed out waiting 3000ms for recv operation to complete",
        "Application timeout caused pair closure",
        "Connect timeout [127.0.0.1]:29500",
        "wait timeout after 3000ms, keys: /default_pg/0//cpu//0",
        "Socket Timeout",
        "waitForInput: socket SocketImpl(fd=12) timed out after 3000ms",
        "The client socket has timed out after 600000ms while trying to connect to (a, 1)",
        "[Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)",
        "Some NCCL operations have failed or timed out. Due to the asynchronous nature",
        "Rank 1 timed out in monitoredBarrier after 3000 ms",
        "NCCL communicator was aborted on rank 3",
        "ncclRemoteError: A call failed possibly due to a network error",
        "a remote process exited or there was a network error",
        "[Errno 110] Connection timed out",
        "Horovod has been shut down. This was caused by an exception on one of the ranks",
    ],
)
def test_what_libraries_say_of_a_lost_process(message):
    assert LOST_PROCESS.search(message)


@pytest.mark.parametrize(
    "raised, local_rank, status, line",
    [
        ("None", 0, 0, ""),
        ("UserError('no\\nsuch folder')", 0, 2, "-c: error: no such folder\n"),
        ("UserError('no such folder')", 1, 2, ""),
        ("MissingMachine('1 of 2 came')", 0, 1, "-c: error: 1 of 2 came\n"),
        ("ImageError('bad picture')", 1, 2, "-c: error: bad picture\n"),
        (
            "Stopped('step 3 of epoch 2')",
            0,
            143,
            "stopped after step 3 of epoch 2, whi",
        ),
        ("Stopped('step 3 of epoch 2')", 1, 143, ""),
        ("KeyboardInterrupt()", 0, 130, ""),
        (
            "RuntimeError('Connection closed by peer [127.0.0.1]')",
            1,
            1,
            "Connection closed by peer",
        ),
        (
            "RuntimeError('EADDRINUSE port: 29500')",
            0,
            2,
            "-c: error: port 29500 is in use: choose another one",
        ),
        ("RuntimeError('shape mismatch')", 0, 1, "Traceback"),
        ("RuntimeError('DataLoader worker (pid 7) is killed')", 1, 1, "lost another"),
        ("ConnectionResetError(104, 'Connection reset by peer')", 1, 1, "lost another"),
        ("FileNotFoundError(2, 'No such file')", 0, 1, "Traceback"),
        ("RuntimeError('CUDA error: the launch timed out and was')", 0, 1, "Traceback"),
        (
            "RuntimeError('[/a/b/pair.cc:561] Connection closed by peer [127.0.0.1]:1. '"
            "'This is typically caused by a remote worker crashing. GLHF')",
            1,
            1,
            " lost another: Connection closed by peer [127.0.0.1]:1.\n",
        ),
        (
            "RuntimeError('Caught RuntimeError in DataLoader worker process 0.')",
            1,
            1,
            "Traceback",
        ),
    ],
)
def test_exit_status(raised, local_rank, status, line):
    code = (
        "from common.errors import *\n"
        f"with exit_status():\n    error = {raised}\n    if error is not None: raise error\n"
    )
    assert {UserError, MissingMachine, ImageError, Stopped}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment(LOCAL_RANK=str(local_rank)),
        capture_output=True,
        text=True,
    )
    assert ended.returncode == status
    assert line in ended.stderr
    if not line:
        assert ended.stderr == ""
    elif "Traceback" not in line:
        assert len(ended.stderr.splitlines()) == 1


def test_a_loader_that_dies_while_an_error_is_told():
    """PyTorch's handler of SIGCHLD would raise in the middle of that."""
    code = (
        "import os, signal\n"
        "from common.errors import *\n"
        "def died(*_): raise RuntimeError('DataLoader worker (pid 7) is killed')\n"
        "with exit_status():\n"
        "    signal.signal(signal.SIGCHLD, died)\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])\n"
        "    os.kill(os.getpid(), signal.SIGCHLD)\n"
        "    set_signal = signal.signal\n"
        "    def unblock_first(*words):\n"
        "        signal.signal = set_signal\n"
        "        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])\n"
        "        return set_signal(*words)\n"
        "    signal.signal = unblock_first\n"
        "    raise ConnectionResetError(104, 'Connection reset by peer')\n"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert " lost another: [Errno 104] Connection reset" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


ORPHAN = """
import ctypes, os, signal, sys, time
from common.errors import end_with_launcher

killed, variables = sys.argv[1] == "killed", dict(part.split("=") for part in sys.argv[2:])
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans become its children
if os.fork() == 0:
    launcher = os.getpid()
    os.environ |= {name: value or str(launcher) for name, value in variables.items()}
    if os.fork() == 0:
        while killed and os.getppid() == launcher:  # it still imports
            time.sleep(0.01)
        end_with_launcher()
        os.write(1, b"trains")
        os._exit("LAUNCHER_PID" in os.environ)
    if killed:
        os.kill(launcher, signal.SIGKILL)
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
statuses = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(1 + killed)]
os.write(1, str(statuses).encode())
"""
ELASTIC, PID = "TORCHELASTIC_RUN_ID=none", "LAUNCHER_PID="


@pytest.mark.parametrize(
    "words, printed",
    [
        (("alive", ELASTIC, PID), "trains[0]"),
        (("killed", ELASTIC, PID), "[-9, 1]"),
        (("killed", ELASTIC), "trains[-9, 0]"),  # plain torchrun: nobody can tell
    ],
)
def test_a_launcher_that_dies_while_its_process_imports(words, printed):
    ended = run(sys.executable, "-c", ORPHAN, *words, timeout=30)
    assert (ended.stdout, ended.stderr) == (printed, "")


# --- arguments ---------------------------------------------------------------------------


def parse(*flags):
    return parse_arguments(build_parser("A test."), "test", list(flags))


def test_defaults_are_those_of_the_recipe():
    args = parse("--data", "x")
    assert (args.arch, args.epochs, args.global_batch_size, args.lr) == (
        "resnet18",
        90,
        256,
        0.1,
    )
    assert (args.momentum, args.weight_decay, args.warmup_epochs) == (0.9, 1e-4, 5)
    assert (args.schedule, args.image_size, args.seed) == ("step", 224, 0)
    assert str(args.output) == "runs/test"
    assert args.workers is None  # share_out() knows the number of processes


def test_help_names_what_defaults_do_not_say(monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    said = " ".join(build_parser("A test.").format_help().split())
    for words in (
        "--epochs N 90 ",
        "at epoch 30 and again at epoch 60, whatever --epochs is",
        "a run of up to 5 epochs never leaves the default warm-up",
        "--image-size N 224; with --pretrained the size on which the weights were",
    ):
        assert words in said


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--data", "x", "--epoch", "3"), "unrecognized arguments: --epoch 3"),
        ((), "give one of --data DIR and --synthetic"),
        (("--data", "x", "--synthetic"), "give one of --data DIR and --synthetic"),
        (("--data", "x", "--arch", "resnet19"), "resnet19: did you mean resnet18"),
        (("--data", "x", "-b", "0"), "0 is not above 0"),
        (("--data", "x", "--epochs", "many"), "invalid positive value: 'many'"),
        (("--data", "x", "--lr", "-1"), "-1 is not 0 or above"),
        (("--data", "x", "--lr", "nan"), "nan is not 0 or above"),
        (("--data", "x", "--min-crop", "1.5"), "1.5 is not above 0 and at most 1"),
        (("--data", "x", "-j", "-2"), "-2 is not 0 or above"),
        (("--data", "x", "--seed", "-2"), "-2 is not 0 or above"),
        (
            ("--data", "x", "--evaluate"),
            "--evaluate needs --resume auto|PATH or --pretrained",
        ),
    ],
)
def test_bad_flags_end_with_status_2_and_one_line(flags, message, capsys):
    with pytest.raises(SystemExit) as end:
        parse(*flags)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


# --- meters ------------------------------------------------------------------------------


def test_meter_adds_sums_and_counts():
    meter = Meter(CPU)
    outputs = torch.eye(7)[[0, 1, 2, 3]] + torch.tensor([0, 0, 0.1, 0.2, 0.3, 0.4, 0.5])
    labels = torch.tensor([0, 1, 6, 0])
    meter.add(torch.tensor(2.0), outputs, labels)
    meter.add(torch.tensor(5.0), outputs[:1], labels[:1])
    sums = meter.take()
    assert sums.tolist() == [4 * 2 + 5, 3, 4, 5, 0]
    result = averages(sums)
    assert result.images == 5 and result.loss == pytest.approx(13 / 5)
    assert (result.top1, result.top5) == (pytest.approx(60), pytest.approx(80))
    assert meter.take().tolist() == [0] * 5


def test_top5_of_fewer_classes_than_five():
    meter = Meter(CPU)
    meter.add(torch.tensor(0.0), torch.tensor([[0.1, 0.9]]), torch.tensor([0]))
    assert meter.take().tolist()[1:4] == [0, 1, 1]


def test_sums_meet_no_tensor_of_another_float_type(monkeypatch, tmp_path):
    """Apex O1 patches these operators: float32 with float64 is an error there."""
    for name in ("__iadd__", "__mul__"):
        original = getattr(torch.Tensor, name)

        def strict(one, other, original=original):
            floats = {
                t.dtype
                for t in (one, other)
                if torch.is_tensor(t) and t.is_floating_point()
            }
            assert len(floats) <= 1, floats
            return original(one, other)

        monkeypatch.setattr(torch.Tensor, name, strict)
    meter = Meter(CPU)
    meter.add(torch.tensor(2.0), torch.eye(4), torch.arange(4))
    assert meter.take().tolist() == [8, 4, 4, 4, 0]


def test_meter_carries_the_stop_signal():
    fed = []
    watchdog = Namespace(stop_requested=True, feed=lambda: fed.append(1))
    meter = Meter(CPU, watchdog)
    assert meter.take()[4] == 1
    for batches in (1, 2):  # the watchdog hears of each
        meter.add(torch.tensor(2.0), torch.eye(4), torch.arange(4))
        assert len(fed) == batches


def test_averages_over_nothing():
    assert (
        math.isnan(averages(torch.zeros(5)).loss)
        and averages(torch.zeros(5)).images == 0
    )
    assert averages(torch.eye(5)[4]).stop and not averages(torch.zeros(5)).stop


def test_epoch_timer_leaves_the_warm_up_out(monkeypatch):
    clock = iter([0.0, 10.0, 12.0, 13.0])
    monkeypatch.setattr("common.meters.time.perf_counter", lambda: next(clock))
    timer = EpochTimer()
    timer.start(0)
    assert timer.lap(10, 100, 5.0) == (10.0, 0.5)
    assert timer.lap(20, 100, 0.5) == (50.0, 0.25)
    timer.lap(25, 50, 0.25)
    figures = timer.summary(CPU)
    assert figures["seconds"] == 13 and figures["warmup_steps"] == 10
    assert figures["images_per_second"] == 50 and figures["step_milliseconds"] == 200
    assert figures["data_wait_share"] == 0.25 and figures["peak_memory_mib"] > 0


def test_epoch_timer_waits_until_what_loaders_prepared_is_used_up(monkeypatch):
    """Over laps, and over the end of an epoch."""
    clock = iter(float(second) for second in range(10))
    monkeypatch.setattr("common.meters.time.perf_counter", lambda: next(clock))
    timer = EpochTimer(12)
    timer.start(0)
    timer.lap(5, 100, 0.0)
    timer.lap(10, 100, 0.0)
    figures = timer.summary(CPU)
    assert figures["warmup_steps"] == 10 and figures["images_per_second"] is None
    timer.start(0)
    timer.lap(5, 100, 0.0)
    timer.lap(10, 70, 0.0)
    figures = timer.summary(CPU)
    assert figures["warmup_steps"] == 5 and figures["images_per_second"] == 70
    timer.start(0)
    timer.lap(5, 30, 0.0)
    timer.lap(7, 30, 0.0)
    figures = timer.summary(CPU)
    assert figures["warmup_steps"] == 0 and figures["images_per_second"] == 30
    assert figures["step_milliseconds"] == 350  # of steps of 200 and of 500
    assert figures["step_milliseconds_p90"] == 500


@pytest.mark.parametrize(
    ("share", "value"), [(0.9, 9.0), (0.91, 10.0), (0.5, 5.0), (0.01, 1.0), (1.0, 10.0)]
)
def test_percentile(share, value):
    assert percentile([float(number) for number in range(10, 0, -1)], share) == value


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_shown_by_rank_0(terminal, monkeypatch, capsys):
    """A line now and then, or a bar; the figures are those since the epoch's first step."""
    clock = Namespace(monotonic=lambda: clock.now)
    monkeypatch.setattr("common.progress.time", clock)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    args = parse("--data", "x", "--epochs", "9")
    args.per_process_workers = 4
    for rank in (0, 1):
        shown = Progress(args, rank)
        shown.start(1, 4, 20)  # resumed
        for step, clock.now in ((6, 100), (9, 110), (12, 131)):
            shown.lap(step, Averages(0.5, 10.0, 20.0, 64), 0.0)
        lines = capsys.readouterr().out.splitlines()
        said = "loss 0.500, top-1 10.0 %, "
        starts = [f"epoch 2/9, step {step}/20: {said}" for step in (6, 12)]
        assert [
            line[: len(start)] for line, start in zip(lines, starts, strict=False)
        ] == (starts if rank == 0 and not terminal else [])
        assert shown.bar.disable == (rank != 0 or not terminal)
        assert shown.bar.disable or shown.bar.n == 12
        shown.close()
        figures = shown.figures(CPU)
        assert (figures["first_step"], figures["warmup_steps"]) == (4, 8)
        assert shown.timer.cold_steps == 0  # two batches for each loader process
    args.synthetic = 1  # no loader processes
    assert Progress(args, 0).timer.cold_steps == 1


@pytest.mark.parametrize("size, said", [(15, True), (16, False)])
def test_few_images_per_process_are_named_at_the_start(size, said, capsys):
    """256 images on 32 GPUs are 8 each."""
    args = parse("--synthetic", "--precision", "fp32")
    args.per_process_batch_size = size
    print_start(args, Namespace(epoch=0, step=0), CPU, 2, 10)
    note = f"note: {size} images per process and step are few"
    assert (note in capsys.readouterr().out) is said
    args.evaluate = True
    print_start(args, Namespace(epoch=0, step=0), CPU, 2, 10)
    assert "note" not in capsys.readouterr().out


@pytest.mark.parametrize("gpus, said", [(32, True), (16, False)])
def test_dataparallel_shares_its_batch_out_over_gpus(gpus, said, monkeypatch, capsys):
    """256 images on 32 GPUs are 8 each, in one process; the GPUs are stand-ins."""
    args = parse("--synthetic", "--precision", "fp32")
    args.per_process_batch_size, args.strategy = 256, "dataparallel"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr("common.report.describe", lambda _: "a GPU")
    device = torch.device("cuda", 0)
    print_start(args, Namespace(epoch=0, step=0), device, 1, 10)
    note = "note: 8 images per GPU and step are few"
    assert (note in capsys.readouterr().out) is said


@pytest.mark.parametrize(
    "epoch, step, flags, said",
    [
        (0, 0, (), []),
        (
            *(1, 3, ()),
            [
                "resumed at epoch 2, after step 3 of it (image 1536 of its order), "
                "saved by 4 processes"
            ],
        ),
        (9, 0, (), ["complete already: 9 of 9 epochs"]),
        (9, 0, ("--evaluate", "--resume", "auto"), []),
    ],
)
def test_a_run_begins_with_what_it_is(epoch, step, flags, said, capsys):
    args = parse(
        "--synthetic", "--precision", "fp32", "-b", "512", "--lr", "0.2", *flags
    )
    args.per_process_batch_size, args.epochs = 256, 9
    print_start(args, Namespace(epoch=epoch, step=step, saved_by=4), CPU, 2, 10)
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("test: 2 processes on ")
    assert first.endswith(" (cpu), resnet18, fp32, seed 0")
    assert lines == [
        "10 steps an epoch of 512 images, 256 per process, synthetic images, "
        "learning rate 0.4",
        *said,
    ]


def test_a_resumed_epoch_stays_out_of_the_medians():
    measured = ("seconds", "images_per_second", "step_milliseconds", "data_wait_share")

    def record(first_step, value):
        return {
            **dict.fromkeys(measured, value),
            "first_step": first_step,
            "val_top1": 50.0,
        }

    records = [record(0, 9.0), record(0, 2.0), record(7, 100.0), record(0, 4.0)]
    assert summarise(records)["seconds"] == 3
    assert summarise(records[:1])["seconds"] == 9
    assert summarise([record(0, 9.0), record(7, 1.0)])["seconds"] == 5
    for top1, one in zip((50.0, 70.0, 60.0), records, strict=False):
        one["val_top1"] = top1
    summary = summarise(records[:3])
    assert (summary["val_top1"], summary["best_val_top1"]) == (60.0, 70.0)
    assert summary["epochs"] == 3


def test_an_epoch_is_printed_as_it_is_recorded(capsys):
    figures = {"seconds": 8.04, "images_per_second": 99.6, "data_wait_share": 0.25}
    train = {"epoch": 4, "train_loss": 1.5, "train_top1": 12.0, "first_step": 0}
    val = {"val_loss": 2.5, "val_top1": 34.0, "val_top5": 56.0, "val_images": 78}
    print_epoch({**train, **val, **figures}, 9)
    said = (
        "epoch 5/9: train loss 1.5000, top-1 12.00 %; val loss 2.5000, top-1 34.00 %, "
    )
    said += "top-5 56.00 %, 78 images; 8.0 s"
    assert capsys.readouterr().out == f"{said}, 100 images/s, waited for data 25%\n"
    figures["images_per_second"] = None
    print_epoch({**train, **val, **figures, "first_step": 7}, 9)
    assert capsys.readouterr().out == f"{said} from step 7 on (warm-up)\n"


# --- schedule ----------------------------------------------------------------------------


def test_learning_rate_is_scaled_linearly():
    assert scaled_learning_rate(0.1, 256) == pytest.approx(0.1)
    assert scaled_learning_rate(0.1, 1024) == pytest.approx(0.4)


def test_warm_up_then_steps():
    factors = [learning_rate_factor(step, 10, 90, 5, "step") for step in range(900)]
    assert factors[0] == pytest.approx(0.02) and factors[24] == pytest.approx(0.5)
    assert factors[49] == 1 and factors[299] == 1
    assert factors[300] == pytest.approx(0.1) and factors[899] == pytest.approx(0.01)
    assert all(a <= b for a, b in zip(factors[:50], factors[1:50], strict=False))


def test_warm_up_then_cosine_to_zero():
    factors = [learning_rate_factor(step, 10, 9, 1, "cosine") for step in range(91)]
    assert max(factors) == 1 and factors[50] == pytest.approx(0.5)
    assert factors[90] == pytest.approx(0) and 0 < factors[89] < 0.001
    assert learning_rate_factor(0, 10, 9, 0, "cosine") == 1


# --- seeding -----------------------------------------------------------------------------


def test_seeds_are_32_bits_and_differ():
    seeds = {seed_from(0, epoch, index) for epoch in range(10) for index in range(1000)}
    assert len(seeds) == 10000 and all(0 <= seed < 2**32 for seed in seeds)


def test_augmentation_and_dropout_draw_from_their_keys():
    import random

    draws = []
    for key in ((0, 1, 2), (0, 1, 2), (0, 1, 3)):
        seed_augmentation(*key)
        draws.append((torch.rand(3).tolist(), random.random()))
    assert (
        draws[0] == draws[1]
        and draws[0][0] != draws[2][0]
        and draws[0][1] != draws[2][1]
    )
    seed_step(0, 1, 2, 0)
    first = torch.rand(3)
    seed_step(0, 1, 2, 1)
    assert not torch.equal(first, torch.rand(3))


# --- model -------------------------------------------------------------------------------


def test_autocast_reaches_a_fresh_thread():
    """Replicas of nn.DataParallel run in threads, where autocast's dtype is not inherited."""
    seen = {}

    class Probe(nn.Linear):
        def forward(self, images):
            outputs = super().forward(images)
            seen[threading.current_thread().name] = outputs.dtype
            return outputs

    model = AutocastModel(Probe(4, 4), torch.bfloat16)
    thread = threading.Thread(target=model, args=(torch.ones(1, 4),), name="replica")
    with torch.autocast(
        "cpu", torch.float16
    ):  # what the thread would otherwise see is not this
        thread.start()
        thread.join()
    assert seen == {"replica": torch.bfloat16}
    assert (
        AutocastModel(nn.Linear(4, 4), torch.float32)(torch.ones(1, 4)).dtype
        == torch.float32
    )


def test_the_trap_that_the_wrapper_is_for():
    """Autocast around threads does not reach them: the thread computes in fp32."""
    seen = []
    layer = nn.Linear(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        thread = threading.Thread(
            target=lambda: seen.append(layer(torch.ones(1, 4)).dtype)
        )
        thread.start()
        thread.join()
    assert seen != [torch.bfloat16]


def test_channels_last_goes_through_a_compressor_in_memory_order():
    class Half:
        def compress(self, tensor):
            assert tensor.is_contiguous()
            return tensor.half(), tensor.dtype

        def decompress(self, tensor, dtype):
            return tensor.to(dtype)

    for tensor in (
        torch.randn(8, 3, 5, 5).to(memory_format=torch.channels_last),
        torch.randn(8, 3, 5, 5),
        torch.randn(8, 3, 1, 1).to(memory_format=torch.channels_last),
        torch.randn(10),
    ):
        view = contiguous_view(tensor)
        assert view.is_contiguous() and view.data_ptr() == tensor.data_ptr()
        order = InMemoryOrder(Half())
        back = order.decompress(*order.compress(tensor))
        assert back.stride() == tensor.stride()
        torch.testing.assert_close(back, tensor.half().float())


def model_arguments(**changes):
    args = parse("--data", "x")
    for name, value in changes.items():
        setattr(args, name, value)
    return args


def test_first_weights_depend_on_the_seed_alone():
    one, again = (
        build_model(model_arguments(seed=1), 10).state_dict() for _ in range(2)
    )
    other = build_model(model_arguments(seed=2), 10).state_dict()
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["conv1.weight"], other["conv1.weight"])
    assert one["fc.weight"].shape == (10, 512)
    assert one["layer1.0.conv1.weight"].is_contiguous(memory_format=torch.channels_last)
    plain = build_model(model_arguments(no_channels_last=True), 10).state_dict()
    assert plain["layer1.0.conv1.weight"].is_contiguous()


@pytest.mark.parametrize(
    "arch",
    ("googlenet", "inception_v3", "vit_b_32", "mobilenet_v3_small", "regnet_y_400mf"),
)
def test_every_model_has_one_output(arch):
    size = 299 if arch == "inception_v3" else 224
    check_image_size(model_arguments(arch=arch, image_size=size), 10)


@pytest.mark.parametrize("arch, size", (("vit_b_16", 30), ("alexnet", 16)))
def test_an_image_size_that_does_not_fit_is_refused(arch, size):
    with pytest.raises(
        UserError, match=f"{arch} cannot train on images of --image-size {size}"
    ):
        check_image_size(model_arguments(arch=arch, image_size=size), 10)


def test_pretrained_weights_that_do_not_fit_are_refused():
    for build in (build_model, check_image_size):
        with pytest.raises(UserError, match="for 1000 classes, the data has 10"):
            build(model_arguments(pretrained=True), 10)
        args = model_arguments(pretrained=True, arch="vit_b_16", image_size=192)
        with pytest.raises(UserError, match="are for --image-size 224, not 192"):
            build(args, 1000)


def configuration(model):
    """The settings of a model and of all its parts, and the shapes of its weights."""
    plain = bool | int | float | str | tuple
    parts = [
        (
            name,
            type(part),
            {k: v for k, v in vars(part).items() if isinstance(v, plain)},
        )
        for name, part in model.named_modules()
    ]
    return parts, {name: one.shape for name, one in model.state_dict().items()}


def test_a_reloaded_pretrained_model_is_built_as_its_weights_were(monkeypatch):
    """One of each family, without the weights: they are in the checkpoint."""
    families = {get_model_builder(arch).__module__: arch for arch in architectures()}
    downloads = []
    monkeypatch.setattr(model, "download_once", downloads.append)
    monkeypatch.setattr(WeightsEnum, "get_state_dict", lambda *_, **__: {})
    monkeypatch.setattr(nn.Module, "load_state_dict", lambda *_: None)
    for arch in families.values():
        args = parse("--data", "x", "--pretrained", "--arch", arch)
        with torch.device("cpu" if arch.startswith("regnet") else "meta"):
            built = build_model(args, 1000)
            args.resume = "checkpoint.pt"
            again = build_model(args, 1000)
        assert configuration(built) == configuration(again), arch
        assert len(downloads) == 1, arch
        downloads.clear()


def test_a_pretrained_run_begins_with_its_protocol(capsys):
    for flags, said in (
        ((), ""),
        (
            ("--pretrained",),
            "resizes the shorter side to 232 (bilinear) and takes the ",
        ),
        (("--pretrained", "--image-size", "448"), " to 512 (bilinear) and takes the "),
    ):
        args = parse("--data", "x", "--arch", "resnet50", *flags)
        args.per_process_batch_size, state = 256, Namespace(epoch=0, step=0)
        print_start(args, state, CPU, 1, 10)
        printed = capsys.readouterr().out
        assert said in printed and ("validation" in printed) == bool(said)
    assert f"takes the middle {args.image_size} pixels\n" in printed


def test_auto_downloads_only_where_there_is_no_checkpoint(tmp_path, monkeypatch):
    downloads = []

    def download(weights):
        downloads.append(weights)
        raise OSError("no network")

    monkeypatch.setattr(model, "download_once", download)
    flags = ["--data", "x", "--pretrained", "--resume", "auto"]
    args = parse(*flags, "--output", str(tmp_path))
    with pytest.raises(UserError, match="the weights of resnet18: no network"):
        build_model(args, 1000)
    (tmp_path / "checkpoint.pt").touch()
    build_model(args, 1000)
    assert len(downloads) == 1


def test_processes_of_a_machine_download_weights_once(tmp_path):
    weights = build_model(model_arguments(arch="squeezenet1_1"), 1000).state_dict()
    torch.save(weights, tmp_path / "squeezenet1_1.pth")
    file = str(tmp_path / "squeezenet1_1.pth")
    with Ranks(tmp_path, 4, download, file=file) as ranks:
        for found in ranks.results():
            assert all(torch.equal(found[name], weights[name]) for name in weights)
        assert ranks.text().count("Downloading: ") == 1
