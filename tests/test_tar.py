"""Tar archives give the same images and runs as folders; a bad archive causes a one-line error."""

import os
import shutil
import subprocess
import tarfile
import tracemalloc

import pytest
import torch
from ranks import parse
from torchvision.datasets.folder import IMG_EXTENSIONS

from common import tar
from common.data import DeviceLoader, EpochSampler, build_datasets, fingerprint
from common.errors import UserError

# Archives the current folder's pictures into $1
WHOLE = "tar -cf $1/train.tar -C train . && tar -cf $1/val.tar val"
SHARDS = """
tar -cf $1/train-1.tar -C train cat/0.JPEG "cat 2"
tar -cf $1/train-0.tar -C train --exclude 0.JPEG cat
tar -b 128 -cf $1/val.tar --format pax -C val cat "cat 2"
"""


def arguments(data, *flags):
    return parse("--data", data, "--image-size", 32, "-b", 4, *flags)


@pytest.fixture
def archives(pictures, tmp_path):
    """Return a function that archives the pictures in a new folder."""
    for part in ("train", "val"):  # sorted by path, "cat 2/" comes before "cat/"
        cat = pictures / part / "cat"
        (pictures / part / "dog").rename(pictures / part / "cat 2")
        (cat / "1.JPEG").rename(cat / f"ünï {'long ' * 30}.jpeg")
        for suffix in (".txt", ".gif", *IMG_EXTENSIONS):
            shutil.copy(cat / "2.JPEG", cat / f"a{suffix.upper()}")
        (cat / "._0.JPEG").write_bytes(b"of macOS")

    def make(commands):
        folder = tmp_path / "archives"
        folder.mkdir()
        words = ("bash", "-ec", commands, "bash", folder)
        subprocess.run(words, cwd=pictures, check=True)
        for path in pictures.rglob("._*"):
            path.unlink()
        return folder

    return make


def test_images_beyond_4_gib_of_an_archive(pictures, archives):
    """A 5 GiB file (here, zeros that need no disk space) may precede the images."""
    file = archives(WHOLE) / "train.tar"
    content = file.read_bytes()
    big = tarfile.TarInfo("notes.txt")
    big.size = 5 * 2**30
    with open(file, "wb") as opened:
        opened.write(big.tobuf())
        opened.seek(big.size, os.SEEK_CUR)
        opened.write(content)
    for _ in range(2):  # the second time, from the index file
        train_set, _ = build_datasets(arguments(file.parent))
        assert len(train_set) == 16 + len(IMG_EXTENSIONS)
        for index, path in enumerate(train_set.paths):
            image = (pictures / f"train{os.fsdecode(path)}").read_bytes()
            assert train_set.archives.read(index) == image


def test_the_index_of_many_images_needs_little_memory(tmp_path):
    with tarfile.open(tmp_path / "train.tar", "w") as archive:
        for number in range(2000):
            archive.addfile(tarfile.TarInfo(f"cat/{number}.jpeg"))
    tracemalloc.start()
    assert sum(1 for _ in tar.images_in(tmp_path / "train.tar")) == 2000
    assert tracemalloc.get_traced_memory()[1] < 1.5e6
    tracemalloc.stop()


@pytest.mark.parametrize("commands", (WHOLE, SHARDS))
def test_archives_have_the_images_of_the_folder(pictures, archives, commands):
    """A run can be resumed with either format; loader processes share files, so none may seek."""
    made = archives(commands)
    pairs = map(build_datasets, (arguments(pictures), arguments(made)))
    for files, members in zip(*pairs, strict=True):
        assert fingerprint(files) == fingerprint(members)
        assert files.classes == members.classes == ["cat", "cat 2"]
        sampler = EpochSampler(range(len(files)), 0, 0, 1)
        facts = {"batch_size": 4, "device": torch.device("cpu"), "training": True}
        loaders = [
            DeviceLoader(arguments("x", "-j", workers), images, sampler, **facts)
            for images, workers in ((files, 0), (members, 2))
        ]
        one, other = map(list, loaders)
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert not any(os.lseek(x, 0, os.SEEK_CUR) for x in members.archives.files)


