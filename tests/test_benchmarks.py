"""What benchmarks compare and how; no time is asserted here."""

import json
import random

import pytest
import torch
from conftest import ROOT
from PIL import Image
from torchvision.transforms import InterpolationMode

from benchmarks import comparison, usual
from benchmarks.photographs import write_photographs
from common import images


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photographs")
    return folder, write_photographs(folder, 12, 6, classes=2)


def test_photographs_are_like_imagenets_files(photographs):
    folder, facts = photographs
    assert facts["images"] == 18 and abs(facts["mean_bytes"] / 100_000 - 1) < 0.1
    for file in folder.glob("train/*/*.JPEG"):
        image = Image.open(file)
        assert image.mode == "RGB" and 280 <= min(image.size) <= max(image.size) <= 500
        assert image.layer[0][1:3] == (2, 2)  # colours at half the resolution


def test_the_usual_pipeline_is_our_pillow_pipeline_normalised(photographs):
    """Both do the same work, so that comparing their speeds means something."""
    folder, _ = photographs
    val = usual.folder(folder / "val", usual.VAL)
    validation = images.ValTransform(224, 256, InterpolationMode.BILINEAR)
    for number, (path, _) in enumerate(val.samples):
        ours = images.read_image(path, "pil", validation)
        normalised = usual.NORMALISE(ours.float() / 255)
        torch.testing.assert_close(val[number][0], normalised, rtol=0, atol=1e-6)
    crop = usual.TRAIN[0]
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
    assert rows["twice"]["ratio"] == {"median": 2, "low": 2, "high": 2}


def test_the_figures_of_the_performance_page_are_of_a_commit_and_a_command():
    for name in ("input", "step", "memory"):
        report = json.loads((ROOT / "results" / f"{name}.json").read_text())
        assert report["argv"][2] == f"benchmarks.{name}" and report["commit"]
