"""The scripts of tutorial/labs/ are broken as their page says; other scripts pass."""

import re
import shutil
import subprocess
import time

import pytest
from conftest import ROOT, Started, environment, processes_of, run, wait_until
from played import Played, python

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
    "08": "rank 0 sees the same images in the same order in epochs 0 and 1",
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
LOOP = re.search(
    r" +for x, y in loader:\n(?: {12}.*\n)+", (LABS / SCRIPTS["19"]).read_text()
)
JOINED = "        with model.join():\n" + re.sub("(?m)^", "    ", LOOP[0]).rstrip(" ")
# Other cures than those of solutions/: lab, old text, new text
CURES = [
    ("03", "torch.manual_seed(dist.get_rank())", "torch.manual_seed(1)"),
    ("06", "(loss / dist", "(2 * loss / dist"),
    ("12", "CosineAnnealingLR(optimizer, ", "CosineAnnealingLR(optimizer, 18, 0 * "),
    ("15", "if not self.training or torch.rand(()) < 0.5:\n            x = x +",
     "if True:\n            x = x + torch.rand(()).round() *"),
    ("16", "accuracy(net, ", "accuracy(model, "),
    ("18", "nullcontext() if number % PASSES == 0", "nullcontext() if number % 4 == 3"),
    ("19", LOOP[0], JOINED),
    ("20", "if dist.get_rank() == 0:\n            with", "if True:\n            with"),
    ("21", "model.state_dict()", "{k[7:]: w for k, w in model.state_dict().items()}"),
]  # fmt: skip


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """What the grader says of the broken scripts, the solutions and the other cures."""
    names = ("broken", "solved", "cured")
    folder = tmp_path_factory.mktemp("labs")
    labs = [folder / name / "tutorial" / "labs" for name in names]
    for one in labs:
        shutil.copytree(LABS, one)
    for patch in sorted((LABS / "solutions").glob("*.patch")):
        subprocess.run(["git", "apply", patch], cwd=folder / "solved", check=True)
    for number, old, new in CURES:
        path = labs[2] / SCRIPTS[number]
        assert path.read_text().count(old) == 1, number
        path.write_text(path.read_text().replace(old, new))
    words = ["all"], ["all"], [number for number, *_ in CURES]
    patience = "5", "30", "30"  # seconds; only broken labs hang
    with Played(folder / "logs") as played:
        for one, chosen, seconds in zip(labs, words, patience, strict=True):
            variables = environment(PATIENCE=seconds)
            played.start(python, (one / "grade.py", *chosen), variables)
        statuses = played.end(seconds=400)
        logs = [played.log(number).splitlines() for number in range(3)]
    assert statuses == [1, 0, 0]
    # What is printed last is how many labs pass
    return [{line[:2]: line[2:].lstrip(": ") for line in log[:-1]} for log in logs]


@pytest.mark.parametrize("number", SCRIPTS)
def test_a_broken_script_fails_and_its_solution_passes(graded, number):
    broken, solved, _ = graded
    assert BROKEN[number] in broken[number]
    assert solved[number] == "passes"


@pytest.mark.parametrize("number", [number for number, *_ in CURES])
def test_what_counts_is_what_a_script_does(graded, number):
    assert graded[2][number] == "passes"


def test_an_unknown_lab_and_ctrl_c(tmp_path):
    ended = run("python", LABS / "grade.py", "99")
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    command = ["python", LABS / "grade.py", "19"]  # it hangs
    with Started(tmp_path, command, output=None, PATIENCE="100") as grader:
        wait_until(lambda: len(processes_of(grader.run)) == 3, 60, "two ranks")
        time.sleep(2)
        grader.process.send_signal(2)
        assert grader.process.wait(timeout=20) == 130
        assert not processes_of(grader.run)
