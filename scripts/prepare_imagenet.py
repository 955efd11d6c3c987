"""Unpack the official ILSVRC2012 archives to train/CLASS/*.JPEG and val/CLASS/*.JPEG.

    python -m scripts.prepare_imagenet ARCHIVES TARGET    # what the .sh runs

torchvision compares each archive with its official checksum, then unpacks it.
"""

import shutil
import sys
import tarfile
from pathlib import Path

from torchvision.datasets import imagenet

from common.errors import UserError, one_line_errors


def unpack(archives: Path, target: Path) -> None:
    """Unpack both parts, except a part that `target` already contains.

    Raises:
        UserError: an archive is missing or damaged, SciPy is missing, or writing fails.
    """
    names = {key: name for key, (name, _) in imagenet.ARCHIVE_META.items()}
    paths = {key: (archives / name).resolve() for key, name in names.items()}
    for path in paths.values():
        if not path.is_file():
            raise UserError(f"{path} is missing; download it from image-net.org")
    try:
        path = paths["devkit"]
        target.mkdir(parents=True, exist_ok=True)
        imagenet.parse_devkit_archive(target, path)  # writes TARGET/meta.bin
        for part in ("val", "train"):
            parse = getattr(imagenet, f"parse_{part}_archive")
            path, folder = paths[part], target / part
            if not folder.exists():
                print(f"checking and unpacking {path}", flush=True)
                partial = target / f"{part}.partial"
                shutil.rmtree(partial, ignore_errors=True)
                parse(target, path, folder=partial.name)
                partial.rename(folder)  # only now that it is complete
            print(f"{folder}: {sum(1 for _ in folder.glob('*/*'))} images", flush=True)
    except ImportError:
        raise UserError("the labels are read with SciPy: pip install scipy") from None
    except RuntimeError:  # torchvision's error for a wrong checksum
        raise UserError(f"{path} is damaged; download it again") from None
    except (OSError, tarfile.TarError) as error:
        raise UserError(f"cannot unpack {path} to {target}: {error}") from None


def main() -> None:
    """Unpack the archives given on the command line."""
    if len(sys.argv) != 3:
        raise UserError("usage: python -m scripts.prepare_imagenet ARCHIVES TARGET")
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))


if __name__ == "__main__":
    with one_line_errors():
        main()
