"""Test the images, their augmentation and order, and the errors for unusable data."""

import multiprocessing
import os
import random
import subprocess
import time
from functools import partial

import numpy
import pytest
import torch
from ranks import Ranks, parse, train_unlike
from torch.utils.data import RandomSampler, TensorDataset, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets

from common.arguments import divide
from common.data import DeviceLoader, EpochSampler, build_datasets, seed_generators
from common.errors import UserError

CPU, NAME = torch.device("cpu"), "distributed"


def loader_of(dataset, *flags, place=(0, 1), sampler=None, training=True):
    """Return a process's loader; `place` is (rank, number of processes)."""
    args = parse("--data", "x", "--decoder", "pil", "-b", 8, "-j", 0, *flags)
    rank, size = place
    if sampler is None:
        sampler = DistributedSampler(dataset, size, rank, seed=1, drop_last=True)
    batch_size = divide(args.global_batch_size, size, "processes")
    if not training:
        batch_size = divide(batch_size, args.accumulate, "micro-batches")
    sampler = EpochSampler(sampler, args.seed, rank, size)
    return DeviceLoader(args, dataset, sampler, batch_size, CPU, training)


def load(loader, epoch, first=0):
    """Return the batches of an epoch: [[(pixels in bytes, label), ...], ...]."""
    set_epoch(loader, epoch, first)
    pairs = (zip(*batch, strict=True) for batch in loader)
    return [[(x.numpy().round(3).tobytes(), int(y)) for x, y in pair] for pair in pairs]


def set_epoch(loader, epoch, first=0):
    """Set the epoch in the same way as a run that resumes after `first` steps."""
    loader.sampler.set_epoch(epoch, first * loader.batch_size)


class Draws(torch.utils.data.Dataset):
    """A dataset of 27 images; three different libraries draw their three channels."""

    def __len__(self):
        return 27

    def __getitem__(self, index):
        channels = random.randbytes(8), numpy.random.bytes(8)
        channels = [list(channel) for channel in channels]
        channels.append(torch.randint(256, (8,)).tolist())
        return torch.tensor(channels, dtype=torch.uint8).view(3, 2, 4), index


