"""Compare the scripts with tests/reference.py, a program that shares no code with them.

If we compared the scripts only with each other, all could be wrong in the same way.
"""

import functools
import json
import os
import re
import sys
from argparse import Namespace
from functools import partial

import numpy
import pytest
import reference
import torch
import torchvision
from conftest import ROOT, run
from PIL import Image
from played import free_port
from ranks import NETS, recorded, results, run_ranks, small

HOROVOD = "horovod_distributed"
FLAGS = {  # the default, as README.md and --help have it, and another value
    "lr": (0.1, 0.7),
    "warmup_epochs": (5, 0.5),
    "schedule": ("step", "cosine"),
    "momentum": (0.9, 0.5),
    "weight_decay": (1e-4, 0.05),
    "label_smoothing": (0, 0.1),
    "image_size": (224, 32),
    "min_crop": (0.08, 0.6),
    "no_flip": (False, True),
    "max_steps": (None, 2),
    "seed": (0, 7),
    "decoder": ("torchcodec", "pil"),
    "accumulate": (1, 3),
}
DEFAULTS = {flag: default for flag, (default, _) in FLAGS.items()}
OTHER = {flag: other for flag, (_, other) in FLAGS.items()}
OTHER |= {"epochs": 3, "batch": 12, "precision": "fp32"}
# With a batch size of 8, 7 of the 47 images are left over; two processes would pad 47 to 48
FIRST = {"image_size": 20, "batch": 8, "precision": "fp32"}
FP16 = {"precision": "fp16", "epochs": 3, "lr": 0.02, "warmup_epochs": 1.5, "seed": 3}
FP16 |= {"schedule": "cosine", "label_smoothing": 0.2, "weight_decay": 0.01}
FP16 |= {"accumulate": 2}
BF16 = {"precision": "bf16", "epochs": 2, "warmup_epochs": 0, "seed": 1, "lr": 0.5}
# These runs continue beyond epochs 30 and 60, or with the cosine schedule, beyond epoch 30
LONG = {**FIRST, "epochs": 61, "batch": 4, "max_steps": 1}
LONG_COSINE = {**LONG, "epochs": 33, "schedule": "cosine", "warmup_epochs": 2, "lr": 1}
# Cases for any number of processes, with loader processes
MANY = {**FIRST, "batch": 12, "epochs": 6, "lr": 2, "warmup_epochs": 1}
WARM_UP = {"epochs": 1, "warmup_epochs": 1, "schedule": "cosine"}  # and nothing else
CASES = {  # the network, and the flags that differ from the defaults
    "the default recipe": ("small", LONG),
    "the cosine": ("small", LONG_COSINE),
    "images of 224": ("small", {**FIRST, "image_size": 224, **WARM_UP}),
    "all flags": ("drop", OTHER),
    "fp16": ("loud", {**FIRST, **FP16}),
    "bf16": ("norm", {**FIRST, **BF16}),
    "many": ("small", MANY),
    "mobilenet_v3_small": (None, {**FIRST, "epochs": 2, "seed": 5, "min_crop": 0.5}),
}
SHARED = ("all flags", "fp16", "bf16")  # cases for two processes
# These runs are killed after step 2 of epoch 2 and after the last step of epoch 1, then resumed
KILLED = {"fp16": 7, "bf16": 5}
# The bound is derived as follows: with more than two processes, their gradients may be
# added in a different order. A float32 sum of terms whose absolute values add up to A is off by
# at most about eps * A per level of the addition tree; A is a few times the gradient here. SGD
# adds up lr / (1 - momentum) * steps errors. 18 steps, gradients below 1 (asserted), 4 levels.
MOMENTUM_BOUND = 4 * torch.finfo(torch.float32).eps / (1 - 0.9)
WEIGHT_BOUND = 18 * 2 * 12 / 256 * MOMENTUM_BOUND


