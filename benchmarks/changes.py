"""What each change gave: the input pipeline and the step, one change after the other.

    python -m benchmarks.changes [ROUNDS]

Each row has one change more than the row above it, up to what the scripts do; what was
tried and left out stands beside what it would have replaced. Prints median ratios to
the first row with their quartiles and writes results/changes.json. Takes five minutes.
"""

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate
from torchvision import transforms
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from benchmarks import usual
from benchmarks.comparison import compared, interleave, print_rows, write_results
from benchmarks.input import TRAIN, arguments, epochs, speed
from benchmarks.photographs import write_photographs
from benchmarks.step import torchrun
from common.data import build_datasets, collate
from common.errors import exit_status
from common.images import (
    NvimgcodecPicture,
    Picture,
    TrainTransform,
    nvimgcodec_decoder,
)

STEPS = 3  # of a measurement
BATCH, SIZE = 16, 224  # images per process, pixels
DRAWN = "box drawn with Python's numbers"


# --- input ---


class LibraryDraw(TrainTransform):
    """The box drawn by torchvision."""

    crop = v2.RandomResizedCrop(224)

    def __call__(self, picture: Picture) -> torch.Tensor:
        """Draw, read and resize."""
        blank = torch.empty(1).expand(3, picture.height, picture.width)
        box = self.crop.make_params([blank])
        part = picture.read(box["top"], box["left"], box["height"], box["width"])
        pixels = v2.functional.resize(part, [self.size, self.size])
        return (
            v2.functional.horizontal_flip(pixels) if random.random() < 0.5 else pixels
        )


class PlanarResize(TrainTransform):
    """The pixels put into planes before they are resized."""

    def __call__(self, picture: Picture) -> torch.Tensor:
        """Draw, read, copy and resize."""
        return super().__call__(Planar(picture))


class Planar:
    """A picture whose parts are (3, H, W) in memory, too."""

    def __init__(self, picture: Picture):
        self.picture = picture
        self.height, self.width = picture.height, picture.width

    def read(self, *box: int) -> torch.Tensor:
        """The pixels of one part."""
        return self.picture.read(*box).contiguous()


class MappedPicture(NvimgcodecPicture):
    """The library reads the file by itself."""

    def __init__(self, path: str):
        self.path = path
        self.codec, self.decoder, self.params = nvimgcodec_decoder(os.getpid())
        self.stream = self.codec.CodeStream(path)
        self.height, self.width = self.stream.height, self.stream.width


