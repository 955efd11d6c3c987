"""A run's progress, and the files from which a killed run resumes."""

import fcntl
import json
import math
import os
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from common.arguments import AUTO
from common.data import fingerprint
from common.errors import UserError
from common.images import NO_TORCHCODEC
from common.meters import AllReduce, averages, format_metrics, metric_names

# best.pt is from the epoch with the highest value (for a loss, the lowest)
BEST_METRIC, LOWER_IS_BETTER = "val_top1", False
# Flags that a resumed run may change. load() compares the images, not their paths.
MAY_CHANGE = {"data", "synthetic", "output", "resume", "evaluate", "workers"}
MAY_CHANGE |= {"print_interval", "compile", "save_minutes", "accumulate"}
MAY_CHANGE |= {"local_rank", "nprocs", "nnodes", "node_rank", "dist_url"}


class Checkpoint:
    """A run's progress, which is saved to and restored from OUTPUT/checkpoint.pt."""

    def __init__(
        self, args: Namespace, datasets: tuple[Dataset, ...], objects: dict[str, Any]
    ):
        """`objects` have a state_dict(); the one named "state_dict" is the bare model.

        `datasets` are for training and validation; a resumed run needs the same images.
        Raises UserError if no metric is named BEST_METRIC.
        """
        self.args, self.objects = args, objects
        names = [f"val_{name}" for name in metric_names(len(datasets[1].classes))]
        if BEST_METRIC not in names:
            raise UserError(f"BEST_METRIC {BEST_METRIC} is none of {', '.join(names)}")
        self.file = args.output / "checkpoint.pt"
        self.best_file = args.output / "best.pt"
        self.images = [number for one in datasets for number in fingerprint(one)]
        recipe = {**vars(args), "classes": len(datasets[1].classes)}
        recipe["images"] = "{} (digest {}), {} (digest {})".format(*self.images)
        if args.schedule == "step":
            del recipe["epochs"]  # this schedule does not use them
        self.recipe = {n: str(v) for n, v in recipe.items() if n not in MAY_CHANGE}
        self.epoch, self.step = 0, 0  # finished epochs, and steps of the next epoch
        self.sums: dict[str, Tensor] = {}  # sums of these steps, over all processes
        self.records: list[dict] = []  # one for each finished epoch, as in epochs.jsonl
        self.best = math.inf if LOWER_IS_BETTER else -math.inf  # of BEST_METRIC
        self.saved_at = time.monotonic()

    def load(self, rank: int) -> None:
        """Load the file given by --resume, if any; rank 0 also locks the output folder.

        Raises UserError if the file does not fit this run or another run uses --output.
        """
        path, output = self.args.resume, self.args.output
        if path == AUTO:
            path = self.file if self.file.exists() or self.args.evaluate else None
        if not self.args.evaluate:
            if self.file.exists() and (path or Path()).resolve() != self.file.resolve():
                text = f"--output {output} holds another run"
                raise UserError(f"{text}: add --resume, or choose another --output")
            output.mkdir(parents=True, exist_ok=True)
            if rank == 0:
                self.lock = lock_file(output / "lock")
        if path is None:
            return
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
            recipe = content["recipe"]
        except Exception as error:  # the unpickler raises many kinds
            reason = type(error).__name__
            raise UserError(f"--resume {path} cannot be loaded: {reason}") from None
        compared, loaded = self.recipe, self.objects
        if self.args.evaluate:
            compared, loaded = ("arch", "classes"), ("state_dict",)
            self.objects["state_dict"].transform_input = recipe["pretrained"] == "True"
        for name in compared:
            now = self.recipe[name]
            if recipe.get(name, now) != now:  # other strategies may lack a flag
                text = f"{path} was saved with {name} = {recipe[name]}, now it is {now}"
                raise UserError(f"{text}: use the same, or start a new run")
        for name in loaded:
            if name not in content:
                raise UserError(f"{path} has no {name}: resume with the same script")
            self.objects[name].load_state_dict(content[name])
        self.epoch, self.step = content["epoch"], content["step"]
        self.sums, self.records = content["sums"], content["records"]
        if self.best_file.exists():  # a new folder has no best.pt
            self.best = content["best_acc1"].item()

    def compare_ranks(
        self, rank: int, world_size: int, device: torch.device, all_reduce: AllReduce
    ) -> None:
        """Raise UserError if a process's images or progress differ from rank 0's."""
        # Each process fills its row of a table of zeros; the sum is the whole table
        facts = [*self.images, self.epoch, self.step]
        table = torch.zeros(world_size, len(facts), dtype=torch.float64)
        table[rank] = torch.tensor(facts, dtype=torch.float64)
        table = all_reduce(table.to(device))
        if different := (table != table[0]).any(dim=1).nonzero().flatten().tolist():
            raise UserError(
                f"rank {different[0]} has different images or another checkpoint than "
                "rank 0: --data and --output must be the same on all machines"
            )

    def record_interval(self, step: int, sums: dict[str, Tensor]) -> None:
        """Add an interval's sums; raise UserError if the loss is infinite or NaN."""
        if not math.isfinite(loss := sums["loss"].item()):
            raise UserError(f"the loss is {loss} by step {step}: lower --lr")
        self.step = step
        self.sums = {name: self.sums.get(name, 0) + x for name, x in sums.items()}

    def record_epoch(self, val: dict[str, float], speed: dict[str, float]) -> None:
        """Finish the epoch; record its averages, validation averages, and `speed`."""
        train = averages(self.sums)
        record = {"epoch": self.epoch, "steps": self.step, "images": train["images"]}
        record |= {f"train_{name}": x for name, x in train.items() if name != "images"}
        record |= {f"val_{name}": x for name, x in val.items()}
        self.records.append(record | speed)
        self.epoch, self.step, self.sums = self.epoch + 1, 0, {}

    def save(self) -> None:
        """Write epochs.jsonl, best.pt if the metric improved, then checkpoint.pt."""
        files = [self.file]
        value = self.records[-1][BEST_METRIC] if self.step == 0 else self.best
        if value < self.best if LOWER_IS_BETTER else value > self.best:
            self.best = value
            files.insert(0, self.best_file)
        content = {
            "epoch": self.epoch,
            "step": self.step,
            "arch": self.args.arch,
            # Other scripts expect a tensor; float32 would round 200 / 3
            "best_acc1": torch.tensor(self.best, dtype=torch.float64),
            "sums": self.sums,
            "records": self.records,
            "recipe": self.recipe,
            **{name: one.state_dict() for name, one in self.objects.items()},
        }
        lines = "".join(json.dumps(record) + "\n" for record in self.records)
        replace_file(self.file.with_name("epochs.jsonl"), lines.encode())
        for file in files:
            replace_file(file, content)
        self.saved_at = time.monotonic()

    def save_if_due(self) -> None:
        """Save if the last save was at least --save-minutes ago."""
        if time.monotonic() - self.saved_at >= 60 * self.args.save_minutes:
            self.save()

    def print_header(self, device: torch.device, world_size: int, steps: int) -> None:
        """Print the model, the devices and where the run starts (`steps` per epoch)."""
        args, (train, _, val, _), name = self.args, self.images, "CPU"
        model = self.objects["state_dict"]
        weights = sum(one.numel() for one in model.parameters())
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
            name += f" ({torch.cuda.device_count()} visible)"
        lacks = NO_TORCHCODEC and args.decoder == "pil"
        reason = f" (no TorchCodec: {NO_TORCHCODEC})" if lacks else ""
        print(f"{args.arch} ({type(model).__name__}), {weights:,} parameters", end=", ")
        print(f"{args.precision}, {world_size} x {name}")
        print(f"decoder {args.decoder}{reason}", flush=True)
        if args.evaluate:
            return
        batch = args.global_batch_size
        share = batch // world_size // args.accumulate
        rate = self.objects["optimizer"].param_groups[0]["initial_lr"]
        start = f"resumed from epoch {self.epoch + 1}, step {self.step}"
        if self.epoch >= args.epochs:
            start = f"complete: all {self.epoch} epochs are done"
        elif not self.epoch + self.step:
            start = "a new run"
        images = f"{train:,} training and {val:,} validation images"
        print(f"{images} of {self.recipe['classes']} classes")
        parts = f"{world_size} process{'es' * (world_size > 1)} x {share} images"
        parts += f" x {args.accumulate} micro-batches" * (args.accumulate > 1)
        print(f"{steps:,} steps per epoch, {batch} images per step: {parts}", end=", ")
        print(f"learning rate {rate:.4g}")
        print(f"{args.output}: {start}", flush=True)

    def print_epoch(self) -> None:
        """Print the last epoch's metrics, the best value so far, and the speed."""
        record, best = self.records[-1], BEST_METRIC.removeprefix("val_")
        seconds = record["seconds"]
        took = f"{seconds:.1f} s" if seconds < 60 else tqdm.format_interval(seconds)
        print(
            f"epoch {self.epoch}/{self.args.epochs}: "
            f"{format_metrics(record, prefix='train_')}; "
            f"val {format_metrics(record, prefix='val_')}, "
            f"best {format_metrics({best: self.best}, [best]).removeprefix('top-1 ')}; "
            f"{record['images_per_second']:.0f} images/s, {took}, saved",
            flush=True,
        )


def lock_file(path: Path) -> Any:
    """Lock a file until this process ends; raise UserError if it is locked already."""
    file = open(path, "w")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"another process is writing to --output {path.parent}: let it end, or "
            f"choose another --output (if its machine has died, delete {path})"
        ) from None
    except OSError:  # this file system does not support locks
        pass
    return file


def replace_file(path: Path, content: bytes | dict) -> None:
    """Write a temporary file, flush it to the disk, and rename it to `path`.

    At any moment, a reader or a crash finds either the old content or the new content.
    """
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        if isinstance(content, bytes):
            file.write(content)
        else:
            torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
