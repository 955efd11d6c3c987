"""How many loader processes and threads each training process has by default."""

import os
import sys
from argparse import Namespace

import pytest
from conftest import ROOT, run

from launch.check import set_threads
from launch.cores import cpu_quota, own_cores
from common.data import share_out

TORCHRUN = {"LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"}
HOROVODRUN = {"HOROVOD_LOCAL_SIZE": "4", "HOROVOD_SIZE": "4"}
MPIRUN = {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_SIZE": "4"}


def slurm(tasks, cpus):
    """What srun hands down: tasks on each machine, and the step's CPUs on this one."""
    return {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_CPUS_ON_NODE": str(cpus),
    }


@pytest.fixture(autouse=True)
def no_slurm_around_the_tests(monkeypatch):
    for name in list(os.environ):
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    "variables, affinity, processes, expected",
    [
        pytest.param({}, 32, 1, 16, id="dataparallel"),
        pytest.param(TORCHRUN, 32, 4, 8, id="torchrun"),
        pytest.param(TORCHRUN, 3, 4, 1, id="torchrun, fewer cores than processes"),
        pytest.param(TORCHRUN, 255, 4, 16, id="torchrun, many cores"),
        pytest.param({"LOCAL_RANK": "0", **TORCHRUN}, 32, 4, 8, id="launch"),
        pytest.param({}, 32, 4, 8, id="mp.spawn"),
        pytest.param(HOROVODRUN, 32, 4, 8, id="horovodrun"),
        pytest.param(MPIRUN, 32, 4, 8, id="mpirun"),
        pytest.param(slurm("4", 32), 8, 4, 8, id="srun, 4 x 8"),
        pytest.param(slurm("8(x2),4", 48), 6, 8, 6, id="srun, 8 x 6"),
        pytest.param(slurm("4(x2)", 128), 32, 4, 16, id="srun, 4 x 32"),
        pytest.param(slurm("4", 32), 64, 4, 8, id="srun, tasks not bound"),
        pytest.param(slurm("4", 32), 16, 4, 8, id="srun, two tasks a socket"),
        pytest.param(slurm("1(x2)", 32) | TORCHRUN, 32, 4, 8, id="srun, torchrun"),
        pytest.param(slurm("1(x2)", 32), 32, 4, 8, id="srun, mp.spawn"),
        pytest.param(slurm("1(x2)", 32) | MPIRUN, 32, 4, 8, id="srun, mpirun"),
        pytest.param(slurm("1", 64) | TORCHRUN, 8, 4, 2, id="srun, taskset, torchrun"),
        pytest.param(slurm("4", 32) | HOROVODRUN, 8, 4, 8, id="srun, Horovod's tasks"),
        pytest.param({"SLURM_CPUS_ON_NODE": "32"}, 64, 4, 8, id="sbatch, torchrun"),
    ],
)
def test_each_process_has_loaders_for_its_cores(
    variables, affinity, processes, expected, monkeypatch
):
    """The processes that each launcher starts, with the environment that it gives."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(affinity)))
    monkeypatch.setattr("launch.cores.cpu_quota", lambda _: None)
    for local_rank in range(processes):
        args = Namespace(global_batch_size=48, workers=None)
        share_out(args, local_rank, 2 * processes, processes)  # on two machines
        assert args.per_process_workers == expected
        assert args.workers == processes * expected


@pytest.mark.parametrize(
    "own, quotas, expected",
    [
        ("0::/", {}, None),
        ("0::/", {".": "max 100000"}, None),
        ("0::/", {".": "600000 100000"}, 6),
        ("0::/", {".": "550000 100000"}, 6),
        ("0::/pod/box", {"pod": "800000 100000", "pod/box": "max 100000"}, 8),
        ("0::/pod/box", {"pod": "800000 100000", "pod/box": "50000 100000"}, 1),
        ("0::/pod/box", {"pod/other": "100000 100000"}, None),
        ("1:cpu:/pod\n0::/../box", {"pod": "100000 100000"}, None),
    ],
)
def test_the_quota_of_a_container(own, quotas, expected, tmp_path, monkeypatch):
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(own + "\n")
    for folder, content in quotas.items():
        folder = tmp_path / "sys" / "fs" / "cgroup" / folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.max").write_text(content + "\n")
    assert cpu_quota(tmp_path) == expected
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)))
    assert own_cores(2, tmp_path) == max(1, (expected or 32) // 2)
    monkeypatch.setattr("launch.cores.cpu_quota", lambda _: expected)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    set_threads(2)
    assert int(os.environ["OMP_NUM_THREADS"]) == max(1, (expected or 32) // 2)
    set_threads(1)  # leaves what is set
    assert int(os.environ["OMP_NUM_THREADS"]) == max(1, (expected or 32) // 2)


# Prints in one write what a process finds, without the seconds that PyTorch takes
PROBE = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from launch.cores import own_cores

def main(*_):
    child = os.environ.get("LAUNCHER_PID") == str(os.getppid())
    found = f"CORES {{own_cores(1)}} EACH {{own_cores(2)}} LAUNCHER {{child}}"
    os.write(1, f"{{found}}\\n".encode())
"""
TORCH_LAUNCHER = (sys.executable, "-m", "launch.torchrun")
TWO = ("cpu:gloo", "--nproc-per-node", "2")
# As torch.multiprocessing.spawn does
SPAWN = """from multiprocessing import get_context

    for process in [get_context("spawn").Process(target=main) for _ in range(2)]:
        process.start()
"""


@pytest.mark.parametrize(
    "command",
    [
        pytest.param((*TORCH_LAUNCHER, "torchrun", *TWO), id="torchrun"),
        pytest.param((*TORCH_LAUNCHER, "launch", *TWO), id="launch"),
        pytest.param((sys.executable,), id="mp.spawn"),
        pytest.param(
            ("horovodrun", "-np", "2", "--gloo", "python"),
            id="horovodrun",
            marks=pytest.mark.horovod,
        ),
        pytest.param(
            ("mpirun", "-np", "2", "--oversubscribe", "--bind-to", "none", "python"),
            id="mpirun",
            marks=pytest.mark.mpi,
        ),
    ],
)
def test_launchers_hand_the_affinity_down(command, tmp_path):
    """Two processes that were started on half of the cores."""
    cores = sorted(os.sched_getaffinity(0))
    half = cores[: max(1, len(cores) // 2)]
    main = SPAWN if command == (sys.executable,) else "main()"
    probe = tmp_path / "probe.py"
    probe.write_text(f'{PROBE}\nif __name__ == "__main__":\n    {main}\n')
    on = ("taskset", "-c", ",".join(map(str, half)))
    ended = run(*on, *command, probe)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    ours = str("launch.torchrun" in command)
    found = f"CORES {len(half)} EACH {max(1, len(half) // 2)} LAUNCHER {ours}"
    assert ended.stdout.count(found) == 2, ended.stdout
