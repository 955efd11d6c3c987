"""What benchmarks compare and how; no time is asserted here."""

import json
import random

import numpy
import pytest
import torch
from conftest import ROOT
from PIL import Image
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from benchmarks import comparison, usual
from benchmarks.photographs import BYTES, photograph, write_photographs
from common import images


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photographs")
    return folder, write_photographs(folder, 12, 6, classes=2)


def test_photographs_are_like_imagenets_files(photographs):
    folder, facts = photographs
    files = sorted(folder.glob("train/*/*.JPEG"))
    assert len(files) == 12 and facts["images"] == 18
    mean = sum(file.stat().st_size for file in files) / len(files)
    assert abs(mean / BYTES - 1) < 0.1 and abs(facts["mean_bytes"] / BYTES - 1) < 0.1
    for file in files:
        image = Image.open(file)
        assert image.mode == "RGB" and 280 <= min(image.size) <= max(image.size) <= 500
        horizontal, vertical = image.layer[0][1:3]  # of brightness; 1, 1 of colours
        assert (horizontal, vertical) == (2, 2)


def test_photographs_have_the_spectrum_of_photographs():
    image = photograph(numpy.random.default_rng(0), 375, 500).getchannel(0)
    pixels = numpy.asarray(image).astype(float)
    amplitude = abs(numpy.fft.rfft2(pixels - pixels.mean()))
    frequency = numpy.hypot(
        numpy.fft.fftfreq(375)[:, None], numpy.fft.rfftfreq(500)[None]
    )
    band = (frequency > 0.01) & (frequency < 0.2)
    slope, _ = numpy.polyfit(numpy.log(frequency[band]), numpy.log(amplitude[band]), 1)
    assert -1.15 < slope < -0.85


def test_photographs_are_always_the_same(photographs, tmp_path):
    folder, facts = photographs
    assert write_photographs(tmp_path, 12, 6, classes=2) == facts
    for file in folder.glob("*/*/*.JPEG"):
        assert (tmp_path / file.relative_to(folder)).read_bytes() == file.read_bytes()


def test_the_usual_pipeline_is_our_pillow_pipeline_normalised(photographs):
    """Both do the same work, so that comparing their speeds means something."""
    folder, _ = photographs
    val = usual.val_set(folder / "val")
    validation = images.ValTransform(224, 256, InterpolationMode.BILINEAR)
    for number, (path, _) in enumerate(val.samples):
        ours = images.read_image(path, "pil", validation)
        normalised = usual.NORMALISE(ours.float() / 255)
        torch.testing.assert_close(val[number][0], normalised, rtol=0, atol=1e-6)
    crop = next(
        step
        for step in usual.train_set(folder / "train").transform.transforms
        if isinstance(step, transforms.RandomResizedCrop)
    )
    assert crop.scale == (0.08, 1.0) and crop.size == (224, 224)


def test_rounds_are_interleaved_and_the_first_does_not_count():
    calls = []

    def candidate(name):
        def measure():
            calls.append(name)
            return float(len(calls))

        return measure

    found = comparison.interleave({name: candidate(name) for name in "abc"}, rounds=3)
    rounds = ["".join(calls[start : start + 3]) for start in range(0, 12, 3)]
    assert [sorted(one) for one in rounds] == [["a", "b", "c"]] * 4
    assert len(set(rounds)) > 1  # not always after the same neighbour
    assert found["a"] == [index + 1.0 for index in range(3, 12) if calls[index] == "a"]


def test_ratios_are_taken_within_a_round():
    random.seed(0)
    drift = [random.uniform(1, 3) for _ in range(9)]
    found = {"base": drift, "twice": [2 * value for value in drift]}
    rows = comparison.compared(found, "base")
    assert rows["base"]["ratio"] == {"median": 1, "low": 1, "high": 1}
    assert rows["twice"]["ratio"] == {"median": 2, "low": 2, "high": 2}
    assert rows["twice"]["value"]["median"] == 2 * sorted(drift)[4]


def test_the_figures_of_the_performance_page_are_of_a_commit_and_a_command():
    for name in ("input", "step", "memory", "startup", "changes"):
        report = json.loads((ROOT / "results" / f"{name}.json").read_text())
        assert report["argv"][2] == f"benchmarks.{name}" and report["commit"]
