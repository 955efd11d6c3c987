"""Decoders and transforms produce the expected pixels, or a one-line error."""

import base64
import importlib
import io
import sys

import numpy
import pytest
import torch
from conftest import MISSING
from PIL import Image
from ranks import parse
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import pil_to_tensor

from common import arguments, images
from common.data import DeviceLoader, EpochSampler, build_datasets
from common.errors import UserError, one_line_errors
from common.nvimgcodec import make_decoder

DECODERS = [name for name in images.DECODERS if not MISSING.get(name)]
CPU = torch.device("cpu")
WHOLE = v2.Compose([v2.PILToTensor()])


def picture_of(height, width):
    """Return a smooth image with some noise."""
    rows, columns, colors = numpy.mgrid[:height, :width, :3]
    waves = 128 + 90 * numpy.sin(rows / (5 + colors) + columns / (9 - colors))
    noise = numpy.random.default_rng(0).normal(0, 6, (height, width, 3))
    return Image.fromarray((waves + noise).clip(0, 255).astype("uint8"))


def saved(image, **options):
    file = io.BytesIO()
    image.save(file, **{"format": "JPEG", **options})
    return file.getvalue()


def odd_files():
    """Return (name, content) of the kinds of files that occur in data sets."""
    image = picture_of(64, 80)
    for mode in ("CMYK", "L"):
        yield mode, saved(image.convert(mode))
    content = saved(image.convert("CMYK"))
    marker = content.index(b"\xff\xee")  # Adobe's, which inverts colors
    yield "CMYK without Adobe", content[:marker] + content[marker + 16 :]
    for mode in ("RGB", "L", "1", "P", "RGBA", "LA"):
        yield f"PNG, {mode}", saved(image.convert(mode), format="PNG")
    alpha = saved(image.convert("P"), format="PNG", transparency=3)
    yield "PNG, palette with alpha", alpha
    yield "WebP", saved(image, format="WEBP", lossless=True)
    for name in ("GIF", "TIFF", "BMP", "PPM"):
        yield name, saved(image, format=name)
    for mode in ("CMYK", "LAB", "RGBA"):  # nvImageCodec would change LAB's colors
        yield f"TIFF, {mode}", saved(image.convert(mode), format="TIFF")
    yield "progressive", saved(image, progressive=True)
    for orientation in (3, 6):
        exif = Image.Exif()
        exif[0x0112] = orientation
        yield f"turned, {orientation}", saved(image, exif=exif)
    yield "damaged EXIF", saved(image, exif=b"Exif\0\0II*\0\xff\xff\xff\xffdamaged")
    for name in ("4:4:4", "4:2:2", "4:1:1"):
        yield name, saved(image, subsampling=name)
    yield "junk at the end", saved(image) + b"junk"
    for width, height in ((80, 1), (1, 1), (77, 61)):
        yield f"{width} x {height}", saved(image.crop((0, 0, width, height)))


# A PNG of one pixel with 16 bits per color, which Pillow cannot write: 200, 30000, 65535
RGB_16 = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABEAIAAADA54+dAAAAD0lEQVR4nGNgOFFq8P8/AAlQA2xIugMlAAAAAElFTkSuQmCC"


@pytest.mark.parametrize("decoder", DECODERS)
def test_16_bits_become_8(decoder):
    """Our conversion keeps 16-bit gray, most of which Pillow's convert() would make white."""
    pixels = numpy.arange(64 * 80, dtype="uint16").reshape(64, 80) * 12
    expected = torch.from_numpy((pixels >> 8).astype("uint8")).expand(3, 64, 80)
    gray, big = Image.fromarray(pixels), pixels.astype(">u2").tobytes()
    swapped = Image.frombytes("I;16B", (80, 64), big)
    for content, found in (
        (saved(gray, format="PNG"), expected),
        (saved(gray, format="TIFF"), expected),
        (saved(swapped, format="TIFF"), expected),
        (b"P5 80 64 65535\n" + big, expected),
        (base64.b64decode(RGB_16), torch.tensor([0, 117, 255]).view(3, 1, 1)),
    ):
        made = images.read_image("x", decoder, WHOLE, content)
        assert torch.equal(made.int(), found.int()), content[:20]
    for dtype in ("int32", "float32"):  # is 1.0 white, or 255.0?
        content = saved(Image.fromarray(pixels.astype(dtype)), format="TIFF")
        with pytest.raises(UserError, match="x.tif: 32-bit pixels have no defined ra"):
            images.read_image("x.tif", decoder, WHOLE, content)


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_decoder_gives_pillows_pixels(decoder):
    """All decoders give Pillow's pixels; like most ImageNet scripts, they ignore EXIF orientation."""
    for kind, content in odd_files():
        with Image.open(io.BytesIO(content)) as opened:
            expected = pil_to_tensor(opened.convert("RGB"))
        found = images.read_image("x", decoder, WHOLE, content)
        assert torch.equal(found, expected), kind
        for steps in [images.RandomResizedCrop(32)], [v2.Resize(36), v2.CenterCrop(32)]:
            transform = v2.Compose([*steps, v2.PILToTensor()])
            made = images.read_image("x", decoder, transform, content)
            assert made.shape == (3, 32, 32) and made.dtype == torch.uint8, kind


