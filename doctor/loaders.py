"""Track the passes over DataLoaders, and record which samples each batch contains."""

import contextlib
import gc
import os
import weakref
from array import array
from collections import deque
from dataclasses import dataclass, field
from time import perf_counter as clock

from .event import Event
from .record import SHORT, place, quiet, recorder, torch, wrap
from .sample import digest, hashes
from .watcher import Watcher, tell

EARLY, LATE = 8, 64  # most batches of a pass, and in all, to hash after the watch


class Epoch(Event):
    """A pass over a DataLoader has begun."""

    loader: int  # loaders are numbered in the order of their first passes
    epoch: int  # the pass's number, from 0
    type: str  # the type of the dataset inside all subsets
    sampler: str
    length: int | None  # number of batches
    samples: int | None
    stream: bool  # the dataset is an IterableDataset
    place: str


class EpochEnd(Event):
    """A pass over a DataLoader has ended, or the next one has begun."""

    loader: int
    epoch: int
    whole: bool  # the loader had no more batches
    batches: int
    steps: int  # optimizer steps that used its batches


class Batch(Event, limit=100_000):
    """A DataLoader has returned a batch."""

    loader: int
    epoch: int
    number: int  # the batch's number in this pass, from 0
    indices: array | None  # the samples' indices in the dataset inside all subsets
    labels: array | None  # the batch's only tensor (N,) of integers
    rows: array | None  # a hash of each sample's contents
    marks: array | None = None  # in a stream: a hash of integers, except the sample's
    index: int | None = None  # of the only sample, or of a whole batch


@dataclass
class Pass:
    """The state of a pass over a DataLoader, in the process that iterates over it."""

    loader: int
    epoch: int
    stream: bool = False
    batches: int = 0
    steps: int = 0
    ended: bool = False
    reads: deque = field(default_factory=lambda: deque(maxlen=8))

    @property
    def which(self) -> dict[str, int]:
        """The loader's number and the pass's number."""
        return {"loader": self.loader, "epoch": self.epoch}


def size(value) -> int | None:
    """Return the length of a value, or None if it has none."""
    with contextlib.suppress(TypeError, NotImplementedError, AttributeError):
        return len(value)


def leaves(value) -> list:
    """Return all dense tensors in nested containers."""
    found = torch.utils._pytree.tree_leaves(value)
    return [x for x in found if torch.is_tensor(x) and x.layout == torch.strided]


def inside(dataset) -> tuple[object, list]:
    """Return the dataset inside all subsets, and each subset's indices."""
    subsets = []
    while isinstance(dataset, torch.utils.data.Subset):
        subsets.append(dataset.indices)
        dataset = dataset.dataset
    return dataset, subsets


