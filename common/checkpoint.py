"""The state of a run: the contents of a checkpoint, and how to write and read it."""

import argparse
import contextlib
import errno
import fcntl
import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from common.data import fingerprint
from common.errors import UserError, say
from common.meters import averages

CHECKPOINT = "checkpoint.pt"
BEST = "best.pt"
RECORDS = "epochs.jsonl"
LOCK = "lock"
BEST_METRIC = "val_top1"  # best.pt holds the epoch in which it is highest

# Flags that a resumed run may change; all others have to stay the same
MAY_CHANGE = {
    *("data", "synthetic"),  # the images are compared, not their folder
    *("epochs", "decoder"),  # see recipe_of()
    *("output", "resume", "evaluate", "strategy"),
    *("workers", "device", "timeout", "print_interval", "checkpoint_steps"),
    *("compile", "no_channels_last", "compress_gradients", "opt_level"),
    *("backend", "local_rank", "nprocs", "nnodes", "node_rank", "dist_url"),
}


def recipe_of(args: argparse.Namespace) -> dict:
    """The flags that decide what a run computes.

    --epochs may change, except with the cosine schedule, whose curve depends on it.
    Only the Pillow decoder gives different pixels, because Pillow also resizes them.
    """
    if args.evaluate:  # only the model matters
        return {"arch": args.arch, "pretrained": args.pretrained}
    recipe = {name: v for name, v in vars(args).items() if name not in MAY_CHANGE}
    recipe["epochs"] = args.epochs if args.schedule == "cosine" else None
    recipe["decoder"] = "pil" if args.decoder == "pil" else "auto"
    return recipe


class TrainingState:
    """Everything that a run needs in order to resume, and its progress.

    Attributes:
        epoch: finished epochs.
        step: steps done in the current epoch.
        sums: the Meter's sums over all processes in the current epoch.
        learning_rate: of the last step.
        best: the highest BEST_METRIC so far.
        records: one dict for each finished epoch, as in epochs.jsonl.
        stop_requested: whether any process was asked to stop when sums were last added.
        arch: torchvision's name of the model, or the name of its class.
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
        """Collect the objects to save.

        Args:
            datasets: for training and for validation; a resumed run needs the same.
            extra: more objects with state_dict() and load_state_dict().

        Raises:
            UserError: --pretrained with a model that is not torchvision's.
        """
        self.arch, kind = args.arch, type(raw_model)
        if not kind.__module__.startswith("torchvision."):
            self.arch = kind.__name__
            if args.pretrained:
                raise UserError(
                    f"--pretrained: torchvision has no weights of {self.arch}"
                )
        self.images = {
            name: fingerprint(dataset)
            for name, dataset in zip(("train", "val"), datasets, strict=True)
        }
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
        self.lock: BinaryIO | None = None

    @property
    def position(self) -> str:
        """The progress of the run, in words."""
        if self.step:
            return f"step {self.step} of epoch {self.epoch + 1}"
        return f"epoch {self.epoch}"

    def add(self, step: int, sums: dict[str, float]) -> dict[str, float]:
        """Add the sums of all processes up to `step`; returns their averages.

        Raises:
            UserError: the loss is no longer finite.
        """
        self.step = step
        recent = averages(sums)
        self.stop_requested = recent["stop"]
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        if not math.isfinite(recent["loss"]):
            raise self.diverged(f"the loss became {recent['loss']}")
        return recent

    def diverged(self, what: str, earlier: str = CHECKPOINT) -> UserError:
        """The error that ends a run whose numbers are no longer finite.

        Args:
            earlier: a file with finite numbers, if the run has written it.
        """
        file = self.folder / earlier
        return UserError(
            f"{what} by {self.position} at learning rate {self.learning_rate:.4g}; "
            "start again with a lower --lr or more --warmup-epochs"
            + (f" ({file} is from before)" if file.exists() else "")
        )

    def finish_epoch(self, val: dict[str, float], figures: dict) -> dict:
        """Close the current epoch; returns its record.

        Args:
            val: averages over the validation images.
            figures: further entries of the record.

        Raises:
            UserError: the validation loss is not finite.
        """
        if not math.isfinite(val["loss"]):
            what = f"the validation loss became {val['loss']}"
            raise self.diverged(what, BEST)
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
        """Write epochs.jsonl, checkpoint.pt, and best.pt if the last epoch is the best.

        Raises:
            UserError: the folder cannot be written to, or a weight is not finite; the
                existing files are unchanged.
        """
        weights = self.raw_model.state_dict()
        if not all(tensor.isfinite().all() for tensor in weights.values()):
            raise self.diverged("a weight is not finite")
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
        """Resume from the result of open_checkpoint(), or start if that is None.

        Raises:
            UserError: see lock_output; or the checkpoint belongs to another run.
        """
        if rank == 0 and not args.evaluate:
            self.lock = lock_output(self.folder)
        if checkpoint is None:
            return
        path, content = checkpoint
        check_recipe(path, content, self.recipe)
        parts = self.parts
        if args.evaluate:
            parts = {}
        elif content["images"] != self.images:
            raise UserError(
                f"{path} was made with other images ({counts(content['images'])}) than "
                f"--data has now ({counts(self.images)}): use the same --data, or "
                "another --output for another run"
            )
        try:
            self.raw_model.load_state_dict(content["state_dict"])
            for name, part in parts.items():
                part.load_state_dict(content[name])
        except (KeyError, RuntimeError, ValueError) as error:
            raise UserError(
                f"{path} does not fit this model and strategy: {error}"
            ) from None
        if args.evaluate:
            return
        self.epoch, self.step = content["epoch"], content["step"]
        self.sums, self.records = content["sums"], content["records"]
        self.learning_rate = content["learning_rate"]
        if (self.folder / BEST).exists():  # a new folder has no best yet
            self.best = content["best_acc1"].item()


class SavedTensors:
    """Tensors of an optimizer that its own state_dict does not hold."""

    def __init__(self, tensors: Iterable[Tensor]):
        self.tensors = list(tensors)

    def state_dict(self) -> dict[str, list[Tensor]]:
        """The tensors, in their order."""
        return {"tensors": [tensor.detach() for tensor in self.tensors]}

    def load_state_dict(self, content: dict[str, list[Tensor]]) -> None:
        """Fill the tensors in place."""
        for tensor, saved in zip(self.tensors, content["tensors"], strict=True):
            tensor.detach().copy_(saved)


def counts(images: dict[str, list]) -> str:
    """The numbers of training and validation images, in words."""
    return f"{images['train'][0]} and {images['val'][0]}"


def find_checkpoint(args: argparse.Namespace) -> Path | None:
    """Find the checkpoint that the flags name; None for a fresh start.

    Raises:
        UserError: the output folder cannot be written to, or holds a run that the flags
            neither resume nor validate.
    """
    existing = Path(args.output, CHECKPOINT)
    if not args.evaluate:
        make_output_folder(Path(args.output))
    if args.resume == "auto":
        if args.evaluate and not existing.exists():
            raise UserError(f"--resume auto: there is no {existing}")
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
            f"{args.output} holds a run's checkpoint: continue it with --resume auto, "
            "or choose another --output"
        )
    return None


def open_checkpoint(args: argparse.Namespace) -> tuple[Path, dict] | None:
    """The path and the content of `--resume`'s checkpoint; None for a fresh start.

    The content stays valid even if a run replaces the file.

    Raises:
        UserError: see find_checkpoint and read_checkpoint.
    """
    path = find_checkpoint(args)
    return None if path is None else (path, read_checkpoint(path))


def check_checkpoint(args: argparse.Namespace) -> None:
    """Raise the errors of a resumed run before it starts.

    Raises:
        UserError: see lock_output, find_checkpoint, read_checkpoint, check_recipe.
    """
    checkpoint = open_checkpoint(args)
    if checkpoint is not None:
        recipe = recipe_of(args)
        if args.precision is None:
            recipe.pop("precision", None)  # chosen where the device is known
        check_recipe(*checkpoint, recipe)


def lock_output(folder: Path) -> BinaryIO | None:
    """Keep all other runs out of an output folder until the returned file is closed.

    The lock is a POSIX record lock: it works over NFS, loader processes do not inherit
    it, and the kernel removes it when a process is killed.

    Returns:
        The file; None if the file system has no locks.

    Raises:
        UserError: another run has the lock, or the folder cannot be written to.

    Source: https://man7.org/linux/man-pages/man2/fcntl_locking.2.html
    """
    make_output_folder(folder)
    try:
        file = open(folder / LOCK, "ab")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"cannot write {folder / LOCK}: {error.strerror}") from None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise UserError(
                f"another run is writing to {folder}; choose another --output"
            ) from None
        say(
            f"warning: {folder} cannot be locked; a second run could overwrite this one"
        )
        return None
    return file


def make_output_folder(folder: Path) -> None:
    """Create a run's folder before it trains, so that a mistake costs nothing.

    Raises:
        UserError: the folder cannot be created or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"--output {folder} cannot be written to")


