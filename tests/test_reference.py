"""The scripts against tests/reference.py, a training that shares no line with them.

Scripts that are compared with each other alone may all be wrong in the same way.
"""

import functools
from argparse import Namespace

import numpy
import pytest
import reference
import torch
import torchvision
from PIL import Image
from ranks import NETS, recorded
from test_equality import start

# The recipe without flags, as README.md and --help have it
DEFAULTS = {
    "lr": 0.1,
    "warmup_epochs": 5,
    "schedule": "step",
    "momentum": 0.9,
    "weight_decay": 1e-4,
    "label_smoothing": 0,
    "image_size": 224,
    "min_crop": 0.08,
    "no_flip": False,
    "max_steps": None,
    "seed": 0,
    "decoder": "torchvision",
    "no_channels_last": False,
}
# The network, and what differs from the defaults: each flag has two values or more.
# A batch of 8 leaves 3 of the 43 images over, and 1 of the 17 for validation alone.
FIRST = {"image_size": 20, "batch": 8, "precision": "fp32"}
OTHER = {
    "lr": 0.7,
    "warmup_epochs": 0.5,
    "schedule": "cosine",
    "momentum": 0.5,
    "weight_decay": 0.05,
    "label_smoothing": 0.1,
    "image_size": 32,
    "min_crop": 0.6,
    "no_flip": True,
    "epochs": 3,
    "batch": 12,
    "max_steps": 2,
    "seed": 7,
    "decoder": "pil",
    "no_channels_last": True,
    "precision": "fp32",
}
FP16 = {
    "precision": "fp16",
    "epochs": 3,
    "lr": 0.02,
    "warmup_epochs": 1.5,
    "schedule": "cosine",
    "label_smoothing": 0.2,
    "weight_decay": 0.01,
    "seed": 3,
}
BF16 = {"precision": "bf16", "epochs": 2, "warmup_epochs": 0, "seed": 1, "lr": 0.5}
# Past epoch 30 and 60, and past epoch 30 on the cosine
LONG = {**FIRST, "epochs": 61, "batch": 4, "max_steps": 1}
LONG_COSINE = {**LONG, "epochs": 33, "schedule": "cosine", "warmup_epochs": 2, "lr": 1}
CASES = {
    "the default recipe": ("small", LONG),
    "the cosine": ("small", LONG_COSINE),
    "images of 224": ("small", {"batch": 8, "epochs": 1, "precision": "fp32"}),
    "all flags": ("drop", OTHER),
    "fp16": ("loud", {**FIRST, **FP16}),
    "bf16": ("norm", {**FIRST, **BF16}),
    "no momentum": ("small", {**FIRST, "epochs": 2, "momentum": 0, "weight_decay": 0}),
    "mobilenet_v3_small": (None, {**FIRST, "epochs": 2, "seed": 5, "min_crop": 1}),
}
SHARED = ("all flags", "fp16", "bf16")  # by two processes
STOPPED = {"fp16": 7}  # after step 2 of epoch 2


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As the scripts' processes have: sums are taken in the same order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """7 classes of pictures of all shapes, one of them grey and one turned by EXIF."""
    folder = tmp_path_factory.mktemp("photographs")
    numbers = numpy.random.default_rng(0)
    for part, count in (("train", 43), ("val", 17)):
        for number in range(count):
            label = number % 7
            shape = (*numbers.integers(24, 64, 2), 3)
            pixels = numbers.integers(0, 160, shape) + 12 * label
            image = Image.fromarray(pixels.astype("uint8"))
            exif = Image.Exif()
            if number == 3:
                image = image.convert("L")
            if number == 5:
                exif[0x112] = 6
            path = folder / part / f"class {10 * label}" / f"{number}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path, exif=exif)
    return folder


def words(recipe):
    """Flags of the command line."""
    for name, value in recipe.items():
        flag = {"batch": "-b"}.get(name, "--" + name.replace("_", "-"))
        if value is not False:
            yield from [flag] if value is True else [flag, str(value)]


@pytest.fixture(scope="module")
def ran(photographs, tmp_path_factory):
    """Runs a script for all cases, once; returns {case: (what each process found, output folder)}."""

    @functools.cache
    def of(name):
        cases = CASES if name == "dataparallel" else SHARED
        folder, runs = tmp_path_factory.mktemp(name), []
        for case in cases:
            net, recipe = CASES[case]
            flags = ["--data", photographs, "-j", 0, "--output", folder / case]
            flags += ["--print-interval", 1, *words(recipe)]
            if net is None:
                flags += ["--arch", case]
            flags = [str(flag) for flag in flags]
            if case in STOPPED:
                runs.append((case, net, flags, STOPPED[case]))
                flags = [*flags, "--resume", "auto"]
            runs.append((case, net, flags, None))
        processes = 1 if name == "dataparallel" else 2
        found = start(name)(
            folder, processes, recorded, name=name, runs=[run[1:] for run in runs]
        )
        return {
            case: (
                [
                    [one for run, one in zip(runs, rank, strict=True) if run[0] == case]
                    for rank in found
                ],
                folder / case,
            )
            for case in cases
        }

    return of


@pytest.fixture(scope="module")
def expected(photographs):
    """What the reference comes to."""

    @functools.cache
    def of(case, processes):
        net, recipe = CASES[case]

        def build(classes):
            if net:
                return NETS[net](classes)
            return torchvision.models.get_model(case, num_classes=classes)

        r = Namespace(**{**DEFAULTS, **recipe})
        return reference.train(photographs, build, crops[case], r, processes)

    crops = {}

    def with_crops(case, found, processes):
        merged = {}
        for rank in found:
            for run in rank:
                merged |= run["crops"]
        # the same whatever the strategy
        assert crops.setdefault(case, merged) == merged
        return of(case, processes)

    return with_crops


NAMES = [
    *[("dataparallel", 1, case) for case in CASES],
    *[
        pytest.param(name, 2, case, marks=marks)
        for name, marks in (
            ("distributed", ()),
            ("multiprocessing_distributed", ()),
            ("horovod_distributed", pytest.mark.horovod),
        )
        for case in SHARED
    ],
]


@pytest.mark.parametrize("name, processes, case", NAMES)
def test_a_run_is_that_of_the_reference(ran, expected, name, processes, case):
    found, output = ran(name)[case]
    right = expected(case, found, processes)
    for rank in found:
        end = rank[-1]
        rates = sum((run["rates"] for run in rank), [])
        assert rates == pytest.approx(right.rates, rel=1e-12)
        assert end["strides"][-1] is not None
        for key, weight in right.epochs[-1][0].items():
            assert weight.stride() == end["weights"][key].stride()
            assert torch.equal(weight, end["weights"][key]), (
                key,
                (weight - end["weights"][key]).abs().max(),
            )
