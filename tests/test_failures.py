"""An error that the user can fix is one line and status 2."""

import sys

import pytest
from conftest import TINY
from ranks import Ranks, start, train

import dataparallel

NAME = "distributed"


@pytest.mark.parametrize(
    "flags, line",
    [
        ("--data nowhere", "nowhere/val: No such file or directory; --data needs "),
        (
            "-b 7 --accumulate 2",
            "--global-batch-size: 7 images cannot be divided by 2 mic",
        ),
        ("--lr fast", "argument --lr: invalid float value: 'fast'"),
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