def input_changes(folder: Path, rounds: int) -> dict[str, dict]:
    """Single training images on one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    old = usual.train_set(folder / "train")
    paths = [path for path, _ in old.samples]
    as_uint8 = transforms.Compose(
        [*old.transform.transforms[:2], transforms.PILToTensor()]
    )
    with_v2 = v2.Compose([v2.RandomResizedCrop(224), v2.RandomHorizontalFlip()])
    library, ours = LibraryDraw(224, 0.08, True), TrainTransform(224, 0.08, True)
    planar = PlanarResize(224, 0.08, True)
    train_set, _ = build_datasets(arguments(folder, "nvimgcodec"))
    candidates: dict[str, Callable[[int], object]] = {
        "usual: Pillow, v1 transforms, float": old.__getitem__,
        "uint8 tensors, normalised on the device": lambda i: as_uint8(
            old.loader(paths[i])
        ),
        "torchvision decodes, v2 transforms": lambda i: with_v2(
            decode_image(paths[i], ImageReadMode.RGB)
        ),
        "nvImageCodec decodes the cropped part": lambda i: library(
            NvimgcodecPicture(paths[i])
        ),
        DRAWN: lambda i: ours(NvimgcodecPicture(paths[i])),
        "packed index, errors that name the file": train_set.__getitem__,
        "seeded by (seed, epoch, index)": epochs(train_set),
    }
    left_out: dict[str, Callable[[int], object]] = {
        "left out: file mapped, not read": lambda i: ours(MappedPicture(paths[i])),
        "left out: planar before the resize": lambda i: planar(
            NvimgcodecPicture(paths[i])
        ),
    }
    works = {**candidates, **left_out}
    found = interleave(
        {name: speed(work, TRAIN) for name, work in works.items()}, rounds
    )
    rows = compared({name: found[name] for name in candidates}, next(iter(candidates)))
    print_rows("one training image after the other, one core", "images/s", rows)
    others = compared({name: found[name] for name in (DRAWN, *left_out)}, DRAWN)
    print_rows("tried in the place of it", "images/s", others)
    return {"images": rows, "left_out": others}


def batch_changes(rounds: int) -> dict[str, dict]:
    """Making a batch of 64 out of single images."""
    pixels = torch.randint(256, (64, 224, 224, 3), dtype=torch.uint8)
    as_decoded = [(image.permute(2, 0, 1), 0) for image in pixels]
    in_planes = [(image.contiguous(), 0) for image, _ in as_decoded]
    works = {
        "images in planes, batch in planes": lambda _: default_collate(in_planes),
        "images as decoded, batch in planes": lambda _: default_collate(as_decoded),
        "images as decoded, batch likewise": lambda _: collate(as_decoded),
    }
    found = interleave({name: speed(work, 20) for name, work in works.items()}, rounds)
    rows = compared(found, next(iter(works)))
    print_rows("64 images into a batch, one core", "batches/s", rows)
    return rows


# --- step ---

VARIANTS: dict[str, dict] = {
    "fp32, NCHW": {},
    "channels_last": {"channels_last": True},
    "bf16 autocast": {"bf16": True},
    "gradients as views of the buckets": {"gradient_as_bucket_view": True},
    "buffers shared before validation only": {"broadcast_buffers": False},
    "left out: SGD in one kernel": {"fused": True},
    "left out: static_graph, too": {"static_graph": True},
}


def train_steps(options: dict) -> Callable[[], float]:
    """Steps per second of a DDP loop."""
    options = dict(options)
    bf16, fused = options.pop("bf16", False), options.pop("fused", False)
    layout = torch.contiguous_format
    if options.pop("channels_last", False):
        layout = torch.channels_last
    broadcast_buffers = options.pop("broadcast_buffers", True)
    torch.manual_seed(0)
    raw_model = torchvision.models.resnet18().to(memory_format=layout)
    model = DistributedDataParallel(raw_model, **options)
    model.broadcast_buffers = broadcast_buffers
    optimizer = torch.optim.SGD(
        model.parameters(), 0.1, 0.9, weight_decay=1e-4, fused=fused
    )
    images = torch.randn(BATCH, 3, SIZE, SIZE).to(memory_format=layout)
    labels = torch.randint(1000, (BATCH,))

    def measure() -> float:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(STEPS):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                outputs = model(images)
            loss = F.cross_entropy(outputs.float(), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        dist.barrier()
        return STEPS / (time.perf_counter() - began)

    return measure


def step_changes(output: str, rounds: str) -> None:
    """One of two processes: all VARIANTS in turns."""
    dist.init_process_group("gloo")
    options: dict = {}
    candidates = {}
    for name, change in VARIANTS.items():
        options = {**options, **change}
        candidates[name] = train_steps(options)
    found = interleave(candidates, int(rounds))
    if dist.get_rank() == 0:
        Path(output).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure everything."""
    if sys.argv[1:2] == ["--process"]:
        step_changes(*sys.argv[2:])
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "steps.json")
        torchrun("benchmarks.changes", "--process", output, rounds)
        steps = compared(json.loads(output.read_text()), next(iter(VARIANTS)))
        title = f"step of resnet18 at {SIZE} px, 2 processes, {BATCH} images each"
        print_rows(title, "steps/s", steps)
        write_photographs(Path(folder), TRAIN, 4)
        images = input_changes(Path(folder), rounds)
    batches = batch_changes(rounds)
    write_results(
        "changes", {"rounds": rounds, **images, "batches": batches, "steps": steps}
    )


if __name__ == "__main__":
    with exit_status():
        main()
