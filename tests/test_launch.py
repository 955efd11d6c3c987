"""Launch and set-up scripts start the right commands, which substitute programs print.

test_scripts.py and others run the real launchers.
"""

import itertools
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, run
from torch import multiprocessing

from scripts import quickstart

PYTHON = sys.executable
# Replaces the interpreter and the programs next to it; real Python, without packages, runs -c CODE
PRINT = f"""#!/bin/sh
name=${{0##*/}}
[ "$name $1" != "python -c" ] || exec {PYTHON} -S "$@"
echo "$name" "$@" "OMP=${{OMP_NUM_THREADS-}}" ${{SHOW:+"in $PWD"}}
case "$name $*" in "${{FAILS:-none}}"*) exit 1 ;; esac
[ "$name $1" != "uv venv" ] || {{ mkdir -p "$6/bin"; cp "$0" "$6/bin/python"; }}
"""
CUDA = """
import os
class cuda:
    is_available = lambda: os.environ["GPUS"] == os.environ.get("USABLE", os.environ["GPUS"]) != "0"
    device_count = lambda: int(os.environ["GPUS"])
"""
MODULES = "torch torchvision numpy PIL tqdm sklearn scipy pytest xdist torchcodec "
MODULES += "matplotlib"


@pytest.fixture
def launch(tmp_path):
    """Run a script with the substitutes; return its exit status and its output."""
    (tmp_path / "decoy").mkdir()
    for name in "python", "torchrun", "horovodrun", "mpirun":
        for folder, text in (("", PRINT), ("decoy", "#!/bin/sh\necho wrong\n")):
            (tmp_path / folder / name).write_text(text)
            (tmp_path / folder / name).chmod(0o755)
    modules = tmp_path / "modules"
    modules.mkdir()
    for name in MODULES.split():
        (modules / f"{name}.py").write_text(CUDA if name == "torch" else "")
    (modules / "horovod").mkdir()
    (modules / "horovod" / "torch.py").touch()
    smi = tmp_path / "decoy" / "nvidia-smi"
    smi.write_text('#!/bin/sh\necho "${SMI-GPU 0: H100}"\n[ "$1" = -L ]\n')
    smi.chmod(0o755)

    def start(script, *flags, root=ROOT, **variables):
        given = {"GPUS": "0", "SMI": "", "PYTHON": f"{tmp_path}/python", **variables}
        names = "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH"
        unset = [f"--unset={name}" for name in names if name not in given]
        given["PYTHONPATH"] = str(modules)
        path = f"PATH={tmp_path}/decoy:/usr/bin:/bin"
        command = "bash", root / "scripts" / script, *flags
        ended = run("env", "-C", tmp_path, *unset, path, *command, timeout=30, **given)
        text = (ended.stdout + ended.stderr).replace(f"{root}/", "")
        return ended.returncode, text.replace(f"{tmp_path}/", "")

    return start


# The script, its variables, its compute threads, and the command without flags
LAUNCHES = """
distributed | GPUS=0 | 1 | torchrun --standalone --nproc-per-node 2
distributed | GPUS=3 | 1 | torchrun --standalone --nproc-per-node 3
distributed | GPUS=3 NPROC=1 | | torchrun --standalone --nproc-per-node 1
distributed | NPROC=4 LAUNCHER=launch OMP_NUM_THREADS=5 | 5 | python -m torch.distributed.launch --nproc-per-node 4
apex_distributed | GPUS=2 | 1 | torchrun --standalone --nproc-per-node 2
dataparallel | GPUS=4 | | python
multiprocessing_distributed | GPUS=6 | 1 | python
horovod_distributed | GPUS=0 | 1 | python scripts/horovodrun.py --gloo -np 2 -H localhost:2 python
horovod_distributed | HOSTS=a:4,b:4 NPROC=8 | 1 | python scripts/horovodrun.py --gloo -np 8 -H a:4,b:4 python
horovod_distributed | CONTROLLER=mpi NPROC=1 | | mpirun -x PATH -np 1 -H localhost:1 python
horovod_distributed | CONTROLLER=mpi NCCL_DEBUG=INFO NCCL_IB_HCA=x LD_LIBRARY_PATH=/x | 1 | mpirun -x PATH -x OMP_NUM_THREADS -x LD_LIBRARY_PATH -x NCCL_DEBUG -x NCCL_IB_HCA -np 2 -H localhost:2 python
"""


