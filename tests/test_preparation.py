"""Test the preparation of data sets: the sample, and ImageNet's archives."""

import hashlib
import importlib
import io
import os
import re
import shutil
import sys
import tarfile
import tracemalloc
from pathlib import Path

import numpy
import pytest
from PIL import Image
from torchvision.datasets import imagenet

from common.errors import UserError, one_line_errors
from scripts import prepare_imagenet, sample_data
from scripts.prepare_imagenet import main, unpack

CLASSES = ("n01440764", "n01443537", "n02119789")


def jpeg(number):
    file = io.BytesIO()
    Image.new("RGB", (20, 20), (number % 256, 50, 90)).save(file, "JPEG")
    return file.getvalue()


def archive(files, mode="w"):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as opened:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            opened.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def archives(tmp_path, monkeypatch):
    """Return archives like the official ones: 3 classes, 4 training images each, 6 for validation."""
    savemat = pytest.importorskip("scipy.io").savemat
    train = {
        f"{name}.tar": archive({f"{name}_{i}.JPEG": jpeg(10 * n + i) for i in range(4)})
        for n, name in enumerate(CLASSES)
    }
    val = {f"ILSVRC2012_val_{n:08d}.JPEG": jpeg(100 + n) for n in (3, 1, 2, 6, 5, 4)}
    rows = [(1, CLASSES[2], "fox", "", 0), (2, CLASSES[0], "tench", "", 0)]
    rows += [(3, CLASSES[1], "goldfish", "", 0), (1001, "n00001740", "entity", "", 3)]
    names = ("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children")
    synsets = numpy.array(rows, dtype=[(name, "O") for name in names])
    matrix, data = io.BytesIO(), "ILSVRC2012_devkit_t12/data/"
    savemat(matrix, {"synsets": synsets})
    truth = f"{data}ILSVRC2012_validation_ground_truth.txt"
    devkit = {f"{data}meta.mat": matrix.getvalue(), truth: b"2\n2\n3\n3\n1\n1\n"}
    contents = {"train": archive(train), "val": archive(val)}
    contents["devkit"] = archive(devkit, "w:gz")
    monkeypatch.setattr(prepare_imagenet, "COUNTS", {"train": 12, "val": 6})
    (tmp_path / "archives").mkdir()
    for part, (name, _) in list(imagenet.ARCHIVE_META.items()):
        digest = hashlib.md5(contents[part]).hexdigest()
        monkeypatch.setitem(imagenet.ARCHIVE_META, part, (name, digest))
        (tmp_path / "archives" / name).write_bytes(contents[part])
    return tmp_path / "archives"


def test_archives_become_folders_and_a_second_time_what_is_missing(archives, tmp_path):
    target = tmp_path / "imagenet"
    unpack(archives, target)
    files = {path: path.read_bytes() for path in target.rglob("*.JPEG")}
    assert len(files) == 18 and len(list(archives.iterdir())) == 3
    assert files[target / "train" / "n01443537" / "n01443537_2.JPEG"] == jpeg(12)
    for number, name in enumerate((0, 0, 1, 1, 2, 2), start=1):
        path = target / "val" / CLASSES[name] / f"ILSVRC2012_val_{number:08d}.JPEG"
        assert files[path] == jpeg(100 + number)

    kept = target / "val" / CLASSES[0] / "ILSVRC2012_val_00000001.JPEG"
    kept.write_bytes(b"kept")
    (target / "train").rename(target / "train.partial")
    shutil.rmtree(target / "train.partial" / CLASSES[1])
    half = target / "train.partial" / CLASSES[0] / f"{CLASSES[0]}_3.JPEG"
    half.write_bytes(b"half")
    unpack(Path(os.path.relpath(archives)), target)
    found = {path: path.read_bytes() for path in target.rglob("*.JPEG")}
    assert found == {**files, kept: b"kept"}


def test_progress_is_a_bar(archives, monkeypatch):
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    unpack(archives, archives.parent / "log")
    assert log.getvalue().count("\r") == 2 * 2  # at 0 % and 100 % of both parts
    bar = io.StringIO()
    bar.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", bar)
    unpack(archives, archives.parent / "terminal")
    for line in ("val: 100%.* 6/6 .*images/s", "train: 100%.* 12/12 .*images/s"):
        assert re.search(line, bar.getvalue()) and re.search(line, log.getvalue())


