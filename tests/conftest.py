"""Shared fixtures, which create data and run scripts with their real launchers."""

import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

from benchmarks.comparison import commit, describe
from scripts.sample_data import write_digits

ROOT = Path(__file__).resolve().parent.parent
SHARED = "(multihost|cuda|interruption|labs|reference|scripts|start)"
# A flag that makes steps take only a few milliseconds
TINY = "--image-size 32 -b 4 --arch squeezenet1_1 --precision fp32 --print-interval 1".split()


def pytest_addoption(parser):
    add = parser.addoption
    add("--full", action="store_true", help="also long tests: more seeds and kills")
    figures = "add what was measured to FILE, a report of benchmarks/results"
    add("--figures", metavar="FILE", help=figures)
    on_cpu = "the rows of tests/gpu on the CPU, those that can run there"
    add("--rehearse-gpu", action="store_true", help=on_cpu)


def pytest_configure(config):
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a background job
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("rehearse_gpu"):
        MISSING["gpu"] = None


def left_out(config) -> list[str]:
    """Return the markers whose tests do not run in this session."""
    if config.getoption("full"):
        return []
    chosen = "cluster" in config.getoption("markexpr")
    return ["full"] if chosen or os.environ.get("CI") == "true" else ["full", "cluster"]


def pytest_sessionfinish(session):
    """Add this session's figures to the report that --figures names."""
    name = session.config.getoption("figures")
    if name is None or hasattr(session.config, "workerinput"):  # pytest-xdist's
        return
    report = json.loads((ROOT / name).read_text())
    stats = session.config.pluginmanager.get_plugin("terminalreporter").stats
    for test in (one for found in stats.values() for one in found):
        report["figures"] |= dict(getattr(test, "user_properties", ()))
    counts = {status: len(stats.get(status, [])) for status in ("passed", "failed")}
    this = {"commit": commit(), **counts, "cpu": describe(torch.device("cpu"))}
    this |= {"cpu_cores": os.cpu_count(), "torch": torch.__version__}
    report["sessions"].append(this)
    (ROOT / name).write_text(json.dumps(report, indent=1) + "\n")


def problem_of(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except (ImportError, RuntimeError) as error:  # TorchCodec raises a RuntimeError
        return f"cannot be used: {error}"
    return None


def mpi_missing() -> str | None:
    if not sys.modules["horovod.torch"].mpi_built():
        return "Horovod was built without MPI (bash scripts/test.sh --system installs Open MPI)"
    return None if shutil.which("mpirun") else "mpirun is not installed"


os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")  # no remarks about GPUs
NO_HOROVOD = problem_of("horovod.torch")
NO_GPU = None if torch.cuda.is_available() else "no CUDA GPU"
MISSING = {
    "nvimgcodec": problem_of("nvidia.nvimgcodec"),
    "torchcodec": problem_of("torchcodec.decoders"),
    "horovod": NO_HOROVOD and (os.environ.get("HOROVOD_PROBLEM") or NO_HOROVOD),
    "mpi": NO_HOROVOD or mpi_missing(),
    "gpu": NO_GPU,
    "apex": problem_of("apex.amp") or NO_GPU,
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Divide tests between processes, but keep a file's tests together if they share a slow fixture."""
    schedulers = importlib.import_module("xdist.scheduler")
    scheduler = schedulers.LoadScopeScheduling(config, log)
    scheduler._split_scope = lambda test: re.sub(rf"({SHARED}\.py).*", r"\1", test)
    return scheduler


def pytest_collection_modifyitems(config, items):
    for marker in left_out(config):
        chosen = [item for item in items if not item.get_closest_marker(marker)]
        config.hook.pytest_deselected(items=[one for one in items if one not in chosen])
        items[:] = chosen
    for item in items:
        for marker, reason in MISSING.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def environment(**extra: str) -> dict[str, str]:
    """Return a script's environment: no GPU, this Python first on PATH, launchers' variables unset."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    names += ("MASTER_PORT", "NPROC", "LAUNCHER", "CONTROLLER", "HOSTS")
    others = ("SLURM_", "GLOO_", "NCCL_")
    kept = [n for n in os.environ if n not in names and not n.startswith(others)]
    clean = {name: os.environ[name] for name in kept}
    clean["PATH"] = f"{Path(sys.executable).parent}:{clean['PATH']}"
    clean["PYTHON"] = sys.executable
    clean |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    clean["OMPI_ALLOW_RUN_AS_ROOT"] = clean["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return {**clean, **extra}


def start(command, output, variables, **options) -> subprocess.Popen:
    """Start a command from the project's folder, in its own session."""
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=ROOT,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        **options,
    )


def run(*command, timeout: float = 180, **extra: str) -> subprocess.CompletedProcess:
    """Run a command from the project's folder; kill it after `timeout` seconds."""
    process = start(command, subprocess.PIPE, extra, text=True, errors="replace")
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed = "\n".join(process.communicate(timeout=30))
        pytest.fail(f"{command} did not end in {timeout} s\n{printed[-5000:]}")
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def run_torchrun(folder: Path, command: str) -> subprocess.CompletedProcess:
    """Run a job; run it again if Gloo aborted at Python's exit (1 in 80 jobs: pytorch#190489)."""
    for _ in range(3):
        ended = run("bash", "-c", f"cd {folder} && {command}")
        if "terminate called without an active exception" not in ended.stderr:
            break
    return ended


def launcher(strategy: str, *flags, **extra) -> subprocess.CompletedProcess:
    """Run scripts/STRATEGY.sh with flags; `extra` is `timeout` and environment variables."""
    return run("bash", ROOT / "scripts" / f"{strategy}.sh", *flags, **extra)


def processes_of(run: str) -> dict[int, str]:
    """Return the states of the live processes that inherited the variable TEST_RUN=run."""
    command = "ps axeww -o pid=,stat=,args=".split()  # e: also print variables
    printed = subprocess.check_output(command, text=True, errors="replace")
    lines = [line.split() for line in printed.splitlines()]
    lines = [words for words in lines if f"TEST_RUN={run}" in words[2:]]
    return {int(pid): state for pid, state, *_ in lines}


def wait_until(condition, seconds: float, what, interval: float = 0.1) -> None:
    """Poll until `condition()` is true; after `seconds` seconds, fail and print `what` or `what()`."""
    for _ in range(round(seconds / interval)):
        if condition():
            return
        time.sleep(interval)
    pytest.fail(f"not within {seconds} s: {what()[-5000:] if callable(what) else what}")


class Started:
    """A running command; all processes that inherit its TEST_RUN are killed when the block ends."""

    def __init__(self, mark, command, output=subprocess.DEVNULL, **variables):
        self.run = str(mark)
        self.process = start(command, output, {**variables, "TEST_RUN": self.run})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        while found := processes_of(self.run):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def wait_until_gone(self, seconds):
        wait_until(lambda: not processes_of(self.run), seconds, "every process gone")


@pytest.fixture(scope="session")
def digits(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "digits"
    assert write_digits(folder) == 1797
    return folder


@pytest.fixture
def pictures(tmp_path) -> Path:
    """A small data set that tests may change: 2 classes, each with 8 training and 4 validation images."""
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", 8), ("val", 4)):
        for name in ("cat", "dog"):
            folder = tmp_path / "pictures" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = torch.randint(256, (40, 48, 3), generator=generator)
                image = Image.fromarray(pixels.byte().numpy())
                image.save(folder / f"{number}.JPEG")
    return tmp_path / "pictures"