@pytest.mark.parametrize("decoder", DECODERS)
def test_crops_are_torchvisions(decoder, pictures):
    """Crops equal torchvision's, of a Pillow image (--decoder pil) or of a tensor (the others)."""
    for size in ((375, 500), (1000, 1200), (240, 240), (200, 640)):
        content = saved(picture_of(*size), quality=92)
        image = Image.open(io.BytesIO(content))
        image = image if decoder == "pil" else pil_to_tensor(image)
        for resized, cropped in ((256, 224), (182, 160), (91, 80)):
            flags = "--data", pictures, "--image-size", cropped
            train_set, val_set = build_datasets(parse(*flags))
            usual = v2.Compose([v2.Resize(resized), v2.CenterCrop(cropped)])
            made = images.read_image("x", decoder, val_set.transform, content)
            assert torch.equal(made, WHOLE(usual(image))), (size, cropped)
            crop = v2.RandomResizedCrop(cropped)
            usual = v2.Compose([crop, v2.RandomHorizontalFlip()])
            pairs = 3 * [(train_set.transform, usual)]
            options = {"size": cropped, "interpolation": v2.InterpolationMode.BICUBIC}
            ours = v2.Compose([images.RandomResizedCrop(**options), v2.PILToTensor()])
            pairs.append((ours, v2.RandomResizedCrop(**options)))
            for seed, (ours, usual) in enumerate(pairs):
                torch.manual_seed(seed)
                expected = WHOLE(usual(image))
                torch.manual_seed(seed)
                made = images.read_image("x", decoder, ours, content)
                assert torch.equal(made, expected), (size, cropped, seed)


@pytest.mark.parametrize("decoder", DECODERS)
def test_an_unreadable_image_is_one_line(pictures, capfd, decoder):
    path = pictures / "train" / "dog" / "3.JPEG"
    half = path.read_bytes()[:-900]
    path.unlink()
    reasons = {None: "No such file", **dict.fromkeys((b"text", b"", half[:200]), ".")}
    reasons[half] = "truncated|incomplete|cannot decode"
    reasons[saved(Image.new("1", (20000, 20000)), format="PNG")] = "exceeds limit"
    for content, reason in reasons.items():
        if content is not None:
            path.write_bytes(content)
        pattern = f"^--decoder {decoder} cannot read {path}: .*({reason})"
        with pytest.raises(UserError, match=pattern) as caught:
            images.read_image(str(path), decoder, WHOLE)
        assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""  # no library prints anything itself
    for workers in (0, 1):
        args = parse("--data", pictures, "--decoder", decoder, "-b", 2, "-j", workers)
        train, sampler = build_datasets(args)[0], EpochSampler(range(16), 0, 0, 1)
        loader = DeviceLoader(args, train, sampler, 2, CPU, training=True)
        with pytest.raises(SystemExit) as ended, one_line_errors():
            list(loader)
        printed = capfd.readouterr().err
        assert f": error: --decoder {decoder} cannot read {path}: " in printed
        assert printed.count("\n") == 1 and ended.value.code == 2


def test_an_error_of_the_code_keeps_its_traceback(pictures):
    broken = v2.Compose([lambda image: abs("")])
    path = str(pictures / "train" / "dog" / "3.JPEG")
    with pytest.raises(TypeError, match="bad operand"):
        images.read_image(path, DECODERS[0], broken)


@pytest.mark.parametrize(
    "error, reason",
    [
        (ModuleNotFoundError("No module named 'torchcodec'"), "No module named 't.*'"),
        (OSError("libcudart.so.13: cannot open shared object file"), "libcudart.*file"),
        (RuntimeError("\n Could not load it.\nCauses: ...\n"), "Could not load it."),
    ],
)
def test_without_torchcodec_pillow_is_the_default(monkeypatch, error, reason):
    """TorchCodec's import can fail in many ways, for example with another version of PyTorch."""

    class Broken:
        def __getattr__(self, name):
            raise error

    monkeypatch.setitem(sys.modules, "torchcodec.decoders", Broken())
    spec = importlib.util.find_spec("common.images")
    without = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(without)
    monkeypatch.setattr(arguments, "NO_TORCHCODEC", without.NO_TORCHCODEC)
    assert parse("--data", "x").decoder == "pil"
    message = rf"^--decoder torchcodec cannot read x: no TorchCodec \({reason}\); use "
    with pytest.raises(UserError, match=message):
        without.read_image("x", "torchcodec", WHOLE, saved(picture_of(8, 8)))


@pytest.mark.torchcodec
def test_torchcodec_is_the_default_and_imported_before_loader_processes_start():
    assert images.NO_TORCHCODEC == "" and parse("--data", "x").decoder == "torchcodec"
    assert images.decode_jpeg is sys.modules["torchcodec.decoders"].decode_jpeg


def test_a_missing_nvimagecodec_is_one_line(monkeypatch):
    for name in ("nvidia", "nvidia.nvimgcodec"):
        monkeypatch.setitem(sys.modules, name, None)
    make_decoder.cache_clear()
    with pytest.raises(UserError, match="nvimgcodec cannot read x: import .* halted"):
        images.read_image("x", "nvimgcodec", WHOLE, saved(picture_of(8, 8)))
