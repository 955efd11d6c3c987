"""Sort ImageNet's images into train/CLASS/*.JPEG and val/CLASS/*.JPEG.

    python -m scripts.prepare_imagenet ARCHIVES TARGET    # the .sh file runs this

ARCHIVES contains the official archives or Hugging Face's parquet files. The script
verifies the archives' checksums or the parquet files' labels, and counts the images.
"""

import re
import shutil
import sys
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from torchvision.datasets import imagenet
from torchvision.datasets.utils import check_integrity
from tqdm import tqdm

from common.errors import UserError, one_line_errors

HUGGING_FACE = {"val": "validation-*.parquet", "train": "train-*.parquet"}
COUNTS = {"val": 50_000, "train": 1_281_167}


def images(file: Path, opened: BinaryIO | None = None) -> Iterator[tuple]:
    """Yield each image's name, its bytes, and its label (None if not from parquet)."""
    if file.suffix == ".parquet":
        from pyarrow.parquet import ParquetFile

        for batch in ParquetFile(file).iter_batches(100):
            for row in batch.to_pylist():
                yield row["image"]["path"], row["image"]["bytes"], row["label"]
        return
    with tarfile.open(file, "r|*", opened) as archive:
        for member in filter(tarfile.TarInfo.isfile, archive):
            content = archive.extractfile(member)
            if member.name.endswith(".tar"):  # one of train.tar's 1,000 archives
                yield from images(file, content)
            else:
                yield member.name, content.read(), None


def sort(part: str, files: list[Path], folder: Path, classes: list[str]) -> None:
    """Write train or val images to class folders, under the official archives' names.

    `classes` are the classes of the official validation images. Hugging Face's files
    contain the class only in an image's name (n01440764_18_n01440764.JPEG); their
    labels are positions in the sorted list of classes.
    """
    stream, found = (image for file in files for image in images(file)), set()
    seconds = 0.1 if sys.stderr.isatty() else 30  # between updates of the bar
    bar = tqdm(stream, part, COUNTS[part], unit=" images", mininterval=seconds)
    for name, content, label in bar:
        match = re.fullmatch(r"(?:.*/)?(\w+)_(n\d{8})\.JPEG", str(name))
        if classes:
            label_name = classes[int(name[-13:-5]) - 1] if part == "val" else name[:9]
        elif match:
            name, label_name = f"{match[1]}.JPEG", match[2]
        else:
            raise UserError(f"{part}: the name {name} does not end with a class")
        (folder / label_name).mkdir(parents=True, exist_ok=True)
        (folder / label_name / name).write_bytes(content)
        found.add((label, label_name))
    names = sorted({name for _, name in found})
    if found not in (set(enumerate(names)), {(None, name) for name in names}):
        raise UserError(f"{part}: the labels do not number the sorted classes")


def unpack(source: Path, target: Path) -> None:
    """Unpack the train and val images, except a part that `target` already contains.

    Raises UserError if a file or package is missing, or a file cannot be unpacked.
    """
    files = {
        part: sorted(source.glob(name)) or sorted(source.glob(f"data/{name}"))
        for part, name in HUGGING_FACE.items()
    }
    official = {} if any(files.values()) else imagenet.ARCHIVE_META
    for part, (name, _) in official.items():
        files[part] = [(source / name).resolve()]
        if not files[part][0].is_file():
            raise UserError(f"{source}/{name} is missing; get it from image-net.org")
    path, classes = source, []
    try:
        target.mkdir(parents=True, exist_ok=True)
        if official:
            path = files["devkit"][0]
            imagenet.parse_devkit_archive(target, path)  # writes TARGET/meta.bin
            classes = imagenet.load_meta_file(target)[1]
        for part in ("val", "train"):
            folder, partial = target / part, target / f"{part}.partial"
            if not folder.exists():
                shutil.rmtree(partial, ignore_errors=True)
                if official:
                    path = files[part][0]
                    print(f"checking {path}, which takes minutes", flush=True)
                    if not check_integrity(path, official[part][1]):
                        raise RuntimeError
                print(f"unpacking {part} from {path}", flush=True)
                sort(part, files[part], partial, classes)
                if (count := sum(1 for _ in partial.glob("*/*"))) != COUNTS[part]:
                    found = f"{count} images in the {part} files"
                    wanted = f"instead of {COUNTS[part]}; download again"
                    raise UserError(f"{found} {wanted}")
                partial.rename(folder)  # the folder is complete
            print(f"{folder}: {sum(1 for _ in folder.glob('*/*'))} images", flush=True)
    except ImportError as error:
        package = "scipy" if official else "pyarrow"
        install = f"{sys.executable} -m pip install {package}"
        raise UserError(f"{error}; run {install}") from None
    except RuntimeError:  # a wrong checksum
        raise UserError(f"{path} is damaged; download it again") from None
    except (OSError, tarfile.TarError, EOFError, zlib.error, ValueError, KeyError) as e:
        raise UserError(f"cannot unpack {path} to {target}: {e}") from None


def main() -> None:
    """Unpack the archives given on the command line."""
    if len(sys.argv) != 3:
        raise UserError("usage: python -m scripts.prepare_imagenet ARCHIVES TARGET")
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))


if __name__ == "__main__":
    with one_line_errors():
        main()
