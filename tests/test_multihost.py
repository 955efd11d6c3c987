"""Training over two hosts, on every engine; the hosts are network namespaces (hosts.py).

bash scripts/test.sh -k multihost                     # one process on each host, each engine
bash scripts/test.sh -k multihost --full --figures    # failures too; writes results/multinode.json
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import MISSING, ROOT, environment, wait_until
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
        found = {pid for host in NAMES for pid in self.hosts.processes(host)}
        found -= set(self.hosts.daemons)
        # Over a cut network an sshd cannot tell its client that its session is over
        return [pid for pid in found if not read(pid, "cmdline").startswith("sshd: ")]

    def trainers(self, host: str) -> list[int]:
        """Training processes of a host, without their loaders."""
        script = re.compile(
            r"\S*python\S* (-u )?(?!\S*/multiproc)\S*distributed\.py --|\S*python\S* .*spawn_main"
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


def torchrun(job, flags, processes=1, **variables):
    """The same command on both hosts; they find their numbers themselves."""
    common = {"NNODES": "2", "NPROC": str(processes), "RDZV_ENDPOINT": f"hosta:{PORT}"}
    for host in NAMES:
        command = ("bash", ROOT / "scripts" / "distributed.sh", *flags)
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


# Submits a job and ends as it does; sbatch --wait looks at it too seldom
SUBMIT = """
job=$(sbatch --parsable "$@") || exit
while [ -n "$(squeue --noheader --jobs="$job" 2>/dev/null)" ]; do sleep 0.3; done
exit "$(scontrol --oneliner show job "$job" | sed 's/.* ExitCode=\\([0-9]*\\):.*/\\1/')"
"""


def sbatch(job, flags, processes=1, **variables):
    """scripts/slurm.sbatch, its EDIT lines given as options."""
    edited = ("--gpus-per-node=0", "--cpus-per-task=1", "--time=10")
    job.processes["slurm"] = subprocess.Popen(
        job.hosts.command(
            *("hosta", "bash", "-c", SUBMIT, "submit", *edited),
            *(f"--ntasks-per-node={processes}", f"--output={job.folder}/hosta.log"),
            *("scripts/slurm.sbatch", *flags),
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


def assert_same_weights(output, expected, bound=0.0) -> float:
    """Within a bound; returns the largest difference of a weight."""
    largest = 0.0
    one, other = (
        torch.load(folder / "checkpoint.pt", weights_only=True)
        for folder in (output, expected)
    )
    assert (one["epoch"], one["step"]) == (other["epoch"], other["step"])
    for name, tensor in one["state_dict"].items():
        difference = (tensor - other["state_dict"][name]).abs().max().item()
        assert difference <= bound, (name, difference)
        largest = max(largest, difference)
    for number, state in one["optimizer"]["state"].items():
        momentum = other["optimizer"]["state"][number]["momentum_buffer"]
        difference = (state["momentum_buffer"] - momentum).abs().max().item()
        assert difference <= 3 * bound, (number, difference)
    return largest


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


PROBE = """
import os
from launch.cores import own_cores

os.write(1, f"CORES {len(os.sched_getaffinity(0))} EACH {own_cores(2)}\\n".encode())
"""


@NO_SLURM
def test_tasks_of_srun_do_not_share_out_the_cores_of_one(job):
    """Two tasks, each bound to two CPUs, as Slurm's plugins do, of the four of a host."""
    cores = sorted(os.sched_getaffinity(0))[:2]  # the same: Slurm believes in four
    task = ("taskset", "-c", ",".join(map(str, cores)), sys.executable, "-c", PROBE)
    srun = ("srun", "--nodes=1", "--ntasks=2", "--cpus-per-task=2", *task)
    job.start("hosta", *srun, **job.hosts.slurm_variables)
    assert job.end(60) == {"hosta": 0}, job.text()
    assert job.text().count(f"CORES {len(cores)} EACH {len(cores)}\n") == 2, job.text()


# --- what --full adds: four processes, failures, wrong use ---

# Long enough to be killed in between
COURSE_TO_RESUME = [*COURSE, *"-b 16 --epochs 6 --max-steps 20".split()]
COURSE_TO_RESUME += ["--checkpoint-steps", "5"]
# Of four summands, each addition loses up to eps = 1.2e-7 of a weight's change; dropout
# and 12 steps amplify that (see docs/reliability.md for a bound)
ROUNDING = 2e-5


