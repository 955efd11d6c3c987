"""Shared fixtures: data, and running scripts through their real launchers."""

import contextlib
import importlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from PIL import Image

from common.device import describe
from common.log import commit
from common.nvimgcodec import import_library as import_nvimgcodec
from scripts.sample_data import write_digits

ROOT = Path(__file__).resolve().parent.parent
# Flags of a run of seconds: two epochs of ten steps on tiny pictures of digits
SHORT = (
    "--image-size 32 --global-batch-size 64 --lr 0.2 --warmup-epochs 1 --schedule cosine "
    "--min-crop 0.5 --no-flip --epochs 2 --max-steps 10 --precision fp32"
).split()
# Steps of a few milliseconds
TINY = "--image-size 32 -b 4 --arch squeezenet1_1 --precision fp32 --print-interval 1".split()


def pytest_addoption(parser):
    parser.addoption(
        "--full",
        action="store_true",
        help="also the long form of tests: more seeds, kills and process counts",
    )
    parser.addoption(
        "--figures",
        action="store_true",
        help="write results/reliability.json and multinode.json, and lessons/",
    )
    parser.addoption(
        "--rehearse-gpu",
        action="store_true",
        help="the rows of tests/gpu on the CPU, those that can run there",
    )


def pytest_configure(config):
    """Name the conditions of tests that not every machine meets.

    A shell has what it starts in the background ignore Ctrl-C, and what that starts in
    turn: bash could not trap it any more.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for marker in MISSING:
        config.addinivalue_line("markers", f"{marker}: skipped where it is missing")
    config.addinivalue_line("markers", "full: runs with --full only")
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout: needs pytest-timeout")
    if config.getoption("rehearse_gpu"):
        MISSING["gpu"] = None


def pytest_sessionfinish(session, exitstatus):
    """Write results/reliability.json and multinode.json, or add to them."""
    if not session.config.getoption("figures"):
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    this_session = {
        "form": "long" if session.config.getoption("full") else "short",
        "commit": commit(),
        **{name: len(reporter.stats.get(name, [])) for name in ("passed", "failed")},
        "minutes": round((time.monotonic() - BEGAN) / 60, 1),
        "cpu": describe(torch.device("cpu")),
        "cpu_cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "horovod": None if MISSING["horovod"] else version("horovod"),
    }
    hosts = {n: v for n, v in FIGURES.items() if n.startswith("hosts ")}
    others = {n: v for n, v in FIGURES.items() if n not in hosts}
    for name, figures in (("reliability", others), ("multinode", hosts)):
        path = ROOT / "results" / f"{name}.json"
        old = json.loads(path.read_text())
        if not figures:
            continue
        if kinds(old["figures"]) <= kinds(figures):
            old = {"sessions": [], "figures": {}}
        report = {
            "sessions": [*old["sessions"], this_session],
            "figures": {**old["figures"], **figures},
        }
        if "kills in a write" in report["figures"]:
            report["kills"] = kills(report["figures"])
        path.write_text(json.dumps(report, indent=1) + "\n")


def kinds(figures: dict) -> set[str]:
    return {name.split(" / ")[0] for name in figures}


def kills(figures: dict) -> list[dict]:
    """Sum up how often what was killed."""
    saves, halves = figures["kills in a write"]
    again, chains = (
        [value for name, value in figures.items() if name.startswith(beginning)]
        for beginning in ("killed again and again / ", "resumed to the bit / ")
    )
    rows = (
        ("a process that only saves", 1, saves, halves),
        ("a training, at random moments", len(again), sum(map(len, again)), None),
        ("a training under its launcher, once", len(chains), len(chains), None),
    )
    header = ("killed", "runs", "kills", "of them while a file was half written")
    return [dict(zip(header, row, strict=True)) for row in rows]


def problem_of(use) -> str | None:
    try:
        use()
    except ImportError as error:
        return f"cannot be imported: {error}"
    return None


def mpi_missing() -> str | None:
    if not sys.modules["horovod.torch"].mpi_built():
        return "Horovod was built without MPI (bash scripts/test.sh --system installs Open MPI)"
    return None if shutil.which("mpirun") else "mpirun is not installed"


NO_HOROVOD = problem_of(lambda: importlib.import_module("horovod.torch"))
NO_GPU = None if torch.cuda.is_available() else "no CUDA GPU"
MISSING = {
    "nvimgcodec": problem_of(import_nvimgcodec),
    "horovod": NO_HOROVOD and (os.environ.get("HOROVOD_PROBLEM") or NO_HOROVOD),
    "mpi": NO_HOROVOD or mpi_missing(),
    "gpu": NO_GPU,
    "apex": problem_of(lambda: importlib.import_module("apex.amp")) or NO_GPU,
}


def pytest_collection_modifyitems(config, items):
    if not config.getoption("full"):
        long = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if item not in long]
        config.hook.pytest_deselected(items=long)
    for item in items:
        for marker, reason in MISSING.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def environment(**extra: str) -> dict[str, str]:
    """The environment of a launched script: this Python first, no launcher's variables."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NPROC", "LAUNCHER", "CONTROLLER")
    names += ("NNODES", "NODE_RANK", "RDZV_ENDPOINT", "MASTER_ADDR", "MASTER_PORT")
    names += ("HOSTS", "INTERFACE", "MAX_RESTARTS", "JOIN_SECONDS")
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in names and not name.startswith(("SLURM_", "GLOO_", "NCCL_"))
    }
    clean["PATH"] = f"{Path(sys.executable).parent}:{clean['PATH']}"
    clean["PYTHON"] = sys.executable
    clean["OMP_NUM_THREADS"] = "1"
    clean["OMPI_ALLOW_RUN_AS_ROOT"] = clean["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return {**clean, **extra}


def run(*command, timeout: float = 180, **extra: str) -> subprocess.CompletedProcess:
    """Run a command from the project's folder; after `timeout` seconds it is killed."""
    process = subprocess.Popen(
        [str(word) for word in command],
        cwd=ROOT,
        env=environment(**extra),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate(timeout=30)
        pytest.fail(
            f"{command} did not end in {timeout} s\n{stdout[-3000:]}\n{stderr[-3000:]}"
        )
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def launcher(strategy: str, *flags, **extra) -> subprocess.CompletedProcess:
    """Run scripts/STRATEGY.sh with flags; `timeout` and environment variables by name."""
    return run("bash", ROOT / "scripts" / f"{strategy}.sh", *flags, **extra)


def processes_of(run: str) -> dict[int, tuple[int, str]]:
    """Living processes that inherited the variable TEST_RUN=run: {pid: (parent, command)}."""
    found, mark = {}, f"TEST_RUN={run}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            command = (folder / "cmdline").read_bytes().decode("utf-8", "replace")
            state, parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            if state != "Z":
                found[int(folder.name)] = (
                    int(parent),
                    command.replace("\0", " ").strip(),
                )
    return found


def wait_until(condition, seconds: float, what: str, interval: float = 0.1) -> None:
    """Poll until `condition()` is true; fail with `what` after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"not within {seconds} s: {what}")
        time.sleep(interval)


class Running:
    """A training run that is under way, in a process group of its own."""

    def __init__(self, strategy, data, output, *flags, **variables):
        self.output = output
        self.run = str(output)  # marks its processes
        command = ["bash", ROOT / "scripts" / f"{strategy}.sh", "--data", data]
        command += ["-j", "2", "--output", output, *flags]
        self.log = open(output.with_suffix(".log"), "wb")
        self.process = subprocess.Popen(
            [str(word) for word in command],
            cwd=ROOT,
            env=environment(TEST_RUN=self.run, **variables),
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )

    def __enter__(self):
        wait_until(
            lambda: (self.output / "checkpoint.pt").exists(), 90, "first checkpoint"
        )
        return self

    def __exit__(self, *_):
        self.kill()
        self.process.wait()
        self.log.close()

    def kill(self):
        """SIGKILL for every process of the run at once."""
        while found := processes_of(self.run):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def text(self):
        return self.output.with_suffix(".log").read_text(errors="replace")

    def trainers(self):
        """Ids of the training processes: no launcher, and no loader (a fork of a trainer)."""
        processes = processes_of(self.run)
        spawned = "multiprocessing_distributed" in self.process.args[1]
        script = re.compile(
            r"\S*python\S* (-u )?\S*(distributed|dataparallel)\.py (--local-rank=\d )?--data"
        )
        return [
            pid
            for pid, (parent, command) in processes.items()
            if ("spawn_main" in command if spawned else script.match(command))
            and processes.get(parent, (0, ""))[1] != command
        ]

    def loaders(self):
        """Ids of the loader processes: the youngest generation, below a fork server or not."""
        processes = processes_of(self.run)
        parents = {parent for parent, _ in processes.values()}
        return [
            pid
            for pid, (_, command) in processes.items()
            if pid not in parents
            and "python" in command
            and "resource_tracker" not in command
        ]

    def end(self, seconds):
        try:
            status = self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {seconds} s:\n{self.text()[-3000:]}")
        wait_until(lambda: not processes_of(self.run), 40, "every process gone")
        return status


FIGURES: dict = {}
BEGAN = time.monotonic()


@pytest.fixture
def figure():
    """Keep a measured figure; --full writes them down."""

    def keep(name: str, value: float) -> None:
        FIGURES[name] = value

    return keep


@pytest.fixture(scope="session")
def digits(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "digits"
    assert write_digits(folder) == 1797
    return folder


@pytest.fixture
def pictures(tmp_path) -> Path:
    """A small data set to be spoiled: 2 classes, 8 training and 4 validation images each."""
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", 8), ("val", 4)):
        for name in ("cat", "dog"):
            folder = tmp_path / "pictures" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = torch.randint(
                    256, (40, 48, 3), dtype=torch.uint8, generator=generator
                )
                Image.fromarray(pixels.numpy()).save(folder / f"{number}.JPEG")
    return tmp_path / "pictures"
