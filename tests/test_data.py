"""Which images, which pixels, in which order."""

import gc
import hashlib
import multiprocessing
from argparse import Namespace

import numpy
import pytest
import torch
from conftest import ROOT
from ranks import shard_region
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler

from common import data, limits
from common.data import (
    EpochBatches,
    ImageFolder,
    build_datasets,
    build_loader,
    check_datasets,
    share_out,
)
from common.errors import ImageError, UserError

CPU = torch.device("cpu")


def arguments(data, **changes):
    base = dict(
        data=data,
        synthetic=None,
        image_size=32,
        min_crop=0.08,
        no_flip=False,
        decoder="auto",
        seed=0,
        no_channels_last=False,
        pretrained=False,
        max_steps=None,
        global_batch_size=4,
        evaluate=False,
        workers=0,
    )
    return Namespace(**{**base, **changes})


def train_batches(args, epoch, rank=0, world_size=1, workers=0, first_step=0):
    train_set, _ = build_datasets(args)
    args.workers = workers * world_size
    share_out(args, rank, world_size, world_size)
    sampler = DistributedSampler(
        train_set, world_size, rank, seed=args.seed, drop_last=True
    )
    loader = build_loader(args, train_set, sampler, CPU, training=True)
    sampler.set_epoch(epoch)
    loader.first_step = first_step
    return [(images, labels) for images, labels in loader]


def digest(image):
    return hashlib.sha256(image.contiguous().numpy().tobytes()).hexdigest()


def global_batches(args, world_size, workers, epoch=1):
    """Per step the set of (pixels, label) over all ranks."""
    shards = [
        train_batches(args, epoch, rank, world_size, workers)
        for rank in range(world_size)
    ]
    return [
        {
            (digest(image), int(label))
            for images, labels in step
            for image, label in zip(images, labels, strict=True)
        }
        for step in zip(*shards, strict=True)
    ]


def test_global_batch_and_pixels_do_not_depend_on_world_size_or_workers(pictures):
    args = arguments(pictures)
    expected = global_batches(args, 1, 0)
    assert len(expected) == 4 and all(len(step) == 4 for step in expected)
    for world_size, workers in ((2, 0), (4, 0), (1, 1), (1, 3), (2, 1)):
        assert global_batches(args, world_size, workers) == expected, (
            world_size,
            workers,
        )


def test_pixels_depend_on_seed_and_epoch(pictures):
    def epoch_of(seed, epoch):  # all images of the epoch, whatever their order
        steps = global_batches(arguments(pictures, seed=seed), 1, 0, epoch=epoch)
        return set().union(*steps)

    first = epoch_of(0, 0)
    assert len(first) == 16 and epoch_of(0, 0) == first
    assert not first & epoch_of(0, 1) and not first & epoch_of(1, 0)


def test_persistent_workers_see_each_new_epoch(pictures):
    args = arguments(pictures)
    train_set, _ = build_datasets(args)
    args.workers = 2
    share_out(args, 0, 1, 1)
    sampler = DistributedSampler(train_set, 1, 0, seed=0, drop_last=True)
    loader = build_loader(args, train_set, sampler, CPU, training=True)
    epochs = set()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        seen = [digest(image) for images, _ in loader for image in images]
        fresh = [
            digest(image)
            for images, _ in train_batches(args, epoch)
            for image in images
        ]
        assert seen == fresh
        epochs |= set(seen)
    assert len(epochs) == 3 * 16  # no picture twice


def test_loader_processes_start_before_training_and_are_the_only_ones(pictures):
    """A fork beside the threads of a training process may leave a child that hangs."""
    args = arguments(pictures)
    train_set, _ = build_datasets(args)
    args.workers = 2
    share_out(args, 0, 1, 1)
    before = set(multiprocessing.active_children())
    gc.unfreeze()
    sampler = DistributedSampler(train_set, 1, 0, seed=0, drop_last=True)
    loader = build_loader(args, train_set, sampler, CPU, training=True)
    started = set(multiprocessing.active_children()) - before
    assert len(started) == 2
    assert gc.get_freeze_count() > 10_000  # or the collector un-shares their memory
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert len(list(loader)) == 4
        assert set(multiprocessing.active_children()) - before == started