@pytest.mark.full
@pytest.mark.parametrize("engine", engines())
def test_two_processes_on_each_host_differ_by_rounding(
    engine, job, digits, one_host, tmp_path, figure, request
):
    flags = ["--data", digits, *SHORT, "--output", tmp_path / "out"]
    engine(job, flags, processes=2)
    assert set(job.end(180).values()) == {0}, job.text()
    difference = assert_same_weights(tmp_path / "out", one_host(4), ROUNDING)
    name = re.search(r"\[(.*)\]", request.node.name)[1].split("-")[0]
    figure(f"hosts rounding / {name} / largest difference", difference)


@pytest.fixture(scope="module")
def uninterrupted(digits, tmp_path_factory):
    """The run that the interrupted ones are compared with."""
    folder = tmp_path_factory.mktemp("whole")
    flags = ["--data", digits, *COURSE_TO_RESUME, "--output", folder / "out"]
    run_ranks(folder, 2, train, name="distributed", flags=flags)
    return folder / "out"


def training(job, output):
    """Wait until a job trains on both hosts and has saved once."""
    wait_until((output / "checkpoint.pt").exists, 120, "the first checkpoint")
    for host in NAMES:
        assert job.trainers(host), job.text()


def keep(figure, event, request, statuses, seconds):
    """Keep the launchers' exit statuses, and how long it took."""
    engine = re.search(r"\[(.*)\]", request.node.name)[1].split("-")[0]
    figure(f"hosts failure / {event} / {engine}", ended(statuses, seconds))


def ended(statuses, seconds):
    """What a table shows of an end."""
    codes = ("launcher stays" if code is None else code for code in statuses.values())
    return [*codes, f"{seconds:.1f} s"]


@pytest.mark.full
@pytest.mark.parametrize("engine", engines())
def test_a_killed_process_ends_the_job_and_a_relaunch_goes_on(
    engine, job, digits, uninterrupted, tmp_path, figure, request
):
    flags = ["--data", digits, *COURSE_TO_RESUME, "--output", tmp_path / "out"]
    engine(job, flags)
    training(job, tmp_path / "out")
    began = time.monotonic()
    os.kill(job.trainers("hostb")[0], signal.SIGKILL)
    statuses = job.end(60)
    seconds = time.monotonic() - began
    assert not {0, None} & set(statuses.values()), job.text()
    content = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    assert content["epoch"] < 6, "killed too late to say anything"
    for log in tmp_path.glob("*.log"):
        log.unlink()
    engine(job, [*flags, "--resume", "auto"])
    assert set(job.end(120).values()) == {0}, job.text()
    assert "resumed at epoch" in job.text()
    assert_same_weights(tmp_path / "out", uninterrupted)
    keep(figure, "a process is killed", request, statuses, seconds)


LOSSES = {
    "hostb dies": lambda job: job.hosts.kill("hostb", job.hosts.daemons),
    "hosta dies": lambda job: job.hosts.kill("hosta", job.hosts.daemons),
    "the network is cut": lambda job: job.hosts.cut(),
}


@pytest.mark.full
@pytest.mark.parametrize("event", LOSSES)
@pytest.mark.parametrize(
    "engine",
    engines("torchrun", "torchrun, numbered", "mp.spawn", "horovodrun", "mpirun"),
)
def test_the_loss_of_a_host_ends_the_job(
    engine, event, job, digits, tmp_path, figure, request
):
    flags = ["--data", digits, *LONG, "--output", tmp_path / "out"]
    engine(job, [*flags, "--timeout-seconds", 15])
    training(job, tmp_path / "out")
    stays = engine in (mpirun, torchrun) and event == "the network is cut"
    began = time.monotonic()
    try:
        LOSSES[event](job)
        if stays:
            # mpirun and its daemon, or torchrun and the rendezvous on the other host,
            # wait for each other until TCP gives up
            wait_until(lambda: not any(map(job.trainers, NAMES)), 100, "training ends")
            time.sleep(3)
            statuses = {host: p.poll() for host, p in job.processes.items()}
        else:
            statuses = job.end(100)
        seconds = time.monotonic() - began
    finally:
        job.hosts.mend()
    assert not {0, *([] if stays else [None])} & set(statuses.values()), job.text()
    content = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    assert content["epoch"] < 2000
    if "cut" not in event:
        assert seconds < 60
        survivor = "hosta" if event == "hostb dies" else "hostb"
        if "run" not in engine.__name__ or engine is torchrun:  # the others' own words
            assert " lost another: " in job.text(survivor), job.text()
    keep(figure, event, request, statuses, seconds)


