"""Data sets: the sample and ImageNet's archives."""

import hashlib
import io
import re
import shutil
import tarfile

import numpy
import pytest
from PIL import Image
from torchvision.datasets import imagenet

from common.errors import UserError, one_line_errors
from scripts import sample_data
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
    """In the shape of the official ones: 3 classes, 4 training images each, 6 for validation."""
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
    unpack(archives, target)
    found = {path: path.read_bytes() for path in target.rglob("*.JPEG")}
    assert found == {**files, kept: b"kept"}


def test_what_cannot_be_unpacked_is_one_line(archives, tmp_path, monkeypatch, capsys):
    val, new = archives / "ILSVRC2012_img_val.tar", tmp_path / "new"
    content = val.read_bytes()
    for act, reason in (
        (lambda: val.write_bytes(content[:-9]), "val.tar is damaged; download it"),
        (lambda: val.unlink(), "img_val.tar is missing; download it from image-net"),
    ):
        act()
        monkeypatch.setattr("sys.argv", ["x.py", str(archives), str(new)])
        with pytest.raises(SystemExit) as ended, one_line_errors():
            main()
        printed = capsys.readouterr().err
        assert ended.value.code == 2 and printed.count("\n") == 1
        assert re.search(reason, printed) and not (new / "val").exists()


def test_sample_data_is_never_overwritten(digits, tmp_path, monkeypatch, capsys):
    for part, count in (("train", 1438), ("val", 359)):
        assert len(list((digits / part).iterdir())) == 10
        assert len(list((digits / part).rglob("*.JPEG"))) == count
    monkeypatch.setattr("sys.argv", ["sample_data.py", str(digits)])
    sample_data.main()
    assert capsys.readouterr().out == f"1797 images in {digits}\n"
    with pytest.raises(UserError, match=f"^{tmp_path} is not this dataset"):
        sample_data.write_digits(tmp_path)