def horovod_ranks(folder, world_size, task, seconds=180, **arguments):
    """Do what run_ranks does for Horovod, whose processes only horovodrun can start."""
    folder.mkdir(parents=True, exist_ok=True)
    arguments = json.dumps({"folder": str(folder), **arguments}, default=str)
    command = ("horovodrun", "-np", world_size, "-H", f"localhost:{world_size}")
    probe = (sys.executable, ROOT / "tests" / "ranks.py", task.__name__, arguments)
    path = f"{ROOT}:{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}"
    ended = run(*command, "--gloo", *probe, timeout=seconds, PYTHONPATH=path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return results(folder)


def start(name):
    return horovod_ranks if name == HOROVOD else run_ranks


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Use one thread, like the scripts' processes, so that sums are added in the same order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Return 7 classes of images of all shapes; one image is gray, and EXIF rotates another."""
    folder = tmp_path_factory.mktemp("photographs")
    numbers = numpy.random.default_rng(0)
    for part, count in (("train", 47), ("val", 19)):
        for number in range(count):
            label = number % 7
            shape = (*numbers.integers(36, 64, 2), 3)
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
    """Return a case's command-line flags."""
    for name, value in recipe.items():
        flag = {"batch": "-b"}.get(name, "--" + name.replace("_", "-"))
        if value is not False:
            yield from [flag] if value is True else [flag, value]


@pytest.fixture(scope="module")
def ran(photographs, tmp_path_factory):
    """Run a script once for all its cases, with `workers` loader processes.

    Return {case: (for each process, the results of each of its runs; output folder)}.
    """

    @functools.cache
    def of(name, processes, workers):
        folder, runs = tmp_path_factory.mktemp(name), []
        chosen = ("many",) if workers else SHARED if processes == 2 else CASES
        for case in chosen:
            net, recipe = CASES[case]
            flags = ["--data", photographs, "-j", workers, "--output", folder / case]
            interval = 1 if case in KILLED else 3  # not all epochs end with one of 3
            flags += ["--print-interval", interval, *words(recipe)]
            flags += ["--arch", case] if net is None else []
            if case in KILLED:
                flags += ["--save-minutes", 0]
                runs.append((case, net, flags, KILLED[case], free_port()))
                flags = [*flags, "--resume"]
            runs.append((case, net, flags, None, free_port()))
        arguments = {"name": name, "runs": [run[1:] for run in runs]}
        found = start(name)(folder, processes, recorded, **arguments)
        assert len(found) == processes

        def came_to(case):
            places = [place for place, run in enumerate(runs) if run[0] == case]
            return [[rank[place] for place in places] for rank in found]

        return {case: (came_to(case), folder / case) for case in chosen}

    return of


def crops_of(found):
    """Return {(epoch, index): (box, flip)} for all processes and runs together."""
    runs = [run for rank in found for run in rank]
    return {key: crop for run in runs for key, crop in run["crops"].items()}


@pytest.fixture(scope="module")
def expected(photographs, ran):
    """Return the reference's results for the crops that one process of the script has drawn."""

    @functools.cache
    def of(case, processes):
        net, recipe = CASES[case]

        def build(classes):
            if net:
                return NETS[net](classes)
            return torchvision.models.get_model(case, num_classes=classes)

        crops = crops_of(ran(*ALONE)[case][0])
        recipe = Namespace(**{**DEFAULTS, **recipe})
        return reference.train(photographs, build, crops, recipe, processes)

    return of


ALONE = ("dataparallel", 1, 0)
TWO = ("distributed", "multiprocessing_distributed", HOROVOD)
ROWS = [(*ALONE, case) for case in CASES]
ROWS += [(name, 2, 0, case) for name in TWO for case in SHARED]
ROWS += [("dataparallel", 1, 2, "many")]


def marked(rows, *others):
    """Return test parameters whose first value is a script's name, with the marks of its library."""
    marks = {HOROVOD: [pytest.mark.horovod, *others]}
    return [pytest.param(*row, marks=marks.get(row[0], ())) for row in rows]


same = partial(torch.testing.assert_close, rtol=0, atol=0, check_stride=True)


def close(found, right):
    """Accept float64 sums that were grouped differently: up to 400 roundings of 2^-53 each."""
    return found == pytest.approx(right, rel=1e-12)


@pytest.mark.parametrize("name, processes, workers, case", marked(ROWS))
def test_a_run_is_that_of_the_reference(ran, expected, name, processes, workers, case):
    """One or two processes match bit for bit (in a sum of two numbers, the order does not matter)."""
    found, output = ran(name, processes, workers)[case]
    recipe, right = CASES[case][1], expected(case, processes)
    weights, *_ = right.epochs[-1]
    scaler = {"scale": right.scale, "_growth_tracker": right.growth}
    fp16 = recipe["precision"] == "fp16"
    if not workers:  # otherwise, loader processes draw the crops
        assert crops_of(found) == crops_of(ran(*ALONE)[case][0])
    for rank in found:
        assert close([rate for run in rank for rate in run["rates"]], right.rates)
        assert {stride for run in rank for stride in run["strides"]} == {right.stride}
        end = rank[-1]
        same(end["weights"], weights)
        same(end["momenta"], right.momenta)
        assert scaler.items() <= end["scaler"].items() if fp16 else not end["scaler"]
        if case in KILLED:
            killed, _ = rank
            assert len(killed["rates"]) == KILLED[case]
        if fp16:  # the scale has changed, so the test notices a wrong one
            assert killed["scaler"]["scale"] < 2**16
            assert killed["scaler"]["_growth_tracker"] > 0
    saved = torch.load(output / "checkpoint.pt", weights_only=True)
    same(saved["state_dict"], weights)
    records = [json.loads(line) for line in open(output / "epochs.jsonl")]
    steps = len(right.rates) // recipe["epochs"]
    for epoch, (_, train, val) in enumerate(right.epochs):
        record = records[epoch]
        assert (record["epoch"], record["steps"]) == (epoch, steps)
        assert close(record["learning_rate"], right.rates[steps * (epoch + 1) - 1])
        assert (record["images"], record["val_images"]) == (train[3], val[3])
        for part, sums in (("train", train), ("val", val)):
            figures = [record[f"{part}_{name}"] for name in ("loss", "top1", "top5")]
            assert close(figures, [*(sums[:3] * [1, 100, 100] / sums[3])])
    assert len(records) == len(right.epochs)
    hits = [val[1] for *_, val in right.epochs]
    best = torch.load(output / "best.pt", weights_only=True)
    assert best["epoch"] == 1 + hits.index(max(hits))
    same(best["state_dict"], right.epochs[best["epoch"] - 1][0])
    for content in (best, saved):
        assert close(content["best_acc1"].item(), 100 * max(hits) / val[3])


THREE = [("distributed", 3), ("multiprocessing_distributed", 4), (HOROVOD, 3)]


@pytest.mark.parametrize("name, processes", marked(THREE, pytest.mark.full))
def test_more_processes_differ_by_rounding_only(
    ran, expected, name, processes, record_property
):
    found, output = ran(name, processes, 1)["many"]
    right = expected("many", 1)
    for (end,) in found:
        for part, bound, values in (
            ("weights", WEIGHT_BOUND, right.epochs[-1][0].values()),
            ("momentum", MOMENTUM_BOUND, right.momenta),
        ):
            own = end["momenta"] if part == "momentum" else end["weights"].values()
            pairs = zip(own, values, strict=True)
            apart = max((one - other).abs().max().item() for one, other in pairs)
            record_property(f"rounding / {name}, {processes} processes / {part}", apart)
            assert apart <= bound
    assert 0.01 < max(one.abs().max() for one in right.momenta) < 10
    records = [json.loads(line) for line in open(output / "epochs.jsonl")]
    for record, (_, train, val) in zip(records, right.epochs, strict=True):
        assert (record["images"], record["val_images"]) == (train[3], val[3])
        losses = [train[0] / train[3], val[0] / val[3]]
        found = [record["train_loss"], record["val_loss"]]
        assert found == pytest.approx(losses, rel=1e-5)


def test_crops_are_random_within_their_bounds(ran, photographs):
    """The reference gets the crops from the scripts, so it cannot notice wrong crops."""
    files = reference.listing(photographs / "train")
    areas = [numpy.prod(Image.open(file).size) for file, _ in files]
    for case, (_, flags) in CASES.items():
        recipe, crops = {**DEFAULTS, **flags}, crops_of(ran(*ALONE)[case][0])
        flips = numpy.mean([flip for _, flip in crops.values()])
        assert flips == 0 if recipe["no_flip"] else 0.25 < flips < 0.75
        sides = [(index, *crop[0][2:]) for (_, index), crop in crops.items()]
        shares = [height * width / areas[index] for index, height, width in sides]
        ratios = [height / width for _, height, width in sides]
        assert 0.7 < min(ratios) < 0.85 < 1.15 < max(ratios) < 1.4
        least = recipe["min_crop"]
        assert least - 0.03 < min(shares) < least + 0.1 < 0.8 < max(shares) <= 1
        assert len(set(map(str, crops.values()))) > 0.95 * len(crops) > 30


SENT = "--image-size 32 --precision fp32 --min-crop 0.5 --print-interval 4".split()


@pytest.mark.parametrize("name", marked([name] for name in TWO))
def test_a_step_sends_its_gradients_once(tmp_path, digits, name):
    """A step sends four or two bytes per weight, however many micro-batches it has."""
    flags = ["--data", digits, *SENT, "-b", 48, "--max-steps", 2, "--epochs", 1]
    more = [[], ["--accumulate", 4]]
    source = (ROOT / f"{name}.py").read_text()
    choices = re.search(r"--compress-gradients.*choices=(.*)", source)[1]
    for dtype in re.findall(r"\w+16", choices):
        more.append(["--compress-gradients", dtype, "--accumulate", 2])
    runs = []
    for number, others in enumerate(more):
        own = [*flags, *others, "-j", 0, "--output", tmp_path / str(number)]
        runs.append(("small", list(map(str, own)), None, free_port()))
    ranks = start(name)(tmp_path, 2, recorded, name=name, runs=runs, counted=True)
    whole, parts, *halves = ranks[0]
    assert [run["sent"] for run in ranks[0]] == [run["sent"] for run in ranks[1]]
    assert sum(whole["sent"]) == 2 * 4 * sum(w.numel() for w in small(10).parameters())
    assert parts["sent"] == whole["sent"]
    for half in halves:
        assert half["sent"] == [size // 2 for size in whole["sent"]]
    torch.manual_seed(0)
    ends = small(10).state_dict(), *(run["weights"] for run in ranks[0])
    vectors = (torch.cat([weight.flatten() for weight in x.values()]) for x in ends)
    first, whole, parts, *halves = vectors
    moved = (whole - first).abs().max()
    assert 0 < (parts - whole).abs().max() < 1e-4 * moved
    for half in halves:  # bf16 has 8 bits
        assert 0 < (half - whole).abs().max() < 0.05 * moved
    assert len(halves) < 2 or not torch.equal(*halves)  # fp16 has 11
