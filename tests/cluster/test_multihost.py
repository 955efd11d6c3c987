"""Training over two hosts, on every engine; the hosts are network namespaces (hosts.py).

bash scripts/test.sh -m cluster           # one process on each host, each engine
bash scripts/test.sh -m cluster --full    # two, and failures
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from signal import SIGKILL

import pytest
import torch
from conftest import MISSING, ROOT, launcher, start, wait_until
from hosts import NAMES, Hosts, hosts_missing, programs_missing
from torch.utils._pytree import tree_leaves

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(hosts_missing()), reason=str(hosts_missing())),
]

COURSE = "--image-size 32 --arch squeezenet1_1 --precision fp32 --lr 0.02 -j 1 "
COURSE += "--warmup-epochs 0 --print-interval 1 --device cpu --schedule cosine "
COURSE = COURSE.split()
# A run of seconds
SHORT = [*COURSE, *"-b 16 --epochs 2 --max-steps 6".split()]
# Long enough to be killed in between
RESUMED = [*COURSE, *"-b 16 --epochs 6 --max-steps 20 --checkpoint-steps 5".split()]
PORT = 29400
ROUNDING = 2e-5  # of four summands, amplified by dropout and 12 steps


class Job:
    """Commands under way on the hosts, with what they print."""

    def __init__(self, hosts: Hosts, folder: Path):
        self.hosts = hosts
        self.folder = folder
        self.processes: dict[str, subprocess.Popen] = {}

    def start(self, host: str, *command, **variables: str) -> None:
        command = self.hosts.command(host, *command)
        with open(self.folder / f"{host}.log", "ab") as log:
            self.processes[host] = start(command, log, variables)

    def text(self) -> str:
        files = [self.folder / f"{host}.log" for host in NAMES]
        return "".join(f.read_text(errors="replace") for f in files if f.exists())

    def left(self) -> list[str]:
        """Commands of the processes that are neither the hosts' daemons nor gone."""
        pids = (pid for host in NAMES for pid in self.hosts.processes(host))
        # Over a cut network an sshd cannot tell its client that its session is over
        return [one for one in map(command_of, pids) if not one.startswith("sshd: ")]

    def trainers(self, host: str) -> list[int]:
        """Training processes of a host, maybe with their loaders behind them."""
        script = r"\S*python\S* (-u )?(?!\S*/multiproc)\S*distributed\.py --"
        trainer = re.compile(rf"{script}|\S*python\S* .*spawn_main")
        pids = sorted(self.hosts.processes(host))
        return [pid for pid in pids if trainer.match(command_of(pid))]

    def statuses(self) -> dict[str, int | None]:
        """Exit statuses of the launchers."""
        return {host: process.poll() for host, process in self.processes.items()}

    def end(self, seconds: float) -> dict[str, int]:
        """Wait until every process of both hosts is gone; the launchers' statuses."""
        wait_until(
            lambda: not self.left() and None not in self.statuses().values(),
            seconds,
            lambda: f"the end of {self.left()}\n{self.text()}",
        )
        return self.statuses()

    def kill(self) -> None:
        for host in NAMES:
            self.hosts.kill(host)
        for process in self.processes.values():
            process.wait(timeout=20)


