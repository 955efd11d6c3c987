"""Data sets: the sample and ImageNet's archives."""

import io
import tarfile

import numpy
import pytest
from conftest import ROOT, run
from PIL import Image
from played import run_python

CLASSES = ("n01440764", "n01443537", "n02119789")
COUNTS = ("--train-images", "12", "--val-images", "6", "--classes", "3")


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
def archives(tmp_path):
    """In the shape of the official ones: 3 classes, 4 training images each, 6 for validation."""
    from scipy.io import savemat

    train = {
        f"{name}.tar": archive({f"{name}_{i}.JPEG": jpeg(10 * n + i) for i in range(4)})
        for n, name in enumerate(CLASSES)
    }
    val = {f"ILSVRC2012_val_{n:08d}.JPEG": jpeg(100 + n) for n in (3, 1, 2, 6, 5, 4)}
    numbers = [(1, CLASSES[2]), (2, CLASSES[0]), (3, CLASSES[1]), (1001, "n00001740")]
    synsets = numpy.array(numbers, dtype=[("ILSVRC2012_ID", "O"), ("WNID", "O")])
    matrix, data = io.BytesIO(), "ILSVRC2012_devkit_t12/data/"
    savemat(matrix, {"synsets": synsets})
    truth = f"{data}ILSVRC2012_validation_ground_truth.txt"
    devkit = {f"{data}meta.mat": matrix.getvalue(), truth: b"2\n2\n3\n3\n1\n1\n"}
    folder = tmp_path / "archives"
    folder.mkdir()
    (folder / "ILSVRC2012_img_train.tar").write_bytes(archive(train))
    (folder / "ILSVRC2012_img_val.tar").write_bytes(archive(val))
    (folder / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(archive(devkit, "w:gz"))
    return folder


def prepare(archives, target, *flags):
    script = ROOT / "scripts" / "prepare_imagenet.sh"
    return run("bash", script, archives, target, *COUNTS, *flags)


def test_archives_become_folders_and_a_second_time_what_is_missing(archives, tmp_path):
    target = tmp_path / "imagenet"
    ended = prepare(archives, target)
    assert ended.returncode == 0, ended.stderr
    files = {path: path.read_bytes() for path in target.rglob("*.JPEG")}
    train, val = target / "train", target / "val"
    assert len(files) == 18 and len(list(archives.iterdir())) == 3
    assert files[train / "n01443537" / "n01443537_2.JPEG"] == jpeg(12)
    for number, name in zip(range(1, 7), (0, 0, 1, 1, 2, 2), strict=True):
        path = val / CLASSES[name] / f"ILSVRC2012_val_{number:08d}.JPEG"
        assert files[path] == jpeg(100 + number)

    half = (train / CLASSES[1]).rename(train / (CLASSES[1] + ".partial"))
    (half / f"{CLASSES[1]}_3.JPEG").write_bytes(b"half")
    next(val.rglob("*.JPEG")).unlink()
    untouched = train / CLASSES[0] / f"{CLASSES[0]}_0.JPEG"
    before = untouched.stat().st_mtime_ns
    ended = prepare(archives, target)
    assert ended.returncode == 0, ended.stderr
    assert files == {path: path.read_bytes() for path in target.rglob("*.JPEG")}
    assert untouched.stat().st_mtime_ns == before


def test_wrong_counts_and_missing_archives_are_one_line(archives, tmp_path):
    ended = prepare(archives, tmp_path / "a", "--train-images", "13")
    assert ended.returncode == 2
    assert "has 12 images in 3 class folders, but should have 13 in 3" in ended.stderr
    (archives / "ILSVRC2012_img_val.tar").unlink()
    ended = prepare(archives, tmp_path / "b")
    assert ended.returncode == 2 and "ILSVRC2012_img_val.tar is missing" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_sample_data_is_never_overwritten(digits, tmp_path):
    for part, count in (("train", 1438), ("val", 359)):
        assert len(list((digits / part).iterdir())) == 10
        assert len(list((digits / part).rglob("*.JPEG"))) == count
    command = ("-m", "scripts.sample_data")
    again = run_python(tmp_path, *command, digits)
    assert again == (0, f"1797 images in {digits}\n")
    (tmp_path / "mine").mkdir()
    status, printed = run_python(tmp_path, *command, tmp_path / "mine")
    assert status == 2 and "is not this dataset" in printed
