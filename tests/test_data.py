"""Which images, which pixels, in which order."""

import gc
import multiprocessing
import subprocess

import numpy
import pytest
import torch
from ranks import parse
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler

from common.data import build_datasets, build_loader, open_folders
from common.errors import ImageError, UserError

CPU = torch.device("cpu")


def arguments(*flags):
    return parse("--image-size", 32, "-b", 4, *flags)


def train_loader(args, workers=0):
    train_set, _ = build_datasets(args)
    sampler = DistributedSampler(train_set, 1, 0, seed=args.seed, drop_last=True)
    return build_loader(args, train_set, sampler, 4, workers, CPU, training=True)


def pixels_of(loader, epoch):
    loader.batches.sampler.set_epoch(epoch)
    return [
        image.contiguous().numpy().tobytes() for images, _ in loader for image in images
    ]


def test_loader_processes_start_once_and_see_each_new_epoch(pictures):
    """A fork beside the threads of a training process may leave a child that hangs."""
    args = arguments("--data", pictures)
    before = set(multiprocessing.active_children())
    gc.unfreeze()
    loader = train_loader(args, workers=2)
    started = set(multiprocessing.active_children()) - before
    assert len(started) == 2
    assert gc.get_freeze_count() > 10_000  # or the collector un-shares their memory
    epochs = set()
    for epoch in range(3):
        seen = pixels_of(loader, epoch)
        assert seen == pixels_of(train_loader(args), epoch)
        epochs |= set(seen)
        assert set(multiprocessing.active_children()) - before == started
    other = train_loader(arguments("--data", pictures, "--seed", 1))
    epochs |= set(pixels_of(other, epoch=0))
    assert len(epochs) == 4 * 16  # no picture twice


@pytest.mark.parametrize(
    "command, message",
    [
        ("mv train training", "cannot open the folder .*train: No such file"),
        ("mv val/dog val/wolf", "2 found in only one of them: dog, wolf"),
        ("mkdir val/wolf", "in only one of them: wolf"),  # dog and cat are in both
        ("rm -r train/* val/*", "Couldn't find any class folder in .*train"),
        ("rm val/cat/*", "no valid file for the classes cat"),
    ],
)
def test_bad_folders_are_refused(pictures, command, message):
    subprocess.run(["sh", "-c", command], cwd=pictures, check=True)
    for look in (build_datasets, open_folders)[: 1 + ("rm val" not in command)]:
        with pytest.raises(UserError, match=message):
            look(arguments("--data", pictures))


def test_pictures_may_be_deeper_in_their_class_folder(pictures):
    nested = pictures / "train" / "cat" / "more" / "ünï code"
    nested.mkdir(parents=True)
    for path in (pictures / "train" / "cat").glob("*.JPEG"):
        path.rename(nested / path.name)
    (pictures / "train" / "notes.txt").touch()  # is no class
    train_set, _ = build_datasets(arguments("--data", pictures))
    assert len(train_set) == 16 and train_set[0][1] == 0


def test_more_batch_than_images_is_refused(pictures):
    def load(batch, *flags):
        args = arguments("--data", pictures, "-b", batch, "--pretrained", *flags)
        train_set, val_set = build_datasets(args)
        assert (len(train_set), len(val_set)) == (16, 8)
        build_loader(args, train_set, range(16), batch, 0, CPU, training=True)

    load(16)
    load(17, "--evaluate")
    with pytest.raises(UserError, match="16 training images do not fill one global"):
        load(17)


def loaded(dataset, workers=0):
    args = arguments("--data", "x")
    sampler = range(len(dataset))
    return list(build_loader(args, dataset, sampler, 4, workers, CPU, training=False))


IMAGE = torch.zeros(3, 4, 4, dtype=torch.uint8)


def test_items_of_another_kind_are_refused_in_one_line():
    """Normalized images above all, which the device would normalize again."""
    for item, described in (
        ((IMAGE / 255, 1), "(a float32 tensor (3, 4, 4), of type int)"),
        ((IMAGE[:, 1:], 1), "(a uint8 tensor (3, 3, 4), of type int)"),
        ((IMAGE, 1.0), "(a uint8 tensor (3, 4, 4), of type float)"),
        ({"image": IMAGE, "label": 1}, "of type dict"),
    ):
        with pytest.raises(ImageError) as raised:
            loaded([(IMAGE, 0), item], workers=1)
        assert f"a dataset item is {described}, but" in str(raised.value)


def test_items_of_other_people_s_data_sets():
    small = torch.zeros(3, 2, 2, dtype=torch.uint8)
    with pytest.raises(ImageError, match="a batch has images of 2 px and 4 px"):
        loaded([(IMAGE, 0), (small, 0)])
    tensors = TensorDataset(torch.stack([IMAGE, IMAGE]), torch.tensor([3, 4]))
    for dataset in ([(IMAGE, numpy.int64(3)), [IMAGE, 4]], tensors):
        ((_, labels),) = loaded(dataset)
        assert labels.tolist() == [3, 4] and labels.dtype == torch.int64


def test_synthetic_batches_are_on_the_device_and_of_any_number():
    args = arguments("--synthetic", 11)
    assert [len(one) for one in build_datasets(args)] == [11, 4]
    shapes = [tuple(images.shape) for images, _ in train_loader(args)]
    assert shapes == [(4, 3, 32, 32)] * 2
    _, val_set = build_datasets(arguments("--synthetic", 125))
    validation = build_loader(args, val_set, range(5), 4, 0, CPU, training=False)
    assert [len(images) for images, _ in validation] == [4, 1]
