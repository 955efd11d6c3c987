"""The state of a run, and the checkpoints that hold it."""

import argparse
import contextlib
import fcntl
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from common.data import fingerprint
from common.errors import UserError, say
from common.meters import averages

CHECKPOINT = "checkpoint.pt"
BEST = "best.pt"
RECORDS = "epochs.jsonl"
LOCK = "lock"
BEST_METRIC = "val_top1"  # best.pt is from the epoch with the highest value

# Flags that a resumed run may change; all others must stay the same
MAY_CHANGE = {
    *("data", "synthetic"),  # images are compared, not paths
    *("epochs", "decoder"),  # see recipe_of()
    *("output", "resume", "evaluate", "strategy"),
    *("workers", "device", "timeout", "print_interval", "checkpoint_steps"),
    *("compile", "no_channels_last", "compress_gradients", "opt_level"),
    *("backend", "local_rank", "nprocs", "nnodes", "node_rank", "dist_url"),
}


def recipe_of(args: argparse.Namespace) -> dict:
    """Return the flags that determine what a run computes."""
    if args.evaluate:  # only the model matters
        return {"arch": args.arch, "pretrained": args.pretrained}
    recipe = {name: v for name, v in vars(args).items() if name not in MAY_CHANGE}
    # The cosine schedule's curve depends on --epochs
    recipe["epochs"] = args.epochs if args.schedule == "cosine" else None
    # Pillow also resizes the images, so their pixels differ
    recipe["decoder"] = "pil" if args.decoder == "pil" else "auto"
    return recipe


