"""Decoders and crops: the same pixels from every decoder, or a clear error."""

import multiprocessing
import os
import random
import struct
import sys
import zlib

import numpy
import pytest
import torch
from conftest import MISSING
from PIL import Image
from test_data import arguments, train_batches
from torchvision import transforms as v1
from torchvision.io import ImageReadMode, decode_image
from torchvision.models import get_model_weights
from torchvision.transforms.v2 import InterpolationMode, RandomResizedCrop

from common import images
from common.arguments import build_parser, parse_arguments
from common.data import build_datasets, build_loader, share_out
from common.errors import ImageError, UserError
from common.model import (
    architectures,
    pretrained_normalisation,
    validation_protocol,
)

BILINEAR = InterpolationMode.BILINEAR
VALIDATION = images.ValTransform(224, 256, BILINEAR)
needs_nvimgcodec = pytest.mark.nvimgcodec
EVERY_DECODER = [
    "torchvision",
    "pil",
    pytest.param("nvimgcodec", marks=needs_nvimgcodec),
]


def pixels(height, width, channels=3):
    """A smooth picture with some noise, (height, width, channels) uint8."""
    rows, columns = numpy.mgrid[:height, :width]
    waves = [
        128 + 90 * numpy.sin(rows / (5 + c) + columns / (9 - c))
        for c in range(channels)
    ]
    noise = numpy.random.default_rng(0).normal(0, 6, (height, width, channels))
    return (numpy.stack(waves, -1) + noise).clip(0, 255).astype(numpy.uint8)


def write_png16(path, samples):
    """Write (H, W, 1 or 3) uint16 samples as a PNG, which Pillow cannot in colour."""
    height, width, channels = samples.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in samples)
    head = struct.pack(">IIBBBBB", width, height, 16, {1: 0, 3: 2}[channels], 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + b"".join(
            struct.pack(">I", len(data))
            + kind
            + data
            + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in chunks
        )
    )


def write_16_bits(path, channels):
    rng = numpy.random.default_rng(1)
    write_png16(path, rng.integers(0, 2**16, (64, 80, channels)))


def with_orientation(number):
    def save(path, image):
        exif = Image.Exif()
        exif[0x0112] = number
        image.save(path, exif=exif)

    return save


ODD_FILES = {
    "CMYK": lambda path, image: image.convert("CMYK").save(path),
    "PNG named .JPEG": lambda path, image: image.save(path, "PNG"),
    "greyscale": lambda path, image: image.convert("L").save(path),
    "greyscale PNG": lambda path, image: image.convert("L").save(path, "PNG"),
    "two colours": lambda path, image: image.convert("1").save(path, "PNG"),
    "palette": lambda path, image: image.convert("P").save(path, "PNG"),
    "transparency": lambda path, image: image.convert("RGBA").save(path, "PNG"),
    "greyscale and transparency": lambda path, image: image.convert("LA").save(
        path, "PNG"
    ),
    "16-bit PNG": lambda path, image: write_16_bits(path, 3),
    "16-bit greyscale PNG": lambda path, image: write_16_bits(path, 1),
    "progressive": lambda path, image: image.save(path, progressive=True),
    "EXIF: upside down": with_orientation(3),
    "EXIF: on its side": with_orientation(6),
    "damaged EXIF": lambda path, image: image.save(
        path, exif=b"Exif\0\0II*\0\xff\xff\xff\xffdamaged"
    ),
    "WebP": lambda path, image: image.save(path, "WEBP", lossless=True),
    "GIF": lambda path, image: image.convert("L").save(path, "GIF"),
    "one pixel high": lambda path, image: image.crop((0, 0, 80, 1)).save(path),
    "one pixel wide": lambda path, image: image.crop((0, 0, 1, 64)).save(path),
    "one pixel": lambda path, image: image.crop((0, 0, 1, 1)).save(path),
    "4:4:4": lambda path, image: image.save(path, subsampling=0),
    "4:2:2": lambda path, image: image.save(path, subsampling=1),
    "odd size": lambda path, image: image.crop((0, 0, 77, 61)).save(path),
}


def whole(picture):
    return images.to_tensor(picture.read(0, 0, picture.height, picture.width))