@pytest.mark.full
def test_torchrun_starts_a_killed_process_again(
    job, digits, uninterrupted, tmp_path, figure
):
    flags = ["--data", digits, *COURSE_TO_RESUME, "--output", tmp_path / "out"]
    torchrun(job, flags, MAX_RESTARTS="1")
    training(job, tmp_path / "out")
    began = time.monotonic()
    os.kill(job.trainers("hostb")[0], signal.SIGKILL)
    wait_until(lambda: "resumed at epoch" in job.text(), 90, "the second life")
    seconds = round(time.monotonic() - began, 1)
    statuses = job.end(120)
    assert set(statuses.values()) == {0}, job.text()
    assert_same_weights(tmp_path / "out", uninterrupted)
    row = "hosts restart / a process is killed"
    figure(f"{row} / ended with", ended(statuses, seconds))


@pytest.mark.full
def test_torchrun_takes_a_host_back(job, digits, uninterrupted, tmp_path, figure):
    """hostb dies with its torchrun, and is started again two seconds later."""
    flags = ["--data", digits, *COURSE_TO_RESUME, "--output", tmp_path / "out"]
    torchrun(job, flags, MAX_RESTARTS="3")
    training(job, tmp_path / "out")
    began = time.monotonic()
    job.hosts.kill("hostb", job.hosts.daemons)
    time.sleep(2)
    common = {"NNODES": "2", "NPROC": "1", "RDZV_ENDPOINT": f"hosta:{PORT}"}
    command = ("bash", ROOT / "scripts" / "distributed.sh", *flags, "--resume", "auto")
    job.start("hostb", *command, MAX_RESTARTS="3", **common)
    wait_until(lambda: "resumed at epoch" in job.text(), 90, "the second life")
    seconds = round(time.monotonic() - began, 1)
    statuses = job.end(120)
    assert set(statuses.values()) == {0}, job.text()
    assert_same_weights(tmp_path / "out", uninterrupted)
    row = "hosts restart / hostb dies and comes back"
    figure(f"{row} / ended with", ended(statuses, seconds))


@pytest.mark.full
def test_torchrun_gives_a_host_up_that_does_not_come_back(
    job, digits, tmp_path, figure
):
    flags = ["--data", digits, *LONG, "--output", tmp_path / "out"]
    torchrun(job, flags, MAX_RESTARTS="3", JOIN_SECONDS="20")
    training(job, tmp_path / "out")
    began = time.monotonic()
    job.hosts.kill("hostb", job.hosts.daemons)
    statuses = job.end(100)
    seconds = round(time.monotonic() - began, 1)
    assert statuses["hosta"] == 1, job.text()
    assert "did not all meet" in job.text("hosta")
    assert "Traceback" not in job.text("hosta")
    row = "hosts restart / hostb dies for good"
    figure(f"{row} / ended with", ended(statuses, seconds))


