"""What benchmarks compare and how; no time is asserted here."""

import json

import torch
from conftest import ROOT
from torchvision.transforms import InterpolationMode

from benchmarks import usual
from benchmarks.photographs import write_photographs
from common import images


def test_the_usual_pipeline_is_our_pillow_pipeline_normalized(tmp_path):
    """Both do the same work, so that comparing their speeds means something."""
    facts = write_photographs(tmp_path, 12, 6, classes=2)
    assert facts["images"] == 18 and abs(facts["mean_bytes"] / 100_000 - 1) < 0.1
    val = usual.folder(tmp_path / "val", usual.VAL)
    validation = images.ValTransform(224, 256, InterpolationMode.BILINEAR)
    for number, (path, _) in enumerate(val.samples):
        ours = images.read_image(path, "pil", validation)
        normalized = usual.NORMALIZE(ours.float() / 255)
        torch.testing.assert_close(val[number][0], normalized, rtol=0, atol=1e-6)
    crop = usual.TRAIN[0]
    assert crop.scale == (0.08, 1.0) and crop.size == (224, 224)


def test_the_figures_of_the_performance_page_are_of_a_commit_and_a_command():
    for name in ("input", "decoders", "archives", "step", "memory"):
        report = json.loads((ROOT / "results" / f"{name}.json").read_text())
        assert report["argv"][2] == f"benchmarks.{name}" and report["commit"]
