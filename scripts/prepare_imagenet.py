"""Unpack the official ILSVRC2012 archives to train/CLASS/*.JPEG and val/CLASS/*.JPEG.

prepare_imagenet.sh calls this script. Download the archives from
https://image-net.org/download. The training archive contains one archive per class. The
validation archive contains 50,000 images; the development kit lists their classes.
"""

import argparse
import shutil
import tarfile
from pathlib import Path

from common.errors import UserError
from launch.exits import exit_status

TRAIN = "ILSVRC2012_img_train.tar"
VAL = "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
PARTIAL = ".partial"  # suffix of incomplete files and folders


def open_archive(path: Path) -> tarfile.TarFile:
    """Open an archive for reading.

    Raises:
        UserError: the archive is missing or damaged.
    """
    try:
        return tarfile.open(path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing; download it from image-net.org") from None
    except tarfile.TarError as error:
        raise UserError(f"{path} is damaged; download it again: {error}") from None


def write_member(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    """Extract one image from an archive, unless the complete file exists."""
    if path.exists() and path.stat().st_size == member.size:
        return
    temporary = path.with_name(path.name + PARTIAL)
    with archive.extractfile(member) as source, open(temporary, "wb") as target:
        shutil.copyfileobj(source, target)
    temporary.rename(path)


def images_in(archive: tarfile.TarFile) -> list[tarfile.TarInfo]:
    """Return the images in an archive, ignoring folders and other files."""
    return [
        member
        for member in archive
        if member.isfile() and member.name.endswith(".JPEG")
    ]


def extract_train(path: Path, target: Path) -> None:
    """Unpack the class archives, except those whose class folders already exist."""
    with open_archive(path) as outer:
        for number, class_archive in enumerate(outer, start=1):
            folder = target / Path(class_archive.name).stem
            if folder.exists() or not class_archive.isfile():
                continue
            partial = folder.with_name(folder.name + PARTIAL)
            partial.mkdir(parents=True, exist_ok=True)
            with tarfile.open(fileobj=outer.extractfile(class_archive)) as inner:
                for member in images_in(inner):
                    write_member(inner, member, partial / Path(member.name).name)
            partial.rename(folder)
            print(f"train: class {number}, {folder.name}", flush=True)


def val_classes(path: Path) -> list[str]:
    """Read each validation image's class folder, in order, from the development kit.

    Raises:
        UserError: the kit lacks a file, or SciPy is not installed.
    """
    try:
        from scipy.io import loadmat
    except ImportError:
        raise UserError(
            "reading the development kit needs SciPy: pip install scipy"
        ) from None
    files = {}
    with open_archive(path) as archive:
        for member in archive:
            name = Path(member.name).name
            if name in ("meta.mat", "ILSVRC2012_validation_ground_truth.txt"):
                files[name] = archive.extractfile(member)
                if name == "meta.mat":
                    synsets = loadmat(files[name], squeeze_me=True)["synsets"]
                else:
                    numbers = [int(line) for line in files[name].read().split()]
    if len(files) != 2:
        raise UserError(
            f"{path} is not the development kit for ILSVRC2012 tasks 1 and 2"
        )
    folders = {int(synset["ILSVRC2012_ID"]): str(synset["WNID"]) for synset in synsets}
    return [folders[number] for number in numbers]


def extract_val(path: Path, target: Path, classes: list[str]) -> None:
    """Unpack the validation images into class folders, except existing ones."""
    with open_archive(path) as archive:
        members = sorted(images_in(archive), key=lambda member: member.name)
        if len(members) != len(classes):
            raise UserError(
                f"{path} has {len(members)} images, but the development kit has "
                f"{len(classes)} labels: one of them is not the official archive"
            )
        for number, (member, folder) in enumerate(
            zip(members, classes, strict=True), start=1
        ):
            (target / folder).mkdir(parents=True, exist_ok=True)
            write_member(archive, member, target / folder / Path(member.name).name)
            if number % 5000 == 0:
                print(f"val: {number} images", flush=True)


def check_counts(target: Path, expected: dict[str, int], classes: int) -> None:
    """Check the numbers of images and class folders.

    Raises:
        UserError: a count differs from the official one.
    """
    for part, images in expected.items():
        folders = [entry for entry in (target / part).iterdir() if entry.is_dir()]
        found = sum(1 for folder in folders for _ in folder.glob("*.JPEG"))
        if (len(folders), found) != (classes, images):
            raise UserError(
                f"{target / part} has {found} images in {len(folders)} class folders, "
                f"but should have {images} in {classes}: an archive is incomplete, or "
                "the folder already contained other files"
            )


def main() -> None:
    """Unpack the archives and count the images."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "archives", type=Path, help=f"folder with {TRAIN}, {VAL} and {DEVKIT}"
    )
    parser.add_argument("target", type=Path, help="output folder")
    parser.add_argument("--train-images", type=int, default=1281167, help="%(default)s")
    parser.add_argument("--val-images", type=int, default=50000, help="%(default)s")
    parser.add_argument("--classes", type=int, default=1000, help="%(default)s")
    args = parser.parse_args()
    try:
        classes = val_classes(args.archives / DEVKIT)
        extract_val(args.archives / VAL, args.target / "val", classes)
        extract_train(args.archives / TRAIN, args.target / "train")
    except OSError as error:
        raise UserError(f"cannot write to {args.target}: {error.strerror}") from None
    except tarfile.TarError as error:
        raise UserError(f"an archive in {args.archives} is damaged: {error}") from None
    expected = {"train": args.train_images, "val": args.val_images}
    check_counts(args.target, expected, args.classes)
    print(
        f"{args.train_images} training and {args.val_images} validation images "
        f"in {args.target}"
    )


if __name__ == "__main__":
    with exit_status():
        main()