def test_a_resumed_epoch_goes_on_with_the_same_batches(pictures):
    whole = train_batches(arguments(pictures), epoch=3)
    rest = train_batches(arguments(pictures), epoch=3, first_step=2, workers=1)
    assert len(whole) == 4 and len(rest) == 2
    for (images, labels), (images_again, labels_again) in zip(
        whole[2:], rest, strict=True
    ):
        assert torch.equal(images, images_again) and torch.equal(labels, labels_again)


@pytest.mark.parametrize("images", range(1, 12))
@pytest.mark.parametrize("name", [path.stem for path in sorted(ROOT.glob("*.py"))])
def test_validation_shards_count_each_image_once(name, images):
    """By the lines of the scripts themselves, whose region `shard` this runs."""
    for world_size in (1,) if name == "dataparallel" else (1, 2, 3, 4):
        counted = []
        for rank in range(world_size):
            names = {
                "args": Namespace(seed=0),
                "DistributedSampler": DistributedSampler,
            }
            names |= {"train_set": [0] * 8, "val_set": [0] * images}
            exec(
                shard_region(ROOT / f"{name}.py"),
                names | {"rank": rank, "world_size": world_size},
                names,
            )
            batches = EpochBatches(names["val_sampler"], 2, False, None)
            counted += [index for batch in batches for _, index in batch]
        assert sorted(counted) == list(range(images))