@pytest.mark.parametrize("line", LAUNCHES.strip().splitlines())
def test_a_launcher_starts_the_command_beside_the_interpreter(launch, line):
    """The launcher ignores programs with the same names that come first on PATH."""
    name, variables, threads, command = map(str.strip, line.split("|"))
    variables = dict(pair.split("=", 1) for pair in variables.split())
    command = command.replace("mpirun", "mpirun --allow-run-as-root --bind-to none")
    flags = "--nprocs 6 " * name.startswith("multi") + "--data my  images"
    printed = f"{command} {name}.py {flags} OMP={threads}\n"
    assert launch(f"{name}.sh", "--data", "my  images", **variables) == (0, printed)


WRONG = {
    "LAUNCHER=x": "LAUNCHER=x is unknown; choose torchrun or launch",
    "NPROC=0": "NPROC=0: set it to the number of processes, for example 2",
    "NPROC=two": "NPROC=two: set it to the number of processes, for example 2",
    "PYTHON=no/python": "PYTHON=no/python is not an interpreter",
    "CONTROLLER=x": "CONTROLLER=x is unknown; choose gloo or mpi",
}


def test_a_wrong_variable_is_one_line(launch):
    for given, line in WRONG.items():
        name = "horovod_distributed.sh" if "CONTROLLER" in given else "distributed.sh"
        printed = launch(name, **dict([given.split("=")]))
        assert printed == (2, f"{name}: error: {line}\n")


def test_a_missing_module_or_launcher_is_one_line(launch, tmp_path):
    (tmp_path / "horovodrun").unlink()
    (tmp_path / "decoy" / "horovodrun").unlink()
    status, text = launch("horovod_distributed.sh")
    assert status == 2 and " error: horovodrun is missing (scripts/install_" in text
    sklearn = tmp_path / "modules" / "sklearn.py"
    sklearn.unlink()
    assert launch("quickstart.sh")[0] == 2
    sklearn.touch()
    (tmp_path / "modules" / "tqdm.py").unlink()
    status, text = launch("quickstart.sh")
    files = "-r requirements.txt -r requirements/sample.txt\n"
    assert status == 2 and text.startswith("using python without installing anything\n")
    assert f"python lacks some requirements; run python -m pip install {files}" in text
    (tmp_path / "modules" / "PIL.py").unlink()
    status, text = launch("distributed.sh", NPROC="2")
    assert status == 2 and " error: python lacks PIL tqdm; set PYTHON " in text


@pytest.mark.parametrize("name", ("distributed", "dataparallel"))
def test_gpus_that_pytorch_cannot_use_are_one_line(launch, name):
    """nvidia-smi lists GPUs, but the driver is too old, or PyTorch is a build for CPUs."""
    for variables in ({"NPROC": "2"}, {"GPUS": "4", "USABLE": "0"}):
        status, text = launch(f"{name}.sh", SMI="GPU 0: H100", **variables)
        assert (status, text.count("\n")) == (2, 1)
        line = f"{name}.sh: error: nvidia-smi lists GPUs that PyTorch cannot use"
        assert line in text
    gpu = {"SMI": "GPU 0: H100"}
    cpu = [{**gpu, "NPROC": "2", "CUDA_VISIBLE_DEVICES": hide} for hide in ("", "-1")]
    for variables in (*cpu, {"SMI": "No devices found."}, {**gpu, "GPUS": "2"}):
        assert launch(f"{name}.sh", **variables)[0] == 0
    assert "nproc-per-node 2 " in launch("distributed.sh", GPUS="4", USABLE="0")[1]


def test_scripts_that_set_up_start_their_programs(launch, tmp_path):
    using = "using python without installing anything\n"
    digits = "sample_data/digits"
    status, text = launch("quickstart.sh")
    assert status == 0 and text == (
        f"{using}python -m scripts.sample_data {digits} OMP=\n"
        f"python -m scripts.quickstart {digits} runs/quickstart OMP=\n"
    )
    assert launch("quickstart.sh", FAILS="python -m scripts.sample_data")[0] == 1
    prepared = f"{using}python -m scripts.prepare_imagenet a b OMP= in {tmp_path}\n"
    assert launch("prepare_imagenet.sh", "a", "b", SHOW="1") == (0, prepared)
    line = "quickstart.sh: error: it takes no arguments, but got --data x\n"
    assert launch("quickstart.sh", "--data", "x") == (2, line)
    shutil.rmtree(tmp_path / "modules" / "horovod")  # its build fails
    for name in ("apt-get", "c++"):
        (tmp_path / "decoy" / name).symlink_to("/bin/true")
    assert [launch("test.sh", CI=ci)[0] for ci in ("true", "false")] == [1, 0]


def test_the_gpu_check_fails_if_its_tests_or_its_timings_fail(launch, tmp_path):
    how = {"GPUS": "1", "OUTPUT": str(tmp_path)}
    for fails in ("none", "python -m pytest", f"python -m benchmarks.gpu {tmp_path}/t"):
        status, text = launch("gpu_check.sh", FAILS=fails, **how)
        assert (status, text.count("python -m ")) == (fails != "none", 3)