class TrainingState:
    """The progress of a run, and everything else that it needs to resume.

    Attributes:
        epoch: number of finished epochs.
        step: number of finished steps in the current epoch.
        sums: the Meter's sums for the current epoch, over all processes.
        learning_rate: the last step's learning rate.
        best: the highest BEST_METRIC so far.
        records: one dict for each finished epoch, as in epochs.jsonl.
        stop_requested: whether any process had a stop signal before the last add().
        arch: torchvision's name for the model, or its class name.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        datasets: tuple[Dataset, Dataset],
        raw_model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler,
        scaler: torch.amp.GradScaler,
        **extra: Any,
    ):
        """Collect the objects to save; `extra` ones also have a state_dict().

        `datasets` are for training and validation; a resumed run needs the same images.
        Raises UserError if --pretrained is set for a model that is not torchvision's.
        """
        self.arch, kind = args.arch, type(raw_model)
        if not kind.__module__.startswith("torchvision."):
            self.arch = kind.__name__
            if args.pretrained:
                raise UserError(
                    f"--pretrained: torchvision has no weights for {self.arch}"
                )
        train_set, val_set = datasets
        self.images = {"train": fingerprint(train_set), "val": fingerprint(val_set)}
        self.raw_model = raw_model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.scaler = scaler
        self.parts = {
            "optimizer": optimizer,
            "scheduler": scheduler,
            "scaler": scaler,
            **extra,
        }
        self.recipe = recipe_of(args)
        self.folder = Path(args.output)
        self.epoch = 0
        self.step = 0
        self.sums: dict[str, float] = {}
        self.learning_rate = 0.0
        self.best = 0.0
        self.records: list[dict] = []
        self.stop_requested = False

    @property
    def position(self) -> str:
        """The run's progress in words."""
        if self.step:
            return f"step {self.step} of epoch {self.epoch + 1}"
        return f"epoch {self.epoch}"

    def add(self, step: int, sums: dict[str, float]) -> dict[str, float]:
        """Add the sums over all processes up to `step`; return their averages.

        Raises UserError if the loss is no longer finite.
        """
        self.step = step
        recent = averages(sums)
        self.stop_requested = recent["stop"]
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        if not math.isfinite(recent["loss"]):
            raise self.diverged(f"the loss became {recent['loss']}")
        return recent

    def diverged(self, what: str) -> UserError:
        """Return the error that ends a run with infinite or NaN values."""
        return UserError(
            f"{what} by {self.position} at learning rate {self.learning_rate:.4g}; "
            "start again with a lower --lr or more --warmup-epochs"
        )

    def finish_epoch(self, val: dict[str, float], figures: dict) -> dict:
        """Finish the current epoch; return its record, which includes `figures`.

        `val` has the validation averages. Raises UserError if their loss is not finite.
        """
        if not math.isfinite(val["loss"]):
            raise self.diverged(f"the validation loss became {val['loss']}")
        train = averages(self.sums)
        record = {"epoch": self.epoch, "steps": self.step, "images": train["images"]}
        for part, means in (("train", train), ("val", val)):
            record |= {f"{part}_{n}": v for n, v in means.items() if n != "stop"}
        del record["train_images"]
        record |= {"learning_rate": self.learning_rate, **figures}
        self.records.append(record)
        self.epoch += 1
        self.step, self.sums = 0, {}
        self.stop_requested = val["stop"]
        return record

    def save(self) -> None:
        """Write epochs.jsonl, checkpoint.pt and, after the best epoch, best.pt.

        Raises UserError if a file cannot be written, or if a weight is not finite; the
        existing checkpoint then stays unchanged.
        """
        weights = self.raw_model.state_dict()
        if not all(tensor.isfinite().all() for tensor in weights.values()):
            raise self.diverged("a weight became infinite or NaN")
        is_best = False
        if self.records and not self.step:
            metric = self.records[-1][BEST_METRIC]
            is_best = metric > self.best or not (self.folder / BEST).exists()
            self.best = max(metric, self.best)
        content = {
            "epoch": self.epoch,
            "step": self.step,
            "arch": self.arch,
            "state_dict": weights,
            "best_acc1": torch.tensor(self.best, dtype=torch.float64),
            "sums": self.sums,
            "learning_rate": self.learning_rate,
            "records": self.records,
            "recipe": self.recipe,
            "images": self.images,
            **{name: part.state_dict() for name, part in self.parts.items()},
        }
        lines = "".join(json.dumps(record) + "\n" for record in self.records)
        replace_file(self.folder / RECORDS, lambda file: file.write(lines.encode()))
        for name in [BEST, CHECKPOINT] if is_best else [CHECKPOINT]:
            replace_file(self.folder / name, lambda file: torch.save(content, file))

    def resume(
        self, args: argparse.Namespace, rank: int, checkpoint: tuple[Path, dict] | None
    ) -> None:
        """Resume from open_checkpoint()'s result, or start a new run if it is None.

        Raises UserError if the checkpoint does not match this run's flags, images or
        model, or if another run is writing to the output folder.
        """
        if rank == 0 and not args.evaluate:
            self.lock = lock_output(self.folder)  # until the process ends
        if checkpoint is None:
            return
        path, content = checkpoint
        check_recipe(path, content, self.recipe)
        parts, saved = {} if args.evaluate else self.parts, content["images"]
        if saved != self.images and not args.evaluate:
            raise UserError(
                f"{path} was saved with images ({counts(saved)}) that differ from "
                f"those in --data ({counts(self.images)}): use the same --data, or "
                "another --output for a new run"
            )
        try:
            self.raw_model.load_state_dict(content["state_dict"])
            for name, part in parts.items():
                part.load_state_dict(content[name])
        except (KeyError, RuntimeError, ValueError) as error:
            raise UserError(
                f"{path} does not match this model and strategy: {error}"
            ) from None
        if args.evaluate:
            return
        self.epoch, self.step = content["epoch"], content["step"]
        self.sums, self.records = content["sums"], content["records"]
        self.learning_rate = content["learning_rate"]
        if (self.folder / BEST).exists():  # a new folder has no best.pt yet
            self.best = content["best_acc1"].item()


def counts(images: dict[str, list]) -> str:
    """The numbers of training and validation images in words."""
    return f"{images['train'][0]} training, {images['val'][0]} validation"


def find_checkpoint(args: argparse.Namespace) -> Path | None:
    """Return the path of the checkpoint to load, or None for a fresh start.

    Raises UserError if it does not exist, or the output folder contains another run or
    is not writable.
    """
    existing = Path(args.output, CHECKPOINT)
    if not args.evaluate:
        make_output_folder(Path(args.output))
    if args.resume == "auto":
        if args.evaluate and not existing.exists():
            raise UserError(f"--resume auto: {existing} does not exist")
        return existing if existing.exists() else None
    if args.resume is not None:
        path = Path(args.resume)
        if not path.is_file():
            raise UserError(f"--resume {path}: there is no such file")
        if not args.evaluate and existing.exists() and not existing.samefile(path):
            raise UserError(
                f"{args.output} holds another run's checkpoint; choose another --output"
            )
        return path
    if existing.exists() and not args.evaluate:
        raise UserError(
            f"{args.output} already holds a checkpoint: resume it with --resume auto, "
            "or choose another --output"
        )
    return None


