"""The state of a run: what a checkpoint holds, and how it is written and read."""

import argparse
import contextlib
import errno
import fcntl
import io
import itertools
import json
import math
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from launch.agreement import ALONE, Processes, shown
from common.data import digest_of
from common.errors import LOST_PROCESS, UserError, say
from common.meters import Averages, averages

CHECKPOINT = "checkpoint.pt"
BEST = "best.pt"
RECORDS = "epochs.jsonl"
LOCK = "lock"
LEASE_SECONDS = 100

# A resumed run is the same run only if these are the same
RECIPE = (
    "arch",
    "pretrained",  # torchvision builds some networks otherwise for its own weights
    "global_batch_size",
    "lr",
    "warmup_epochs",
    "schedule",
    "momentum",
    "weight_decay",
    "label_smoothing",
    "image_size",
    "min_crop",
    "no_flip",
    "precision",
    "max_steps",
    "seed",
)


def recipe_of(args: argparse.Namespace) -> dict:
    """The values that two lives of one run have in common.

    More epochs are welcome, but under the cosine they bend the whole curve. Of the
    decoders Pillow alone has other pixels, because it resizes them itself.
    """
    if args.evaluate:  # the network alone
        return {"arch": args.arch, "pretrained": args.pretrained}
    recipe = {name: getattr(args, name) for name in RECIPE}
    recipe["epochs"] = args.epochs if args.schedule == "cosine" else None
    recipe["decoder"] = "pil" if args.decoder == "pil" else "auto"
    return recipe