def test_the_environment_is_installed_once(launch, tmp_path):
    """uv installs packages only once, except after a failure or a change of the requirements."""
    root = tmp_path / "project"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    shutil.copytree(ROOT / "requirements", root / "requirements")
    shutil.copy(ROOT / "requirements.txt", root)
    (tmp_path / "decoy" / "python3").write_text(f'#!/bin/sh\nexec {PYTHON} "$@"\n')
    (tmp_path / "decoy" / "uv").write_text(PRINT)
    for name in "python3", "uv":
        (tmp_path / "decoy" / name).chmod(0o755)

    def installed(script="timings.sh", **variables):
        status, text = launch(script, root=root, PYTHON="", **variables)
        return status, [line for line in text.splitlines() if line.startswith("uv ")]

    files = "-r requirements.txt -r requirements/report.txt -c requirements/constraints.txt OMP="
    pip = "uv pip install --quiet --python .venv/bin/python"
    venv = "uv venv --quiet --seed --python python3 .venv OMP="
    auto = f"{pip} --torch-backend=auto {files}"
    status, lines = installed(FAILS="uv pip")
    assert status == 1 and [*lines[:2], *lines[3:]] == [venv, auto, f"{pip} {files}"]
    assert lines[2].startswith("uv cannot use PyTorch's own index: ")
    assert installed() == (0, [auto])
    assert installed() == (0, [])
    assert len(installed("quickstart.sh")[1]) == 1  # it needs other packages
    (root / "requirements.txt").write_text("torch\n")
    assert len(installed()[1]) == 1
    old = "import sys; sys.version_info = (3, 9, 2); exec(sys.argv[1])"
    (root / "requirements.txt").write_text("torch<3\n")
    for name in ("python3", *(f"python3.{minor}" for minor in range(10, 15))):
        (tmp_path / "decoy" / name).write_text(f'#!/bin/sh\n{PYTHON} -c "{old}" "$2"\n')
        (tmp_path / "decoy" / name).chmod(0o755)
    status, text = launch("timings.sh", root=root, PYTHON="")
    assert status == 2 and "error: no Python 3.10 to 3.14 found; install one" in text


def test_help_of_a_launcher_ends_with_that_of_its_script(launch):
    status, text = launch("distributed.sh", "--help")
    assert status == 0 and text.startswith("DistributedDataParallel under torchrun")
    assert text.endswith("\npython distributed.py --help OMP=\n")


@pytest.mark.parametrize("name", ("quickstart", "test", "timings", "install_horovod"))
def test_help_sets_nothing_up(name, tmp_path):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    script = tmp_path / "scripts" / f"{name}.sh"
    ended = run("bash", script, "--help", timeout=10, PYTHON="", HOME=str(tmp_path))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert f"  bash scripts/{name}.sh" in ended.stdout and "#" not in ended.stdout[:60]
    assert [file.name for file in tmp_path.iterdir()] == ["scripts"]


# --- quickstart.py, network.py, multiprocessing_distributed.py ---


