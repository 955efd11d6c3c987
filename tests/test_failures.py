"""Bad input is one line and exit status 2, and never a hang."""

import os
import shutil
import sys

import pytest
from conftest import ROOT, TINY, launcher, processes_of, run, wait_until

from common.errors import UserError
from launch import check, torchrun

HOROVOD = pytest.param("horovod_distributed", marks=pytest.mark.horovod)


@pytest.mark.parametrize("strategy", ("dataparallel", HOROVOD))
def test_missing_data(strategy, tmp_path):
    ended = launcher(strategy, "--data", tmp_path / "nowhere")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert len(ended.stderr.splitlines()) == 1 and "nowhere/train" in ended.stderr


ELASTIC = {"RDZV_ENDPOINT": "a:1", "MAX_RESTARTS": "1"}
FLAGS = [
    (("--data", "nowhere"), {}, "nowhere/train"),
    (("-b", "7"), {}, "the nearest size that can is 8"),
    (("--resume", "no.pt"), {}, "--resume no.pt: there is no such file"),
    (("--output", "/proc/nowhere"), {}, "--output /proc/nowhere: "),
    (("--resume", str(ROOT / "LICENSE")), {}, "LICENSE is not a checkpoint"),
    ((), {"NNODES": "2"}, "NNODES=2 needs either RDZV_ENDPOINT="),
    ((), {"NNODES": "3", "RDZV_ENDPOINT": "a:1"}, "evenly among 6 processes"),
    ((), {"NNODES": "1:2"}, "NNODES=1:2 needs RDZV_ENDPOINT=HOST:PORT, MAX_RESTARTS"),
    ((), {"NNODES": "3:4", **ELASTIC}, "evenly among 6 processes"),
    ((), {"NNODES": "2", "RDZV_ENDPOINT": "a:b"}, "is not of the form HOST:PORT"),
    (("--resume", "x.pt"), {"MAX_RESTARTS": "1"}, "MAX_RESTARTS needs --resume auto"),
    ((), {"LAUNCHER": "mpirun"}, "LAUNCHER=mpirun; choose torchrun or launch"),
]


@pytest.mark.parametrize("flags, variables, message", FLAGS)
def test_bad_input_before_torchrun(
    pictures, tmp_path, monkeypatch, flags, variables, message
):
    words = ["--data", pictures, *TINY, "--output", tmp_path / "out", "--device", "cpu"]
    words = ["torchrun", "--nproc-per-node", "2", ROOT / "distributed.py", *words]
    monkeypatch.setattr(sys, "argv", [str(word) for word in (*words, *flags)])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torchrun, "run", lambda *_: pytest.fail("launched"))
    with pytest.raises(UserError, match=message):
        torchrun.main()


def test_the_check(monkeypatch, capsys, tmp_path):
    for script, hosts, message in (
        ("nowhere.py", "", "nowhere.py: there is no such script"),
        ("launch/ranks.py", "", "ranks.py has no arguments"),
        ("distributed.py", "a:2,b", "HOSTS=a:2,b is not of the form a:4,b:4"),
        ("distributed.py", "a:2,b:1", "cannot be divided evenly among 3 processes"),
        ("distributed.py", "a:2,b:2", None),
    ):
        flags = ("--synthetic", "8", "-b", "4", "--device", "cpu", "--output", tmp_path)
        monkeypatch.setattr(sys, "argv", [*map(str, ("check", ROOT / script, *flags))])
        monkeypatch.setenv("HOSTS", hosts)
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        if message is None:
            check.main()
            assert capsys.readouterr().out == "4 3\n"
        else:
            with pytest.raises(UserError, match=message):
                check.main()


def test_an_interpreter_without_pytorch(tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    bare.chmod(0o755)
    for python, line in {
        str(bare): f"{bare} lacks torch torchvision tqdm numpy PIL; ",
        "/no/python": "PYTHON=/no/python is not an interpreter",
    }.items():
        ended = launcher("distributed", PYTHON=python)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert ended.stderr.startswith(f"distributed.sh: error: {line}")


LAUNCHED = pytest.param(*HOROVOD.values, marks=[*HOROVOD.marks, pytest.mark.full])


@pytest.mark.parametrize("strategy", ("multiprocessing_distributed", LAUNCHED))
def test_an_unreadable_image_ends_the_job(strategy, pictures, tmp_path):
    broken = pictures / "train" / "dog" / "3.JPEG"
    broken.write_bytes(broken.read_bytes()[:200])
    flags = ("--data", pictures, *TINY, "--output", tmp_path / "out")
    ended = launcher(strategy, *flags, timeout=90, TEST_RUN=str(tmp_path))
    assert ended.returncode == (1 if strategy == "horovod_distributed" else 2)
    everything = ended.stdout + ended.stderr
    assert everything.count(f"cannot read the image {broken}") == 1
    wait_until(lambda: not processes_of(str(tmp_path)), 15, "every process gone")


# A training that ends when it starts, as far as torchrun sees
OWN_SCRIPT = """
import os, sys, time
from distributed import arguments
if __name__ == "__main__":
    print("started", flush=True)
    if os.environ["RANK"] == "0":
        sys.exit({status})
    time.sleep(60)
"""


@pytest.mark.parametrize(
    "status, starts", [(2, 1), pytest.param(1, 2, marks=pytest.mark.full)]
)
def test_torchrun_does_not_restart_bad_input(status, starts, tmp_path):
    """The script is one of the user's own, elsewhere."""
    (tmp_path / "own.py").write_text(OWN_SCRIPT.format(status=status))
    script = os.path.relpath(tmp_path / "own.py", ROOT)
    flags = ("--synthetic", "8", "-b", "2", "-j", "1", "--device", "cpu")
    variables = {"SCRIPT": script, "MAX_RESTARTS": "1"}
    ended = launcher("distributed", *flags, **variables)
    assert ended.returncode == status
    assert ended.stdout.count("started") == 2 * starts, ended.stderr
    lines = ended.stderr.splitlines()
    assert len(lines) == starts - 1, lines  # the script says what is wrong
    assert all("rank 0 on " in line and "restarting" in line for line in lines)


def test_help_of_a_launcher():
    ended = launcher("distributed", "--help")
    assert ended.returncode == 0 and "--global-batch-size" in ended.stdout


@pytest.mark.parametrize("name", ("quickstart", "test", "timings", "install_horovod"))
def test_help_sets_nothing_up(name, tmp_path):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    script = tmp_path / "scripts" / f"{name}.sh"
    ended = run("bash", script, "--help", timeout=10, PYTHON="", HOME=str(tmp_path))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert f"  bash scripts/{name}.sh" in ended.stdout and "#" not in ended.stdout[:60]
    assert [file.name for file in tmp_path.iterdir()] == ["scripts"]
