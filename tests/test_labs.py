"""The scripts of tutorial/labs/ are broken as their page says; the solutions pass."""

import shutil
import subprocess
import time

import pytest
from conftest import ROOT, environment, processes_of, start, wait_until
from played import Played, python, run_python

LABS = ROOT / "tutorial" / "labs"
SCRIPTS = {path.name[:2]: path.name for path in sorted(LABS.glob("[0-9][0-9]_*.py"))}
# What is wrong with each
BROKEN = {
    "01": "on two machines with one process each, epoch 0 leaves out 48 of 96 images",
    "02": "if another run of it is under way, before the first step rank 0 fails with ",
    "03": "have different weights before the first step",
    "04": "before the first step rank 1 fails with FileNotFoundError: ",
    "05": "have different weights after step 1",
    "06": "step 1 moves the weights 0.50 times as far as one process does",
    "07": "3 epochs of 96 images are 288; the two processes train on 576",
    "08": "rank 0 sees the same images, in one order, in each epoch",
    "09": "both processes add the same noise to their images",
    "10": "it prints accuracy ",
    "11": "it prints accuracy ",
    "12": "the learning rate falls from 0.1000 to only 0.05",
    "13": "validation images are trained on as well",
    "14": "one process does with the same 16 images and a gradient of at most 0.3",
    "15": "RuntimeError: Expected to have finished reduction in the prior iteration",
    "16": "rank 1 validates with another network than model.pt",
    "17": "step 1 moves the weights 4.00 times as far as one process does",
    "18": "have different weights after step 1",
    "19": "rank 0 still waits in b",
    "20": "nothing happens for ",
    "21": "the network without DDP cannot load model.pt",
    "22": "RuntimeError: Attempting to deserialize object on a CUDA device",
    "23": "resumed ends with other weights than a run without a break",
    "24": "killed during its second save, checkpoint.pt cannot be read",
}


def copy(folder):
    return shutil.copytree(LABS, folder / "tutorial" / "labs")


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """What the grader says of the broken scripts and of the solutions."""
    labs = [copy(tmp_path_factory.mktemp("labs")) for _ in range(2)]
    for patch in sorted((LABS / "solutions").glob("*.patch")):
        folder = labs[1].parent.parent
        subprocess.run(["git", "apply", patch], cwd=folder, check=True)
    patience = "5", "30"  # seconds; nothing else is said to hang
    with Played(labs[0].parent / "logs") as played:
        for folder, seconds in zip(labs, patience, strict=True):
            variables = environment(PATIENCE=seconds)
            played.start(python, (folder / "grade.py", "all"), variables)
        statuses = played.end(seconds=400)
        lines = [played.log(number).splitlines() for number in range(2)]
    said = [{line[:2]: line[2:].lstrip(": ") for line in part[:-1]} for part in lines]
    return statuses, said


@pytest.mark.parametrize("number", SCRIPTS)
def test_a_broken_script_fails_and_its_solution_passes(graded, number):
    statuses, (broken, solved) = graded
    assert statuses == [1, 0]
    assert BROKEN[number] in broken[number]
    assert solved[number] == "passes"


def test_an_unknown_lab_and_ctrl_c(tmp_path):
    status, printed = run_python(tmp_path, LABS / "grade.py", "99")
    assert status == 2 and printed.count("\n") == 1
    mark = {"TEST_RUN": str(tmp_path)}
    with open(tmp_path / "log", "w") as log:
        process = start(["python", LABS / "grade.py", "19"], log, mark)
        try:
            wait_until(lambda: len(processes_of(str(tmp_path))) == 3, 60, "two ranks")
            time.sleep(2)
            process.send_signal(2)
            assert process.wait(timeout=20) == 130
        finally:
            process.kill()
    assert not processes_of(str(tmp_path))