def refuse(source, acts, monkeypatch, capsys):
    """Check that after each act, unpacking fails with a one-line error that names the reason."""
    new = source.parent / "new"
    monkeypatch.setattr("sys.argv", ["x.py", str(source), str(new)])
    for act, reason in acts:
        act()
        with pytest.raises(SystemExit) as ended, one_line_errors():
            main()
        *_, line = capsys.readouterr().err.splitlines()  # after progress bars
        assert ended.value.code == 2 and line.startswith("x.py: error: ")
        assert reason in line and not (new / "val").exists()


def test_what_cannot_be_unpacked_is_one_line(archives, monkeypatch, capsys):
    val = archives / "ILSVRC2012_img_val.tar"
    acts = [(lambda: os.truncate(val, 9999), "val.tar is damaged; download it")]
    acts += [(val.unlink, "img_val.tar is missing; get it from image-net.org")]
    refuse(archives, acts, monkeypatch, capsys)


def test_hugging_faces_files(archives, tmp_path, monkeypatch, capsys):
    """Hugging Face's files become the same folders, without much memory; a wrong file is one line."""
    arrow = pytest.importorskip("pyarrow")
    write_table = importlib.import_module("pyarrow.parquet").write_table
    old, new, data = (tmp_path / name for name in ("old", "good", "hub/data"))
    unpack(archives, old)
    data.mkdir(parents=True)
    names = ("train-0-of-2", "train-1-of-2", "validation-0-of-1")
    files = [data / f"{name}.parquet" for name in names]

    def write(name="{0.stem}_{0.parent.name}.JPEG", classes=CLASSES, val="val/*/*"):
        train = sorted(old.glob("train/*/*"), key=lambda path: path.stem[::-1])
        parts = train[::2], train[1::2], [*old.glob(val)]
        for file, paths in zip(files, parts, strict=True):
            images = {name.format(path): path.read_bytes() for path in paths}
            rows = [{"bytes": images[path], "path": path} for path in images]
            labels = [classes.index(path.parent.name) for path in paths]
            table = arrow.table({"image": rows, "label": labels})
            write_table(table, file)

    write()
    unpack(data.parent, new)
    wanted, found = (
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*.JPEG")}
        for root in (old, new)
    )
    assert found == wanted and len(found) == 18
    rows = [{"bytes": bytes(50_000), "path": "x.JPEG"}] * 1000
    table = arrow.table({"image": rows, "label": [0] * 1000})
    write_table(table, big := new / "x.parquet")
    tracemalloc.start()
    assert sum(1 for _ in prepare_imagenet.images(big)) == 1000
    assert tracemalloc.get_traced_memory()[1] < 2e7  # of 5e7
    tracemalloc.stop()

    acts = [(lambda: write("{0.stem}.JPEG"), "JPEG does not end with a class")]
    acts += [(lambda: write(classes=CLASSES[::-1]), "labels do not number the")]
    acts += [(lambda: (write(), os.truncate(files[-1], 400)), "cannot unpack ")]
    acts += [(lambda: write(val="*/*/*"), "18 images in the val files instead of 6")]
    acts += [(files[-1].unlink, "0 images in the val files instead of 6; download")]
    refuse(data.parent, acts, monkeypatch, capsys)
    write()
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    refuse(data.parent, [(int, "pip install pyarrow")], monkeypatch, capsys)


def test_sample_data_is_never_overwritten(digits, tmp_path, monkeypatch, capsys):
    for part, count in (("train", 1438), ("val", 359)):
        assert len(list((digits / part).iterdir())) == 10
        assert len(list((digits / part).rglob("*.JPEG"))) == count
    monkeypatch.setattr("sys.argv", ["sample_data.py", str(digits)])
    sample_data.main()
    assert capsys.readouterr().out == f"1797 images in {digits}\n"
    with pytest.raises(UserError, match=f"^{tmp_path} is not this dataset"):
        sample_data.write_digits(tmp_path)