@needs_nvimgcodec
@pytest.mark.parametrize("kind", ODD_FILES)
def test_every_decoder_reads_the_same_pixels(tmp_path, kind, monkeypatch):
    path = tmp_path / "picture.JPEG"
    ODD_FILES[kind](path, Image.fromarray(pixels(64, 80)))
    expected = images.PillowPicture(str(path))
    if kind != "GIF":  # the one that nvimgcodec leaves to torchvision
        for_nvimgcodec = {**images.DECODERS, "nvimgcodec": images.NvimgcodecPicture}
        monkeypatch.setattr(images, "DECODERS", for_nvimgcodec)
        monkeypatch.setattr(images, "TorchvisionPicture", None)
    for decoder, open_picture in images.DECODERS.items():
        picture = open_picture(str(path))
        size = picture.height, picture.width
        assert size == (expected.height, expected.width), decoder
        assert torch.equal(whole(picture), whole(expected)), decoder


def test_16_bits_keep_their_upper_half(tmp_path):
    for channels in (1, 3):
        write_16_bits(tmp_path / "picture.png", channels)
        samples = numpy.random.default_rng(1).integers(0, 2**16, (64, 80, channels))
        read = whole(images.PillowPicture(str(tmp_path / "picture.png")))
        upper = torch.from_numpy(samples >> 8).permute(2, 0, 1).expand(3, -1, -1)
        assert torch.equal(read, upper.to(torch.uint8))


@pytest.mark.parametrize("decoder", EVERY_DECODER)
@pytest.mark.parametrize("kind", ODD_FILES)
def test_odd_files_train_and_validate(tmp_path, kind, decoder):
    path = tmp_path / "picture.JPEG"
    ODD_FILES[kind](path, Image.fromarray(pixels(64, 80)))
    for transform in (
        images.TrainTransform(32, 0.08, True),
        images.ValTransform(32, 36, BILINEAR),
    ):
        image = images.read_image(str(path), decoder, transform)
        assert image.shape == (3, 32, 32) and image.dtype == torch.uint8


@needs_nvimgcodec
@pytest.mark.parametrize("options", ({}, {"subsampling": 1}, {"subsampling": 0}))
@pytest.mark.parametrize("progressive", (False, True))
def test_a_part_is_what_the_whole_has_there(
    tmp_path, options, progressive, monkeypatch
):
    """Decoding only a part of the file gives the pixels of decoding all of it."""
    monkeypatch.setattr(images, "TorchvisionPicture", None)  # no way out
    for height, width in ((375, 500), (131, 97)):
        path = str(tmp_path / "picture.JPEG")
        image = Image.fromarray(pixels(height, width))
        image.save(path, quality=90, progressive=progressive, **options)
        decoded = whole(images.PillowPicture(path))
        random.seed(0)
        for _ in range(40):
            top, left, h, w = images.random_box(height, width, 0.01)
            part = images.NvimgcodecPicture(path).read(top, left, h, w)
            assert torch.equal(part, decoded[:, top : top + h, left : left + w])


@pytest.fixture
def photographs(tmp_path):
    """Paths of pictures larger than what is made of them."""
    paths = []
    for number, size in enumerate(((375, 500), (500, 333), (240, 240), (200, 640))):
        paths.append(str(tmp_path / f"{number}.JPEG"))
        Image.fromarray(pixels(*size)).save(paths[-1], quality=92)
    return paths


def seeded(path, decoder, transform, seed=0):
    random.seed(seed)
    return images.read_image(path, decoder, transform)


@needs_nvimgcodec
def test_nvimgcodec_and_torchvision_train_and_validate_on_the_same_bits(photographs):
    train = images.TrainTransform(224, 0.08, True)
    for path in photographs:
        for transform, seeds in ((train, range(10)), (VALIDATION, [0])):
            for seed in seeds:
                one = seeded(path, "torchvision", transform, seed)
                assert torch.equal(one, seeded(path, "nvimgcodec", transform, seed))


@pytest.mark.parametrize(
    "decoder", ("torchvision", pytest.param("nvimgcodec", marks=needs_nvimgcodec))
)
def test_validation_is_within_one_level_of_what_pillow_makes(photographs, decoder):
    largest = 0
    for path in photographs:
        one, other = (
            images.read_image(path, name, VALIDATION).int() for name in (decoder, "pil")
        )
        largest = max(largest, int((one - other).abs().max()))
    assert largest == 1  # 0 would mean that Pillow's own resize is not in use