def command_of(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return words.replace(b"\0", b" ").decode()


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> Iterator[Hosts]:
    """The two hosts, with ssh and Slurm where they are installed."""
    with Hosts(tmp_path_factory.mktemp("multihost") / "hosts") as hosts:
        if not SSH:
            hosts.start_ssh()
        if not SLURM:
            hosts.start_slurm()
        hosts.daemons = {pid for host in NAMES for pid in hosts.processes(host)}
        yield hosts


@pytest.fixture
def job(both, tmp_path) -> Iterator[Job]:
    job = Job(both, tmp_path)
    yield job
    if not SLURM:
        both.slurm("scancel", "--user=root", check=False)
    job.kill()


# --- engines: how a script is started on both hosts ---


def torchrun(job, flags, processes=1, numbered=False, **variables):
    """The same command on both hosts, or numbered ones."""
    for number, host in enumerate(NAMES):
        where = {"NNODES": "2", "NPROC": str(processes)}
        if numbered:
            where |= {"NODE_RANK": str(number), "MASTER_ADDR": "hosta"}
        else:
            where["RDZV_ENDPOINT"] = f"hosta:{PORT}"
        command = ("bash", ROOT / "scripts" / "distributed.sh", *flags)
        job.start(host, *command, **where, **variables)


def spawn(job, flags, processes=1, **variables):
    script = ROOT / "scripts" / "multiprocessing_distributed.sh"
    where = ("--nnodes", 2, "--dist-url", f"tcp://hosta:{PORT}", "--nprocs", processes)
    for number, host in enumerate(NAMES):
        command = ("bash", script, *flags, *where, "--node-rank", number)
        job.start(host, *command, **variables)


def horovodrun(job, flags, processes=1, **variables):
    """Started on hosta, which reaches hostb by ssh."""
    hosts = {"HOSTS": f"hosta:{processes},hostb:{processes}", **job.hosts.ssh_variables}
    command = ("bash", ROOT / "scripts" / "horovod_distributed.sh", *flags)
    job.start("hosta", *command, **{**hosts, **variables})


# Submits a job and ends as it does; sbatch --wait looks at it too seldom
SUBMIT = """
job=$(sbatch --parsable "$@") || exit
while [ -n "$(squeue --noheader --jobs="$job" 2>/dev/null)" ]; do sleep 0.3; done
exit "$(scontrol --oneliner show job "$job" | sed 's/.* ExitCode=\\([0-9]*\\):.*/\\1/')"
"""


def sbatch(job, flags, processes=1, **variables):
    """scripts/slurm.sbatch, its EDIT lines given as options."""
    edited = ("--gpus-per-node=0", "--cpus-per-task=1", "--time=10")
    edited += (f"--ntasks-per-node={processes}", f"--output={job.folder}/hostb.log")
    command = ("bash", "-c", SUBMIT, "submit", *edited, "scripts/slurm.sbatch", *flags)
    job.start("hosta", *command, **job.hosts.slurm_variables, **variables)


SSH = programs_missing("sshd", "ssh", "ssh-keygen")
SLURM = programs_missing("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")


def skip(reason):
    return (pytest.mark.skipif(bool(reason), reason=str(reason)),)


mpirun = partial(horovodrun, CONTROLLER="mpi", INTERFACE="eth0")
sbatch_torchrun = partial(sbatch, LAUNCHER="torchrun")
ENGINES = {
    "torchrun": (torchrun, ()),
    "torchrun, numbered": (partial(torchrun, numbered=True), ()),
    "mp.spawn": (spawn, ()),
    "horovodrun": (horovodrun, skip(SSH or MISSING["horovod"])),
    "mpirun": (mpirun, skip(SSH or MISSING["mpi"])),
    "srun": (sbatch, skip(SLURM)),
    "torchrun in Slurm": (sbatch_torchrun, skip(SLURM)),
}


def engines(*names):
    return [
        pytest.param(ENGINES[name][0], id=name, marks=ENGINES[name][1])
        for name in names or ENGINES
    ]


@pytest.fixture(scope="module")
def one_host(digits, tmp_path_factory):
    """The output of a run on a single host; strategies have the same bits."""
    done = {}

    def of(processes, course=SHORT):
        key = processes, *course
        if key not in done:
            done[key] = tmp_path_factory.mktemp("one") / "out"
            flags = ("--data", digits, *course, "--output", done[key])
            ended = launcher("distributed", *flags, NPROC=str(processes))
            assert ended.returncode == 0, ended.stderr
        return done[key]

    return of


def assert_same_weights(output, expected, bound=0.0) -> float:
    """Weights and momenta, within a bound; returns the largest difference."""
    one, other = (
        torch.load(folder / "checkpoint.pt", weights_only=True)
        for folder in (output, expected)
    )
    assert (one["epoch"], one["step"]) == (other["epoch"], other["step"])
    leaves = (
        tree_leaves([content["state_dict"], content["optimizer"]["state"]])
        for content in (one, other)
    )
    largest = max((a - b).abs().max().item() for a, b in zip(*leaves, strict=True))
    assert largest <= bound
    return largest


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("engine", engines())
def test_two_hosts_train_as_one_host_does(
    engine, processes, job, digits, one_host, tmp_path, record_property, request
):
    """To the bit, or up to rounding where the sum has four summands."""
    flags = ["--data", digits, *SHORT, "--output", tmp_path / "out"]
    engine(job, flags, processes)
    assert set(job.end(180).values()) == {0}, job.text()
    bound = 0 if processes == 1 else ROUNDING
    found = assert_same_weights(tmp_path / "out", one_host(2 * processes), bound)
    if processes == 2:
        name = request.node.callspec.id.split("-")[0]
        record_property(f"hosts rounding / {name} / largest difference", found)


# Rank {rank} meets bad input; the other one hangs, or ends as it loses the first
FAILING = """
import os, sys, time
from distributed import arguments
if __name__ == "__main__":
    print("started", flush=True)
    if os.environ["RANK"] == "{rank}":
        open("{gone}", "w").close()
        sys.exit(2)
    while not ({lost} and os.path.exists("{gone}")):
        time.sleep(0.01)
    sys.exit(1)
"""


@pytest.mark.parametrize("rank, lost", [(0, True), (1, False)])
def test_torchrun_ends_on_all_hosts_at_bad_input(rank, lost, job, tmp_path):
    """Of which one serves the rendezvous. No training process is started again."""
    script, gone = tmp_path / "failing.py", tmp_path / "gone"
    script.write_text(FAILING.format(rank=rank, gone=gone, lost=lost))
    flags = ("--synthetic", 8, "-b", 2, "-j", 1, "--device", "cpu")
    torchrun(job, flags, SCRIPT=str(script), MAX_RESTARTS="3")
    assert job.end(60) == {"hosta": 2, "hostb": 2}, job.text()
    assert job.text().count("started\n") == 2 and "error: " not in job.text()


@pytest.mark.parametrize("there", NAMES)
def test_a_preflight_names_who_is_missing(there, job, tmp_path):
    """Before torchrun, which only knows that somebody is."""
    flags = ("--synthetic", 8, "-b", 2, "-j", 1, "--device", "cpu")
    common = {"NNODES": "2", "RDZV_ENDPOINT": f"hosta:{PORT}"}
    command = (sys.executable, "-m", "launch.preflight", "--timeout-seconds", 5)
    command += ("--nprocs", 1)
    job.start(there, *command, ROOT / "distributed.py", *flags, **common)
    assert job.end(60) == {there: 1}
    lines = {
        "hosta": "rank 1 (host ?) did not register within 5 s",
        "hostb": f"hostb could not reach hosta:{PORT} in 5 s: Connection refused",
    }
    assert job.text().endswith(f"preflight.py: error: {lines[there]}\n")
    assert job.text().count("error: ") == 1  # PyTorch may warn that it knows no names


# --- what --full adds: failures, wrong use ---


def training(job, output):
    """Wait until a job trains on both hosts and has saved once; the time then."""
    wait_until((output / "checkpoint.pt").exists, 120, "the first checkpoint")
    for host in NAMES:
        assert job.trainers(host), job.text()
    return time.monotonic()


def ended(statuses, seconds):
    """What a table shows of an end: the launchers' exit statuses, and how long it took."""
    codes = ("launcher stays" if code is None else code for code in statuses.values())
    return [*codes, f"{seconds:.1f} s"]


FAILURES = {
    "a process is killed": lambda job: os.kill(job.trainers("hostb")[0], SIGKILL),
    "hostb dies": lambda job: job.hosts.kill("hostb"),
    "hosta dies": lambda job: job.hosts.kill("hosta"),
    "the network is cut": lambda job: job.hosts.cut(),
}


@pytest.mark.full
@pytest.mark.parametrize("event", FAILURES)
@pytest.mark.parametrize("engine", engines())
def test_a_failure_ends_the_job_and_a_relaunch_resumes(
    engine, event, job, digits, one_host, tmp_path, record_property, request
):
    if engine in (sbatch, sbatch_torchrun) and event != "a process is killed":
        pytest.skip("Slurm's own daemons notice")
    flags = ["--data", digits, *RESUMED, "--output", tmp_path / "out"]
    flags += ["--timeout-seconds", 15]
    engine(job, flags)
    began = training(job, tmp_path / "out")
    # mpirun and its daemon, or torchrun and the rendezvous on the other host, wait for
    # each other until TCP gives up
    stays = engine in (mpirun, torchrun) and event == "the network is cut"
    try:
        FAILURES[event](job)
        if stays:
            wait_until(lambda: not any(map(job.trainers, NAMES)), 100, "training ends")
            time.sleep(3)
            statuses = job.statuses()
        else:
            statuses = job.end(100)
        seconds = time.monotonic() - began
    finally:
        job.hosts.mend()
    assert not {0, *([] if stays else [None])} & set(statuses.values()), job.text()
    content = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    assert content["epoch"] < 6, "too late to say anything"
    name = f"hosts failure / {event} / {request.node.callspec.id.split('-')[0]}"
    record_property(name, ended(statuses, seconds))
    job.kill()
    for log in tmp_path.glob("*.log"):
        log.unlink()
    engine(job, [*flags, "--resume", "auto"])
    assert set(job.end(120).values()) == {0}, job.text()
    assert "resumed in epoch" in job.text()
    assert_same_weights(tmp_path / "out", one_host(2, RESUMED))


@pytest.mark.full
def test_torchrun_starts_again(job, digits, one_host, tmp_path, record_property):
    """After the loss of a host that is started again."""
    output = tmp_path / "out"
    flags = ["--data", digits, *RESUMED, "--output", output]
    torchrun(job, flags, MAX_RESTARTS="3", JOIN_SECONDS="20")
    began = training(job, output)
    job.hosts.kill("hostb")
    time.sleep(2)
    common = {"NNODES": "2", "NPROC": "1", "RDZV_ENDPOINT": f"hosta:{PORT}"}
    command = ("bash", ROOT / "scripts" / "distributed.sh", *flags)
    job.start("hostb", *command, "--resume", "auto", MAX_RESTARTS="3", **common)
    wait_until(lambda: "resumed in epoch" in job.text(), 90, "the second run")
    seconds, statuses = time.monotonic() - began, job.end(120)
    assert set(statuses.values()) == {0}, job.text()
    assert_same_weights(output, one_host(2, RESUMED))
    event = "hostb dies and comes back / ended with"
    record_property(f"hosts restart / {event}", ended(statuses, seconds))


@pytest.mark.full
def test_training_continues_with_the_hosts_that_are_left(
    job, digits, tmp_path, record_property
):
    """hostb dies and comes back. Every epoch is complete, and none is missing."""
    output = tmp_path / "out"
    flags = ["--data", digits, *RESUMED, "--output", output]
    flags += ["--epochs", "500", "--resume", "auto"]
    where = {"NNODES": "1:2", "RDZV_ENDPOINT": f"hosta:{PORT}", "NPROC": "1"}
    command = ("bash", ROOT / "scripts" / "distributed.sh", *flags)
    runs = ["2 processes on", "1 process on", "2 processes on"]

    def begun():
        return re.findall(r"\d process(?:es)? on", job.text())

    def wait_for_run(number):
        began = time.monotonic()
        wait_until(lambda: len(begun()) == number, 120, f"run {number}")
        length = len((output / "epochs.jsonl").read_text()) if number > 1 else 0
        path = output / "epochs.jsonl"
        wait_until(
            lambda: path.exists() and len(path.read_text()) > length, 60, "epoch"
        )
        assert begun() == runs[:number]
        return time.monotonic() - began

    for host in NAMES:
        job.start(host, *command, **where, MAX_RESTARTS="3")
    wait_for_run(1)
    job.hosts.kill("hostb")
    left = wait_for_run(2)
    job.start("hostb", *command, **where, MAX_RESTARTS="3")
    back = wait_for_run(3)
    for process in job.processes.values():
        process.terminate()
    job.end(60)
    records = [json.loads(line) for line in (output / "epochs.jsonl").open()]
    assert [record["epoch"] for record in records] == [*range(len(records))]
    assert {record["images"] for record in records} == {320}
    record_property(
        "hosts elastic / hostb dies / seconds until an epoch is complete", left
    )
    record_property(
        "hosts elastic / hostb comes back / seconds until an epoch is complete", back
    )


@pytest.mark.full
@pytest.mark.parametrize("engine", engines("srun", "torchrun in Slurm"))
def test_slurm_saves_before_the_time_limit_and_resumes(
    engine, job, digits, one_host, tmp_path
):
    """The signal of --signal=B:USR1@120, sent by hand."""
    output, queued = tmp_path / "out", "the job is requeued"
    engine(job, ["--data", digits, *RESUMED, "--output", output])
    training(job, output)
    identity = job.hosts.slurm("squeue", "-h", "-o", "%A").split()[0]
    job.hosts.slurm("scancel", "--batch", "--signal=USR1", identity)
    state = ("squeue", "-h", "-o", "%t")
    wait_until(lambda: job.hosts.slurm(*state).split() == ["PD"], 90, queued)
    assert "stopped after" in job.text(), job.text()
    # Slurm would start the second run in two minutes
    job.hosts.slurm("scontrol", "update", f"JobId={identity}", "StartTime=now")
    assert job.end(150) == {"hosta": 0}, job.text()
    assert "resumed in epoch" in job.text()
    assert_same_weights(output, one_host(2, RESUMED))


@pytest.mark.full
def test_a_host_name_that_leads_to_loopback(job, digits, tmp_path):
    """As Debian's installer writes it: 127.0.1.1 for the machine's own name."""
    flags = ["--data", digits, *SHORT, "--output", tmp_path / "out"]
    for host in NAMES:
        job.hosts.name_hosts(host, trap=True)
    try:
        torchrun(job, flags)
        assert job.end(60) == {"hosta": 2, "hostb": 2}, job.text()
        assert job.text().count("set INTERFACE") == 2
        torchrun(job, flags, INTERFACE="eth0")
        assert set(job.end(120).values()) == {0}, job.text()
    finally:
        for host in NAMES:
            job.hosts.name_hosts(host)
