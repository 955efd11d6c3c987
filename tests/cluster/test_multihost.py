"""Train with each launcher on two hosts, which are network namespaces (hosts.py).

bash scripts/test.sh -m cluster
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, run, start, wait_until
from hosts import NAMES, Hosts, call, hosts_missing

REASON = hosts_missing()
skipped = pytest.mark.skipif(REASON is not None, reason=str(REASON))
pytestmark = [pytest.mark.cluster, skipped]
FLAGS = (
    "--image-size 32 --arch squeezenet1_1 --precision fp32 --lr 0.02 -b 16 -j 1 "
    "--warmup-epochs 0 --print-interval 1 --epochs 2 --max-steps 3 --schedule cosine"
).split()
# Submits a job and exits with its status; sbatch --wait polls too rarely
SUBMIT = """
job=$(sbatch --parsable "$@") || exit
while [ -n "$(squeue --noheader --jobs="$job" 2>/dev/null)" ]; do sleep 0.3; done
exit "$(scontrol --oneliner show job "$job" | sed 's/.* ExitCode=\\([0-9]*\\):.*/\\1/')"
"""


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    with Hosts(tmp_path_factory.mktemp("multihost") / "hosts") as hosts:
        hosts.start_ssh()
        hosts.start_slurm()
        yield hosts


class Job:
    """Commands that run on the hosts, and their output."""

    def __init__(self, hosts: Hosts, folder: Path):
        self.hosts = hosts
        self.log = folder / "log"
        self.processes: list[subprocess.Popen] = []

    def start(self, host: str, *command, **variables: str) -> None:
        with open(self.log, "ab") as log:
            command = self.hosts.command(host, *command)
            self.processes.append(start(command, log, variables))

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def end(self, seconds: float) -> list[int]:
        """Wait until the hosts have no processes left; return the launchers' statuses."""

        def over() -> bool:
            ended = all(process.poll() is not None for process in self.processes)
            return ended and not any(map(self.hosts.processes, NAMES))

        wait_until(over, seconds, self.text)
        return [process.returncode for process in self.processes]


@pytest.fixture
def job(both, tmp_path):
    job = Job(both, tmp_path)
    yield job
    call(*both.command("hosta", "scancel", "--user=root"))
    for host in NAMES:
        both.kill(host)
    for process in job.processes:
        process.wait(timeout=20)


def torchrun(job, *flags):
    where = "--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint hosta"
    for host in NAMES:
        job.start(host, "torchrun", *where.split(), ROOT / "distributed.py", *flags)


def spawn(job, *flags):
    script = ROOT / "multiprocessing_distributed.py"
    where = "--nnodes 2 --nprocs 1 --dist-url tcp://hosta:29400 --node-rank".split()
    for rank, host in enumerate(NAMES):
        job.start(host, sys.executable, script, *flags, *where, rank)


def horovodrun(job, *flags, **variables):
    """Start the run on hosta, which reaches hostb by SSH."""
    command = ("bash", "scripts/horovod_distributed.sh", *flags)
    job.start("hosta", *command, HOSTS="hosta:1,hostb:1", NPROC="2", **variables)


def mpirun(job, *flags):
    horovodrun(job, *flags, CONTROLLER="mpi")


def sbatch(job, *flags):
    """Submit scripts/slurm.sbatch, with options in place of its EDIT lines."""
    edited = ("--gpus-per-node=0", "--cpus-per-task=1", "--time=10")
    command = ("bash", "-c", SUBMIT, "submit", *edited, f"--output={job.log}.slurm")
    command += ("scripts/slurm.sbatch", *flags)
    job.start("hosta", *command, NPROC="1")


def came_to(output: Path):
    """Return a run's weights, and its records without times."""
    weights = torch.load(output / "checkpoint.pt", weights_only=True)["state_dict"]
    lines = (output / "epochs.jsonl").read_text().splitlines()
    names = ("train_loss", "val_loss", "val_top1", "val_images", "learning_rate")
    return weights, [[json.loads(line)[name] for name in names] for line in lines]


@pytest.fixture(scope="module")
def one_host(digits, tmp_path_factory):
    """Return the results of the same run on one host, which every strategy must reproduce."""
    output = tmp_path_factory.mktemp("one_host") / "run"
    command = ("torchrun", "--standalone", "--nproc-per-node", 2, "distributed.py")
    ended = run(*command, "--data", digits, *FLAGS, "--output", output)
    assert ended.returncode == 0, ended.stderr
    return came_to(output)


LAUNCHERS = [torchrun, spawn, sbatch]
LAUNCHERS += [pytest.param(horovodrun, marks=pytest.mark.horovod)]
LAUNCHERS += [pytest.param(mpirun, marks=pytest.mark.mpi)]


@pytest.mark.parametrize("launch", LAUNCHERS)
def test_two_hosts_come_to_what_one_does(job, digits, one_host, tmp_path, launch):
    output = tmp_path / "run"
    launch(job, "--data", digits, *FLAGS, "--output", output)
    assert not any(job.end(180)), job.text()
    (weights, records), (expected, same) = came_to(output), one_host
    assert records == same
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