def test_normalised_once_and_like_torchvision(pictures):
    from torchvision.transforms import v2

    args = arguments(pictures, global_batch_size=8)
    _, val_set = build_datasets(args)
    share_out(args, 0, 1, 1)
    loader = build_loader(args, val_set, range(len(val_set)), CPU, training=False)
    images, labels = next(iter(loader))
    assert images.is_contiguous(memory_format=torch.channels_last)
    usual = v2.Compose(
        [
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    expected = torch.stack([usual(val_set[index][0]) for index in range(8)])
    torch.testing.assert_close(images, expected, rtol=0, atol=1e-5)
    assert labels.tolist() == [0] * 4 + [1] * 4


def test_paths_come_back_from_the_packed_index(pictures):
    (pictures / "train" / "cat" / "ünï code.JPEG").write_bytes(b"")
    folder = ImageFolder(pictures / "train", ["cat", "dog"], None, "pil")
    found = set(folder.paths)
    assert found == {str(path) for path in (pictures / "train").glob("*/*.JPEG")}


@pytest.mark.parametrize(
    "spoil, message",
    [
        (
            lambda root: (root / "train").rename(root / "training"),
            "cannot open the folder .*train",
        ),
        (
            lambda root: (root / "val" / "dog").rename(root / "val" / "wolf"),
            "in one of them only: dog, wolf",
        ),
        (
            lambda root: [file.unlink() for file in (root / "val" / "cat").iterdir()],
            "no image in class folder cat",
        ),
    ],
)
def test_bad_folders_are_refused(pictures, spoil, message):
    spoil(pictures)
    for look in (build_datasets, check_datasets):
        args = arguments(pictures)
        share_out(args, 0, 1, 1)
        with pytest.raises(UserError, match=message):
            look(args)


def test_the_check_before_a_launch_lists_few_images(pictures, monkeypatch):
    """The processes of the training list all of them, 1.3 million in ImageNet."""
    nested = pictures / "train" / "cat" / "more" / "cats"
    nested.mkdir(parents=True)
    for path in (pictures / "train" / "cat").glob("*.JPEG"):
        path.rename(nested / path.name)
    (pictures / "train" / "cat" / "notes.txt").touch()
    (pictures / "train" / "notes.txt").touch()  # is no class
    needed, listed = [], []
    monkeypatch.setattr(
        limits, "check_shared_memory", lambda *what: needed.append(what)
    )
    is_image = data.has_file_allowed_extension
    monkeypatch.setattr(
        data,
        "has_file_allowed_extension",
        lambda *what: listed.append(what) or is_image(*what),
    )
    for batch, workers in ((1, 0), (1, 1), (2, 1), (1, 7)):
        args = arguments(pictures, global_batch_size=batch, workers=workers)
        share_out(args, 0, 1, 1)
        build_datasets(args)
        listed.clear()
        with monkeypatch.context() as patch:
            patch.setattr(data, "make_dataset", None)
            assert check_datasets(args) == 2
        assert needed[-1] == needed[-2]
        enough = batch * (2 * workers + 2)
        assert len(listed) <= 2 * (enough + 1) + 1


def test_more_batch_than_images_is_refused(pictures):
    with pytest.raises(
        UserError, match="16 training images are less than one global batch of 32"
    ):
        train_batches(arguments(pictures, global_batch_size=32), 0)
    assert len(train_batches(arguments(pictures, global_batch_size=16), 0)) == 1


@pytest.mark.parametrize(
    "batch, processes, nearest", ((63, 2, 64), (10, 4, 8), (1, 4, 4), (100, 3, 99))
)
def test_a_batch_that_cannot_be_divided_is_refused(batch, processes, nearest):
    args = Namespace(global_batch_size=batch, workers=0)
    with pytest.raises(UserError, match=f"the nearest that can is {nearest}$"):
        share_out(args, 0, processes, processes)


def test_the_machine_has_the_same_loader_processes_whatever_the_strategy():
    for workers in range(7):
        for processes in (1, 2, 3, 4):
            shares = []
            for local_rank in range(processes):
                args = Namespace(global_batch_size=24, workers=workers)
                share_out(args, local_rank, 2 * processes, processes)
                assert args.per_process_batch_size == 12 // processes
                shares.append(args.per_process_workers)
            assert sum(shares) == workers and max(shares) - min(shares) <= 1


class Items(torch.utils.data.Dataset):
    """A data set of somebody else."""

    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def loaded(dataset, workers):
    args = arguments(None, workers=workers)
    share_out(args, 0, 1, 1)
    return list(build_loader(args, dataset, range(len(dataset)), CPU, training=False))


IMAGE = torch.zeros(3, 4, 4, dtype=torch.uint8)


@pytest.mark.parametrize("workers", (0, 1))
@pytest.mark.parametrize(
    "item, said",
    [
        ((IMAGE / 255, 1), r"(a float32 tensor (3, 4, 4), of type int)"),
        ((IMAGE[0], 1), r"(a uint8 tensor (4, 4), of type int)"),
        ((IMAGE[:, 1:], 1), r"(a uint8 tensor (3, 3, 4), of type int)"),
        ((IMAGE, 1.0), r"(a uint8 tensor (3, 4, 4), of type float)"),
        ((IMAGE, 1, 2), r"(a uint8 tensor (3, 4, 4), of type int, of type int)"),
        ({"image": IMAGE, "label": 1}, "of type dict"),
        (IMAGE, "a uint8 tensor (3, 4, 4)"),
        ((IMAGE[0, 0, 0], 1), "(a uint8 tensor (), of type int)"),
    ],
)
def test_items_of_another_kind_are_refused_in_one_line(item, said, workers):
    """Normalised images above all, which the device would normalise again."""
    with pytest.raises(ImageError) as raised:
        loaded(Items((IMAGE, 0), item), workers)
    assert str(raised.value) == (
        f"item 1 of Items is {said}, but it has to be a pair of a uint8 tensor "
        "(3, S, S) and an int label: images are normalised later, on the device"
    )


def test_images_of_a_batch_have_one_size():
    small = torch.zeros(3, 2, 2, dtype=torch.uint8)
    with pytest.raises(ImageError, match="a batch has images of 2 and of 4 pixels"):
        loaded(Items((IMAGE, 0), (small, 0)), 0)
    numbered = Items((IMAGE, numpy.int64(3)), [IMAGE, 4])
    ((_, labels),) = loaded(numbered, 0)
    assert labels.tolist() == [3, 4] and labels.dtype == torch.int64
    tensors = TensorDataset(torch.stack([IMAGE, IMAGE]), torch.tensor([5, 6]))
    ((_, labels),) = loaded(tensors, 0)
    assert labels.tolist() == [5, 6] and labels.dtype == torch.int64


def test_synthetic_batches_are_on_the_device_and_of_any_number():
    args = arguments(None, synthetic=11, global_batch_size=4)
    train_set, val_set = build_datasets(args)
    assert (len(train_set), len(val_set)) == (11, 1)
    batches = train_batches(args, 0)
    assert len(batches) == 2
    assert all(images.shape == (4, 3, 32, 32) for images, _ in batches)
    args = arguments(None, synthetic=125, global_batch_size=4)
    share_out(args, 0, 1, 1)
    validation = build_loader(args, build_datasets(args)[1], range(5), CPU, False)
    assert [len(images) for images, _ in validation] == [4, 1]