class Loaders(Watcher):
    """Wraps DataLoader's iterators, and records passes and batches."""

    def __init__(self):
        self.loaders = {}  # by id: a number, the passes, and a weak reference
        self.count, self.collects, self.late = 0, 3, 0
        self.current: Pass | None = None  # the pass of the last batch
        self.fetching: Pass | None = None  # the pass that is loading a batch here

    def hooks(self) -> None:
        iterator = torch.utils.data.dataloader._BaseDataLoaderIter
        wrap(torch.utils.data.DataLoader, "__iter__", self.iterate)
        wrap(iterator, "_next_index", self.next_index)
        wrap(iterator, "__next__", self.next_batch)

    def iterate(self, call, loader):
        if getattr(loader, "_iterator", None) is not None:  # persistent workers
            loader._iterator.__dict__["_doctor_indices"] = deque()
        known = self.loaders.get(id(loader))
        if known is None or known["loader"]() is not loader:
            known = self.learn(loader, place())
        if known["last"]:
            self.end_pass(known["last"], whole=False)
        known["epoch"] += 1
        base, subsets = inside(loader.dataset)
        stream = isinstance(base, torch.utils.data.IterableDataset)
        own = self.fetching = Pass(known["number"], known["epoch"], stream)
        if loader.num_workers:  # workers inherit the environment
            os.environ["DOCTOR_PASS"] = f"{own.loader} {own.epoch}"
        iterator = call(loader)
        known["last"] = iterator.__dict__["_doctor_pass"] = own
        iterator.__dict__["_doctor_subsets"] = subsets  # keep alive with the iterator
        epoch = Epoch(
            **own.which,
            type=type(base).__name__,
            sampler="" if stream else type(loader.sampler).__name__,
            length=size(loader),
            samples=size(loader.dataset),
            stream=stream,
            place=place(),
        )
        recorder.write(epoch)
        tell("on_epoch", own, loader)
        return iterator

    def learn(self, loader, where: str) -> dict:
        """Return a loader's record; a later loader at the same line inherits it."""
        rows = [(k, x) for k, x in self.loaders.items() if x["place"] == where]
        rows = [(k, x) for k, x in rows if x["dataset"]() is loader.dataset]
        if self.collects and any(known["loader"]() is not None for _, known in rows):
            self.collects -= 1
            gc.collect()  # otherwise, an old one may still be there on some ranks only
        for key, known in rows:
            if known["loader"]() is None:
                del self.loaders[key]
                break
        else:
            known = {"number": self.count, "epoch": -1, "last": None, "place": where}
            known["dataset"] = lambda: None
            with contextlib.suppress(TypeError):  # a list has no weak reference
                known["dataset"] = weakref.ref(loader.dataset)
            self.count += 1
        self.loaders[id(loader)] = known
        known["loader"] = weakref.ref(loader)
        return known

    def end_pass(self, own: Pass, whole: bool) -> None:
        if not own.ended:
            own.ended = True
            counts = {"batches": own.batches, "steps": own.steps}
            recorder.write(EpochEnd(**own.which, whole=whole, **counts))

    def next_index(self, call, iterator):
        index = call(iterator)
        iterator.__dict__.setdefault("_doctor_indices", deque()).append(index)
        return index

    def next_batch(self, call, iterator):
        own = iterator.__dict__.get("_doctor_pass")
        if own is None:
            return call(iterator)
        short, began = SHORT and own.batches >= SHORT, clock()
        try:
            if short:
                raise StopIteration
            self.fetching = own
            batch = call(iterator)
        except StopIteration:
            self.end_pass(own, whole=not short)
            raise
        self.current, recorder.ticks = own, recorder.ticks + 1
        waiting = iterator.__dict__.get("_doctor_indices")
        index = waiting.popleft() if waiting else None
        subsets = iterator.__dict__["_doctor_subsets"]
        quiet(self.read)(own, subsets, index, batch, clock() - began)
        own.batches += 1
        return batch

    def read(self, own: Pass, subsets: list, index, batch, seconds: float) -> None:
        """Record which samples a batch contains."""
        if recorder.full(Batch):
            return
        tensors = [one for one in leaves(batch) if one.dim()]
        tensors = [one for one in tensors if len(one) == len(tensors[0])]
        integers = [x for x in tensors if x.dim() == 1 and not x.is_floating_point()]
        labels = integers[0] if len(integers) == 1 else None
        values = None if labels is None else array("q", labels.tolist())
        marks = indices = rows = None
        if own.stream and len(integers) > 1:
            lists = [x.tolist() for x in integers]
            _, *others = sorted(lists, key=lambda x: -len({*x}))
            marks = array("q", map(digest, *others))
        numbers = index if isinstance(index, (list, tuple)) else [None]
        if not own.stream and all(hasattr(one, "__index__") for one in numbers):
            for subset in subsets:
                numbers = [subset[i] for i in numbers]
            indices = array("q", map(int, numbers))
        fits = indices is None or (tensors and len(tensors[0]) == len(indices))
        late = own.batches < EARLY and self.late < LATE and not recorder.watching
        late = late and bool(tensors) and tensors[0].is_cpu
        self.late += late
        if tensors and fits and (recorder.watching or late or indices is None):
            rows = array("q", map(digest, *map(hashes, tensors)))
        found = {**own.which, "number": own.batches, "indices": indices}
        single = numbers[0] if len(numbers) == 1 else None
        single = index if isinstance(index, int) else single
        more = {"marks": marks, "index": single}
        recorder.write(Batch(**found, labels=values, rows=rows, **more))
        read = {**found, "labels": labels, "used": False}
        own.reads.append(read)
        tell("on_batch", own, {**read, "tensors": tensors}, seconds)

    def next_read(self) -> dict | None:
        """Return the batch that is a network's input, if it came from a DataLoader."""
        reads = self.current.reads if self.current else ()
        while len(reads) > 1 and reads[0]["used"]:
            reads.popleft()
        if not reads:
            return None
        if reads[0]["used"] and self.current.ended:
            self.current = None  # the input comes from elsewhere
            return None
        reads[0]["used"] = True  # the oldest unused batch: a prefetcher reads ahead
        return reads[0]

    def on_exit(self) -> None:
        for known in self.loaders.values():
            if known["last"]:
                self.end_pass(known["last"], whole=False)
