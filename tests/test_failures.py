"""Bad input is one line and status 2; a lost process, a signal or a bad image is never a hang."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import time

import pytest
import torch
from conftest import (
    ROOT,
    SHORT,
    environment,
    launcher,
    processes_of,
    run,
    wait_until,
)

FIVE = (
    "dataparallel",
    "distributed",
    "multiprocessing_distributed",
    "apex_distributed",
    "horovod_distributed",
)
HOROVOD = pytest.param("horovod_distributed", marks=pytest.mark.horovod)
PARALLEL = ("distributed", "multiprocessing_distributed", HOROVOD)
TINY = "--image-size 32 -b 4 --arch squeezenet1_1 --precision fp32 --print-interval 1".split()


@pytest.mark.parametrize("strategy", FIVE)
def test_a_mistyped_flag(strategy, digits):
    ended = launcher(strategy, "--data", digits, "--epoch", "3")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        f"{strategy}.py: error: unrecognized arguments: --epoch 3 (--help lists the flags)\n"
    )


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
    output = ("--output", tmp_path / "out")
    ended = launcher("distributed", "--data", pictures, *TINY, *output, *flags)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert message in ended.stderr and len(ended.stderr.splitlines()) == 1


def test_bad_input_without_the_launch_scripts(pictures):
    """Under torchrun itself our line comes once, not once for each process."""
    ended = run(
        *("torchrun", "--standalone", "--nproc-per-node=2", ROOT / "distributed.py"),
        *("--data", pictures, "-b", "7"),
    )
    assert ended.returncode != 0
    assert ended.stderr.count("cannot be divided evenly by 2 processes") == 1


def test_without_a_launcher(pictures):
    ended = run("python", ROOT / "distributed.py", "--data", pictures)
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1
    assert "a launcher has to start this script" in ended.stderr


def test_a_port_that_is_in_use(pictures, tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        url = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        flags = (
            "--data",
            pictures,
            *TINY,
            "--dist-url",
            url,
            "--output",
            tmp_path / "out",
        )
        ended = launcher("multiprocessing_distributed", *flags)
    assert ended.returncode == 2
    assert ended.stderr == (
        f"multiprocessing_distributed.py: error: --dist-url {url}: Address already in use; "
        "choose another port\n"
    )


@pytest.mark.parametrize("strategy", ("dataparallel", *PARALLEL))
def test_an_unreadable_image_ends_the_job(strategy, pictures, tmp_path):
    broken = pictures / "train" / "dog" / "3.JPEG"
    broken.write_bytes(broken.read_bytes()[:200])
    output = tmp_path / "out"
    began = time.monotonic()
    ended = launcher(
        strategy,
        "--data",
        pictures,
        *TINY,
        "--output",
        output,
        timeout=90,
        TEST_RUN=str(output),
    )
    assert ended.returncode != 0
    assert time.monotonic() - began < 60
    everything = ended.stdout + ended.stderr
    assert everything.count(f"cannot read the image {broken}") == 1
    if strategy == "dataparallel":
        assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1
    wait_until(lambda: not processes_of(str(output)), 15, "every process gone")


class Running:
    """A training run that is under way, in a process group of its own."""

    def __init__(self, strategy, data, output, *flags):
        self.output = output
        self.run = str(output)  # marks its processes
        command = [
            "bash",
            str(ROOT / "scripts" / f"{strategy}.sh"),
            "--data",
            str(data),
        ]
        command += [
            *TINY,
            "--epochs",
            "500",
            "-j",
            "2",
            "--output",
            str(output),
            *flags,
        ]
        self.log = open(output.with_suffix(".log"), "wb")
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(TEST_RUN=self.run),
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
        for pid in processes_of(self.run):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()

    def text(self):
        return self.output.with_suffix(".log").read_text(errors="replace")

    def trainers(self):
        """Ids of the training processes: no launcher, and no loader (a fork of a trainer)."""
        processes = processes_of(self.run)
        spawned = "multiprocessing_distributed" in self.process.args[1]
        script = re.compile(r"\S*python\S* (-u )?\S*distributed.py --data")
        return [
            pid
            for pid, (parent, command) in processes.items()
            if ("spawn_main" in command if spawned else script.match(command))
            and processes.get(parent, (0, ""))[1] != command
        ]

    def end(self, seconds):
        try:
            status = self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {seconds} s:\n{self.text()[-3000:]}")
        wait_until(lambda: not processes_of(self.run), 15, "every process gone")
        return status


@pytest.mark.parametrize("strategy", ("dataparallel", *PARALLEL))
def test_ctrl_c_saves_and_leaves_nothing_behind(strategy, pictures, tmp_path):
    with Running(strategy, pictures, tmp_path / "out") as job:
        os.killpg(job.process.pid, signal.SIGINT)
        status = job.end(60)
        assert status != 0
        if strategy in ("dataparallel", "multiprocessing_distributed"):
            assert status == 143
        content = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
        assert content["step"] > 0  # saved where it was stopped, not at an epoch's end
        assert "Traceback" not in job.text() or strategy in (
            "distributed",
            "horovod_distributed",
        )


@pytest.mark.parametrize("strategy", ("distributed", "multiprocessing_distributed"))
def test_sigterm_to_the_parent_alone_saves_and_leaves_nothing_behind(
    strategy, pictures, tmp_path
):
    with Running(strategy, pictures, tmp_path / "out") as job:
        os.kill(job.process.pid, signal.SIGTERM)
        status = job.end(60)
        assert status == (143 if strategy == "multiprocessing_distributed" else 1)


@pytest.mark.parametrize("strategy", PARALLEL)
def test_a_killed_process_ends_the_job(strategy, pictures, tmp_path):
    with Running(strategy, pictures, tmp_path / "out") as job:
        wait_until(lambda: len(job.trainers()) >= 2, 20, "two training processes")
        os.kill(max(job.trainers()), signal.SIGKILL)
        assert job.end(60) != 0


@pytest.mark.parametrize("strategy", ("distributed", "multiprocessing_distributed"))
def test_a_killed_launcher_leaves_no_orphans(strategy, pictures, tmp_path):
    with Running(strategy, pictures, tmp_path / "out") as job:
        job.process.kill()
        assert job.end(60) == -signal.SIGKILL


def test_a_stopped_run_goes_on(pictures, tmp_path):
    """Stopped by SIGTERM and resumed, a run ends with the weights of an uninterrupted one."""
    flags = ("--data", pictures, *TINY, "-j", "2", "--epochs", "40")
    output = tmp_path / "out"
    with Running(
        "multiprocessing_distributed", pictures, output, "-j", "2", "--epochs", "40"
    ) as job:
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.end(60) == 143
    stopped = torch.load(output / "checkpoint.pt", weights_only=True)
    assert stopped["epoch"] < 40
    again = launcher(
        "multiprocessing_distributed", *flags, "--output", output, "--resume", "auto"
    )
    assert again.returncode == 0 and "resumed at epoch" in again.stdout, again.stderr
    whole = launcher(
        "multiprocessing_distributed", *flags, "--output", tmp_path / "whole"
    )
    assert whole.returncode == 0, whole.stderr
    one, other = (
        torch.load(folder / "checkpoint.pt", weights_only=True)
        for folder in (output, tmp_path / "whole")
    )
    for name, tensor in one["state_dict"].items():
        assert torch.equal(tensor, other["state_dict"][name]), name
    timings = {"seconds", "warmup_steps", "images_per_second", "step_milliseconds"}
    timings |= {"data_wait_share", "peak_memory_mib"}
    for record, expected in zip(one["records"], other["records"], strict=True):
        for name in set(record) - timings:
            assert record[name] == expected[name], name


@pytest.mark.parametrize("strategy", ("distributed", HOROVOD))
def test_help_of_a_launcher(strategy):
    ended = launcher(strategy, "--help")
    assert ended.returncode == 0 and "--global-batch-size" in ended.stdout


def test_unknown_launcher(pictures):
    ended = launcher("distributed", "--data", pictures, LAUNCHER="mpirun")
    assert ended.returncode == 2 and "LAUNCHER=mpirun" in ended.stderr


def test_short_flags_are_flags():
    """What the tests of the scripts run with is accepted as it stands."""
    from common.arguments import build_parser, parse_arguments

    args = parse_arguments(build_parser("A test."), "test", ["--data", "x", *SHORT])
    assert (args.max_steps, args.epochs, args.image_size) == (3, 2, 32)
