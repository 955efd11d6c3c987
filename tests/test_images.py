"""Decoders and crops: the same pixels from every decoder, or a clear error."""

import os
import random
import sys
from pathlib import Path

import numpy
import pytest
import torch
from conftest import MISSING
from PIL import Image
from ranks import parse
from torchvision import transforms as v1
from torchvision.models import get_model_weights
from torchvision.transforms.v2 import InterpolationMode, RandomResizedCrop

from common import images, nvimgcodec
from common.data import build_datasets, build_loader
from common.errors import ImageError, UserError
from common.model import architectures, pretrained_normalization, validation_protocol

VALIDATION = images.ValTransform(224, 256, InterpolationMode.BILINEAR)
TRAINING = images.TrainTransform(224, 0.08, True)
DECODERS = [name for name in images.DECODERS if not MISSING.get(name)]
USUAL = images.choose_decoder("auto")


def arguments(data, flags):
    return parse("--data", data, "-b", 1, *flags.split())


def one_by_one(args, dataset, workers=0):
    cpu = torch.device("cpu")
    return build_loader(args, dataset, range(len(dataset)), 1, workers, cpu, False)


def picture_of(height, width):
    """A smooth picture with some noise."""
    rows, columns, colors = numpy.mgrid[:height, :width, :3]
    waves = 128 + 90 * numpy.sin(rows / (5 + colors) + columns / (9 - colors))
    noise = numpy.random.default_rng(0).normal(0, 6, (height, width, 3))
    return Image.fromarray((waves + noise).clip(0, 255).astype(numpy.uint8))


def whole(picture):
    return images.to_tensor(picture.read(0, 0, picture.height, picture.width))


def seeded(path, decoder, transform, seed=0):
    random.seed(seed)
    return images.read_image(str(path), decoder, transform)


SIXTEEN = numpy.random.default_rng(1).integers(0, 2**16, (64, 80)).astype(numpy.uint16)


