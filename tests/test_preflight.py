"""launch/preflight.py: all processes are there and reach one another, or who does not."""

import contextlib
import re
import socket

import pytest
from conftest import ROOT, TINY, environment, launcher, run
from played import Played, free_port, python

from launch.preflight import ranks_of_launcher

HOST = socket.gethostname()
FLAGS = ("--device", "cpu", "--timeout-seconds", "5")
HOROVOD = ("python", "-m", "launch.preflight", *FLAGS, "--backend", "horovod")


def all_there(backend):
    rows = [rf"rank {rank}: {re.escape(HOST)}, cpu .*{backend}\n" for rank in range(2)]
    return "".join(rows) + r"preflight: 2 processes, all-reduce correct, [\d.]+ ms\n"


@pytest.mark.full
@pytest.mark.parametrize(
    "launched",
    [
        pytest.param("horovodrun --gloo -np 2", marks=pytest.mark.horovod),
        pytest.param("mpirun -np 2 --oversubscribe", marks=pytest.mark.mpi),
    ],
)
def test_under_horovod(launched):
    ended = run(*launched.split(), *HOROVOD, PYTHONPATH=str(ROOT))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    text = re.sub(r"^\[[\d,]+\]<stdout>: ?", "", ended.stdout, flags=re.MULTILINE)
    assert re.fullmatch(all_there("horovod"), text), text


FAULTS = {
    "none": ("True", None),
    "missing": ("os._exit(0)", "rank 1 (host ?) did not register within 5 s"),
    "device hangs": (
        "preflight.describe = lambda _: time.sleep(99)",
        f"rank 1 ({HOST}) registered, but its device did not answer within 5 s",
    ),
    "device fails": (
        "preflight.describe = lambda _: 1 / 0",
        f"rank 1 ({HOST}): division by zero",
    ),
    "network hangs": (
        "preflight.all_reduce = lambda *_: time.sleep(99)",
        f"rank 0 ({HOST}), rank 1 ({HOST}) did not finish the all-reduce within 5 s",
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


def test_one_line_says_what_is_wrong(tmp_path):
    """Or that nothing is; all pairs of processes at the same time."""
    ranks = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    with contextlib.ExitStack() as stack:
        pairs = {}
        for name, (fault, _) in FAULTS.items():
            script = tmp_path / name / "preflight.py"
            script.parent.mkdir()
            script.write_text(FAULTY.format(fault=fault))
            pairs[name] = stack.enter_context(Played(script.parent))
            ranks["MASTER_PORT"] = str(free_port())
            for rank in "01":
                variables = environment(RANK=rank, **ranks)
                pairs[name].start(python, (script, *FLAGS), variables)
        for name, (_, line) in FAULTS.items():
            first = pairs[name].processes[0]
            first.join(40)
            assert first.exitcode == bool(line), name
            if line is None:
                assert re.fullmatch(all_there("gloo"), pairs[name].log(0))
            else:
                assert pairs[name].log(0) == f"preflight.py: error: {line}\n"


def test_ranks_of_launchers():
    for prefix in ("HOROVOD_", "OMPI_COMM_WORLD_"):
        names = [prefix + name for name in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")]
        values = dict(zip(names, ("5", "1", "8", "4"), strict=True))
        assert ranks_of_launcher(values, slurm=True) == (5, 1, 8, 4)
    assert ranks_of_launcher({"SLURM_STEP_NUM_TASKS": "1"}, slurm=True) is None
    assert ranks_of_launcher({"SLURM_STEP_NUM_TASKS": "2"}, slurm=False) is None


ELASTIC = {"NNODES": "1:2", "RDZV_ENDPOINT": "a:1", "MAX_RESTARTS": "1"}
UNREACHABLE = rf"rank [01] \({re.escape(HOST)}\): .*none0.*"
NO_NETWORK = {"GLOO_SOCKET_IFNAME": "none0"}, 1, UNREACHABLE


@pytest.mark.parametrize(
    "variables, status, line",
    [
        (ELASTIC, 2, ".*not LEAST:MOST"),
        pytest.param(*NO_NETWORK, marks=pytest.mark.full),
    ],
    ids=("elastic", "no network"),
)
def test_no_training_after_a_preflight_that_failed(variables, status, line, tmp_path):
    flags = (*TINY, "--synthetic", "8", "--device", "cpu", "--output", tmp_path / "out")
    ended = launcher("distributed", *flags, PREFLIGHT="1", **variables)
    assert (ended.returncode, ended.stdout) == (status, "")
    assert re.fullmatch(rf"preflight.py: error: {line}\n", ended.stderr)
    assert not (tmp_path / "out").exists()
