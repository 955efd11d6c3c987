"""What is looked at before a run: processes that reach one another, and limits."""

import contextlib
import re
import socket
import subprocess
import sys
from argparse import Namespace

import pytest
from conftest import ROOT, TINY, launcher, run
from played import Played, load, preflight
from torch.utils.data import DataLoader

sys.path.insert(0, str(ROOT / "scripts"))
import preflight as script

from common import data, limits
from common.arguments import build_parser, parse_arguments
from launch.check import check
from common.data import share_out
from common.errors import UserError

SCRIPT = ROOT / "scripts" / "preflight.py"
HOST = socket.gethostname()


# --- preflight.py ---


def expect_two(text, backend):
    """The lines of two processes, with or without what a launcher puts before them."""
    lines = re.sub(r"^\[[\d,]+\]<stdout>: ?", "", text, flags=re.MULTILINE).splitlines()
    for rank, line in enumerate(lines[:2]):
        start = f"rank {rank}  {HOST}  local rank {rank}  "
        assert line.startswith(start) and line.endswith(f"  {backend}"), text
    assert "of shared memory free" in lines[2] and "open files" in lines[2]
    last = rf"preflight: 2 processes, all-reduce over {backend}: correct, [\d.]+ ms"
    assert re.fullmatch(last, lines[3]), text
    return lines[4:]


HOROVOD = ("python", SCRIPT, "--backend", "horovod", "--device", "cpu")
GLOO = (SCRIPT, "--backend", "gloo", "--device", "cpu")
STARTED = {
    "python": ("python", *GLOO, "--nprocs", "2"),
    "torchrun": ("torchrun", "--standalone", "--nproc-per-node=2", *GLOO),
    "horovodrun": ("horovodrun", "--gloo", "-np", "2", *HOROVOD),
    "mpirun": ("mpirun", "-np", "2", "--bind-to", "none", *HOROVOD),
}
NEEDS = {
    "python": [pytest.mark.full],  # as for dataparallel.sh below
    "horovodrun": [pytest.mark.horovod],
    "mpirun": [pytest.mark.mpi, pytest.mark.full],
}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=NEEDS.get(way, ())) for way in STARTED]
)
def test_under_every_launcher(way):
    ended = run(*STARTED[way], MASTER_PORT=free_port())
    assert ended.returncode == 0, ended.stdout + ended.stderr
    backend = "horovod" if "horovod" in STARTED[way] else "gloo"
    assert not expect_two(ended.stdout, backend)


def test_on_one_machine_it_listens_on_loopback_only():
    for host in script.LOOPBACK:
        with script.listen(host, int(free_port())) as listener:
            assert listener.getsockname()[0] == "127.0.0.1"


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


ME = rf"\({re.escape(HOST)}\)"
NOBODY = r"rank 0 at 127.0.0.1:\d+ did not answer within 4 s"
PID = rf"process \d+ on {re.escape(HOST)}"
# Ranks, each (rank, world size, fault), and the one line that they print. Those that stop
# are stopped; the others end with status 1.
SCENES = {
    "missing": ([(0, 3, None), (1, 3, None)], "rank 2 did not register within 3 s"),
    "silent": (
        [(0, 3, None), (1, 3, "stops"), (2, 3, None)],
        f"rank 1 {ME} registered and then fell silent",
    ),
    "device hangs": (
        [(0, 2, None), (1, 2, "device hangs")],
        f"rank 1 {ME} registered, but its device did not answer within 3 s",
    ),
    "device fails": (
        [(0, 2, None), (1, 2, "device fails")],
        f"rank 1 {ME}: CUDA error: uncorrectable ECC error encountered",
    ),
    "wrong sum": (
        [(0, 2, None), (1, 2, "adds up wrongly")],
        f"rank 1 {ME}: the sum is 4.0 in place of 3.0",
    ),
    "all hang": (
        [(0, 2, None), (1, 2, "hangs")],
        "no process finished the all-reduce within 3 s",
    ),
    "twice": (
        [(0, 3, None), (1, 3, None), (1, 3, None)],
        f"rank 1 is there twice: {PID} and {PID} .*",
    ),
    "different sizes": (
        [(0, 3, None), (1, 2, None)],
        f"rank 1 {ME} was told of 2 processes, rank 0 of 3",
    ),
    "rank 0 missing": ([(1, 2, None)], f"rank 1 {ME}: {NOBODY}"),
    "rank 0 silent": ([(0, 2, "stops"), (1, 2, None)], f"rank 1 {ME}: {NOBODY}"),
    "two ranks 0": (
        [(0, 2, None), (0, 2, None)],
        f"rank 0 is there twice: {PID} and .*",
    ),
    "another program": (
        [(0, 2, None)],
        r"port \d+ is taken by a program .* within 4 s",
    ),
}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """All of them at once, as they mostly wait."""
    with contextlib.ExitStack() as stack:
        started = {}
        for name, (ranks, _) in SCENES.items():
            played = stack.enter_context(Played(tmp_path_factory.mktemp("scene")))
            port = free_port()
            if name == "another program":
                stack.enter_context(socket.create_server(("127.0.0.1", int(port))))
            for rank, size, fault in ranks:
                flags = ["--timeout-seconds", "3", "--device", "cpu"]
                variables = by_hand(rank, size) | {"MASTER_PORT": port}
                played.start(preflight, variables, flags, fault)
            started[name] = played
        yield started


