"""Decoders and transforms produce the expected pixels, or a one-line error."""

import io
import os
import sys
from functools import partial

import numpy
import pytest
import torch
from conftest import MISSING
from PIL import Image
from ranks import parse
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import pil_to_tensor

from common import images
from common.data import build_datasets, build_loader
from common.errors import UserError, one_line_errors
from common.nvimgcodec import make_decoder

DECODERS = [name for name in images.DECODERS if not MISSING.get(name)]
CPU = torch.device("cpu")


def picture_of(height, width):
    """Return a smooth picture with some noise."""
    rows, columns, colors = numpy.mgrid[:height, :width, :3]
    waves = 128 + 90 * numpy.sin(rows / (5 + colors) + columns / (9 - colors))
    noise = numpy.random.default_rng(0).normal(0, 6, (height, width, 3))
    return Image.fromarray((waves + noise).clip(0, 255).astype("uint8"))


def saved(image, **options):
    file = io.BytesIO()
    image.save(file, **{"format": "JPEG", **options})
    return file.getvalue()


def odd_files():
    """Return kinds of files that occur in data sets: an image, and how it is saved."""
    image = picture_of(64, 80)
    yield from ((mode, image.convert(mode), {}) for mode in ("CMYK", "L"))
    for mode in ("RGB", "L", "1", "P", "RGBA", "LA"):
        yield f"PNG, {mode}", image.convert(mode), {"format": "PNG"}
    yield "WebP", image, {"format": "WEBP", "lossless": True}
    yield "GIF", image.convert("L"), {"format": "GIF"}
    yield "progressive", image, {"progressive": True}
    for orientation in (3, 6):
        exif = Image.Exif()
        exif[0x0112] = orientation
        yield f"turned, {orientation}", image, {"exif": exif}
    yield "damaged EXIF", image, {"exif": b"Exif\0\0II*\0\xff\xff\xff\xffdamaged"}
    yield from ((name, image, {"subsampling": name}) for name in ("4:4:4", "4:2:2"))
    for width, height in ((80, 1), (1, 1), (77, 61)):
        yield f"{width} x {height}", image.crop((0, 0, width, height)), {}


def as_tensor(pixels):
    return pil_to_tensor(pixels) if isinstance(pixels, Image.Image) else pixels


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_decoder_gives_pillows_pixels(decoder):
    """The EXIF orientation is ignored, as in most ImageNet scripts."""
    for kind, image, options in odd_files():
        content = saved(image, **options)
        with Image.open(io.BytesIO(content)) as opened:
            expected = pil_to_tensor(opened.convert("RGB"))
        decode = partial(images.DECODERS[decoder], content)
        found = as_tensor(decode(lambda height, width: (0, 0, height, width)))
        assert torch.equal(found, expected), kind
        for made in (
            images.train_transform(decode, 32, 0.08, True),
            images.val_transform(decode, 32),
        ):
            assert made.shape == (3, 32, 32) and made.dtype == torch.uint8, kind


@pytest.mark.parametrize("decoder", DECODERS)
def test_crops_are_torchvisions(decoder):
    """With --decoder pil, a Pillow image is cropped; with the others, a tensor."""
    for size in ((375, 500), (500, 333), (240, 240), (200, 640)):
        content = saved(picture_of(*size), quality=92)
        image = Image.open(io.BytesIO(content))
        image = image if decoder == "pil" else pil_to_tensor(image)
        decode = partial(images.DECODERS[decoder], content)
        usual = v2.Compose([v2.Resize(256), v2.CenterCrop(224)])
        assert torch.equal(images.val_transform(decode, 224), as_tensor(usual(image)))
        usual = v2.Compose([v2.RandomResizedCrop(224), v2.RandomHorizontalFlip()])
        for seed in range(6):
            torch.manual_seed(seed)
            expected = as_tensor(usual(image))
            torch.manual_seed(seed)
            made = images.train_transform(decode, 224, 0.08, True)
            assert torch.equal(made, expected), (size, seed)


def test_pillows_resize_differs_by_one_level():
    """A resumed run may therefore switch between the other two decoders, but not to or from pil."""
    made = [
        images.val_transform(partial(images.DECODERS[decoder], content), 224).int()
        for content in [saved(picture_of(375, 500))]
        for decoder in DECODERS
    ]
    other = DECODERS.index("pil")
    assert (made.pop(other) - made[0]).abs().max() == 1
    assert all(torch.equal(one, made[0]) for one in made)


@pytest.mark.parametrize("decoder", DECODERS)
def test_an_unreadable_image_is_one_line(pictures, capfd, decoder):
    path = pictures / "train" / "dog" / "3.JPEG"
    half = path.read_bytes()[:-900]
    path.unlink()
    reasons = {None: "No such file", **dict.fromkeys((b"text", b"", half[:200]), ".")}
    for content, reason in {
        **reasons,
        half: "truncated|incomplete|cannot decode",
    }.items():
        if content is not None:
            path.write_bytes(content)
        pattern = f"^--decoder {decoder} cannot read {path}: .*({reason})"
        with pytest.raises(UserError, match=pattern) as caught:
            images.read_image(str(path), decoder, partial(images.val_transform, size=8))
        assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""  # no library adds remarks of its own
    for workers in (0, 1):
        args = parse("--data", pictures, "--decoder", decoder, "-b", 2, "-j", workers)
        train_set, _ = build_datasets(args)
        loader = build_loader(args, train_set, range(16), 0, 1, CPU, training=True)
        with pytest.raises(SystemExit) as ended, one_line_errors():
            list(loader.epoch(0))
        printed = capfd.readouterr().err
        assert f": error: --decoder {decoder} cannot read {path}: " in printed
        assert printed.count("\n") == 1 and ended.value.code == 2


def test_an_error_of_the_code_keeps_its_traceback(pictures):
    def broken(decode):
        return decode[0]

    path = str(pictures / "train" / "dog" / "3.JPEG")
    with pytest.raises(TypeError, match="not subscriptable"):
        images.read_image(path, DECODERS[0], broken)


def test_a_loop_of_links_adds_no_images(pictures):
    """Links to folders are not followed; links to files are images."""
    folder = pictures / "train" / "dog"
    os.symlink("..", folder / "up")
    os.symlink(".", folder / "here")
    os.symlink("0.JPEG", folder / "linked.JPEG")
    train_set, _ = build_datasets(parse("--data", pictures, "--decoder", "pil"))
    assert len(train_set) == 17 and train_set.labels.tolist() == 8 * [0] + 9 * [1]


@pytest.mark.parametrize("decoder", ("torchcodec", "nvimgcodec"))
def test_a_missing_decoder_is_one_line(monkeypatch, decoder):
    for name in ("torchcodec", "torchcodec.decoders", "nvidia", "nvidia.nvimgcodec"):
        monkeypatch.setitem(sys.modules, name, None)
    make_decoder.cache_clear()
    message = f"--decoder {decoder} cannot read x: import of .* halted"
    with pytest.raises(UserError, match=message):
        transform = partial(images.val_transform, size=8)
        images.read_image("x", decoder, transform, saved(picture_of(8, 8)))
