"""Bad input is one line and exit status 2, and never a hang."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time

import pytest
import torch
from conftest import (
    ROOT,
    SHORT,
    TINY,
    environment,
    launcher,
    processes_of,
    run,
    wait_until,
)
from played import run_python
from ranks import Ranks, train

FIVE = (
    "dataparallel",
    "distributed",
    "multiprocessing_distributed",
    "apex_distributed",
    "horovod_distributed",
)
HOROVOD = pytest.param("horovod_distributed", marks=pytest.mark.horovod)
PARALLEL = ("distributed", "multiprocessing_distributed", HOROVOD)


def refusal(folder, strategy, *flags, **variables):
    """The one line that ends a run of scripts/STRATEGY.sh in its first process."""
    words = [ROOT / f"{strategy}.py"]
    if strategy not in ("dataparallel", "multiprocessing_distributed"):
        words = ["-m", "launch.check", *words, ""]
        if strategy != "horovod_distributed":
            words += ["launch.torchrun", "torchrun"]
        words.append("--")
    status, printed = run_python(folder, *words, *flags, **variables)
    assert status == 2 and printed.count("\n") == 1, printed
    return printed


@pytest.mark.parametrize("strategy", FIVE)
def test_a_mistyped_flag(strategy, digits, tmp_path):
    assert refusal(tmp_path, strategy, "--data", digits, "--epoch", "3") == (
        f"{strategy}.py: error: unrecognized arguments: --epoch 3 (--help lists the flags)\n"
    )


@pytest.mark.parametrize("strategy", FIVE)
def test_an_interpreter_without_pytorch(strategy, tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    bare.chmod(0o755)
    ended = launcher(strategy, "--synthetic", PYTHON=str(bare))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(
        f"{strategy}.sh: error: {bare} lacks torch torchvision tqdm numpy PIL; "
    )
    assert ended.stderr.count("\n") == 1
    ended = launcher(strategy, "--synthetic", PYTHON="/no/python")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        f"{strategy}.sh: error: PYTHON=/no/python names no interpreter\n"
    )


RECORDER = """#!/bin/sh
set -f
echo $0 $* >> "$RECORD" # in one line
[ "$1" != - ] # install_horovod.sh then ends: there is no PyTorch
"""


@pytest.mark.parametrize("named", ("environment/bin/recorder", "recorder"))
@pytest.mark.parametrize(
    "script, last, status",
    [
        ("quickstart", "scripts/quickstart.py sample_data/digits runs/quickstart", 0),
        ("test", "-m pytest -k nothing", 0),
        ("gpu_check", "-m tests.gpu.summary .*/results/gpu", 0),
        ("install_horovod", "-", 3),
        ("distributed", "-m launch.check .* -k nothing", 0),
    ],
)
def test_a_relative_interpreter_from_another_folder(
    script, last, status, named, tmp_path
):
    """PYTHON is a stub, which records how it was called and runs nothing.

    No other program has its name: a script that does not find it runs nothing either.
    """
    stub = tmp_path / "environment" / "bin" / "recorder"
    stub.parent.mkdir(parents=True)
    stub.write_text(RECORDER)
    stub.chmod(0o755)
    record = tmp_path / "record"
    variables = environment(PYTHON=named, RECORD=str(record), CI="false")
    variables["PATH"] = f"environment/bin:{variables['PATH']}"
    ended = subprocess.run(
        ["bash", os.path.relpath(ROOT / "scripts" / f"{script}.sh", tmp_path)]
        + ["-k", "nothing"],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == status, ended.stderr
    calls = record.read_text().splitlines()
    assert all(call.startswith(f"{stub} ") for call in calls)
    assert re.fullmatch(f"{stub} {last}", calls[-1])


@pytest.mark.parametrize("strategy", ("dataparallel", *PARALLEL))
def test_missing_data(strategy, tmp_path):
    ended = launcher(strategy, "--data", tmp_path / "nowhere")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert len(ended.stderr.splitlines()) == 1 and "nowhere/train" in ended.stderr


@pytest.mark.parametrize(
    "flags, message",
    [
        (("-b", "7"), "the nearest that can is 8"),
        (("-b", "32"), "16 training images are less than one global batch of 32"),
        (("--arch", "resnet20"), "resnet20: did you mean"),
        (("--resume", "no.pt"), "--resume no.pt: there is no such file"),
        (("--output", "/proc/nowhere"), "--output /proc/nowhere: "),
        (("--resume", str(ROOT / "LICENSE")), "LICENSE is no checkpoint"),
        (("--device", "cuda"), "--device cuda: this machine shows no CUDA GPU"),
    ],
)
def test_bad_input(pictures, tmp_path, flags, message):
    if "cuda" in flags and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    flags = ("--data", pictures, *TINY, "--output", tmp_path / "out", *flags)
    assert message in refusal(tmp_path, "distributed", *flags)


def test_bad_input_without_the_launch_scripts(pictures):
    """Under torchrun itself our line comes once, not once for each process."""
    ended = run(
        *("torchrun", "--standalone", "--nproc-per-node=2", ROOT / "distributed.py"),
        *("--data", pictures, "-b", "7"),
    )
    assert ended.returncode != 0
    assert ended.stderr.count("cannot be divided evenly by 2 processes") == 1


def test_without_a_launcher(pictures, tmp_path):
    script = ROOT / "distributed.py"
    status, printed = run_python(tmp_path, script, "--data", pictures)
    assert status == 2 and printed.count("\n") == 1
    assert "a launcher has to start this script" in printed


def test_a_port_that_is_in_use(pictures, tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        url = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        flags = ("--data", pictures, *TINY, "--dist-url", url)
        flags += ("--output", tmp_path / "out")
        printed = refusal(tmp_path, "multiprocessing_distributed", *flags)
    assert printed == (
        f"multiprocessing_distributed.py: error: --dist-url {url}: Address already in use; "
        "choose another port\n"
    )


@pytest.mark.parametrize(
    "strategy",
    (
        pytest.param("dataparallel", marks=pytest.mark.full),
        pytest.param("distributed", marks=pytest.mark.full),
        "multiprocessing_distributed",
        pytest.param(
            "horovod_distributed", marks=[pytest.mark.horovod, pytest.mark.full]
        ),
    ),
)
def test_an_unreadable_image_ends_the_job(strategy, pictures, tmp_path):
    broken = spoiled(pictures)
    flags = ("--data", pictures, *TINY, "--output", tmp_path / "out")
    began = time.monotonic()
    ended = launcher(strategy, *flags, timeout=90, TEST_RUN=str(tmp_path))
    assert ended.returncode != 0
    assert time.monotonic() - began < 60
    everything = ended.stdout + ended.stderr
    assert everything.count(f"cannot read the image {broken}") == 1
    if strategy == "dataparallel":
        assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1
    wait_until(lambda: not processes_of(str(tmp_path)), 15, "every process gone")


@pytest.mark.parametrize("name, others", [("dataparallel", 0), ("distributed", 2)])
def test_an_unreadable_image_ends_all_processes(name, others, pictures, tmp_path):
    broken = spoiled(pictures)
    flags = ["--data", pictures, *TINY, "-j", 3, "--output", tmp_path / "out"]
    flags += ["-b", 3]
    with Ranks(tmp_path, others + 1, train, name=name, flags=flags) as ranks:
        statuses = ranks.end()
        text = ranks.text()
    assert sorted(statuses) == [*[1] * others, 2]
    assert text.count(f"cannot read the image {broken}") == 1
    assert text.count(" lost another: ") == others and "Traceback" not in text


# A training that fails at its first start, but for what torchrun sees of it
FAILING = """
import os, sys, time
print("started", flush=True)
if os.environ["RANK"] == "0":
    sys.exit({status})