def read_checkpoint(path: Path) -> dict:
    """Map a checkpoint into CPU memory, without executing anything in it.

    Raises:
        UserError: the file cannot be read, or is not a checkpoint of these scripts.
    """
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except OSError as error:
        raise UserError(
            f"cannot read the checkpoint {path}: {error.strerror}"
        ) from None
    except Exception as error:  # the unpickler raises errors of many kinds
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise UserError(
            f"{path} is no checkpoint, or it is damaged: {reason[:120]}"
        ) from None
    needed = {"epoch", "step", "state_dict", "best_acc1", "sums", "learning_rate"}
    needed |= {"records", "recipe", "images"}
    missing = needed.difference(content if type(content) is dict else ())
    if missing:
        names = ", ".join(sorted(missing))
        raise UserError(f"{path} is no checkpoint of these scripts: it has no {names}")
    return content


def check_recipe(path: Path, content: dict, recipe: dict) -> None:
    """Refuse to resume with flags that differ from the checkpoint's.

    Raises:
        UserError: a value differs; the message has the flag and both values.
    """
    for name, saved in content["recipe"].items():
        if name in recipe and saved != recipe[name]:
            flag = "--" + name.replace("_", "-")
            raise UserError(
                f"{path} was made with {flag} {shown(saved)}, now it is "
                f"{shown(recipe[name])}: use the same value, or another --output"
            )


def shown(value: Any) -> str:
    """A flag's value in words."""
    if value is None or value is False:
        return "not given"
    return "given" if value is True else str(value)


def replace_file(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Replace a file so that at every moment the old or the complete new one exists.

    Raises:
        UserError: writing failed; the old file is unchanged.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)  # left by a run that was killed
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):  # it takes room on a full disk
            temporary.unlink(missing_ok=True)
        # When a write fails, torch.save raises a second error on top of the first
        cause = error.__context__ or error
        if not isinstance(cause, OSError):
            raise  # of something else that ended meanwhile
        reason = getattr(cause, "strerror", None) or str(cause).splitlines()[0]
        raise UserError(
            f"cannot write {path}: {reason}; what was there is unchanged"
        ) from None
