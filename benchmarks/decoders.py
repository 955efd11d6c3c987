"""Compare TorchCodec's JPEG decoder with torchvision's deprecated decoder.

    python -m benchmarks.decoders [ROUNDS]

One process decodes whole images from memory with each decoder and compares the pixels.
It does so for each EXIF orientation. All times are the process's CPU times, which other
programs affect less. The benchmark writes results/decoders.json in a few minutes.
"""

import io
import tempfile
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torchvision.io import ImageReadMode, decode_image

from benchmarks.comparison import compare, parse_number, pin_core, speed, write_results
from benchmarks.photographs import write_photographs
from common.images import DECODERS, import_torchcodec, to_tensor
from launch.exits import exit_status

IMAGES, ORIENTATION = 300, 0x0112  # the EXIF tag
BASELINE = "torchvision's decoder"


def to_source(content: bytes) -> Tensor:
    """Copy a file's content to a tensor."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def with_torchvision(content: bytes) -> Tensor:
    """Decode a whole file with torchvision."""
    return decode_image(to_source(content), ImageReadMode.RGB)


def without_change(content: bytes) -> Tensor:
    """Decode a whole file with TorchCodec, which applies its EXIF orientation."""
    return import_torchcodec()(to_source(content))


def with_ours(decoder: str) -> Callable[[bytes], Tensor]:
    """Return a function that decodes a whole file with one of our decoders."""

    def decode(content: bytes) -> Tensor:
        picture = DECODERS[decoder](content)
        return to_tensor(picture.read(0, 0, picture.height, picture.width))

    return decode


def rotated(content: bytes, orientation: int) -> bytes:
    """Return the same image with an EXIF orientation."""
    exif, file = Image.Exif(), io.BytesIO()
    exif[ORIENTATION] = orientation
    Image.open(io.BytesIO(content)).save(file, "JPEG", quality="keep", exif=exif)
    return file.getvalue()


def equal(decode: Callable[[bytes], Tensor], files: Sequence[bytes]) -> int:
    """Count the files that torchvision decodes to the same pixels as `decode`."""
    pairs = ((decode(content), with_torchvision(content)) for content in files)
    return sum(torch.equal(one, other) for one, other in pairs)


def main() -> None:
    """Run all measurements."""
    warnings.simplefilter("ignore", DeprecationWarning)
    rounds = parse_number(__doc__, "ROUNDS", 15)
    pin_core()
    with tempfile.TemporaryDirectory() as folder:
        photographs = write_photographs(Path(folder), IMAGES, 0)
        files = [path.read_bytes() for path in sorted(Path(folder).glob("*/*/*"))]
    kinds = {"no EXIF data": files}
    for n in range(1, 9):
        kinds[f"EXIF orientation {n}"] = [rotated(content, n) for content in files]
    ours = {f"--decoder {name}": with_ours(name) for name in DECODERS}
    decoders = {**ours, "TorchCodec without our change": without_change}
    pixels = {
        kind: {"files": len(own)} | {x: equal(y, own) for x, y in decoders.items()}
        for kind, own in kinds.items()
    }
    print(pixels)
    decoders = {BASELINE: with_torchvision, **decoders}
    works = {name: speed(decode, files) for name, decode in decoders.items()}
    rows = compare("whole images", works, rounds)
    results = {"photographs": [photographs], "pixels": pixels, "decoding": rows}
    facts = {"torchcodec": version("torchcodec"), "rounds": rounds}
    write_results("decoders", {**facts, **results})


if __name__ == "__main__":
    with exit_status():
        main()
