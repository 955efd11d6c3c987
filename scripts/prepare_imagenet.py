"""Sort ImageNet's images into train/CLASS/*.JPEG and val/CLASS/*.JPEG.

    python -m scripts.prepare_imagenet ARCHIVES TARGET    # the .sh file runs this

ARCHIVES contains the official archives, whose checksums torchvision verifies, or
Hugging Face's parquet or tar.gz files, whose labels and image count it verifies.
"""

import re
import shutil
import sys
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from torchvision.datasets import imagenet

from common.errors import UserError, one_line_errors

HUGGING_FACE = {
    "val": ("validation-*.parquet", "val_images.tar.gz"),
    "train": ("train-*.parquet", "train_images_*.tar.gz"),
}
COUNTS = {"val": 50_000, "train": 1_281_167}


def find(source: Path, names: tuple[str, ...]) -> list[Path]:
    """Return the files of the first pattern that matches in `source` or its data/."""
    for pattern in (*names, *(f"data/{name}" for name in names)):
        if files := sorted(source.glob(pattern)):
            return files
    return []


def images(file: Path) -> Iterator[tuple[str, bytes, int | None]]:
    """Yield each image's name and content and, from parquet, its label."""
    if file.suffix == ".parquet":
        from pyarrow.parquet import ParquetFile

        for batch in ParquetFile(file).iter_batches(100):
            for row in batch.to_pylist():
                yield row["image"]["path"], row["image"]["bytes"], row["label"]
    else:
        with tarfile.open(file, "r|gz") as archive:
            for member in filter(tarfile.TarInfo.isfile, archive):
                yield member.name, archive.extractfile(member).read(), None


def sort(part: str, files: list[Path], folder: Path) -> None:
    """Write Hugging Face's images under the names used in the official archives.

    A name ends with the class: n01440764_18_n01440764.JPEG. The files do not
    name the class elsewhere: a label is a position in the sorted list of classes.
    """
    found = set()
    for file in files:
        for name, content, label in images(file):
            match = re.fullmatch(r"(?:.*/)?(\w+)_(n\d{8})\.JPEG", str(name))
            if not match:
                raise UserError(f"{file}: the name {name} does not end with a class")
            path = folder / match[2] / f"{match[1]}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            found.add((label, match[2]))
    classes = sorted({name for _, name in found})
    if found not in (set(enumerate(classes)), {(None, name) for name in classes}):
        raise UserError(f"{file}: the labels do not number the sorted classes")
    count = sum(1 for _ in folder.glob("*/*"))
    if count != COUNTS[part]:
        wanted = f"{COUNTS[part]}; download {' or '.join(HUGGING_FACE[part])} again"
        raise UserError(f"{count} images in the {part} files instead of {wanted}")


def unpack(source: Path, target: Path) -> None:
    """Unpack both parts, except a part that `target` already contains.

    Raises:
        UserError: a file or package is missing, files are damaged, or writing fails.
    """
    files = {part: find(source, names) for part, names in HUGGING_FACE.items()}
    official = not any(files.values())
    for part, (name, _) in imagenet.ARCHIVE_META.items() if official else ():
        files[part] = (source / name).resolve()
        if not files[part].is_file():
            raise UserError(f"{files[part]} is missing; download it from image-net.org")
    try:
        target.mkdir(parents=True, exist_ok=True)
        if official:
            path = files["devkit"]
            imagenet.parse_devkit_archive(target, path)  # writes TARGET/meta.bin
        for part in ("val", "train"):
            folder, partial = target / part, target / f"{part}.partial"
            path = files[part] if official else source  # for the messages
            if not folder.exists():
                print(f"checking and unpacking {part} from {path}", flush=True)
                shutil.rmtree(partial, ignore_errors=True)
                if official:
                    parse = getattr(imagenet, f"parse_{part}_archive")
                    parse(target, path, folder=partial.name)
                else:
                    sort(part, files[part], partial)
                partial.rename(folder)  # only now that it is complete
            print(f"{folder}: {sum(1 for _ in folder.glob('*/*'))} images", flush=True)
    except ImportError as error:
        package = "scipy" if official else "pyarrow"
        install = f"{sys.executable} -m pip install {package}"
        raise UserError(f"{error}; run {install}") from None
    except RuntimeError:  # torchvision's error for a wrong checksum
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