class TrainingState:
    """Everything that a run needs to go on, and how far it has come.

    Attributes:
        epoch: finished epochs.
        step: steps done in the epoch under way.
        sums: (5,) float64, the Meter's sums over all processes in the epoch under way.
        best_acc1: best validation top-1 so far, in percent.
        records: one dict for each finished epoch, as in epochs.jsonl.
        stop_requested: whether any process was asked to stop when sums were last
            combined.
        saved_by: number of processes of the life that this one goes on from.
        images: what agree() found: number and digest of the images of each part.
        lock: what rank 0 got from lock_output().
        origin: what was loaded, in words that no other checkpoint has.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        raw_model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: LambdaLR,
        scaler: torch.amp.GradScaler,
        **extra: Any,
    ):
        """Collect what is to be saved; `extra` are more objects with a state_dict."""
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
        self.sums = torch.zeros(5, dtype=torch.float64)
        self.best_acc1 = 0.0
        self.records: list[dict] = []
        self.stop_requested = False
        self.world_size = self.saved_by = args.world_size
        self.images: dict[str, list] = {}
        self.lock: io.FileIO | None = None
        self.origin = "none"

    def add(self, step: int, sums: Tensor) -> Averages:
        """Take in the sums of all processes up to `step`; returns their averages.

        Raises:
            UserError: the loss is not finite any more.
        """
        self.step = step
        self.sums += sums.to("cpu")
        recent = averages(sums)
        if not math.isfinite(recent.loss):
            raise self.diverged(f"the loss became {recent.loss}")
        self.stop_requested = recent.stop
        return recent

    @property
    def position(self) -> str:
        """How far the run has come, in words."""
        if self.step:
            return f"step {self.step} of epoch {self.epoch + 1}"
        return f"epoch {self.epoch}"

    def diverged(self, what: str, earlier: str = CHECKPOINT) -> UserError:
        """The error that ends a run whose numbers are not finite any more.

        Args:
            earlier: the file that holds finite ones, if the run has written it.
        """
        file = self.folder / earlier
        return UserError(
            f"{what} by {self.position} at learning rate {self.learning_rate:.4g}; "
            "begin again with a lower --lr or more --warmup-epochs"
            + (f" ({file} is from before)" if file.exists() else "")
        )

    @property
    def learning_rate(self) -> float:
        """What the last step was taken with; the scheduler is one step ahead."""
        factor = self.scheduler.lr_lambdas[0](max(0, self.scheduler.last_epoch - 1))
        return self.scheduler.base_lrs[0] * factor

    def finish_epoch(self, val: Averages, figures: dict) -> dict:
        """Close the epoch under way; returns its record.

        Raises:
            UserError: the validation loss is not finite.
        """
        if not math.isfinite(val.loss):
            raise self.diverged(f"the validation loss became {val.loss}", BEST)
        train = averages(self.sums)
        record = {
            "epoch": self.epoch,
            "steps": self.step,
            "images": train.images,
            "train_loss": train.loss,
            "train_top1": train.top1,
            "val_loss": val.loss,
            "val_top1": val.top1,
            "val_top5": val.top5,
            "val_images": val.images,
            "learning_rate": self.learning_rate,
            **figures,
        }
        self.records.append(record)
        self.epoch += 1
        self.step = 0
        self.sums.zero_()
        self.stop_requested = val.stop
        return record

    def save(self) -> None:
        """Write epochs.jsonl, best.pt if the last epoch is the best, and checkpoint.pt.

        checkpoint.pt comes last: a run killed before it goes on from the earlier one
        and writes the other two again. Where it is the best, it is a link to best.pt.

        Raises:
            UserError: the folder cannot be written, or a weight is not finite; what was
                there before is untouched.
        """
        weights = self.raw_model.state_dict()
        if not all(tensor.isfinite().all() for tensor in weights.values()):
            raise self.diverged("a weight is not finite")
        best, checkpoint = self.folder / BEST, self.folder / CHECKPOINT
        is_best = False
        if self.records and not self.step:
            top1 = self.records[-1]["val_top1"]
            is_best = top1 > self.best_acc1 or not best.exists()
            self.best_acc1 = max(top1, self.best_acc1)
        content = {
            "epoch": self.epoch,
            "step": self.step,
            "arch": self.recipe["arch"],
            "state_dict": weights,
            "best_acc1": torch.tensor(self.best_acc1),
            "sums": self.sums[:4].tolist(),
            "records": self.records,
            "recipe": self.recipe,
            "images": self.images,
            "world_size": self.world_size,
            **{name: part.state_dict() for name, part in self.parts.items()},
        }
        lines = "".join(json.dumps(record) + "\n" for record in self.records)
        if is_best:
            replace_file(best, lambda file: torch.save(content, file))
        replace_file(self.folder / RECORDS, lambda file: file.write(lines.encode()))
        replace_file(
            checkpoint, best if is_best else lambda file: torch.save(content, file)
        )

    def load(self, path: Path) -> None:
        """Go on from a checkpoint; every process reads it by itself.

        Raises:
            UserError: the file is no checkpoint, or not one of this run.
        """
        content = self._read(path)
        check_recipe(path, content, self.recipe)
        check_images(path, content, self.images)
        try:
            self.raw_model.load_state_dict(content["state_dict"])
            for name, part in self.parts.items():
                part.load_state_dict(content[name])
        except (KeyError, RuntimeError, ValueError) as error:
            raise UserError(
                f"{path} does not fit this model and strategy: {error}"
            ) from None
        self.epoch, self.step = content["epoch"], content["step"]
        self.sums[:4] = torch.tensor(content["sums"], dtype=torch.float64)
        if (self.folder / BEST).exists():  # in a new folder a new best begins
            self.best_acc1 = content["best_acc1"].item()
        self.records = content["records"]
        self.saved_by = content["world_size"]

    def load_weights(self, path: Path) -> None:
        """Load a checkpoint's weights and nothing else, to validate them."""
        content = self._read(path)
        check_recipe(path, content, self.recipe)
        try:
            self.raw_model.load_state_dict(content["state_dict"])
        except RuntimeError as error:
            raise UserError(f"{path} does not fit this model: {error}") from None

    def _read(self, path: Path) -> dict:
        content = read_checkpoint(path)
        epoch, step = content["epoch"], content["step"]
        # Sums and timings are those of one moment of one run; weights take long to hash
        figures = digest_of(repr((content["sums"], content["records"])).encode())
        self.origin = f"epoch {epoch}, step {step}, digest {figures:012x}"
        return content


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


def resume(
    args: argparse.Namespace, state: TrainingState, everyone: Processes = ALONE
) -> None:
    """Bring `state` to where `--resume` says; every process reads the file by itself.

    Raises:
        UserError: see lock_output, find_checkpoint and TrainingState.load; or one of
            `everyone` has another checkpoint, or none.
    """
    state.images = everyone.images
    if not args.evaluate:  # before anything in the folder is read
        problem = "none"
        if everyone.rank == 0:
            try:
                state.lock = lock_output(state.folder)
                if state.lock is None:
                    say(
                        f"warning: the file system of {state.folder} has no locks, so "
                        "a second run could overwrite this one"
                    )
            except UserError as error:
                problem = str(error)
        problem = everyone.texts(problem)[0]
        if problem != "none":
            raise UserError(problem)
    with everyone.all_or_none():
        path = find_checkpoint(args)
        if path is not None and args.evaluate:
            state.load_weights(path)
        elif path is not None:
            state.load(path)
    everyone.compare({"checkpoint:": state.origin})


