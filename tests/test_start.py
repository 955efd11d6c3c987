"""distributed.py as the start of another project, by the patch in start/."""

import os
import re
import shutil
from collections import Counter
from pathlib import Path
from signal import SIGKILL

import numpy
import pytest
import torch
from conftest import ROOT, Started, processes_of, run, wait_until
from PIL import Image
from start.project.model import Net
from test_interruption import came_to

from common.checkpoint import TrainingState
from common.data import build_loader
from common.errors import UserError
from common.model import build_model
from launch.check import check, load_script

START = Path(__file__).parent / "start"
FLAGS = (
    "--data pictures --image-size 64 -b 8 --lr 0.064 --warmup-epochs 0 --epochs 2 -j 2 "
    "--precision fp32 --device cpu --print-interval 1 --checkpoint-steps 5"
).split()


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """What README says to take along, patched, with pictures and a finished run."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copy(ROOT / "distributed.py", folder / "train.py")
    for source in (ROOT / "common", ROOT / "launch", START / "project"):
        shutil.copytree(source, folder / source.name)
    launchers = shutil.ignore_patterns("[!dl]*", "*.py", "dataparallel.sh")
    shutil.copytree(ROOT / "scripts", folder / "scripts", ignore=launchers)
    patched = run("git", "-C", folder, "apply", START / "distributed.patch")
    assert patched.returncode == 0, patched.stderr
    for part, number in (("train", 322), ("val", 25)):
        draw = numpy.random.default_rng(number)
        (folder / "pictures" / part).mkdir(parents=True)
        lines = "path,label\n"
        for index in range(number):
            pixels = draw.integers(0, 192, (64, 64, 3), dtype="uint8")
            pixels[..., index % 3] += 16
            lines += f"{part}/{index}.png,{index % 3}\n"
            Image.fromarray(pixels).save(folder / "pictures" / part / f"{index}.png")
        (folder / "pictures" / f"{part}.csv").write_text(lines)
    whole = run(*command(folder, "whole"))
    assert re.match("train: 2 processes on .*, Net at 64 px, fp32", whole.stdout), (
        whole.stderr
    )
    return folder


def command(folder, output, *flags):
    words = ("env", "-C", folder, "SCRIPT=train.py", "bash", "scripts/distributed.sh")
    return [str(word) for word in (*words, *FLAGS, "--output", output, *flags)]


def test_few_lines_are_changed():
    """A replaced line counts twice: as removed and as added."""
    changed = Counter()
    for file in (START / "distributed.patch").read_text().split("--- a/")[1:]:
        lines = sum(line[:1] in ("+", "-") for line in file.splitlines()[2:])
        changed[file.split()[0].split("/")[0]] += lines
    assert changed.keys() == {"train.py", "common"}
    assert changed["train.py"] <= 30 and changed["common"] <= 5, changed


def test_a_run_of_which_one_process_was_killed_ends_as_the_whole_one(project):
    saved = project / "killed" / "checkpoint.pt"
    with Started(saved, command(project, "killed")) as job:
        wait_until(saved.exists, 90, "first checkpoint", interval=0.005)
        found = processes_of(job.run)
        launchers = [pid for pid, (_, words) in found.items() if "-m launch." in words]
        victim = max(pid for pid, (parent, _) in found.items() if parent in launchers)
        os.kill(victim, SIGKILL)
        assert job.process.wait(timeout=30) == 1 and torch.load(saved)["step"] > 0
        job.wait_until_gone(30)
    again = run(*command(project, "killed", "--resume", "auto"))
    assert again.returncode == 0 and "after step" in again.stdout, again.stderr
    whole, killed = map(came_to, (project / "whole", saved.parent))
    assert whole == killed and len(whole) > 50


def test_validation_counts_each_picture_once(project):
    found = torch.load(project / "whole" / "checkpoint.pt")
    net, record, sums = Net(0, 3).eval(), found["records"][-1], Counter()
    net.load_state_dict(found["state_dict"])
    for line in (project / "pictures" / "val.csv").read_text().splitlines()[1:]:
        path, label = line.split(",")
        pixels = torch.tensor(numpy.array(Image.open(project / "pictures" / path)))
        outputs = net((pixels.permute(2, 0, 1)[None] - 127.5) / 73.6)
        sums["val_loss"] += -outputs.log_softmax(1)[0, int(label)].item() / 25
        sums["val_top1"] += 4 * (outputs.argmax().item() == int(label))
        sums["val_confidence"] += outputs.softmax(1).max().item() / 25
    assert record["val_images"] == 25 and record["val_top1"] > 50
    assert {name: record[name] for name in sums} == pytest.approx(sums, rel=1e-5)
    assert found["state_dict"]["layers.4.weight"].stride(1) == 1  # channels_last


def test_mistakes_are_one_line(project, monkeypatch):
    """Each UserError is a line, and status 2."""
    monkeypatch.syspath_prepend(project)
    monkeypatch.chdir(project)
    monkeypatch.setattr("sys.argv", ["train.py"])
    script = load_script(project / "train.py")
    check(script.arguments([*FLAGS, "--output", "new"]), 2, script=script)
    args = script.arguments([*FLAGS, "--output", "whole", "--resume", "auto"])
    args.z_loss = 0.01
    with pytest.raises(UserError, match="--z-loss was 0.001 .* is now 0.01"):
        check(args, 2, script=script)
    args = script.arguments([*FLAGS, "-b", "400", "--pretrained"])
    data = script.build_datasets(args)
    with pytest.raises(UserError, match="322 training images do not fill"):
        build_loader(args, data[0], range(322), 400, 0, torch.device("cpu"), True)
    with pytest.raises(UserError, match="--pretrained: .* no weights for Net"):
        TrainingState(args, data, Net(0, 3), None, None, None)
    del data[0].classes
    with pytest.raises(UserError, match="Pictures has no `classes`"):
        build_model(args, data[0])
