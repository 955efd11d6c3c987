"""Optional: reads images from tar archives in any order, without unpacking."""

import hashlib
import os
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from zipfile import BadZipFile

import numpy
from torchvision.datasets.folder import IMG_EXTENSIONS

from common.errors import UserError


class Archives:
    """The images of class folders in tar archives, in the order that ImageFolder uses.

    For N images, `paths` is (N,) bytes, `labels` is (N,) int64, and `places` is (N, 3)
    int64: archive, offset and size in bytes. `classes` are the class folders. Raises
    UserError if an archive is unusable.
    """

    def __init__(self, archives: list[Path]):
        """Read the index from a file next to the archives, or build and write it.

        The file's name depends on the archives' names, sizes and modification times.
        """
        found = [(archive.name, archive.stat()) for archive in archives]
        key = repr([(name, s.st_size, s.st_mtime_ns) for name, s in found])
        digest = hashlib.blake2b(key.encode(), digest_size=6).hexdigest()
        file = archives[0].with_name(f"{archives[0].stem}-{digest}.npz")
        try:
            index = dict(numpy.load(file))
        except (OSError, ValueError, EOFError, BadZipFile):
            index = build_index(archives)
            with suppress(OSError), tempfile.TemporaryDirectory(dir=file.parent) as new:
                numpy.savez(Path(new, file.name), **index)
                os.replace(Path(new, file.name), file)
        self.paths, self.labels = index["paths"], index["labels"]
        self.places, self.classes = index["places"], index["classes"].tolist()
        self.files = [os.open(archive, os.O_RDONLY) for archive in archives]

    def read(self, image: int) -> bytes:
        """Read an image file from an open archive, which loader processes share."""
        archive, offset, size = self.places[image].tolist()
        return os.pread(self.files[archive], size, offset)


def build_index(archives: list[Path]) -> dict[str, numpy.ndarray]:
    """Find and sort the images; raise UserError if any is misplaced or none exist."""
    images, first = {}, None
    for number, archive in enumerate(archives):
        for path, *place in images_in(archive):
            *parents, label, name = f"/{path}".split("/")
            first = first or (path, parents)
            if not label or parents != first[1]:
                raise UserError(f"{archive}: {path} or {first[0]} has no class folder")
            if (label, name) in images:
                raise UserError(f"{archive}: two images are named {label}/{name}")
            images[label, name] = (number, *place)
    if not images:
        raise UserError(f"no CLASS/*.JPEG in {', '.join(map(str, archives))}")
    found = sorted(images)
    classes, labels = numpy.unique([one for one, _ in found], return_inverse=True)
    paths = numpy.array([os.fsencode(f"/{label}/{name}") for label, name in found])
    places = numpy.array([images[one] for one in found])
    return {"paths": paths, "labels": labels, "places": places, "classes": classes}


def images_in(archive: Path) -> Iterator[tuple[str, int, int]]:
    """Yield each image's path, byte offset and size; raise UserError on damage."""
    try:
        with tarfile.open(archive, "r:") as opened:
            while member := opened.next():
                opened.members.clear()  # a million entries would need gigabytes
                path = member.name.removeprefix("./")
                image = path.lower().endswith(IMG_EXTENSIONS)
                if image and "/._" not in f"/{path}" and not member.isdir():  # macOS
                    if not member.isreg() or member.issparse():
                        raise tarfile.ReadError(f"{path} is a link or a sparse file")
                    yield path, member.offset_data, member.size
            opened.fileobj.seek(opened.offset)
            rest = opened.fileobj.read(2**20)  # tar fills its last record with zeros
            if len(rest) < 512 or rest.strip(b"\0") or opened.fileobj.read(1):
                raise tarfile.ReadError(f"damaged at {opened.offset}, or made by cat")
    except (tarfile.TarError, OSError) as error:
        raise UserError(f"cannot read {archive} as uncompressed tar: {error}") from None
