"""Two processes with two workers each read ten files: how often is a sample used?

python tutorial/18_streams/streams.py
"""

import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

RANKS, WORKERS, FILES, LINES, BATCH = 2, 2, 10, 8, 4
SPLITS = {  # which reader is this worker, and how many readers are there?
    "no split": lambda rank, worker: (0, 1),
    "by rank": lambda rank, worker: (rank, RANKS),
    "by worker": lambda rank, worker: (worker, WORKERS),
    "rank * workers + worker": lambda r, w: (r * WORKERS + w, RANKS * WORKERS),
    "worker * ranks + rank": lambda r, w: (w * RANKS + r, RANKS * WORKERS),
}


class Stream(IterableDataset):
    """Yields a worker's share of the samples; each worker has a copy of this object."""

    def __init__(self, folder: str, rank: int, split: str):
        self.folder, self.rank, self.split, self.epoch = folder, rank, split, 0

    def __iter__(self) -> Iterator[str]:
        files = sorted(Path(self.folder).iterdir())
        random.Random(self.epoch).shuffle(files)  # the same order in all workers
        number, readers = SPLITS[self.split](self.rank, get_worker_info().id)
        for file in files[number::readers]:
            yield from file.read_text().split()


def read(folder: str, split: str) -> None:
    """Read an epoch as both ranks would, one after the other; print the counts."""
    seen, batches = Counter(), []
    for rank in range(RANKS):
        loader = DataLoader(Stream(folder, rank, split), BATCH, num_workers=WORKERS)
        found = list(loader)
        seen.update(sample for batch in found for sample in batch)
        batches.append(len(found))
    times = Counter(seen.values())
    counts = [f"{times[n]} used {n}x" for n in sorted(times)]
    counts.append(f"{FILES * LINES - len(seen)} never used")
    print(f"{split}\n  samples: {', '.join(counts)}")
    print(f"  batches per rank: {batches}")


def main() -> None:
    """Write ten files with eight samples each, and read them with each split."""
    with tempfile.TemporaryDirectory() as folder:
        for file in range(FILES):
            lines = [f"{file}.{line}" for line in range(LINES)]
            Path(folder, f"shard-{file}.txt").write_text("\n".join(lines))
        for split in SPLITS:
            read(folder, split)


if __name__ == "__main__":
    main()