def test_the_quickstart_resumes_each_run_and_shows_how_long_the_rest_takes(
    tmp_path, monkeypatch, capsys
):
    commands, clock = [], itertools.count(0, 120)  # each run takes two minutes
    record = dict.fromkeys(("train_loss", "val_loss", "val_top1", "seconds"), 1)

    def train(command, env):
        commands.append((Path(command[1]).stem, env["NPROC"], command[-1]))
        output = tmp_path / commands[-1][0]
        assert command[command.index("--output") + 1] == str(output)
        output.mkdir(exist_ok=True)
        lines = [json.dumps({**record, "epoch": epoch}) + "\n" for epoch in range(4)]
        (output / "epochs.jsonl").write_text("".join(lines))
        return SimpleNamespace(returncode=3 * (output.name == "horovod_distributed"))

    half = tmp_path / "multiprocessing_distributed"
    half.mkdir()
    (half / "epochs.jsonl").write_text("{}\n" * 3)  # an interrupted run
    monkeypatch.setattr(quickstart.subprocess, "run", train)
    monkeypatch.setattr(quickstart.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(quickstart, "find_spec", lambda name: name == "horovod")
    monkeypatch.setattr(quickstart.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(quickstart.torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(quickstart.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["quickstart", "data", str(tmp_path)])
    with pytest.raises(SystemExit, match="True"):  # one run has failed
        quickstart.main()
    processes = dict.fromkeys(quickstart.LAUNCHERS, "2") | {"dataparallel": "1"}
    del processes["apex_distributed"]
    assert commands == [(*pair, "--resume") for pair in processes.items()]
    printed = capsys.readouterr().out
    assert re.findall(r"^== run (.*)", printed, re.M) == [
        "1 of 5: dataparallel",  # then 4 + 1 + 4 epochs are left, after 4 in 2 minutes
        "2 of 5: distributed (about 4.5 minutes left)",
        "3 of 5: multiprocessing_distributed (about 2.5 minutes left)",
        "4 of 5: apex_distributed",
        "5 of 5: horovod_distributed (about 2.7 minutes left)",
    ]
    assert re.search(r"^\| horovod_.*\| failed with status 3 \|$", printed, re.M)


def test_an_interrupted_quickstart_starts_no_other_run(tmp_path, monkeypatch, capsys):
    """The launcher may end with any status, so the test sends the signal itself."""
    started = []

    def train(command, env):
        started.append(command)
        os.kill(os.getpid(), signal.SIGINT)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(quickstart.subprocess, "run", train)
    monkeypatch.setattr(sys, "argv", ["quickstart", "data", str(tmp_path)])
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit, match="130"):
        quickstart.main()
    signal.signal(signal.SIGINT, before)
    printed = capsys.readouterr()
    assert len(started) == 1 and "| strategy" not in printed.out
    assert "run the same command to continue\n" in printed.err


@pytest.mark.parametrize("status", (-9, 1, 2))
def test_mp_spawn_names_the_process_that_was_killed(status, monkeypatch):
    """The parent prints nothing after a UserError (status 2), which the process has printed."""
    script = str(ROOT / "multiprocessing_distributed.py")
    text = f"process 1 ended: {status}"

    def spawn(*_, **__):
        raise multiprocessing.ProcessExitedException(text, 1, 7, status)

    monkeypatch.setattr(multiprocessing, "spawn", spawn)
    monkeypatch.setattr(sys, "argv", [script, "--synthetic", "4"])
    with pytest.raises(SystemExit, match="^2$" if status == 2 else f"^{text}$"):
        runpy.run_path(script, run_name="__main__")


def test_processes_of_one_machine_meet_where_no_other_gets_in(monkeypatch):
    """Only the user's own settings, or several machines, open a port to other machines."""
    script = str(ROOT / "multiprocessing_distributed.py")
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS")

    def spawn(worker, args, nprocs):
        raise InterruptedError(args[0].dist_url, [*map(os.environ.get, names)])

    monkeypatch.setattr(multiprocessing, "spawn", spawn)
    others = ["--nnodes", "2", "--dist-url", "tcp://h:9"]
    for flags, given, address, found in (
        ([], {}, f"file:///proc/{os.getpid()}/fd/", ["lo", "lo", "1"]),
        ([], {names[0]: "eth7", names[2]: "4"}, "file:///", ["eth7", "lo", "4"]),
        (others, {}, "tcp://h:9", [None, None, "1"]),
    ):
        monkeypatch.setattr(os, "environ", given.copy())
        monkeypatch.setattr(sys, "argv", [script, "--synthetic", "4", *flags])
        with pytest.raises(InterruptedError) as raised:
            runpy.run_path(script, run_name="__main__")
        assert raised.value.args[0].startswith(address)
        assert raised.value.args[1] == found


# --- horovodrun.py ---

RANK = """
import os, sys, time
rank, status = os.environ["HOROVOD_RANK"], int(sys.argv[1])
line = " ".join(map(str, ("rank", rank, *map(os.isatty, (1, 2)))))
os.write(1, f"{line}\\n".encode())  # at once: two processes write
if rank == "1":
    time.sleep(1)
    print("script.py: error: what to do", file=sys.stderr)
    os.kill(os.getpid(), 9) if status == 9 else sys.exit(status)
time.sleep(60)
"""
ENDS = [(2, 2, "script.py: error: what to do")]
ENDS += [(9, 137, "horovodrun: error: rank 1 ended with status 137 (SIGKILL)")]


@pytest.mark.horovod
@pytest.mark.parametrize("status, code, last", ENDS)
def test_horovodrun_prints_what_the_processes_print(status, code, last, tmp_path):
    """In the first run, each process sees a terminal."""
    (tmp_path / "rank.py").write_text(RANK)
    command = [PYTHON, "scripts/horovodrun.py", "--gloo", "-np", "2", PYTHON]
    command += [str(tmp_path / "rank.py"), str(status)]
    if status == 2:
        command = ["script", "-qec", shlex.join(command), "/dev/null"]
    ended = run(*command)
    text = (ended.stdout + ended.stderr).replace("\r", "")
    assert (ended.returncode, text.splitlines()[-1]) == (code, last), text
    for rank in 0, 1:
        line = f"rank {rank} {status == 2} {status == 2}\n"
        assert line in text and f":{line}" not in text
    assert "Traceback" not in text
