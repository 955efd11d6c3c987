"""How many cores a job may use, and the compute threads of each process."""

import os

import pytest

from common.device import machine_cores
from launch.check import set_threads


@pytest.mark.parametrize(
    "slurm, affinity, quota, expected",
    [
        (None, 32, None, 32),
        ("8", 2, None, 8),  # srun binds each of four tasks to its share of the job's
        (None, 32, "max 100000", 32),
        (None, 32, "550000 100000", 6),
        ("32", 32, "50000 100000", 1),
    ],
)
def test_cores_of_a_job(slurm, affinity, quota, expected, tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_CPUS_ON_NODE", raising=False)
    if slurm:
        monkeypatch.setenv("SLURM_CPUS_ON_NODE", slurm)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(affinity)))
    if quota:
        (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
        (tmp_path / "sys/fs/cgroup/cpu.max").write_text(quota + "\n")
    assert machine_cores(tmp_path) == expected
    monkeypatch.setattr("launch.check.machine_cores", lambda: expected)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    set_threads(2)
    assert os.environ["OMP_NUM_THREADS"] == str(max(1, expected // 2))
    set_threads(1)  # leaves what is set
    assert os.environ["OMP_NUM_THREADS"] == str(max(1, expected // 2))
