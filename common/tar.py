"""Optional: reads images from tar archives in any order, without unpacking."""

import functools
import hashlib
import os
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy
from torchvision.datasets.folder import IMG_EXTENSIONS

from common.errors import UserError


def archives_of(root: Path) -> list[Path]:
    """Return the archives that hold a missing folder `root`: root.tar or root-*.tar."""
    if root.is_dir():
        return []
    whole = root.with_name(f"{root.name}.tar")
    return [whole] if whole.exists() else sorted(root.parent.glob(f"{root.name}-*.tar"))


class Archives:
    """The images in a folder's tar archives, in ImageFolder's order.

    For N images, `paths` is (N,) bytes, `labels` is (N,) int64, and `places` is (N, 3)
    int64: archive, offset and size in bytes. `classes` are the class folders. Raises
    UserError if an archive is unusable.
    """

    def __init__(self, root: Path):
        self.archives = archives_of(root)
        self.files: dict[tuple[int, int], int] = {}
        found = [(one.name, one.stat()) for one in self.archives]
        index = cached_index(root, *((n, s.st_size, s.st_mtime_ns) for n, s in found))
        columns = (numpy.ascontiguousarray(index[name]) for name in index.dtype.names)
        self.paths, self.labels, self.places = columns
        _, first = numpy.unique(self.labels, return_index=True)
        self.classes = [os.fsdecode(path).split("/")[1] for path in self.paths[first]]

    def read(self, image: int) -> bytes:
        """Read an image file; each process opens an archive only once."""
        archive, offset, size = self.places[image].tolist()
        key = os.getpid(), archive
        if key not in self.files:
            self.files[key] = os.open(self.archives[archive], os.O_RDONLY)
        return os.pread(self.files[key], size, offset)


@functools.cache
def cached_index(root: Path, *stats: tuple[str, int, int]) -> numpy.ndarray:
    """Read the index from a file next to the archives, or build it and write the file.

    The file's name depends on the names, sizes and modification times of the archives.
    Raises UserError if an archive is unusable.
    """
    digest = hashlib.blake2b(repr(stats).encode(), digest_size=6).hexdigest()
    file = root.with_name(f"{root.name}-{digest}.npy")
    with suppress(OSError, ValueError, EOFError):
        return numpy.load(file)
    index = build_index(archives_of(root))
    with suppress(OSError), tempfile.TemporaryDirectory(dir=root.parent) as folder:
        numpy.save(Path(folder, file.name), index)
        os.replace(Path(folder, file.name), file)
    return index


def build_index(archives: list[Path]) -> numpy.ndarray:
    """Find and sort the images; raise UserError if one is misplaced or none exist."""
    images, first = {}, None
    for number, archive in enumerate(archives):
        for path, *place in images_in(archive):
            *parents, label, name = f"/{path}".split("/")
            first = first or (path, parents)
            if not label or parents != first[1]:
                raise UserError(f"{archive}: {path} or {first[0]} has no class folder")
            if (label, name) in images:
                raise UserError(f"{archive}: a second image is {label}/{name}")
            images[label, name] = (number, *place)
    if not images:
        raise UserError(f"no CLASS/*.JPEG in {', '.join(map(str, archives))}")
    labels = {name: n for n, name in enumerate(sorted({name for name, _ in images}))}
    rows = [
        (os.fsencode(f"/{label}/{name}"), labels[label], place)
        for (label, name), place in sorted(images.items())
    ]
    longest = max(len(path) for path, *_ in rows)
    columns = [("path", f"S{longest}"), ("label", "i8"), ("place", "i8", 3)]
    return numpy.array(rows, dtype=columns)


def images_in(archive: Path) -> Iterator[tuple[str, int, int]]:
    """Yield each image's path, byte offset and size; raise UserError on damage."""
    try:
        with tarfile.open(archive, "r:") as opened:
            while member := opened.next():
                opened.members.clear()  # a million of them would need gigabytes
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
