"""Compare reading images from a tar archive with reading files in folders.

    python -m benchmarks.archives [ROUNDS]

One process reads the same images from both, with and without decoding. The benchmark
also measures how long it takes to index an archive with as many members as ImageNet.
All times are the process's CPU times, which depend less on other programs than
wall-clock times do. It writes benchmarks/results/archives.json in a few minutes.
"""

import os
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.comparison import compare, parse_number, pin_core, speed, write_results
from benchmarks.input import TRAIN, Training, arguments
from benchmarks.photographs import write_photographs
from common.data import ImageFolder, build_datasets
from common.errors import one_line_errors
from common.tar import Archives

MEMBERS = 1_281_167
FOLDERS, TAR = "files in folders", "tar archive"


class Reading(ImageFolder):
    """A dataset that reads files without decoding them."""

    def __getitem__(self, index: int) -> bytes:
        if self.archives:
            return self.archives.read(index)
        return Path(self.root + os.fsdecode(self.paths[index])).read_bytes()


def single_images(folders: dict[str, Path], rounds: int) -> dict[str, dict]:
    """Measure how fast this process reads single images."""
    works: dict[str, dict[str, Callable]] = {"reading": {}, "training": {}}
    for name, folder in folders.items():
        train_set = Training(build_datasets(arguments(folder))[0], 0)
        files = Reading(folder / "train", None, "")
        works["reading"][name] = speed(files.__getitem__, [*range(TRAIN)] * 30)
        works["training"][name] = speed(train_set.__getitem__, range(TRAIN))
    return {title: compare(title, works[title], rounds) for title in works}


def index_seconds(root: Path) -> dict[str, float]:
    """Measure the CPU time to build an archive's index, and to read a saved index."""
    with tarfile.open(f"{root}.tar", "w") as archive:
        for number in range(MEMBERS):
            label = number * 1000 // MEMBERS
            name = f"n{label:08d}/n{label:08d}_{number}.JPEG"
            archive.addfile(tarfile.TarInfo(name))
            archive.members.clear()
    seconds = {}
    for name in ("built", "read from its file"):
        began = time.process_time()
        assert len(Archives([root.with_name(f"{root.name}.tar")]).paths) == MEMBERS
        seconds[name] = time.process_time() - began
        print(f"index {name}: {seconds[name]:.1f} s", flush=True)
    return seconds


def main() -> None:
    """Run all measurements."""
    rounds = parse_number(__doc__, "ROUNDS", 9)
    pin_core()
    with tempfile.TemporaryDirectory() as temporary:
        folders = {FOLDERS: Path(temporary, "folders"), TAR: Path(temporary, "tar")}
        images = write_photographs(folders[FOLDERS], TRAIN, 8)
        folders[TAR].mkdir()
        for part in ("train", "val"):
            with tarfile.open(folders[TAR] / f"{part}.tar", "w") as archive:
                archive.add(folders[FOLDERS] / part, part)
        results = single_images(folders, rounds)
        index = {"images": MEMBERS, **index_seconds(Path(temporary, "train"))}
    found = {"rounds": rounds, "photographs": [images], **results}
    write_results("archives", {**found, "index": [index]})


if __name__ == "__main__":
    with one_line_errors():
        main()