time.sleep(60)
"""


@pytest.mark.parametrize("status, starts", [(2, 1), (1, 2)])
def test_torchrun_does_not_restart_bad_input(status, starts, tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(FAILING.format(status=status))
    words = ("-m", "launch.torchrun", "torchrun", "cpu:gloo")
    words += ("--nproc-per-node", "2", script)
    ended, printed = run_python(tmp_path, *words, MAX_RESTARTS="1")
    lines = printed.splitlines()
    assert ended == status and lines.count("started") == 2 * starts, printed
    others = [line for line in lines if line != "started"]
    assert len(others) == starts - 1, printed  # the script says what is wrong
    assert all("rank 0 on " in line and "starting again" in line for line in others)


def spoiled(pictures):
    broken = pictures / "train" / "dog" / "3.JPEG"
    broken.write_bytes(broken.read_bytes()[:200])
    return broken


@pytest.mark.parametrize("strategy", ("distributed", HOROVOD))
def test_help_of_a_launcher(strategy):
    ended = launcher(strategy, "--help")
    assert ended.returncode == 0 and "--global-batch-size" in ended.stdout


@pytest.mark.parametrize("name", ("quickstart", "test", "timings", "install_horovod"))
def test_help_sets_nothing_up(name, tmp_path):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    script = tmp_path / "scripts" / f"{name}.sh"
    ended = run("bash", script, "--help", timeout=10, PYTHON="", HOME=str(tmp_path))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert f"  bash scripts/{name}.sh" in ended.stdout and "#" not in ended.stdout[:60]
    assert [file.name for file in tmp_path.iterdir()] == ["scripts"]


def test_unknown_launcher(pictures):
    ended = launcher("distributed", "--data", pictures, LAUNCHER="mpirun")
    assert ended.returncode == 2 and "LAUNCHER=mpirun" in ended.stderr


def test_short_flags_are_flags():
    """What the tests of the scripts run with is accepted as it stands."""
    from common.arguments import build_parser, parse_arguments

    args = parse_arguments(build_parser("A test."), "test", ["--data", "x", *SHORT])
    assert (args.max_steps, args.epochs, args.image_size) == (10, 2, 32)


@pytest.mark.parametrize(
    "strategy, variables, flags, message",
    [
        ("distributed", {"NNODES": "2"}, (), "NNODES=2 needs either RDZV_ENDPOINT="),
        (
            "distributed",
            {"MAX_RESTARTS": "1"},
            ("--resume", "somewhere.pt"),
            "MAX_RESTARTS goes with --resume auto, not with --resume somewhere.pt",
        ),
        (
            "distributed",
            {"NNODES": "3", "RDZV_ENDPOINT": "a:1"},
            (),
            "cannot be divided evenly by 6 processes",
        ),
        pytest.param(
            *("horovod_distributed", {"HOSTS": "a:2,b"}, ()),
            "HOSTS=a:2,b is not of the form a:4,b:4",
            marks=pytest.mark.horovod,
        ),
        pytest.param(
            *("horovod_distributed", {"HOSTS": "a:2,b:1"}, ()),
            "cannot be divided evenly by 3 processes",
            marks=pytest.mark.horovod,
        ),
    ],
)
def test_wrong_words_about_machines(
    strategy, variables, flags, message, pictures, tmp_path
):
    flags = ("--data", pictures, *TINY, "--output", tmp_path / "out", *flags)
    assert message in refusal(tmp_path, strategy, *flags, **variables)
