"""Tar archives in place of folders: the same images and the same run, or a clear error."""

import os
import random
import subprocess

import pytest
import torch
from played import free_port
from ranks import parse, recorded, run_ranks
from test_reference import same

from common import tar
from common.data import build_datasets, fingerprint
from common.errors import UserError
from launch.check import check

# From the folder of the pictures into $1
WHOLE = "tar -cf $1/train.tar -C train . && tar -cf $1/val.tar val"
SHARDS = """
tar -cf $1/train-1.tar -C train cat/0.JPEG "cat 2"
tar -cf $1/train-0.tar -C train --exclude 0.JPEG cat
tar -cf $1/val.tar --format pax -C val cat "cat 2"
"""


def arguments(data, *flags):
    flags = ("-b", 4, "--output", data / "out", "-j", 0, *flags)
    return parse("--data", data, "--image-size", 32, *flags)


@pytest.fixture
def archives(pictures, tmp_path):
    """Makes archives of the pictures in a folder of their own."""
    for part in ("train", "val"):  # in the order of paths, "cat 2/" is before "cat/"
        (pictures / part / "dog").rename(pictures / part / "cat 2")
        (pictures / part / "cat" / "1.JPEG").rename(
            pictures / part / "cat" / f"ünï {'long ' * 30}.jpeg"
        )
        (pictures / part / "cat" / "notes.txt").touch()

    def make(commands):
        folder = tmp_path / "archives"
        folder.mkdir()
        words = ("bash", "-ec", commands, "bash", folder)
        subprocess.run(words, cwd=pictures, check=True)
        return folder

    return make


@pytest.mark.parametrize("commands", (WHOLE, SHARDS))
def test_archives_have_the_images_of_the_folder(pictures, archives, commands):
    made = archives(commands)
    check(arguments(made), 2)
    pairs = map(build_datasets, (arguments(pictures), arguments(made)))
    for files, members in zip(*pairs, strict=True):
        assert fingerprint(files) == fingerprint(members)
        assert (files.classes, members.classes) == (["cat", "cat 2"],) * 2
        for index in range(len(files)):
            items = []
            for dataset in (files, members):
                random.seed(index)
                items.append(dataset[index])
            assert torch.equal(items[0][0], items[1][0])
            assert items[0][1] == items[1][1]


def test_a_run_stops_with_archives_and_goes_on_with_folders(
    pictures, archives, tmp_path
):
    """In two processes, and comes to the same weights."""
    flags = ["--image-size", 32, "-b", 4, "-j", 2, "--epochs", 2, "--print-interval", 1]
    flags += ["--precision", "fp32", "--device", "cpu", "--output"]
    runs = [
        (pictures, ["whole"], None),
        (archives(SHARDS), ["parts"], 3),
        (pictures, ["parts", "--resume", "auto"], None),
    ]
    runs = [
        ("small", [*flags, tmp_path / name, "--data", data, *more], stop, free_port())
        for data, (name, *more), stop in runs
    ]
    for rank in run_ranks(tmp_path, 2, recorded, name="distributed", runs=runs):
        whole, stopped, resumed = rank
        assert len(stopped["steps"]) == 3 and len(whole["steps"]) == 8
        assert stopped["steps"] + resumed["steps"] == whole["steps"]
        same(resumed["weights"], whole["weights"])


def test_an_unreadable_image_is_named(archives):
    made = archives(WHOLE)
    train_set, _ = build_datasets(arguments(made))
    content = (made / "train.tar").read_bytes()
    (made / "train.tar").write_bytes(content.replace(b"\xff\xd8\xff", b"\0\0\0"))
    with pytest.raises(UserError, match=r"the image .*train\*.tar/cat/0.JPEG"):
        train_set[0]


def test_the_index_is_kept_until_an_archive_changes(archives, monkeypatch):
    made, built, build = archives(WHOLE), [], tar.build_index
    monkeypatch.setattr(
        tar, "build_index", lambda paths: built.append(paths[0].stem) or build(paths)
    )
    first, _ = build_datasets(arguments(made))
    check(arguments(made), 1)
    assert built == ["train", "val"]
    os.utime(made / "train.tar", (0, 0))
    for file in made.glob("val-*.npy"):
        file.write_bytes(b"")
    tar.cached_index.cache_clear()  # as in another process
    again, _ = build_datasets(arguments(made))
    assert built == ["train", "val"] * 2 and fingerprint(first) == fingerprint(again)
    monkeypatch.setattr(tar.tempfile, "TemporaryDirectory", lambda dir: open("/none"))
    for file in made.glob("*.npy"):
        file.unlink()
    os.utime(made / "train.tar", (1, 1))
    os.utime(made / "val.tar", (1, 1))
    build_datasets(arguments(made))  # as in a folder that is read-only
    assert not [*made.glob("*.npy")]


@pytest.mark.parametrize(
    "command, message",
    [
        ("rm train.tar", "cannot open the folder .*train: No such .* train.tar and"),
        (": > train.tar", "train.tar as uncompressed tar: empty file"),
        ("tar -cf train.tar -T /dev/null", "train.tar has no images"),
        ("gzip val.tar && mv val.tar.gz val.tar", "val.tar as uncompressed tar: "),
        ("touch 0.jpeg && tar -rf val.tar 0.jpeg", "0.jpeg or .* has no class fo"),
        ("mv train.tar train-0.tar; cp train-0.tar train-1.tar", "a second image is"),
        ("truncate -s 9000 train.tar", "unexpected end of data|damaged"),
        ("truncate -s $((512 + 512)) val.tar", "damaged at 1024"),
        ("cp val.tar x && cat x >> val.tar", "or made by cat"),
        ("mkdir c && ln -s x c/x.png && tar -cf val.tar c", "x.png is a link or"),
        ("mkdir c && touch c/1.png && tar -cf val.tar c", "3 found in only one of"),
    ],
)
def test_bad_archives_are_refused(archives, command, message):
    made = archives(WHOLE)
    subprocess.run(["bash", "-ec", command], cwd=made, check=True)
    with pytest.raises(UserError, match=message) as raised:
        check(arguments(made), 1)
    assert "\n" not in str(raised.value)
