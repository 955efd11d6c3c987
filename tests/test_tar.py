"""Tar archives in place of folders: the same images and the same run, or a clear error."""

import os
import subprocess

import pytest
import torch
from ranks import parse

from common import tar
from common.checkpoint import recipe_of
from common.data import build_datasets, build_loader, fingerprint
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
    """Also where each loader process opens them; so a run resumes with either."""
    made = archives(commands)
    check(arguments(made), 2)
    assert recipe_of(arguments(made)) == recipe_of(args := arguments(pictures))
    pairs = map(build_datasets, (args, arguments(made)))
    for files, members in zip(*pairs, strict=True):
        assert fingerprint(files) == fingerprint(members)
        assert (files.classes, members.classes) == (["cat", "cat 2"],) * 2
        order, cpu = range(len(files)), torch.device("cpu")
        one, other = (
            list(build_loader(args, images, order, 1, workers, cpu, False))
            for images, workers in ((files, 0), (members, 2))
        )
        torch.testing.assert_close(one, other, rtol=0, atol=0)


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