@pytest.mark.parametrize("decoder", ("pil", "torchvision"))
def test_pretrained_weights_validate_as_torchvision_does(pictures, decoder):
    """From the file to the normalised batch; all 80 architectures have 25 protocols."""
    assert len(architectures()) >= 80
    for path in pictures.glob("val/*/*"):
        Image.fromarray(pixels(250, 330)).save(path, quality=92)
    ours = {}
    for arch in architectures():
        words = f"--data {pictures} --pretrained --arch {arch} --decoder {decoder} -j 0"
        args = parse_arguments(build_parser("A test."), "test", words.split())
        args.global_batch_size = 1
        preset = get_model_weights(arch).DEFAULT.transforms()
        chosen = *validation_protocol(args), *pretrained_normalisation(arch).flatten()
        if ours.setdefault(str(preset), chosen) is not chosen:
            assert chosen == ours[str(preset)]
            continue
        share_out(args, 0, 1, 1)
        _, val_set = build_datasets(args)
        loader = build_loader(args, val_set, [0], torch.device("cpu"), training=False)
        ((batch, _),) = loader
        if decoder == "pil":
            expected = preset(Image.open(val_set.paths[0]).convert("RGB"))
        else:
            expected = preset(decode_image(val_set.paths[0], ImageReadMode.RGB))
        levels = (
            (batch[0] - expected).abs() * 255 * torch.tensor(preset.std).view(3, 1, 1)
        )
        assert batch[0].shape == expected.shape, arch
        assert levels.max() < (0.01 if decoder == "pil" else 1.01), arch


@pytest.mark.parametrize(
    "flags, expected",
    [
        ("--pretrained --arch vit_h_14", (518, 518, "bicubic")),
        ("--pretrained --image-size 224", (224, 256, "bilinear")),
        ("--pretrained --arch resnet50", (224, 232, "bilinear")),
        ("--pretrained --arch resnet50 --image-size 160", (160, 182, "bilinear")),
        ("--arch vit_h_14", (224, 256, "bilinear")),
    ],
)
def test_the_protocol_of_the_weights_is_for_their_own_image_size(flags, expected):
    words = ["--data", "x", *flags.split()]
    args = parse_arguments(build_parser("A test."), "test", words)
    crop, resized, interpolation = validation_protocol(args)
    assert (crop, resized, interpolation.value) == expected


def test_pil_feeds_the_bits_of_the_usual_transforms(photographs, monkeypatch):
    usual = v1.Compose([v1.Resize(256), v1.CenterCrop(224), v1.PILToTensor()])
    for path in photographs:
        image = Image.open(path).convert("RGB")
        assert torch.equal(usual(image), images.read_image(path, "pil", VALIDATION))
        random.seed(3)
        top, left, height, width = images.random_box(image.height, image.width, 0.08)
        mirrored = random.random() < 0.5
        crop = v1.functional.resized_crop(image, top, left, height, width, [224, 224])
        crop = v1.functional.hflip(crop) if mirrored else crop
        train = images.TrainTransform(224, 0.08, True)
        assert torch.equal(
            v1.functional.pil_to_tensor(crop), seeded(path, "pil", train, 3)
        )


@pytest.mark.parametrize(
    "height, width", ((375, 500), (500, 375), (1, 80), (80, 1), (30, 3000), (1, 1))
)
@pytest.mark.parametrize("min_crop", (0.08, 1.0))
def test_random_boxes_are_distributed_like_torchvisions(height, width, min_crop):
    random.seed(0)
    torch.manual_seed(0)
    ours = numpy.array(
        [images.random_box(height, width, min_crop) for _ in range(4000)]
    )
    tops, lefts, heights, widths = ours.T
    assert (tops >= 0).all() and (lefts >= 0).all()
    assert (heights > 0).all() and (tops + heights <= height).all()
    assert (widths > 0).all() and (lefts + widths <= width).all()
    crop = RandomResizedCrop(224, scale=(min_crop, 1.0))
    theirs = numpy.array(
        [
            tuple(
                crop.make_params([torch.empty(1).expand(3, height, width)])[name]
                for name in ("top", "left", "height", "width")
            )
            for _ in range(4000)
        ]
    )
    # Means of 4,000 draws: their standard error is below 1 % of the side
    sides = numpy.array((height, width, height, width))
    assert (abs(ours.mean(0) - theirs.mean(0)) / sides < 0.03).all()
    assert (abs(ours.std(0) - theirs.std(0)) / sides < 0.03).all()


