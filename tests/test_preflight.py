"""launch/preflight.py: all processes are there and reach one another, or who does not."""

import re
import socket
import sys

import pytest
from conftest import ROOT, TINY, launcher, run

from launch.preflight import ranks_of_launcher

HOST = re.escape(socket.gethostname())
MODULE = ("-m", "launch.preflight", "--device", "cpu", "--timeout-seconds", "4")
HOROVOD = ("python", *MODULE, "--backend", "horovod")
STARTED = {
    "python": (sys.executable, *MODULE, "--nprocs", "2"),
    "torchrun": ("torchrun", "--standalone", "--nproc-per-node=2", *MODULE),
    "horovodrun": ("horovodrun", "--gloo", "-np", "2", *HOROVOD),
    "mpirun": ("mpirun", "-np", "2", "--oversubscribe", "--bind-to", "none", *HOROVOD),
}
NEEDS = {"horovodrun": pytest.mark.horovod}
NEEDS["mpirun"] = [pytest.mark.mpi, pytest.mark.full]


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=NEEDS.get(way, ())) for way in STARTED]
)
def test_under_every_launcher(way):
    ended = run(*STARTED[way], PYTHONPATH=str(ROOT))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    text = re.sub(r"^\[[\d,]+\]<stdout>: ?", "", ended.stdout, flags=re.MULTILINE)
    backend = "horovod" if "run" in way and way != "torchrun" else "gloo"
    rows = [rf"rank {rank}: {HOST}, cpu .*{backend}\n" for rank in range(2)]
    last = r"preflight: 2 processes, all-reduce correct, [\d.]+ ms\n"
    assert re.fullmatch("".join(rows) + last, text), text


FAULTS = {
    "missing": ("True", "rank 1 (host ?) did not register within 4 s"),
    "device hangs": (
        "preflight.describe = lambda _: time.sleep(99)",
        f"rank 1 ({HOST}) registered, but its device did not answer within 4 s",
    ),
    "device fails": (
        "preflight.describe = lambda _: 1 / 0",
        f"rank 1 ({HOST}): division by zero",
    ),
    "network hangs": (
        "preflight.all_reduce = lambda *_: time.sleep(99)",
        f"rank 0 ({HOST}), rank 1 ({HOST}) did not finish the all-reduce within 4 s",
    ),
}
# Process 1 of 2 with a fault
FAULTY = """
import os, time
from launch import preflight
from launch.exits import exit_status
if os.environ["RANK"] == "1":
    {fault}
with exit_status():
    preflight.main()
"""


@pytest.mark.parametrize("name", FAULTS)
def test_one_line_says_what_is_wrong_and_all_end(name, tmp_path):
    fault, line = FAULTS[name]
    script = tmp_path / "preflight.py"
    script.write_text(FAULTY.format(fault=fault))
    ranks = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ranks["MASTER_PORT"] = str(listener.getsockname()[1])
    started = " ".join(
        f"RANK={n} python {script} {' '.join(MODULE[2:])} &" for n in (0, 1)
    )
    if name == "missing":
        started = started.partition("&")[0] + "&"
    command = f"{started} wait -n; echo $?; kill $(jobs -p) 2>/dev/null; wait"
    ended = run("bash", "-c", command, PYTHONPATH=str(ROOT), **ranks)
    assert ended.stdout == "1\n"
    assert ended.stderr == f"preflight.py: error: {line}\n"


def test_ranks_of_launchers():
    for prefix in ("HOROVOD_", "OMPI_COMM_WORLD_"):
        names = [prefix + name for name in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")]
        values = dict(zip(names, ("5", "1", "8", "4"), strict=True))
        assert ranks_of_launcher(values, slurm=True) == (5, 1, 8, 4)
    assert ranks_of_launcher({"SLURM_STEP_NUM_TASKS": "1"}, slurm=True) is None
    assert ranks_of_launcher({"SLURM_STEP_NUM_TASKS": "2"}, slurm=False) is None


def test_no_training_after_a_preflight_that_failed(tmp_path):
    """Gloo is told to use a network that is not there."""
    flags = (*TINY, "--synthetic", "8", "--device", "cpu", "--output", tmp_path / "out")
    variables = {"PREFLIGHT": "1", "GLOO_SOCKET_IFNAME": "none0"}
    ended = launcher("distributed", *flags, **variables)
    assert (ended.returncode, ended.stdout) == (1, "")
    line = rf"preflight.py: error: rank [01] \({HOST}\): .*none0.*\n"
    assert re.fullmatch(line, ended.stderr)
    assert not (tmp_path / "out").exists()
