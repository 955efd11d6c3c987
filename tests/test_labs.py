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
# Other changes than those of solutions/: lab, old text, new text, expected verdict
CHANGES = [
    ("03", "torch.manual_seed(dist.get_rank())", "torch.manual_seed(1)", "passes"),
    ("04", "prepare(images)\n", "prepare(images)\n        dist.barrier()\n", "FileNotFound"),
    ("06", "(loss / dist", "(2 * loss / dist", "passes"),
    ("07", "shuffle=True", "sampler=range(dist.get_rank(), 96, 2)", "in the same order"),
    ("09", "noise = 0.1", "torch.seed()\n        noise = 0.003", "hardly any noise"),
    ("10", """print(f"accuracy {result""", """print("accuracy", f"{result""", "it prints accuracy"),
    ("11", "shuffle=False", "shuffle=False, drop_last=True", "32 of the 33 validation"),
    ("12", "CosineAnnealingLR(optimizer, ", "CosineAnnealingLR(optimizer, 18, 0 * ", "passes"),
    ("15", "if not self.training or torch.rand(()) < 0.5:\n            x = x +",
     "if True:\n            x = x + torch.rand(()).round() *", "passes"),
    ("16", "accuracy(net, ", "accuracy(model, ", "passes"),
    ("18", "nullcontext() if number % PASSES == 0 else model.no_sync()", "nullcontext()",
     "a step averages the gradients 4 times instead of once"),
    ("19", LOOP[0], JOINED, "passes"),
    ("20", "if dist.get_rank() == 0:\n            with", "if True:\n            with", "passes"),
    ("21", "model.state_dict()", "{k[7:]: w for k, w in model.state_dict().items()}", "passes"),
    ("22", "    net.load_state_dict(torch.load(PRETRAINED))\n", "", "does not start from"),
    ("24", """torch.save(content, "checkpoint.pt")""",
     """torch.save(content, open("checkpoint.pt", "wb"))""", "cannot be read"),
    ("23", "if CHECKPOINT.exists():", "if False:", "takes 18 steps instead of the last 6"),
]  # fmt: skip


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """What the grader says of the broken scripts, of the solutions and of the changes."""
    names = ("broken", "solved", "changed")
    folder = tmp_path_factory.mktemp("labs")
    labs = [folder / name / "tutorial" / "labs" for name in names]
    for one in labs:
        shutil.copytree(LABS, one)
    for patch in sorted((LABS / "solutions").glob("*.patch")):
        subprocess.run(["git", "apply", patch], cwd=folder / "solved", check=True)
    for number, old, new, _ in CHANGES:
        path = labs[2] / SCRIPTS[number]
        assert path.read_text().count(old) == 1, number
        path.write_text(path.read_text().replace(old, new))
    words = ["all"], ["all"], [number for number, *_ in CHANGES]
    patience = "5", "30", "30"  # seconds; only broken labs hang
    with Played(folder / "logs") as played:
        for one, chosen, seconds in zip(labs, words, patience, strict=True):
            variables = environment(PATIENCE=seconds)
            played.start(python, (one / "grade.py", *chosen), variables)
        statuses = played.end(seconds=400)
        logs = [played.log(number).splitlines() for number in range(3)]
    assert statuses == [1, 0, 1]
    # What is printed last is how many labs pass
    return [{line[:2]: line[2:].lstrip(": ") for line in log[:-1]} for log in logs]


@pytest.mark.parametrize("number", SCRIPTS)
def test_a_broken_script_fails_and_its_solution_passes(graded, number):
    broken, solved, _ = graded
    assert BROKEN[number] in broken[number]
    assert solved[number] == "passes"


@pytest.mark.parametrize("number, old, new, said", CHANGES)
def test_what_counts_is_what_a_script_does(graded, number, old, new, said):
    assert said in graded[2][number]


def test_an_unknown_lab_and_ctrl_c(tmp_path):
    ended = run("python", LABS / "grade.py", "99")
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    with Started(tmp_path, ["python", LABS / "grade.py", "19"]) as grader:
        wait_until(lambda: len(processes_of(grader.run)) == 3, 60, "two ranks")
        time.sleep(2)
        grader.process.send_signal(2)
        assert grader.process.wait(timeout=20) == 130
        assert not processes_of(grader.run)
