"""A run's progress, and the files from which a killed run resumes."""

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.utils.data import Dataset

from common.data import fingerprint
from common.errors import UserError
from common.meters import averages

BEST_METRIC = "val_top1"  # best.pt is from the epoch with the highest value
# Flags that a resumed run may change; all others must stay the same
MAY_CHANGE = {"data", "synthetic"}  # images are compared, not paths
MAY_CHANGE |= {"output", "resume", "evaluate", "workers", "print_interval", "compile"}
MAY_CHANGE |= {"save_minutes", "compress_gradients", "local_rank"}
MAY_CHANGE |= {"nprocs", "nnodes", "node_rank", "dist_url"}


def recipe_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags that determine what a run computes."""
    if args.evaluate:  # only the model matters
        return {"arch": args.arch}
    recipe = {name: v for name, v in vars(args).items() if name not in MAY_CHANGE}
    if args.schedule != "cosine":  # whose curve depends on --epochs
        del recipe["epochs"]
    # Pillow also resizes the images, so that their pixels differ
    recipe["decoder"] = "pil" if args.decoder == "pil" else "others"
    return recipe


class Checkpoint:
    """The progress of a run, and OUTPUT/checkpoint.pt, which holds all of it.

    Attributes:
        epoch: number of finished epochs.
        step: number of finished steps in the current epoch.
        sums: the Meter's sums for the current epoch, over all processes.
        best: the highest BEST_METRIC so far.
        records: one dict for each finished epoch, as in epochs.jsonl.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        datasets: tuple[Dataset, Dataset],
        objects: dict[str, Any],
    ):
        """Store what to save.

        Args:
            datasets: for training and validation; a resumed run needs the same images.
            objects: by name, what has a state_dict() to save. The one with the name
                "state_dict" is the model that validates.
        """
        self.args = args
        self.folder = Path(args.output)
        self.file = self.folder / "checkpoint.pt"
        self.objects = objects
        self.images = [fingerprint(dataset) for dataset in datasets]
        self.epoch, self.step = 0, 0
        self.sums: dict[str, Tensor] = {}
        self.best = 0.0
        self.records: list[dict] = []
        self.saved_at = time.monotonic()

    def load(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        all_reduce: Callable[[Tensor], Tensor],
    ) -> None:
        """Load the checkpoint that --resume asks for, if any, in every process.

        With --evaluate, load only the model. Raises UserError if there is no such file,
        if it is from another recipe or other images, or if --output holds another run;
        and, in every process, if one has other images or another checkpoint.
        """
        self._load()
        # Each process fills its row of a table of zeros; the sum is the whole table
        facts = [*self.images[0], *self.images[1], self.epoch, self.step]
        table = torch.zeros(world_size, len(facts), dtype=torch.float64)
        table[rank] = torch.tensor(facts, dtype=torch.float64)
        table = all_reduce(table.to(device))
        if different := (table != table[0]).any(dim=1).nonzero().flatten().tolist():
            raise UserError(
                f"rank {different[0]} has other images or another checkpoint than rank "
                "0: --data and --output must be the same on all machines"
            )

    def _load(self) -> None:
        args, path = self.args, self._path()
        if path is None:
            return
        try:
            with open(path, "rb") as file:
                content = torch.load(file, map_location="cpu", weights_only=True)
            recipe, saved_images = content["recipe"], content["images"]
        except Exception as error:  # the unpickler raises many kinds of errors
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"{path} is not a checkpoint: {reason}") from None
        for name, now in recipe_of(args).items():
            if name in recipe and recipe[name] != now:
                raise UserError(
                    f"--{name.replace('_', '-')} was {recipe[name]} when {path} was "
                    f"saved, and is now {now}: use the same, or another --output"
                )
        if args.evaluate:
            self.objects["state_dict"].load_state_dict(content["state_dict"])
            return
        if saved_images != self.images:
            raise UserError(
                f"{path} was saved with {saved_images[0][0]} training and "
                f"{saved_images[1][0]} validation images that are not those of --data: "
                "use the same images, or another --output"
            )
        for name, one in self.objects.items():
            one.load_state_dict(content[name])
        self.epoch, self.step = content["epoch"], content["step"]
        self.sums, self.records = content["sums"], content["records"]
        if (self.folder / "best.pt").exists():  # a new folder has no best.pt yet
            self.best = content["best_acc1"].item()

    def _path(self) -> Path | None:
        """Return the file to load, or None for a new run."""
        args, exists = self.args, self.file.exists()
        path = self.file if args.resume == "auto" else Path(args.resume or "")
        if args.resume and not path.is_file() and (path != self.file or args.evaluate):
            raise UserError(f"--resume {path}: there is no such file")
        if args.evaluate:
            return path if args.resume else None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--output {self.folder}: {error.strerror}") from None
        if exists and not (args.resume and self.file.samefile(path)):
            raise UserError(
                f"--output {self.folder} holds another run: continue it with --resume, "
                "or choose another --output"
            )
        return path if args.resume and path.exists() else None

    def add(self, step: int, sums: dict[str, Tensor]) -> dict[str, float]:
        """Add an interval's sums over all processes; return their averages.

        Raises UserError if the loss is infinite or not a number.
        """
        self.step = step
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0) + value
        means = averages(sums)
        if not math.isfinite(means["loss"]):
            raise UserError(
                f"the loss became {means['loss']} in epoch {self.epoch + 1} by step "
                f"{step}: start again with a lower --lr or more --warmup-epochs"
            )
        return means

    def finish_epoch(self, val: dict[str, float], figures: dict[str, float]) -> dict:
        """Finish the current epoch and return its record, as in epochs.jsonl.

        `val` has the validation averages; `figures` are added as they are.
        """
        train = averages(self.sums)
        record = {
            "epoch": self.epoch,
            "steps": self.step,
            "images": train.pop("images"),
        }
        record |= {f"train_{name}": value for name, value in train.items()}
        record |= {f"val_{name}": value for name, value in val.items()}
        self.records.append(record | figures)
        self.epoch, self.step, self.sums = self.epoch + 1, 0, {}
        return self.records[-1]

    def save(self) -> None:
        """Write epochs.jsonl, best.pt after the best epoch, and checkpoint.pt last.

        If a file cannot be written, the old one stays and an OSError or RuntimeError is
        raised.
        """
        files = [self.file]
        if self.step == 0 and self.records:
            metric, best = self.records[-1][BEST_METRIC], self.folder / "best.pt"
            if metric > self.best or not best.exists():
                files.insert(0, best)
            self.best = max(metric, self.best)
        content = {
            "epoch": self.epoch,
            "step": self.step,
            "arch": self.args.arch,
            "best_acc1": torch.tensor(self.best, dtype=torch.float64),
            "sums": self.sums,
            "records": self.records,
            "recipe": recipe_of(self.args),
            "images": self.images,
            **{name: one.state_dict() for name, one in self.objects.items()},
        }
        lines = "".join(json.dumps(record) + "\n" for record in self.records)
        replace_file(self.folder / "epochs.jsonl", lambda f: f.write(lines.encode()))
        for file in files:
            replace_file(file, lambda f: torch.save(content, f))
        self.saved_at = time.monotonic()

    def save_if_due(self) -> None:
        """Save, if the last save was --save-minutes ago."""
        if time.monotonic() - self.saved_at >= 60 * self.args.save_minutes:
            self.save()


def replace_file(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write a file beside `path`, flush it to the disk and rename it to `path`.

    A reader, or a crash at any moment, finds either the old content or the new one.
    """
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
