"""What all processes of a run must have in common, compared before they train.

Two processes with different arguments, images or checkpoints would wait for each other
in different all-reduces, for ever, or train a model that is neither's. So each sends a
digest of what it has and, only where these differ, the words to say in what.

All it takes is a strategy's `combine`, the sum of a tensor over all processes: each
fills its own row of a table of zeros, and the sum is the table of all.
"""

import argparse
import contextlib
import json
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.data import Dataset

from common.data import ImageFolder, digest_of
from common.errors import UserError, complain

# What may differ: a process's place in the job, how long it waits, where its machine
# has its folders (what is in them is compared), how many loader processes it has
LOCAL = (
    "local_rank",
    "node_rank",
    "dist_url",
    "timeout",
    "data",
    "output",
    "resume",
    "workers",
    "per_process_workers",
)
NAMES_SHOWN = 3


class Processes:
    """All processes of a run. Each has to call the same methods in the same order."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        combine: Callable[[Tensor], Tensor],
    ):
        """Take this process's place.

        Args:
            device: where `combine` wants its tensors.
            combine: returns the sum of a float64 tensor over all processes.
        """
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.combine = combine
        self.images: dict[str, list] = {}  # what images_of() says of each part

    def numbers(self, own: Sequence[int]) -> list[list[int]]:
        """Exchange whole numbers below 2**53, equally many; returns one list a rank."""
        table = torch.zeros(self.world_size, len(own), dtype=torch.float64)
        table[self.rank] = torch.tensor(own)
        return self.combine(table.to(self.device)).long().tolist()

    def texts(self, own: str) -> list[str]:
        """Exchange texts; returns one a rank."""
        content = own.encode(errors="surrogateescape")
        lengths = [length for (length,) in self.numbers([len(content)])]
        rows = self.numbers([*content, *[0] * (max(lengths) - len(content))])
        return [
            bytes(row[:length]).decode(errors="replace")
            for row, length in zip(rows, lengths, strict=True)
        ]

    def unlike(self, digest: int) -> list[int]:
        """The ranks whose digest is not rank 0's."""
        digests = self.numbers([digest])
        return [rank for rank, other in enumerate(digests) if other != digests[0]]

    def compare(self, facts: Mapping[str, Any]) -> None:
        """See that all processes have the same facts.

        Raises:
            UserError: they differ.
        """
        facts = {name: shown(value) for name, value in facts.items()}
        text = json.dumps(facts, sort_keys=True)
        ranks = self.unlike(digest_of(text.encode()))
        if not ranks:
            return
        texts = self.texts(text)
        own, other = json.loads(texts[0]), json.loads(texts[ranks[0]])
        names = [name for name in {**own, **other} if own.get(name) != other.get(name)]
        said = [
            f"{name} {other.get(name)} (rank 0: {own.get(name)})"
            for name in names[:NAMES_SHOWN]
        ]
        self.refuse(ranks, ", ".join(said) + (" ..." if names[NAMES_SHOWN:] else ""))

    def compare_paths(self, name: str, paths: Any) -> None:
        """See that all processes have the same files in the same order.

        Args:
            name: of the folder.
            paths: PackedPaths below it.

        Raises:
            UserError: they differ; the text has the first file that does.
        """
        ranks = self.unlike(paths.digest(len(paths)))
        if not ranks:
            return
        counts = [count for (count,) in self.numbers([len(paths)])]
        # Halve the range in which the first difference lies
        same, most = 0, min(counts[0], counts[ranks[0]])
        while same < most:
            middle = (same + most + 1) // 2
            digests = self.numbers([paths.digest(min(middle, len(paths)))])
            if digests[ranks[0]] == digests[0]:
                same = middle
            else:
                most = middle - 1
        own = paths[same][len(paths.root) :] if same < len(paths) else "/ (no more)"
        files = self.texts(name + own)
        self.refuse(
            ranks,
            f"{counts[ranks[0]]} images in {name}/ (rank 0: {counts[0]}), "
            f"of which the first that differs is {files[ranks[0]]} "
            f"(rank 0: {files[0]})",
        )

    @contextlib.contextmanager
    def all_or_none(self) -> Iterator[None]:
        """End all processes where one of them cannot do what stands in the block.

        Raises:
            UserError: it was raised in the block of this process, or of another.
        """
        problem = None
        try:
            yield
        except UserError as error:
            problem = error
        self.compare({"error:": str(problem or "none")})
        if problem is not None:
            raise problem

    def refuse(self, ranks: Sequence[int], what: str) -> NoReturn:
        """Have rank 0 say how the first of `ranks` differs, and raise everywhere."""
        hosts = self.texts(socket.gethostname())
        others = f"; {len(ranks) - 1} more differ as well" if ranks[1:] else ""
        error = UserError(
            f"rank {ranks[0]} on {hosts[ranks[0]]} differs from rank 0 on {hosts[0]}: "
            f"{what}{others}. Give all processes the same"
        )
        if self.rank == 0:
            complain(str(error))
        # A launcher kills the others once one has left: not before it is said
        with contextlib.suppress(RuntimeError):
            self.numbers([0])
        error.said = True
        raise error


ALONE = Processes(0, 1, torch.device("cpu"), lambda sums: sums)


def agree(
    args: argparse.Namespace,
    rank: int,
    device: torch.device,
    combine: Callable[[Tensor], Tensor],
    train_set: Dataset,
    val_set: Dataset,
) -> Processes:
    """See that all processes were started alike; returns them.

    Compares the flags that a run depends on, the kind of device, PyTorch's version, and
    names and order of the images. It comes after the loader processes, which are not to
    be forks of a process that communicates, and before anything that would hang.

    Raises:
        UserError: something differs. Rank 0 has said what, with rank and host.
    """
    everyone = Processes(rank, args.world_size, device, combine)
    flags = {
        "--" + name.replace("_", "-"): value
        for name, value in vars(args).items()
        if name not in LOCAL
    }
    # The two other decoders have the same pixels
    flags["--decoder"] = args.decoder if args.decoder == "pil" else None
    flags["--device"] = device.type
    flags["PyTorch"] = torch.__version__.split("+")[0]
    everyone.compare(flags)
    for name, dataset in (("train", train_set), ("val", val_set)):
        everyone.images[name] = images_of(dataset)
        if isinstance(dataset, ImageFolder):
            everyone.compare_paths(name, dataset.paths)
        else:
            everyone.compare({f"images in {name}:": len(dataset)})
    return everyone


def images_of(dataset: Dataset) -> list[int | None]:
    """Number of the images and digest of their paths, which is None without paths."""
    paths = dataset.paths if isinstance(dataset, ImageFolder) else None
    return [len(dataset), paths and paths.digest(len(paths))]


def shown(value: Any) -> str:
    """A flag's value in words."""
    if value is None or value is False or value == sys.maxsize:
        return "not given"
    return "given" if value is True else str(value)