def odd_files():
    """How files of data sets differ: an image, and how it is saved."""
    image = picture_of(64, 80)
    yield from ((mode, image.convert(mode), {}) for mode in ("CMYK", "L"))
    for mode in ("RGB", "L", "1", "P", "RGBA", "LA"):
        yield f"PNG, {mode}", image.convert(mode), {"format": "PNG"}
    yield "PNG, 16 bits", Image.fromarray(SIXTEEN), {"format": "PNG"}
    yield "WebP", image, {"format": "WEBP", "lossless": True}
    yield "GIF", image.convert("L"), {"format": "GIF"}
    yield "progressive", image, {"progressive": True}
    for orientation in range(2, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        yield f"turned, {orientation}", image, {"exif": exif}
    yield "damaged EXIF", image, {"exif": b"Exif\0\0II*\0\xff\xff\xff\xffdamaged"}
    yield from ((name, image, {"subsampling": name}) for name in ("4:4:4", "4:2:2"))
    for width, height in ((80, 1), (1, 1), (77, 61)):
        yield f"{width} x {height}", image.crop((0, 0, width, height)), {}


def test_every_decoder_reads_the_same_pixels(tmp_path):
    path = str(tmp_path / "picture.JPEG")
    for kind, image, options in odd_files():
        image.save(path, **{"format": "JPEG", **options})
        content = Path(path).read_bytes()
        expected = whole(images.PillowPicture(content))
        if kind == "PNG, 16 bits":
            assert numpy.array_equal(expected[2], SIXTEEN >> 8)
        for decoder in DECODERS:
            found = whole(images.DECODERS[decoder](content))
            assert torch.equal(found, expected), (decoder, kind)
            for transform in (TRAINING, VALIDATION):
                made = images.read_image(path, decoder, transform)
                assert made.shape == (3, 224, 224) and made.dtype == torch.uint8
        if "nvimgcodec" in DECODERS and kind != "GIF":  # which it leaves to Pillow
            own = nvimgcodec.open_picture(content, None)
            assert torch.equal(whole(own), expected), kind


@pytest.fixture
def photographs(tmp_path):
    """Pictures larger than what is made of them."""
    for number, size in enumerate(((375, 500), (500, 333), (240, 240), (200, 640))):
        picture_of(*size).save(tmp_path / f"{number}.JPEG", quality=92)
    return sorted(tmp_path.glob("*.JPEG"))


def test_decoders_train_on_the_same_bits_and_validate_within_one_level(photographs):
    largest = 0
    for path in photographs:
        for transform, seeds in ((TRAINING, range(10)), (VALIDATION, [0])):
            for seed in seeds:
                one = seeded(path, USUAL, transform, seed)
                for decoder in set(DECODERS) - {"pil"}:
                    assert torch.equal(one, seeded(path, decoder, transform, seed))
        one = seeded(path, USUAL, VALIDATION).int()
        largest = max(largest, (one - seeded(path, "pil", VALIDATION)).abs().max())
    assert largest == 1  # 0 would mean that Pillow's own resize is not in use


@pytest.mark.parametrize("decoder", ("pil", "auto"))
def test_pretrained_weights_validate_as_torchvision_does(pictures, decoder):
    """From the file to the normalized batch; all 80 architectures have 25 protocols."""
    assert len(architectures()) >= 80
    for path in pictures.glob("val/*/*"):
        picture_of(250, 330).save(path, quality=92)
    ours = {}
    for arch in architectures():
        args = arguments(pictures, f"--pretrained --arch {arch} --decoder {decoder}")
        preset = get_model_weights(arch).DEFAULT.transforms()
        chosen = *validation_protocol(args), *pretrained_normalization(arch).flatten()
        if ours.setdefault(str(preset), chosen) is not chosen:
            assert chosen == ours[str(preset)]
            continue
        _, val_set = build_datasets(args)
        batch, _ = next(iter(one_by_one(args, val_set)))
        image = Image.open(next(pictures.glob("val/*/*"))).convert("RGB")
        expected = preset(
            image if decoder == "pil" else v1.functional.pil_to_tensor(image)
        )
        std = torch.tensor(preset.std).view(3, 1, 1)
        assert batch[0].shape == expected.shape, arch
        most = ((batch[0] - expected).abs() * 255 * std).max()
        assert most < (0.01 if decoder == "pil" else 1.01), arch


def test_the_protocol_of_the_weights_is_for_their_own_image_size():
    for flags, *expected in (
        ("--pretrained --arch vit_h_14", 518, 518, "bicubic"),
        ("--pretrained --image-size 224", 224, 256, "bilinear"),
        ("--pretrained --arch resnet50", 224, 232, "bilinear"),
        ("--pretrained --arch resnet50 --image-size 160", 160, 182, "bilinear"),
        ("--arch vit_h_14", 224, 256, "bilinear"),
    ):
        crop, resized, interpolation = validation_protocol(arguments("x", flags))
        assert [crop, resized, interpolation.value] == expected, flags


def test_pil_feeds_the_bits_of_the_usual_transforms(photographs):
    usual = v1.Compose([v1.Resize(256), v1.CenterCrop(224), v1.PILToTensor()])
    for path in photographs:
        image = Image.open(path).convert("RGB")
        assert torch.equal(usual(image), seeded(path, "pil", VALIDATION))
        random.seed(3)
        box = images.random_box(image.height, image.width, 0.08)
        crop = v1.functional.resized_crop(image, *box, [224, 224])
        crop = v1.functional.hflip(crop) if random.random() < 0.5 else crop
        expected = v1.functional.pil_to_tensor(crop)
        assert torch.equal(expected, seeded(path, "pil", TRAINING, 3))


@pytest.mark.parametrize("size", ((375, 500), (500, 375), (30, 3000), (1, 1)))
def test_random_boxes_are_distributed_like_torchvisions(size):
    random.seed(0)
    torch.manual_seed(0)
    ours = numpy.array([images.random_box(*size, 0.08) for _ in range(4000)])
    assert (ours[:, :2] >= 0).all() and (ours[:, 2:] > 0).all()
    assert (ours[:, :2] + ours[:, 2:] <= size).all()
    crop, image = RandomResizedCrop(224), torch.empty(3, *size)
    drawn = [crop.make_params([image]) for _ in range(4000)]
    theirs = numpy.array([[*one.values()] for one in drawn])
    # Means of 4,000 draws: their standard error is below 1 % of the side
    assert (abs(ours.mean(0) - theirs.mean(0)) / (*size, *size) < 0.03).all()
    assert (abs(ours.std(0) - theirs.std(0)) / (*size, *size) < 0.03).all()


@pytest.mark.parametrize("decoder", DECODERS)
def test_an_unreadable_image_is_named_with_decoder_and_reason(pictures, capfd, decoder):
    path = pictures / "train" / "dog" / "3.JPEG"
    half = path.read_bytes()[:-900]
    path.unlink()
    reasons = {None: "No such file", **dict.fromkeys((b"text", b"", half[:200]), ".")}
    for content, reason in {**reasons, half: "truncated|incomplete"}.items():
        if content is not None:
            path.write_bytes(content)
        pattern = f"^cannot read the image {path} with {decoder}: .*({reason})"
        with pytest.raises(ImageError, match=pattern) as caught:
            images.read_image(str(path), decoder, VALIDATION)
        assert "\n" not in str(caught.value) and ".cpp" not in str(caught.value)
    assert capfd.readouterr().err == ""  # no library adds remarks of its own
    args = arguments(pictures, f"--decoder {decoder}")
    for workers in (0, 2):
        with pytest.raises(ImageError, match=f"^cannot read the image {path} with"):
            list(one_by_one(args, build_datasets(args)[0], workers))


def test_loader_processes_see_no_gpu(pictures):
    args = arguments(pictures, "--decoder pil")
    dataset, _ = build_datasets(args)
    dataset.transform = lambda _: open(os.environ["CUDA_VISIBLE_DEVICES"])
    with pytest.raises(ImageError, match="with pil: .* No such file .*: ''$"):
        next(iter(one_by_one(args, dataset, 1)))


@pytest.mark.nvimgcodec
@pytest.mark.torchcodec
def test_auto_is_the_first_decoder_that_is_installed(monkeypatch, tmp_path):
    assert images.choose_decoder("auto") == "nvimgcodec"
    for module, name in ((nvimgcodec, "check_library"), (images, "import_torchcodec")):
        monkeypatch.setattr(module, name, vars(module)[name].__wrapped__)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    load = "import ctypes, os; ctypes.CDLL(os.environ['CUDA_VISIBLE_DEVICES'] or 'none.so')"
    for decoder, library, problem, following in (
        ("nvimgcodec", "", "cannot import name 'nvimgcodec'", "torchcodec"),
        ("nvimgcodec", "nvimgcodec = 'old'", "older than 0.9", "torchcodec"),
        ("nvimgcodec", load, "none.so: cannot open", "torchcodec"),
        ("nvimgcodec", "import os; os.abort()", "exit status -6", "torchcodec"),
        ("torchcodec", "", "import of torchcodec.decoders halted", "pil"),
    ):
        (tmp_path / "nvidia.py").write_text(library)
        monkeypatch.setitem(sys.modules, f"{decoder}.decoders", None)
        assert images.choose_decoder("auto") == following
        with pytest.raises(UserError, match=f"{decoder}: {problem}.*; pip install -r"):
            images.choose_decoder(decoder)
