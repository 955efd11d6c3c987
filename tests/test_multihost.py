"""Training over two hosts, on every engine; the hosts are network namespaces (hosts.py).

bash scripts/test.sh -k multihost                     # one process on each host, each engine
bash scripts/test.sh -k multihost --full --figures    # failures too; writes results/multinode.json
"""

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import MISSING, ROOT, environment
from hosts import NAMES, Hosts, hosts_missing, programs_missing
from ranks import run_ranks, train

pytestmark = pytest.mark.skipif(bool(hosts_missing()), reason=str(hosts_missing()))

COURSE = "--image-size 32 --arch squeezenet1_1 --precision fp32 --lr 0.02 -j 1 "
COURSE += "--warmup-epochs 0 --print-interval 1 --device cpu --schedule cosine "
COURSE = COURSE.split()
# A run of seconds
SHORT = [*COURSE, *"-b 16 --epochs 2 --max-steps 6".split()]
# A run that is there until something happens to it
LONG = [*COURSE, *"-b 4 --epochs 2000 --max-steps 20 --checkpoint-steps 5".split()]
PORT = 29400


class Job:
    """Commands under way on the hosts, with what they print."""

    def __init__(self, hosts: Hosts, folder: Path):
        self.hosts = hosts
        self.folder = folder
        self.processes: dict[str, subprocess.Popen] = {}
        self.ended: dict[str, float] = {}

    def start(self, host: str, *command, **variables: str) -> None:
        log = open(self.folder / f"{host}.log", "ab")
        self.processes[host] = subprocess.Popen(
            self.hosts.command(host, *command),
            cwd=ROOT,
            env=environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        log.close()

    def text(self, *chosen: str) -> str:
        files = [self.folder / f"{host}.log" for host in chosen or NAMES]
        return "".join(f.read_text(errors="replace") for f in files if f.exists())

    def left(self) -> list[int]:
        """Processes that are neither the hosts' daemons nor gone."""
        found = [pid for host in NAMES for pid in self.hosts.processes(host)]
        return [pid for pid in found if pid not in self.hosts.daemons]

    def trainers(self, host: str) -> list[int]:
        """Training processes of a host, without their loaders."""
        script = re.compile(
            r"\S*python\S* (-u )?\S*distributed\.py --|\S*python\S* .*spawn_main"
        )
        commands = {pid: read(pid, "cmdline") for pid in self.hosts.processes(host)}
        return [
            pid
            for pid, command in commands.items()
            if script.match(command) and commands.get(parent(pid)) != command
        ]

    def end(self, seconds: float) -> dict[str, int]:
        """Wait until every process of both hosts is gone; the launchers' statuses."""
        until = time.monotonic() + seconds
        while self.left() or any(p.poll() is None for p in self.processes.values()):
            if time.monotonic() > until:
                left = {pid: read(pid, "cmdline") for pid in self.left()}
                pytest.fail(f"left after {seconds} s: {left}\n{self.text()[-5000:]}")
            time.sleep(0.1)
        return {host: p.returncode for host, p in self.processes.items()}

    def kill(self) -> None:
        for host in NAMES:
            self.hosts.kill(host, self.hosts.daemons)
        for process in self.processes.values():
            process.wait(timeout=20)


def read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def parent(pid: int) -> int:
    stat = read(pid, "stat")
    return int(stat.rsplit(")", 1)[1].split()[1]) if stat else 0


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> Iterator[Hosts]:
    """The two hosts, with ssh and Slurm where they are installed."""
    with Hosts(tmp_path_factory.mktemp("multihost") / "hosts") as hosts:
        if not SSH:
            hosts.start_ssh()
        if not SLURM:
            hosts.start_slurm()
        hosts.daemons = tuple(pid for host in NAMES for pid in hosts.processes(host))
        yield hosts


@pytest.fixture
def job(both, tmp_path) -> Iterator[Job]:
    job = Job(both, tmp_path)
    yield job
    if "slurm" in job.processes:
        both.slurm("scancel", "--user=root", check=False)
    job.kill()


# --- engines: how a script is started on both hosts ---


def torchrun(job, flags, processes=1, script="distributed", **variables):
    """The same command on both hosts; they find their numbers themselves."""
    common = {"NNODES": "2", "NPROC": str(processes), "RDZV_ENDPOINT": f"hosta:{PORT}"}
    for host in NAMES:
        command = ("bash", ROOT / "scripts" / f"{script}.sh", *flags)
        job.start(host, *command, **{**common, **variables})


def static(job, flags, processes=1, **variables):
    """torchrun with numbered hosts."""
    common = {"NNODES": "2", "NPROC": str(processes), "MASTER_ADDR": "hosta"}
    for number, host in enumerate(NAMES):
        command = ("bash", ROOT / "scripts" / "distributed.sh", *flags)
        job.start(host, *command, **{**common, "NODE_RANK": str(number), **variables})


def spawn(job, flags, processes=1, **variables):
    url = f"tcp://hosta:{PORT}"
    for number, host in enumerate(NAMES):
        job.start(
            host,
            *("bash", ROOT / "scripts" / "multiprocessing_distributed.sh", *flags),
            *("--nprocs", processes, "--nnodes", 2),
            *("--node-rank", number, "--dist-url", url),
            **variables,
        )


def horovodrun(job, flags, processes=1, **variables):
    """Started on hosta, which reaches hostb by ssh."""
    job.start(
        "hosta",
        *("bash", ROOT / "scripts" / "horovod_distributed.sh", *flags),
        HOSTS=f"hosta:{processes},hostb:{processes}",
        **{**job.hosts.ssh_variables, **variables},
    )


def mpirun(job, flags, processes=1, **variables):
    variables = {"INTERFACE": "eth0", **variables}
    horovodrun(job, flags, processes, CONTROLLER="mpi", **variables)


def sbatch(job, flags, processes=1, options=(), **variables):
    """scripts/slurm.sbatch, edited for these hosts; ends with the job."""
    text = (ROOT / "scripts" / "slurm.sbatch").read_text()
    text = re.sub(r"#SBATCH --(gpus-per-node|cpus-per-task).*\n", "", text)
    file = job.folder / "edited.sbatch"
    file.write_text(text)
    job.processes["slurm"] = subprocess.Popen(
        job.hosts.command(
            *("hosta", "sbatch", "--wait", f"--ntasks-per-node={processes}"),
            *("--time=10", "--signal=B:USR1@60", f"--output={job.folder}/hosta.log"),
            *options,
            file,
            *flags,
        ),
        cwd=ROOT,
        env=environment(**job.hosts.slurm_variables, **variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=open(job.folder / "hostb.log", "ab"),
    )


def sbatch_torchrun(job, flags, processes=1, **variables):
    sbatch(job, flags, processes, LAUNCHER="torchrun", **variables)


SSH = programs_missing("sshd", "ssh", "ssh-keygen")
SLURM = programs_missing("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
NO_HOROVOD = pytest.mark.skipif(
    bool(SSH or MISSING["horovod"]), reason=str(SSH or MISSING["horovod"])
)
NO_MPI = pytest.mark.skipif(
    bool(SSH or MISSING["mpi"]), reason=str(SSH or MISSING["mpi"])
)
NO_SLURM = pytest.mark.skipif(bool(SLURM), reason=str(SLURM))
FULL = pytest.mark.full
ENGINES = {
    "torchrun": (torchrun, ()),
    "torchrun, numbered": (static, ()),
    "mp.spawn": (spawn, ()),
    "horovodrun": (horovodrun, (NO_HOROVOD,)),
    "mpirun": (mpirun, (NO_MPI,)),
    "srun": (sbatch, (NO_SLURM,)),
    "torchrun in Slurm": (sbatch_torchrun, (NO_SLURM,)),
}


def engines(*names, marks=()):
    return [
        pytest.param(ENGINES[name][0], id=name, marks=(*ENGINES[name][1], *marks))
        for name in names or ENGINES
    ]


@pytest.fixture(scope="module")
def one_host(digits, tmp_path_factory):
    """The output of a run on a single host; strategies have the same bits."""
    done = {}

    def of(world_size):
        if world_size not in done:
            folder = tmp_path_factory.mktemp("one")
            flags = ["--data", digits, *SHORT, "--output", folder / "out"]
            run_ranks(folder, world_size, train, name="distributed", flags=flags)
            done[world_size] = folder / "out"
        return done[world_size]

    return of


def assert_same_weights(output, expected, bound=0.0):
    one, other = (
        torch.load(folder / "checkpoint.pt", weights_only=True)
        for folder in (output, expected)
    )
    assert (one["epoch"], one["step"]) == (other["epoch"], other["step"])
    for name, tensor in one["state_dict"].items():
        difference = (tensor - other["state_dict"][name]).abs().max().item()
        assert difference <= bound, (name, difference)
    for number, state in one["optimizer"]["state"].items():
        momentum = other["optimizer"]["state"][number]["momentum_buffer"]
        difference = (state["momentum_buffer"] - momentum).abs().max().item()
        assert difference <= 3 * bound, (number, difference)


@pytest.mark.parametrize(
    "engine",
    [
        *engines("torchrun", "mp.spawn", "horovodrun", "mpirun"),
        *engines("srun", "torchrun in Slurm"),
        *engines("torchrun, numbered", marks=(FULL,)),
    ],
)
def test_two_hosts_train_as_one_host_does(engine, job, digits, one_host, tmp_path):
    flags = ["--data", digits, *SHORT, "--output", tmp_path / "out"]
    engine(job, flags)
    statuses = job.end(120)
    assert set(statuses.values()) == {0}, job.text()
    assert_same_weights(tmp_path / "out", one_host(2))
