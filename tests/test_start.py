"""Start another project from distributed.py, with the changes that the README describes.

The project has its own data set and network (start/project), AdamW, one more metric, a
second loss, and an average of the weights (EMA), which is used for validation.
"""

import os
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy
import pytest
import torch
from conftest import ROOT, Started, wait_until
from PIL import Image
from played import run_path
from ranks import Ranks
from start.project.model import Net
from torch.utils._pytree import tree_leaves
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import pil_to_tensor

FLAGS = "--data pictures --image-size 64 -b 8 --warmup-epochs 0 --epochs 2 -j 1"
FLAGS += " --precision fp32 --print-interval 1 --save-minutes 0"
TIMED = "seconds images_per_second data_wait peak_memory_mib".split()


def edit(folder):
    """Apply the edits of start/edits.txt; return how many lines they remove and add."""
    changed = Counter()
    for block in (ROOT / "tests" / "start" / "edits.txt").read_text().split("\n\n"):
        name, *lines = block.splitlines()
        old, new = ([x[2:] for x in lines if x[0] == sign] for sign in "-+")
        changed[name.split("/")[0]] += len({*old} ^ {*new})
        text = (folder / name).read_text()
        assert text.count("\n".join(old)) == 1, block
        (folder / name).write_text(text.replace("\n".join(old), "\n".join(new)))
    return changed


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Return the project's folder, with images and a finished run."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copy(ROOT / "distributed.py", folder / "train.py")
    optional = shutil.ignore_patterns("tar.py", "nvimgcodec.py", "__pycache__")
    shutil.copytree(ROOT / "common", folder / "common", ignore=optional)
    shutil.copytree(ROOT / "tests" / "start" / "project", folder / "project")
    changed = edit(folder)
    assert changed["train.py"] <= 30 and changed["common"] <= 5, changed
    for part, number in (("train", 82), ("val", 25)):
        draw = numpy.random.default_rng(number)
        (folder / "pictures" / part).mkdir(parents=True)
        lines = "path,label\n"
        for index in range(number):
            pixels = draw.integers(0, 192, (64, 64, 3), dtype="uint8")
            pixels[..., index % 3] += 16
            lines += f"{part}/{index}.png,{index % 3}\n"
            Image.fromarray(pixels).save(folder / "pictures" / part / f"{index}.png")
        (folder / "pictures" / f"{part}.csv").write_text(lines)
    trained(folder, "whole")
    return folder


def train(project: Path, flags: tuple, script: str = "train.py") -> None:
    """Run train.py as a launcher does, but in a process that has already imported PyTorch."""
    for name in [name for name in sys.modules if name.split(".")[0] == "common"]:
        del sys.modules[name]  # the project has its own modules
    os.chdir(project)
    sys.argv[:] = [script, *flags]
    run_path(script)


def trained(folder: Path, output: str, *flags: str) -> str:
    """Run train.py in two processes; return rank 0's output."""
    flags = (*FLAGS.split(), "--output", output, *flags)
    with Ranks(folder / "logs", 2, train, project=folder, flags=flags) as ranks:
        assert ranks.end(120) == [0, 0], ranks.text()
        return ranks.log(0)


def came_to(output):
    """Return everything that a run has saved, except for times and memory."""
    files = [torch.load(output / name) for name in ("checkpoint.pt", "best.pt")]
    for content in files:
        for record in content["records"]:
            for name in TIMED:
                del record[name]
    leaves = tree_leaves(files)
    return [leaf.tolist() if torch.is_tensor(leaf) else leaf for leaf in leaves]


def test_a_killed_run_ends_with_the_same_bits(project):
    """After the test kills the launcher, all other processes end, too."""
    saved = project / "killed" / "checkpoint.pt"
    command = "torchrun --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0"  # id "none"
    command += " --nproc-per-node 2 train.py --output killed"
    command = ("env", "-C", project, *command.split(), *FLAGS.split())
    with Started(saved, command) as job:
        wait_until(saved.exists, 90, "first checkpoint", interval=0.005)
        job.process.kill()
        job.wait_until_gone(60)
    assert torch.load(saved)["step"] > 0
    trained(project, "killed", "--resume")
    whole, killed = map(came_to, (project / "whole", saved.parent))
    assert whole == killed and len(whole) > 90


def test_validation_is_of_the_average_and_counts_each_picture_once(project):
    found = torch.load(project / "whole" / "best.pt")
    net, record = Net(0, 3).eval(), found["records"][-1]
    net.load_state_dict(found["state_dict"])
    usual = v2.Compose([v2.Resize(73), v2.CenterCrop(64)])
    sums = dict.fromkeys(("val_loss", "val_top1", "val_confidence"), 0)
    for line in (project / "pictures" / "val.csv").read_text().splitlines()[1:]:
        path, label = line.split(",")
        pixels = usual(pil_to_tensor(Image.open(project / "pictures" / path)))
        outputs = net((pixels[None] - 127.5) / 73.6)
        sums["val_loss"] += -outputs.log_softmax(1)[0, int(label)].item() / 25
        sums["val_top1"] += 4 * (outputs.argmax().item() == int(label))
        sums["val_confidence"] += outputs.softmax(1).max().item() / 25
    assert {name: record[name] for name in sums} == pytest.approx(sums, rel=1e-4)
    assert record["val_images"] == 25 and record["val_top1"] > 50
    name = "layers.4.weight"
    assert not torch.equal(found["state_dict"][name], found["raw_model"][name])
    assert found["recipe"]["z_loss"] == "0.001"  # a resumed run needs the same flag
    printed = trained(project, "new", "--evaluate", "--resume", "whole/best.pt")
    assert f", top-1 {record['val_top1']:.2f} %, " in printed
    assert f", confidence {record['val_confidence']:.4g}, 25 images" in printed