def by_hand(rank: int, size: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
    }


@pytest.mark.parametrize("name", SCENES)
def test_one_line_says_what_is_wrong_and_all_end(scenes, name):
    played, (ranks, error) = scenes[name], SCENES[name]
    running = [n for n, (_, _, fault) in enumerate(ranks) if fault != "stops"]
    assert played.end(*running) == [1] * len(running)
    printed = list(filter(None, played.text().splitlines()))  # also PyTorch is quiet
    # Neither of two ranks 0 can know that the other is not another job's: both speak
    lines = 2 if name == "two ranks 0" else 1
    assert len(printed) == len(played.errors()) == lines, played.text()
    assert len(set(printed)) == 1
    assert re.fullmatch(error, played.errors()[0]), played.text()


def test_ranks_of_launchers():
    for names in (script.TORCH, *script.OTHERS):
        values = dict(zip(names, ("5", "1", "8", "4"), strict=True))
        assert script.ranks_of_launcher(values) == (5, 1, 8, 4)
        del values[names[1]]
        with pytest.raises(UserError, match="no LOCAL_RANK in the environment"):
            script.ranks_of_launcher(values)
    assert script.ranks_of_launcher({}) is None
    slurm = {"PROCID": 5, "LOCALID": 1, "NTASKS": 8, "NODEID": 1, "STEP_ID": 0}
    slurm |= {"STEP_NUM_TASKS": 8, "STEP_TASKS_PER_NODE": "4(x2)"}
    slurm = {f"SLURM_{name}": str(value) for name, value in slurm.items()}
    with pytest.raises(UserError, match="MASTER_ADDR and MASTER_PORT say not where"):
        script.ranks_of_launcher(slurm)
    slurm |= {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert script.ranks_of_launcher(slurm) == (5, 1, 8, 4)
    assert script.ranks_of_launcher({**slurm, "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert script.ranks_of_launcher(slurm, slurm=False) is None
    with pytest.raises(UserError, match="no MASTER_ADDR"):
        script.meeting_point(script.Ranks(0, 0, 8, 4))


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--timeout-seconds", "0"), "0 is not above 0"),
        (("--backend", "horovod"), "needs horovodrun or mpirun to start it"),
        (("distributed.py", "--epoch", "3"), "unrecognized arguments: --epoch 3"),
        (("--device", "cpu", "distributed.py"), "go behind distributed.py"),
    ],
)
def test_bad_flags(flags, message, capsys):
    with pytest.raises((UserError, SystemExit)) as raised:
        script.main(list(flags))
    assert message in str(raised.value) + capsys.readouterr().err


# --- through the launch scripts ---


FLAGS = (*TINY, "--synthetic", "8", "--epochs", "1", "--device", "cpu", "--output")


@pytest.mark.parametrize(
    "strategy, backend, variables",
    [
        ("dataparallel", "gloo", {}),
        pytest.param(
            *("distributed", "gloo", {"LAUNCHER": "launch", "NPROC": "2"}),
            marks=pytest.mark.full,
        ),
        pytest.param(
            *("multiprocessing_distributed", "gloo", {"NPROC": "2"}),
            marks=pytest.mark.full,
        ),
        pytest.param(
            *("horovod_distributed", "horovod", {"NPROC": "2"}),
            marks=[pytest.mark.full, pytest.mark.horovod],
        ),
    ],
)
def test_training_after_a_preflight(strategy, backend, variables, tmp_path):
    output = tmp_path / "out"
    ended = launcher(strategy, *FLAGS, output, PREFLIGHT="1", **variables)
    assert ended.returncode == 0, ended.stderr
    assert expect_two(ended.stdout, backend)  # and more lines
    assert (output / "report.json").exists()


@pytest.mark.parametrize(
    "strategy",
    (
        "distributed",
        pytest.param("multiprocessing_distributed", marks=pytest.mark.full),
        pytest.param(
            "horovod_distributed", marks=[pytest.mark.full, pytest.mark.horovod]
        ),
    ),
)
def test_no_training_after_a_preflight_that_failed(strategy, tmp_path):
    """Gloo is told to use a network that is not there."""
    output = tmp_path / "out"
    network = {"GLOO_SOCKET_IFNAME": "none0", "HOROVOD_GLOO_IFACE": "none0"}
    ended = launcher(strategy, *FLAGS, output, PREFLIGHT="1", NPROC="2", **network)
    assert (ended.returncode, ended.stdout) == (1, "")
    line = rf"preflight.py: error: rank [01] {ME}: .*none0.*\n"
    if strategy == "horovod_distributed":  # horovodrun adds pages of its own
        assert len(re.findall(line, ended.stderr)) == 1
    else:
        assert re.fullmatch(line, ended.stderr)
    assert [file.name for file in output.glob("*")] == ["lock"]


# --- limits ---


def own_shared_memory() -> str | None:
    """Why a process cannot have a /dev/shm of its own; None where it can."""
    command = ("unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
    try:
        ended = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        return str(error)
    return ended.stderr.strip() or None


OWN_SHARED_MEMORY = pytest.mark.skipif(
    bool(own_shared_memory()), reason=f"no /dev/shm of its own: {own_shared_memory()}"
)


def loaded(tmp_path, data, flags, memory=None, files=None, check=True):
    """Status and last line of a process that loads with such limits.

    DataLoader warns before, where there are fewer cores than loader processes.
    """
    with Played(tmp_path) as played:
        played.start(load, data, flags, memory, files, check)
        return played.end(0)[0], played.log(0).splitlines()[-1]


def needed(workers, batches, batch_size, image_size):
    """Bytes of shared memory, counted by hand for sizes that fill their pages."""
    assert batch_size * 3 * image_size**2 % 4096 == 0
    images, labels = batch_size * 3 * image_size**2, 4096
    return batches * (images + labels) + 4096 * 2 * (3 * workers + 8)


@OWN_SHARED_MEMORY
@pytest.mark.parametrize("workers, batches", [(1, 4), (3, 4)])
def test_just_enough_shared_memory(pictures, tmp_path, workers, batches):
    """Two for each loader process, one in use and the next, but no more than an epoch has."""
    flags = f"-b 4 --image-size 64 -j {workers}".split()
    memory = needed(workers, batches, 4, 64)
    status, text = loaded(tmp_path, pictures, flags, memory)
    assert status == 0 and text.startswith("loaded"), text


@OWN_SHARED_MEMORY
def test_too_little_shared_memory(pictures, tmp_path):
    """A page less is refused, and two batches less is what a loader process crashes of."""
    flags = "-b 4 --image-size 64 -j 1".split()
    memory = needed(1, 4, 4, 64)
    status, text = loaded(tmp_path, pictures, flags, memory - 4096)
    assert status == 2
    assert text == (
        "loader: error: /dev/shm has 292 KiB free, and batches from 1 loader processes "
        "take up to 296 KiB: make it larger (docker run --shm-size), or lower --workers"
    )
    status, text = loaded(tmp_path, pictures, flags, memory - 2 * 53248, check=False)
    assert status not in (0, 2) and "loaded" not in text


def test_shared_memory_of_all_processes_of_a_machine(monkeypatch):
    asked = []
    monkeypatch.setattr(limits, "check_shared_memory", lambda *what: asked.append(what))
    args = Namespace(workers=3, image_size=64, global_batch_size=12, device="cpu")
    for rank in range(4):
        share_out(args, rank, 6, 4)  # of 6 processes 4 are here
        limits.check_limits(args, 600, 60)
    limits.check_limits(args, 0, 60)  # validation alone
    one = needed(1, 4, 2, 64)
    assert asked == [(3 * one, 3)] * 5  # the fourth process loads by itself


def test_what_dataloader_does_by_itself():
    loader = DataLoader([1], num_workers=1)
    assert loader.prefetch_factor == limits.PREFETCH


def test_open_files_are_raised_where_that_is_allowed(pictures, tmp_path):
    flags = "-b 4 --image-size 32 -j 6".split()
    status, text = loaded(tmp_path, pictures, flags, files=(48, 1000))
    assert status == 0 and 48 < int(text.split()[1]) < 1000, text


def test_too_few_open_files(pictures, tmp_path):
    flags = "-b 4 --image-size 32 -j 6".split()
    status, text = loaded(tmp_path, pictures, flags, files=(48, 48))
    assert status == 2
    assert re.fullmatch(
        r"loader: error: this process may open 48 files, and with 6 loader processes "
        r"takes \d+: raise the limit \(ulimit -Hn\), or lower --workers",
        text,
    )
    status, text = loaded(tmp_path, pictures, flags, files=(48, 48), check=False)
    assert status not in (0, 2) and "loaded" not in text


def test_five_scripts_and_the_check_look_at_limits(pictures, tmp_path, monkeypatch):
    """All open their data by the same function, once their parts are known."""
    asked = []
    monkeypatch.setattr(limits, "check_shared_memory", lambda *what: asked.append(what))
    flags = ["--data", str(pictures), *TINY, "-j", "2", "--device", "cpu"]
    args = parse_arguments(build_parser("A test."), "test", flags)
    args.output = tmp_path / "out"
    monkeypatch.setattr(data, "make_dataset", None)  # the check lists no folder
    check(args, 2)
    assert len(asked) == 1
    text = (ROOT / "distributed.py").read_text()
    assert 0 < text.index("share_out(args") < text.index("build_datasets(args)")
