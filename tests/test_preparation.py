"""Data sets: the sample and ImageNet's archives."""

import io
import tarfile

import numpy
import pytest
from conftest import ROOT, run
from PIL import Image
from played import run_python

CLASSES = ("n01440764", "n01443537", "n02119789")


def jpeg(number):
    file = io.BytesIO()
    Image.new("RGB", (20, 20), (number % 256, 50, 90)).save(file, "JPEG")
    return file.getvalue()


def add(archive, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def archive_of(files):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            add(archive, name, content)
    return buffer.getvalue()


@pytest.fixture
def archives(tmp_path):
    """Archives in the shape of the official ones: 3 classes, 4 training images each, 6 for validation."""
    from scipy.io import savemat

    folder = tmp_path / "archives"
    folder.mkdir()
    with tarfile.open(folder / "ILSVRC2012_img_train.tar", "w") as outer:
        for number, name in enumerate(CLASSES):
            files = {
                f"{name}_{image}.JPEG": jpeg(10 * number + image) for image in range(4)
            }
            add(outer, f"{name}.tar", archive_of(files))
    with tarfile.open(folder / "ILSVRC2012_img_val.tar", "w") as archive:
        for number in (3, 1, 2, 6, 5, 4):
            add(archive, f"ILSVRC2012_val_{number:08d}.JPEG", jpeg(100 + number))
    synsets = numpy.zeros(4, dtype=[("ILSVRC2012_ID", "O"), ("WNID", "O")])
    for row, (number, name) in enumerate(
        ((1, CLASSES[2]), (2, CLASSES[0]), (3, CLASSES[1]), (1001, "n00001740"))
    ):
        synsets[row] = (number, name)
    matrix = io.BytesIO()
    savemat(matrix, {"synsets": synsets})
    truth = b"2\n2\n3\n3\n1\n1\n"
    with tarfile.open(folder / "ILSVRC2012_devkit_t12.tar.gz", "w:gz") as archive:
        add(archive, "ILSVRC2012_devkit_t12/data/meta.mat", matrix.getvalue())
        add(
            archive,
            "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt",
            truth,
        )
    return folder


def prepare(archives, target, *flags):
    counts = flags or ("--train-images", "12", "--val-images", "6", "--classes", "3")
    return run(
        "bash", ROOT / "scripts" / "prepare_imagenet.sh", archives, target, *counts
    )


def tree(target):
    return {
        str(path.relative_to(target)): path.read_bytes()
        for path in target.rglob("*.JPEG")
    }


def test_archives_become_folders(archives, tmp_path):
    target = tmp_path / "imagenet"
    ended = prepare(archives, target)
    assert ended.returncode == 0, ended.stderr
    files = tree(target)
    assert len(files) == 18
    assert files["train/n01443537/n01443537_2.JPEG"] == jpeg(12)
    for number, name in zip(range(1, 7), (0, 0, 1, 1, 2, 2), strict=True):
        path = f"val/{CLASSES[name]}/ILSVRC2012_val_{number:08d}.JPEG"
        assert files[path] == jpeg(100 + number)
    assert len(list(archives.iterdir())) == 3


def test_preparation_goes_on_where_it_stopped(archives, tmp_path):
    target = tmp_path / "imagenet"
    assert prepare(archives, target).returncode == 0
    whole = tree(target)
    (target / "train" / CLASSES[1]).rename(target / "train" / (CLASSES[1] + ".partial"))
    (target / "train" / (CLASSES[1] + ".partial") / f"{CLASSES[1]}_3.JPEG").write_bytes(
        b"half"
    )
    next((target / "val").rglob("*.JPEG")).unlink()
    untouched = target / "train" / CLASSES[0] / f"{CLASSES[0]}_0.JPEG"
    before = untouched.stat().st_mtime_ns
    ended = prepare(archives, target)
    assert ended.returncode == 0, ended.stderr
    assert tree(target) == whole and untouched.stat().st_mtime_ns == before


def test_wrong_counts_and_missing_archives_are_said(archives, tmp_path):
    ended = prepare(
        archives,
        tmp_path / "a",
        "--train-images",
        "13",
        "--val-images",
        "6",
        "--classes",
        "3",
    )
    assert ended.returncode == 2
    assert "has 12 images in 3 class folders, it should have 13 in 3" in ended.stderr
    (archives / "ILSVRC2012_img_val.tar").unlink()
    ended = prepare(archives, tmp_path / "b")
    assert ended.returncode == 2 and "ILSVRC2012_img_val.tar is missing" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_sample_data(digits):
    counts = {
        part: {
            folder.name: len(list(folder.iterdir()))
            for folder in (digits / part).iterdir()
        }
        for part in ("train", "val")
    }
    assert set(counts["train"]) == set(counts["val"]) and len(counts["train"]) == 10
    assert sum(counts["train"].values()) == 1438 and sum(counts["val"].values()) == 359
    with Image.open(next(digits.rglob("*.JPEG"))) as image:
        assert (image.format, image.size) == ("JPEG", (64, 64))


def test_sample_data_never_overwrites(digits, tmp_path):
    command = ("-m", "scripts.sample_data")
    again = run_python(tmp_path, *command, digits)
    assert again == (0, f"1797 images in {digits}\n")
    (tmp_path / "mine").mkdir()
    status, printed = run_python(tmp_path, *command, tmp_path / "mine")
    assert status == 2 and "is not this data set" in printed