def find_checkpoint(args: argparse.Namespace) -> Path | None:
    """The checkpoint that the arguments ask to start from; None for a fresh start.

    Raises:
        UserError: the output folder cannot be written to, or holds a run that is
            neither resumed nor validated.
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
            f"{args.output} holds a run's checkpoint: go on with --resume auto, "
            "or choose another --output"
        )
    return None


def lock_output(folder: Path) -> io.FileIO | None:
    """Keep all other runs out of an output folder until the returned file is closed.

    The lock is a POSIX record lock: it works over NFS, loader processes do not inherit
    it, and the kernel removes it when a process is killed. Once a process closes any
    descriptor of the file its lock is gone, so open it only here. The file remains:
    another run may be waiting at it. A lock that another machine holds is waited for:
    if that machine died, an NFS server keeps its lock until a lease of 90 s ends.

    Returns:
        The file; None where the file system has no locks.

    Raises:
        UserError: another run has the lock, or the folder cannot be written to.

    Source: https://man7.org/linux/man-pages/man2/fcntl_locking.2.html
    """
    make_output_folder(folder)
    path, host = folder / LOCK, socket.gethostname()
    try:
        file = io.FileIO(path, "a+")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    for second in itertools.count():
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {host}".encode())
            return file
        except OSError as error:
            problem = error
        file.seek(0)
        owner = file.read().decode(errors="replace")
        taken = problem.errno in (errno.EACCES, errno.EAGAIN)
        if not taken or owner.endswith(f" on {host}") or second == LEASE_SECONDS:
            break
        if second == 1:
            say(f"waiting up to {LEASE_SECONDS} s for the lock of {owner} on {folder}")
        time.sleep(1)
    file.close()
    if taken:
        raise UserError(
            f"another run ({owner}) is writing to {folder}; choose another --output"
        )
    if problem.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
        return None
    raise UserError(f"cannot lock {path}: {problem.strerror}")


def make_output_folder(folder: Path) -> None:
    """Make the folder of a run, before there is something to lose.

    Raises:
        UserError: it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"--output {folder} cannot be written to")


def read_checkpoint(path: Path) -> dict:
    """Read a checkpoint onto the CPU; nothing in it is executed.

    Raises:
        UserError: the file cannot be read or is no checkpoint of these scripts.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(
            f"cannot read the checkpoint {path}: {error.strerror}"
        ) from None
    except Exception as error:  # whatever the unpickler makes of a file that is none
        reason = (
            str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        )
        raise UserError(
            f"{path} is no checkpoint, or a damaged one: {reason[:120]}"
        ) from None
    needed = (
        "epoch",
        "step",
        "arch",
        "state_dict",
        "best_acc1",
        "sums",
        "records",
        "recipe",
        "images",
        "world_size",
    )
    missing = [
        name for name in needed if not isinstance(content, dict) or name not in content
    ]
    if missing:
        raise UserError(
            f"{path} is no checkpoint of these scripts: no {', '.join(missing)} in it"
        )
    return content


def check_recipe(path: Path, content: dict, recipe: dict) -> None:
    """Refuse to go on with another recipe, or a part of one, than the checkpoint's.

    Raises:
        UserError: a value differs; the text has the flag and both values.
    """
    for name in recipe:
        saved = content["recipe"].get(name)
        if saved != recipe[name]:
            flag = "--" + name.replace("_", "-")
            raise UserError(
                f"{path} was made with {flag} {shown(saved)}, now it is "
                f"{shown(recipe[name])}: give the same, or another --output"
            )


def check_images(path: Path, content: dict, images: dict[str, list]) -> None:
    """Refuse to resume with other images than the checkpoint's.

    Args:
        images: what images_of() says of "train" and of "val".

    Raises:
        UserError: they differ; the text says which, and how many there were and are.
    """
    for name, now in images.items():
        saved = content["images"].get(name, now)
        if saved != now:
            kind = "training" if name == "train" else "validation"
            others = " with other names" if saved[0] == now[0] else ""
            raise UserError(
                f"{path} was made with {saved[0]} {kind} images, now there are "
                f"{now[0]}{others}: give the same --data, or another --output for "
                "another run"
            )


def replace_file(path: Path, source: Callable[[BinaryIO], Any] | Path) -> None:
    """Write a file so that at any moment the old one or the whole new one is there.

    Args:
        source: writes to an open binary file; or a file to link to, or else to copy.

    Raises:
        UserError: writing failed; the old file is untouched.
        RuntimeError: a loader process died meanwhile; the same holds.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)  # a killed run's; it may be a link to best.pt
        if isinstance(source, Path):
            try:
                os.link(source, temporary)
            except OSError:  # the file system has no links
                shutil.copyfile(source, temporary)
        else:
            with open(temporary, "wb") as file:
                source(file)
        with open(temporary, "rb") as file:
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
        # torch.save, broken off, raises an error of its own on top of the first one
        while isinstance(error, RuntimeError) and error.__context__ is not None:
            error = error.__context__
        if LOST_PROCESS.search(str(error)):  # noticed by a signal handler
            raise error from None
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UserError(
            f"cannot write {path}: {reason}; what was there is untouched"
        ) from None