def test_a_folder_is_preferred_to_an_archive_beside_it(pictures, archives):
    made = archives(WHOLE)
    (pictures / "train").rename(made / "train")
    for name in ("train-0.tar", "training.tar"):
        (made / name).write_bytes(b"not read")
    train_set, val_set = build_datasets(arguments(made))
    assert train_set.archives is None and val_set.archives is not None
    assert not [*made.glob("train*.npz")]


def test_an_unreadable_image_is_named(archives):
    made = archives(WHOLE)
    train_set, _ = build_datasets(arguments(made))
    content = (made / "train.tar").read_bytes()
    (made / "train.tar").write_bytes(content.replace(b"\xff\xd8\xff", b"\0\0\0"))
    with pytest.raises(UserError, match=f"cannot read {made}/train/cat/0.JPEG: "):
        train_set[0]


def test_the_index_is_kept_until_an_archive_changes(archives, monkeypatch):
    made, built, build = archives(WHOLE), [], tar.build_index
    seen = lambda paths: built.append(paths[0].stem) or build(paths)  # noqa: E731
    monkeypatch.setattr(tar, "build_index", seen)
    first, again = build_datasets(arguments(made)), build_datasets(arguments(made))
    assert sorted(built) == ["train", "val"]
    assert [*map(fingerprint, first)] == [*map(fingerprint, again)]
    old = os.stat(made / "val.tar")
    shutil.copy(made / "train.tar", made / "val.tar")
    os.utime(made / "val.tar", ns=(old.st_atime_ns, old.st_mtime_ns))
    again = build_datasets(arguments(made))
    assert [*map(fingerprint, again)] == [fingerprint(first[0])] * 2
    os.utime(made / "train.tar", (0, 0))
    for length in (0, 200):  # a crash may leave a part of the file
        for file in made.glob("val-*.npz"):
            file.write_bytes(file.read_bytes()[:length])
        build_datasets(arguments(made))
    assert sorted(built) == ["train", "train", "val", "val", "val", "val"]
    monkeypatch.setattr(tar.tempfile, "TemporaryDirectory", lambda dir: open("/none"))
    for file in made.glob("*.npz"):
        file.unlink()
    build_datasets(arguments(made))  # as if the folder were read-only
    assert not [*made.glob("*.npz")] and len(built) == 8


@pytest.mark.parametrize(
    "command, message",
    [
        ("rm train.tar", "No such .*train' .--data needs .* or train.tar and val.tar"),
        (": > train.tar", "train.tar as uncompressed tar: empty file"),
        ("tar -cf train.tar -T /dev/null", "no CLASS/.* in .*train.tar"),
        ("gzip val.tar && mv val.tar.gz val.tar", "val.tar as uncompressed tar: "),
        ("touch 0.jpeg && tar -rf val.tar 0.jpeg", "0.jpeg or .* has no class fo"),
        ("mv train.tar train-0.tar; cp train-0.tar train-1.tar", "two images are"),
        ("truncate -s 9000 train.tar", "unexpected end of data|damaged"),
        ("truncate -s $((512 + 512)) val.tar", "damaged at 1024"),
        ("cp val.tar x && cat x >> val.tar", "or made by cat"),
        ("mkdir c && ln -s x c/x.png && tar -cf val.tar c", "x.png is a link or"),
        ("mkdir c && truncate -s 1M c/1.png && tar -Scf val.tar c", "or a sparse file"),
        ("mkdir .c && touch .c/1.png && tar -cf val.tar .c", "val/.c/1.png is hidden"),
        ("mkdir c && touch c/1.png && tar -cf val.tar c", "has no class c"),
    ],
)
def test_bad_archives_are_refused(archives, command, message):
    made = archives(WHOLE)
    subprocess.run(["bash", "-ec", command], cwd=made, check=True)
    with pytest.raises(UserError, match=message) as raised:
        build_datasets(arguments(made))
    assert "\n" not in str(raised.value)
