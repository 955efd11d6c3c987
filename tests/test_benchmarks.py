"""What benchmarks compare and how; no time is asserted here."""

import pytest
import torch
from torchvision.transforms import InterpolationMode

from benchmarks import usual
from benchmarks.gpu import copies_in, overlap, under_load
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


def test_how_long_copies_overlap_with_kernels():
    kernels = [(5, 12), (12, 20), (50, 60)]
    for copies, shared in (([(0, 10)], 5), ([(8, 30), (55, 57)], 14), ([(21, 40)], 0)):
        assert overlap(copies, kernels) == overlap(kernels, copies) == shared
    assert overlap([], kernels) == 0
    event = {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 0}
    events = [{"cat": "kernel", "name": "conv", "ts": 10, "dur": 4000}, {"ph": "M"}]
    events += [event | {"dur": 9}, event | {"ts": 3010, "dur": 3000}]
    events += [event | {"name": "Memcpy DtoH (Device -> Pinned)", "ts": 20, "dur": 7}]
    assert copies_in(events) == (3, 1 / 3)
    with pytest.raises(RuntimeError, match="no kernels, or no copies"):
        copies_in(events[:3])


def test_clock_and_power_are_those_of_a_busy_gpu():
    samples = [(345, 70), (1980, 500), (1700, 600), (1600, 690), (345, 90)]
    samples = [{"clocks.sm": mhz, "power.draw": watts} for mhz, watts in samples]
    assert under_load(samples) == "; 1700 MHz, 600 W" and under_load([]) == ""