def open_checkpoint(args: argparse.Namespace) -> tuple[Path, dict] | None:
    """Return the checkpoint's path and content, or None for a fresh start.

    The content stays valid even if a run replaces the file. Raises UserError like
    find_checkpoint() and read_checkpoint().
    """
    path = find_checkpoint(args)
    return None if path is None else (path, read_checkpoint(path))


def check_checkpoint(args: argparse.Namespace) -> None:
    """Raise a UserError if a run cannot start or resume with these flags."""
    recipe, checkpoint = recipe_of(args), open_checkpoint(args)
    if args.precision is None:
        recipe.pop("precision", None)  # chosen later, for the device
    if checkpoint is not None:
        check_recipe(*checkpoint, recipe)


def lock_output(folder: Path) -> BinaryIO:
    """Keep all other runs out of an output folder until the returned file is closed.

    The lock is a POSIX record lock: it works over NFS, loader processes do not inherit
    it, and the kernel releases it when a process is killed. Raises UserError if another
    run holds the lock or the folder cannot be written to; prints a warning if the file
    system does not support locks.

    Source: https://man7.org/linux/man-pages/man2/fcntl_locking.2.html
    """
    make_output_folder(folder)
    try:
        file = open(folder / LOCK, "ab")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"cannot write {folder / LOCK}: {error.strerror}") from None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.close()
        raise UserError(
            f"another run is writing to {folder}; choose another --output"
        ) from None
    except OSError as error:  # this file system has no locks
        say(f"warning: cannot keep a second run out of {folder}: {error.strerror}")
    return file


def make_output_folder(folder: Path) -> None:
    """Create a run's output folder; raises UserError if it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"--output {folder} is not writable")


def read_checkpoint(path: Path) -> dict:
    """Map a checkpoint into CPU memory without executing code from it.

    Raises UserError if the file is unreadable or not one of these scripts' checkpoints.
    """
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except OSError as error:
        raise UserError(
            f"cannot read the checkpoint {path}: {error.strerror}"
        ) from None
    except Exception as error:  # the unpickler raises many kinds of errors
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise UserError(
            f"{path} is not a checkpoint, or is damaged: {reason[:120]}"
        ) from None
    needed = {"epoch", "step", "state_dict", "best_acc1", "sums", "learning_rate"}
    needed |= {"records", "recipe", "images"}
    missing = needed.difference(content if type(content) is dict else ())
    if missing:
        names = ", ".join(sorted(missing))
        raise UserError(f"{path} is not a checkpoint: it lacks {names}")
    return content


def check_recipe(path: Path, content: dict, recipe: dict) -> None:
    """Raise a UserError if `recipe` differs from the recipe in the checkpoint."""
    for name, saved in content["recipe"].items():
        if name in recipe and saved != recipe[name]:
            flag = "--" + name.replace("_", "-")
            raise UserError(
                f"{flag} was {shown(saved)} when {path} was saved, and is now "
                f"{shown(recipe[name])}: use the same value, or another --output"
            )


def shown(value: Any) -> str:
    """Format a flag's value for a message."""
    if value is None or value is False:
        return "not given"
    return "given" if value is True else str(value)


def replace_file(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Replace a file atomically, or raise a UserError and keep the old file."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)  # or a power failure could undo the new name
        os.close(folder)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):  # the disk may be full
            temporary.unlink(missing_ok=True)
        # After a failed write, torch.save raises a second error that hides the first
        cause = error.__context__ or error
        if not isinstance(cause, OSError):
            raise cause from None  # perhaps a loader process died meanwhile
        reason = cause.strerror or cause
        raise UserError(
            f"cannot write {path}: {reason}; any existing file is unchanged"
        ) from None
