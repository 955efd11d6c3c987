"""An error that the user can fix is one line and status 2; others keep their tracebacks."""

import errno
import sys

import pytest
from conftest import ROOT, TINY
from ranks import Ranks, start, train, train_disturbed

import dataparallel

NAME = "distributed"


@pytest.mark.parametrize(
    "flags, line",
    [
        ("--data nowhere", "nowhere/val: No such file or directory; --data needs "),
        ("--resume no.pt", "--resume no.pt cannot be loaded: FileNotFoundError"),
        (f"--resume {ROOT / 'LICENSE'}", "LICENSE cannot be loaded: "),
        (
            "-b 7 --accumulate 2",
            "--global-batch-size: 7 images cannot be divided by 2 mic",
        ),
        ("-b 700", "16 training images are too few"),
        ("--lr fast", "argument --lr: invalid float value: 'fast'"),
        ("--arch resnet19", "--arch resnet19: Unknown model resnet19"),
        ("--output {folder}/run", "run holds another run: continue it with --resume"),
    ],
)
def test_bad_input_is_one_line(flags, line, pictures, tmp_path, monkeypatch, capsys):
    """The rank that a launcher or Slurm has left in the environment does not matter."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint.pt").touch()
    for name in ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "RANK"):
        monkeypatch.setenv(name, "1")
    base = ["--data", pictures, *TINY, "-j", "0", "--output", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", [])
    with pytest.raises(SystemExit) as ended:
        start(dataparallel, [*base, *flags.format(folder=tmp_path).split()])
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    assert printed.err.startswith("dataparallel.py: error: ") and line in printed.err
    assert printed.err.count("\n") == 1


def test_an_unreadable_image_is_one_line_of_the_process_that_reads_it(
    pictures, tmp_path
):
    """The other processes' tracebacks say that they have lost that process."""
    broken = pictures / "train" / "dog" / "3.JPEG"
    broken.write_bytes(broken.read_bytes()[:200])
    flags = ["--data", pictures, *TINY, "-b", 16, "-j", 1, "--output", tmp_path / "out"]
    with Ranks(tmp_path, 2, train, name=NAME, flags=flags) as ranks:
        assert sorted(ranks.end()) == [1, 2], ranks.text()
        line = ranks.log(ranks.end().index(2)).splitlines()[-1]
        assert line.startswith(f"{NAME}.py: error: ") and str(broken) in line
        assert ranks.text().count(str(broken)) == 1


@pytest.mark.parametrize("number", (errno.ECONNREFUSED, errno.EADDRINUSE))
def test_an_error_of_another_program_keeps_its_traceback(number, pictures, tmp_path):
    """For example, an error of a user's metrics server is not mistaken for the launcher's."""
    what = OSError(number, "for the user's own server")
    flags = ["--data", pictures, *TINY, "-j", 0, "--output", tmp_path / "out"]
    how = {"name": NAME, "flags": flags, "net": "small", "at": 2, "what": what}
    with Ranks(tmp_path, 1, train_disturbed, **how) as ranks:
        assert ranks.end() == [1], ranks.text()
        assert "Traceback" in ranks.text() and str(what) in ranks.text()
        assert f"{NAME}.py: error:" not in ranks.text()