def test_a_global_batch_is_the_same_whoever_loads_it():
    """A batch does not depend on the number of processes or of (persistent) loader processes."""
    whole = [load(loader_of(Draws()), epoch) for epoch in range(3)]
    for size, workers in ((1, 2), (2, 0), (4, 1)):
        flags = ("-j", workers)
        before = set(multiprocessing.active_children())
        ranks = [loader_of(Draws(), *flags, place=(r, size)) for r in range(size)]
        started = set(multiprocessing.active_children()) - before
        assert len(started) == size * workers  # before training starts threads
        for epoch, right in enumerate(whole):
            shards = [load(rank, epoch) for rank in ranks]
            assert len(right) == 3  # 27 // 8; the incomplete batch is dropped
            for step, *parts in zip(right, *shards, strict=True):
                assert sorted(sum(parts, [])) == sorted(step)
                assert {len(part) for part in parts} == {8 // size}
            assert set(multiprocessing.active_children()) - before == started
            assert load(ranks[0], epoch, first=2) == shards[0][2:]  # resumed
    other = load(loader_of(Draws(), "--seed", 1), 0)
    images = [image for epoch in (*whole, other) for batch in epoch for image in batch]
    assert len(images) == 4 * 24
    for channel in range(3):  # no library repeats a random number
        seen = {image[32 * channel : 32 * (channel + 1)] for image, _ in images}
        assert len(seen) == len(images)
    assert len({tuple(label for b in epoch for _, label in b) for epoch in whole}) == 3


def test_a_loader_process_ends_if_its_training_process_is_gone():
    """Its parent may be killed before DataLoader first checks whether the parent is alive."""
    check = loader_of(Draws()).worker_init_fn
    child = multiprocessing.get_context("fork").Process
    for target, status in ((check, 0), (partial(check_too_late, check), 1)):
        process = child(target=target, args=(0,))
        process.start()
        process.join()
        assert process.exitcode == status


def check_too_late(check, number):
    os.getppid = lambda: 1  # as if init had adopted this process
    check(number)


class Repeats(WeightedRandomSampler):
    """A sampler that repeats an image within one process."""

    def __init__(self, place):
        super().__init__([0.0] * 5 + [1.0] + [0.0] * 21, 24)

    def set_epoch(self, epoch):
        pass


def test_a_repeated_image_is_augmented_anew():
    """Repetitions in one epoch, on another rank or in another epoch get different augmentations."""
    seen = []
    for place in ((0, 2), (1, 2)):
        loader = loader_of(Draws(), place=place, sampler=Repeats(place))
        for epoch in range(2):
            seen += [one for batch in load(loader, epoch) for one in batch]
    assert {label for _, label in seen} == {5} and len(seen) == 2 * 2 * 24
    assert len(set(seen)) == len(seen)


def test_all_libraries_draw_by_the_key():
    def draw(*key):
        seed_generators(*key)
        return random.random(), numpy.random.rand(), torch.rand(()).item()

    keys = [(0, 0, 1), (0, 1, 1), (1, 0, 1), (0, 0, 2), (0, 0, 1, 1)]
    drawn = [draw(*key) for key in keys]
    assert drawn == [draw(*key) for key in keys]
    assert all(len(set(library)) == 5 for library in zip(*drawn, strict=True))


def test_a_random_sampler_draws_anew_for_each_epoch_and_rank():
    drawn = []
    for epoch, rank in ((0, 0), (1, 0), (0, 1), (0, 0)):
        sampler = EpochSampler(RandomSampler(range(99)), 0, rank, 2)
        sampler.set_epoch(epoch)
        drawn.append(tuple(index for *_, index in sampler))
    assert len({*drawn}) == 3 and drawn[3] == drawn[0]


IMAGE = torch.zeros(3, 4, 4, dtype=torch.uint8)


def test_batches_that_cannot_be_made_are_one_line():
    dataset = TensorDataset(torch.stack([IMAGE] * 16), torch.arange(16))
    few = "images are too few for -b and"
    for flags, place, training, problem in (
        (("-b", 16), (0, 1), True, None),
        (("-b", 17), (0, 1), True, f"16 training {few} 1 pro"),
        (("-b", 20), (0, 2), True, f"16 training {few} 2 pro"),
        (("-b", 17, "--evaluate", "--pretrained"), (0, 1), True, None),
        (("-b", 17), (0, 1), False, None),
        (("-b", 17), (16, 17), False, f"16 validation {few} 17 .*: lower one"),
        (("-b", 63), (0, 2), True, "63 images cannot be divided by 2 proc"),
        (("-b", 1), (1, 2), True, "1 images cannot be divided by 2 proc"),
        (("-b", 12, "--accumulate", 4), (0, 2), False, "6 images .* by 4 micro-bat"),
    ):
        sampler = range(*(place[0], 16, place[1]))
        how = {"place": place, "sampler": sampler, "training": training}
        if problem is None:
            loader_of(dataset, *flags, **how)
            continue
        with pytest.raises(UserError, match=problem):
            loader_of(dataset, *flags, **how)


def test_validation_needs_no_more_memory_than_a_micro_batch():
    dataset = [(IMAGE, numpy.int64(label)) for label in range(11)]
    flags, how = ("--accumulate", 2), {"place": (1, 2), "sampler": range(1, 11, 2)}
    loader = loader_of(dataset, *flags, training=False, **how)
    labels = [labels.tolist() for _, labels in loader]
    assert labels == [[1, 3], [5, 7], [9]]  # batch of 8, 4 per rank, 2 per micro-batch
    ((images, labels),) = loader_of(dataset, *flags, **how)
    assert images.shape == (4, 3, 4, 4) and labels.dtype == torch.int64


def test_images_that_are_normalized_already_are_refused():
    for image in (IMAGE / 255, IMAGE.permute(1, 2, 0), IMAGE[None], IMAGE.numpy()):
        with pytest.raises(UserError, match="image . is not a uint8 tensor"):
            next(iter(loader_of([(image, 1)] * 8)))


def test_waiting_for_data_does_not_include_the_step(monkeypatch):
    """Loading an image takes 1 s, a step 50 s; only loading counts, from 0 in each epoch."""
    clock = [0.0]

    class Slow(Draws):
        def __getitem__(self, index):
            clock[0] += 1
            return super().__getitem__(index)

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    loader = loader_of(Slow())
    for epoch, first in ((0, 0), (1, 1)):
        set_epoch(loader, epoch, first)
        for step, _ in enumerate(loader, start=1):
            assert loader.waited == 8 * step
            clock[0] += 50


FOLDERS = """
mkdir -p elsewhere/deep test "val/cat 2" "train/cat 2" train/cat/.empty "train/cat/a b" train/cat/a train/dog/x.jpg
cp train/dog/3.JPEG "val/cat 2"; cp train/dog/4.JPEG "train/cat 2/long ünï $(printf %0200d).JPEG"
mv train/cat/0.JPEG "train/cat/a b"; mv train/cat/1.JPEG train/cat/a; mv train/cat/2.JPEG elsewhere/deep
ln -s ../../elsewhere train/cat/linked; ln -s a train/cat/again; ln -s 3.JPEG train/cat/file.JPEG
mv train/dog/0.JPEG train/dog/x.jpg/
for suffix in jpg png ppm bmp pgm tif tiff webp gif txt; do
    cp train/dog/1.JPEG train/dog/a.$suffix; cp train/dog/2.JPEG train/dog/b.${suffix^^}
done
touch train/notes.txt; mv train/dog .; ln -s ../dog train/dog
for n in {100..399}; do for part in train val; do
    mkdir $part/n$n; ln $part/cat/3.JPEG $part/n$n/0.jpg
done; done
"""


def test_images_are_those_that_torchvision_finds(pictures):
    """We find the same files with any suffix, behind links, in subfolders, in hundreds of classes."""
    subprocess.run(["bash", "-ec", FOLDERS], cwd=pictures, check=True)
    pair = build_datasets(parse("--data", pictures, "--image-size", 8))
    for images, count in zip(pair, (10 + 1 + 24 + 300, 4 + 1 + 4 + 300), strict=True):
        other = datasets.ImageFolder(images.root)
        paths = [images.root + os.fsdecode(path) for path in images.paths]
        assert list(zip(paths, images.labels.tolist(), strict=True)) == other.samples
        assert images.classes == other.classes and len(other.classes) == 303
        assert [images[n][1] for n in range(count)] == other.targets  # all readable


REFUSED = """
mv train training: No such file or directory: .*train' .--data needs train/CLASS
mv val/dog val/wolf: val/ has no class dog
cp -r val/dog val/wolf: train/ has no class wolf
rm -r train/* val/*: find any class folder in .*val.*--data needs
mv val/dog/* val; rm -r val/*/: val.*--data needs .*see scripts/prepare_imagenet.sh
rm val/dog/*: val/dog has no images
rm train/dog/*; touch train/dog/0.gif: train/dog has no images .*png .*webp
mkdir {train,val}/.ipynb_checkpoints: val/.ipynb_checkpoints has no images
cp -r train/dog train/.x; cp -r val/dog val/.x: val/.x/0.JPEG is hidden; .*4 are hidden
cp -r train/dog .x; mv .x train/dog: train/dog/.x/0.JPEG is hidden; .*8 are hidden
cd train/dog; for i in {1..20}; do mkdir $(printf %0250d); cd 00*; done: File name too long
touch train/dog/._0.JPEG: train/dog/._0.JPEG is hidden; .*1 are hidden
ln -s . train/dog/here; ln -s .. train/dog/up: dog/(up|here) links to a folder above it
mkdir o; ln -s ../../o train/dog/o; ln -s ../train/dog o/y: train/dog/o/y links to a fo
"""


@pytest.mark.parametrize("case", REFUSED.strip().split("\n"))
def test_bad_folders_are_refused(pictures, case):
    command, message = case.split(": ", 1)
    subprocess.run(["bash", "-ec", command], cwd=pictures, check=True)
    with pytest.raises(UserError, match=message):
        build_datasets(parse("--data", pictures))


def test_synthetic_batches_are_of_any_number():
    flags = "--image-size", 32, "-b", 4, "--max-steps", 3  # more than an epoch has
    args = parse("--synthetic", 11, *flags)
    train_set, val_set = build_datasets(args)
    assert (len(train_set), len(val_set)) == (11, 4)
    sampler = EpochSampler(range(11), args.seed, 0, 1)
    loader = DeviceLoader(args, train_set, sampler, 4, CPU, training=True)
    set_epoch(loader, 0, first=1)
    batches = [images for images, _ in loader]
    assert len(loader) == 2 and [tuple(b.shape) for b in batches] == [(4, 3, 32, 32)]
    args = parse("--synthetic", "--max-steps", 50, "-b", 4)  # validates 1 image of 25
    assert [*map(len, build_datasets(args))] == [1281167, 8]


def test_other_images_on_one_rank_are_one_line_in_every_process(pictures, tmp_path):
    """One image's name differs on one rank: each process prints one line, and writes no file."""
    other = tmp_path / "other"
    subprocess.run(["cp", "-r", pictures, other], check=True)
    (other / "val" / "cat" / "3.JPEG").rename(other / "val" / "cat" / "9.JPEG")
    own = [["--data", folder] for folder in (pictures, pictures, other)]
    flags = ["--image-size", 32, "-b", 3, "-j", 0, "--output", tmp_path / "out"]
    with Ranks(tmp_path, 3, train_unlike, name=NAME, flags=flags, own=own) as ranks:
        assert ranks.end(120) == [2] * 3, ranks.text()
        for rank in range(3):
            line = f"{NAME}.py: error: rank 2 has different images or another check"
            assert ranks.log(rank).startswith(line)
            assert ranks.log(rank).count("\n") == 1
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["lock"]