# Rank {rank} meets bad input; the other one hangs, or ends as it loses the first
FAILING = """
import os, sys, time
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
    words = (sys.executable, "-m", "launch.torchrun", "torchrun", "cpu:gloo")
    common = {"NNODES": "2", "RDZV_ENDPOINT": f"hosta:{PORT}", "MAX_RESTARTS": "3"}
    for host in NAMES:
        job.start(host, *words, "--nproc-per-node", "1", script, **common)
    assert job.end(60) == {"hosta": 2, "hostb": 2}, job.text()
    assert job.text().count("started\n") == 2 and "error: " not in job.text()


def job_id(both) -> str:
    return both.slurm("squeue", "-h", "-o", "%A").split()[0]


def waits(job) -> bool:
    """Whether the job waits for its second life."""
    return job.hosts.slurm("squeue", "-h", "-o", "%t").split() == ["PD"]


def live_again(job):
    """Have Slurm start the second life at once, and wait for it."""
    update = ("scontrol", "update", f"JobId={job_id(job.hosts)}", "StartTime=now")

    def lives():
        if "life 2" not in job.text() and waits(job):
            job.hosts.slurm(*update, check=False)  # it may have begun meanwhile
        return "life 2" in job.text()

    wait_until(lives, 90, "the second life")


@pytest.mark.full
@pytest.mark.parametrize("engine", engines("srun", "torchrun in Slurm"))
def test_slurm_saves_before_the_time_limit_and_goes_on(
    engine, job, digits, uninterrupted, tmp_path, figure, request
):
    """The signal of --signal=B:USR1@120, sent by hand."""
    flags = ["--data", digits, *COURSE_TO_RESUME, "--output", tmp_path / "out"]
    engine(job, flags)
    training(job, tmp_path / "out")
    began = time.monotonic()
    job.hosts.slurm("scancel", "--batch", "--signal=USR1", job_id(job.hosts))
    wait_until(lambda: waits(job), 90, "the job is queued again")
    seconds = time.monotonic() - began
    assert "stopped after" in job.text(), job.text()
    live_again(job)
    assert job.end(150) == {"slurm": 0}, job.text()
    assert "resumed at epoch" in job.text(), job.text()
    assert_same_weights(tmp_path / "out", uninterrupted)
    keep(figure, "Slurm's time limit", request, {}, seconds)


@pytest.mark.full
@pytest.mark.parametrize("engine", engines("srun"))
def test_slurm_queues_again_what_lost_a_host(
    engine, job, digits, uninterrupted, tmp_path, figure, request
):
    flags = ["--data", digits, *COURSE_TO_RESUME, "--output", tmp_path / "out"]
    engine(job, flags, MAX_RESTARTS="1")
    training(job, tmp_path / "out")
    began = time.monotonic()
    job.hosts.kill("hostb")
    try:
        wait_until(lambda: waits(job), 100, "the job is queued again")
        seconds = time.monotonic() - began
    finally:
        job.hosts.start_slurmd("hostb")
        if not SSH:
            job.hosts.start_sshd("hostb")
        time.sleep(1)
        new = job.hosts.processes("hostb")
        job.hosts.daemons = (*job.hosts.daemons, *new)
    live_again(job)
    assert job.end(150) == {"slurm": 0}, job.text()
    assert "resumed at epoch" in job.text(), job.text()
    assert_same_weights(tmp_path / "out", uninterrupted)
    keep(figure, "hostb dies with its slurmd", request, {}, seconds)


@pytest.mark.full
@pytest.mark.parametrize("engine", engines("srun", "torchrun in Slurm"))
def test_slurm_does_not_queue_again_what_met_bad_input(engine, job, pictures, tmp_path):
    """One process meets it, and Slurm ends the others."""
    image = pictures / "train" / "dog" / "3.JPEG"
    image.write_bytes(image.read_bytes()[:200])
    flags = ["--data", pictures, *SHORT, "--output", tmp_path / "out"]
    engine(job, [*flags, "-b", 4], processes=2, MAX_RESTARTS="1")
    assert job.end(90) == {"slurm": 2}, job.text()
    assert "queued again" not in job.text()
    assert job.text().count(f"cannot read the image {image}") == 1, job.text()


def wrong(job, flags, start, figure, name, seconds=75):
    """Start something that cannot work: it ends soon, on both hosts, not with 0."""
    began = time.monotonic()
    start(flags)
    statuses = job.end(seconds)
    took = round(time.monotonic() - began, 1)
    assert not {0, None} & set(statuses.values()), job.text()
    figure(f"hosts wrong / {name} / ended with", ended(statuses, took))
    return job.text()


@pytest.fixture
def flags(digits, tmp_path):
    return ["--data", digits, *SHORT, "--output", tmp_path / "out"]


@pytest.mark.full
def test_another_number_of_hosts(job, flags, figure):
    def start(flags):
        for host, count in zip(NAMES, ("2", "4"), strict=True):
            command = ("bash", ROOT / "scripts" / "distributed.sh", *flags)
            common = {"NPROC": "1", "RDZV_ENDPOINT": f"hosta:{PORT}"}
            job.start(host, *command, NNODES=count, **common)

    text = wrong(job, flags, start, figure, "different NNODES")
    assert text.count(" differs: ") == 2 and "NNODES differs: " in text
    assert "2 on hosta" in text and "4 on hostb" in text


@pytest.mark.full
def test_another_learning_rate(job, flags, figure):
    def start(flags):
        common = {"NNODES": "2", "NPROC": "1", "RDZV_ENDPOINT": f"hosta:{PORT}"}
        for host, more in zip(NAMES, ((), ("--lr", "0.3")), strict=True):
            command = ("bash", ROOT / "scripts" / "distributed.sh", *flags, *more)
            job.start(host, *command, **common)

    text = wrong(job, flags, start, figure, "different flags")
    assert re.search(
        r"rank 1 on host[ab] differs from rank 0 on host[ab]: --lr 0.\d+ \(rank 0: 0",
        text,
    ), text


@pytest.mark.full
@pytest.mark.parametrize("way", ("torchrun", "mp.spawn"))
def test_the_same_number_twice(way, job, flags, figure):
    def start(flags):
        for host in NAMES:
            if way == "torchrun":
                command = ("bash", ROOT / "scripts" / "distributed.sh", *flags)
                common = {"NNODES": "2", "NPROC": "1", "MASTER_ADDR": "hosta"}
                job.start(host, *command, NODE_RANK="0", **common)
            else:
                script = ROOT / "scripts" / "multiprocessing_distributed.sh"
                more = ("--nprocs", 1, "--nnodes", 2, "--node-rank", 0)
                url = ("--dist-url", f"tcp://hosta:{PORT}")
                job.start(host, "bash", script, *flags, *more, *url)

    text = wrong(job, flags, start, figure, f"the same NODE_RANK twice, {way}")
    assert text.count("NODE_RANK=0 on host") == 2, text
    assert "Traceback" not in text


@pytest.mark.full
@pytest.mark.parametrize("there", NAMES)
@pytest.mark.parametrize(
    "engine", engines("torchrun", "torchrun, numbered", "mp.spawn")
)
def test_one_host_does_not_come(engine, there, job, flags, figure, request):
    def start(flags):
        job.hosts.cut()
        try:
            engine(job, flags)
            other = next(host for host in NAMES if host != there)
            job.processes.pop(other).kill()
            job.hosts.kill(other, job.hosts.daemons)
        finally:
            job.hosts.mend()

    name = re.search(r"\[(.*)\]", request.node.name)[1].replace("-", ", only ")
    text = wrong(job, flags, start, figure, f"one host missing, {name}")
    if there == "hosta":
        assert "1 of 2 machines came to hosta" in text, text
    else:
        assert "hostb could not reach hosta" in text, text
    assert "Traceback" not in text


@pytest.mark.full
@pytest.mark.parametrize("engine", engines("horovodrun", "mpirun"))
def test_ssh_does_not_reach_a_host(engine, job, flags, figure, request):
    def start(flags):
        job.hosts.cut()
        engine(job, flags)

    name = re.search(r"\[(.*)\]", request.node.name)[1]
    try:
        text = wrong(job, flags, start, figure, f"host unreachable, {name}", 100)
    finally:
        job.hosts.mend()
    assert "hostb" in text


@pytest.mark.full
@pytest.mark.parametrize(
    "engine", engines("torchrun", "torchrun, numbered", "mp.spawn")
)
def test_a_port_in_use(engine, job, flags, figure, request):
    port = 29500 if engine is static else PORT
    code = (
        f"import socket, time; s = socket.create_server(('', {port})); time.sleep(99)"
    )
    before = job.hosts.daemons
    listener = subprocess.Popen(job.hosts.command("hosta", sys.executable, "-c", code))
    job.hosts.daemons = (*before, listener.pid)
    time.sleep(1)
    name = re.search(r"\[(.*)\]", request.node.name)[1]
    try:
        text = wrong(
            job,
            flags,
            lambda flags: engine(job, flags, JOIN_SECONDS="15"),
            figure,
            f"port in use, {name}",
        )
    finally:
        job.hosts.daemons = before
        listener.kill()
        listener.wait()
    assert "Address already in use; choose another port" in text, text
    assert "hostb" in text and "Traceback" not in text


@pytest.mark.full
def test_a_host_name_that_leads_to_loopback(job, flags, figure, tmp_path):
    """As Debian's installer writes it: 127.0.1.1 for the machine's own name."""
    for host in NAMES:
        job.hosts.name_hosts(host, trap=True)
    try:
        text = wrong(
            job,
            flags,
            lambda flags: torchrun(job, flags),
            figure,
            "own name is 127.0.1.1",
        )
        for host in NAMES:
            assert f"the host name {host} leads to 127.0.1.1" in text, text
        assert "INTERFACE=eth0" in text
        torchrun(job, [*flags, "--resume", "auto"], INTERFACE="eth0")
        assert set(job.end(120).values()) == {0}, job.text()
    finally:
        for host in NAMES:
            job.hosts.name_hosts(host)