def test_half_of_the_images_are_mirrored(tmp_path):
    path = str(tmp_path / "picture.JPEG")
    Image.fromarray(pixels(64, 64)).save(path)
    mirroring = images.TrainTransform(64, 1.0, True)
    plain = images.TrainTransform(64, 1.0, False)
    mirrored = 0
    for seed in range(200):
        one, other = (seeded(path, "torchvision", t, seed) for t in (mirroring, plain))
        assert torch.equal(one, other) or torch.equal(one, other.flip(-1))
        mirrored += not torch.equal(one, other)
    assert 70 < mirrored < 130


DAMAGE = {
    "empty": (b"", "."),
    "no image": (b"this is text", "."),
    "nothing but a head": (slice(0, 200), "."),
    "cut in half": (slice(0, 0.5), "truncated|incomplete"),
    "not there": (None, "No such file"),
}


@pytest.mark.parametrize("decoder", EVERY_DECODER)
@pytest.mark.parametrize("kind", DAMAGE)
def test_an_unreadable_image_is_named_with_decoder_and_reason(
    tmp_path, capfd, kind, decoder
):
    path = tmp_path / "broken.JPEG"
    spoil, reason = DAMAGE[kind]
    Image.fromarray(pixels(64, 80)).save(path)
    content = path.read_bytes()
    if spoil is None:
        path.unlink()
    elif isinstance(spoil, bytes):
        path.write_bytes(spoil)
    else:
        end = spoil.stop if isinstance(spoil.stop, int) else len(content) // 2
        path.write_bytes(content[:end])
    pattern = f"^cannot read the image {path} with {decoder}: .*({reason})"
    with pytest.raises(ImageError, match=pattern) as caught:
        images.read_image(str(path), decoder, images.ValTransform(32, 36, BILINEAR))
    assert "\n" not in str(caught.value) and ".cpp" not in str(caught.value)
    assert capfd.readouterr().err == ""  # no library adds remarks of its own


@needs_nvimgcodec
def test_nvimgcodec_sees_damage_only_where_it_decodes(tmp_path):
    path = tmp_path / "broken.JPEG"
    Image.fromarray(pixels(300, 300)).save(path)
    path.write_bytes(path.read_bytes()[:-2000])
    picture = images.NvimgcodecPicture(str(path))
    assert picture.read(0, 0, 50, 50).shape == (3, 50, 50)
    with pytest.raises(RuntimeError, match="truncated"):
        picture.read(250, 0, 50, 50)


@pytest.mark.parametrize("decoder", EVERY_DECODER)
@pytest.mark.parametrize("workers", (0, 2))
def test_loaders_hand_the_error_on(pictures, workers, decoder):
    broken = pictures / "train" / "dog" / "3.JPEG"
    broken.write_bytes(broken.read_bytes()[:200])
    with pytest.raises(ImageError, match=f"^cannot read the image {broken} with"):
        train_batches(arguments(pictures, decoder=decoder), 0, workers=workers)


@needs_nvimgcodec
def test_a_forked_process_makes_a_decoder_of_its_own():
    def made() -> int:
        images.nvimgcodec_decoder(os.getpid())
        return images.nvimgcodec_decoder.cache_info().misses

    made()
    before = made()  # the second call makes none
    assert images.nvimgcodec_decoder.cache_info().misses == before
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=lambda: queue.put(made()))
    child.start()
    assert queue.get() == before + 1
    child.join()


@needs_nvimgcodec
def test_a_decoder_that_cannot_be_made_is_no_secret(tmp_path, monkeypatch):
    path = tmp_path / "picture.JPEG"
    Image.fromarray(pixels(64, 80)).save(path)

    def fail(pid):
        raise RuntimeError("no decoder")

    monkeypatch.setattr(images, "nvimgcodec_decoder", fail)
    with pytest.raises(ImageError, match="with nvimgcodec: no decoder"):
        images.read_image(
            str(path), "nvimgcodec", images.ValTransform(32, 36, BILINEAR)
        )


def test_auto_is_nvimgcodec_where_it_is_installed(pictures, monkeypatch):
    args = arguments(pictures)
    build_datasets(args)
    assert args.decoder == ("torchvision" if MISSING["nvimgcodec"] else "nvimgcodec")

    monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", None)
    monkeypatch.setitem(sys.modules, "nvidia", None)
    images.import_nvimgcodec.cache_clear()
    args = arguments(pictures)
    build_datasets(args)
    assert args.decoder == "torchvision"
    with pytest.raises(UserError, match="requirements-nvimgcodec.txt"):
        build_datasets(arguments(pictures, decoder="nvimgcodec"))
    images.import_nvimgcodec.cache_clear()
