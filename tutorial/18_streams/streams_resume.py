"""A run is killed after five batches: which samples does the resumed run read?

python tutorial/18_streams/streams_resume.py
"""

from collections import Counter
from collections.abc import Iterator
from itertools import islice

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

RANKS, WORKERS, FILES, LINES, BATCH, TAKEN = 2, 2, 10, 6, 4, 5
State = dict[int, int]  # how many batches each of this rank's workers delivered


class Stream(IterableDataset):
    """Yields batches of samples, each with the worker's state after the batch."""

    def __init__(self, rank: int, state: State):
        # A loader starts with worker 0, so worker 0 takes the role whose turn is next
        self.rank = rank
        self.turns = sorted((delivered, role) for role, delivered in state.items())

    def __iter__(self) -> Iterator[tuple[list[str], int, int]]:
        delivered, role = self.turns[get_worker_info().id]
        files = range(FILES)[role * RANKS + self.rank :: RANKS * WORKERS]
        for first in range(delivered * BATCH, len(files) * LINES, BATCH):
            places = range(first, min(first + BATCH, len(files) * LINES))
            lines = [divmod(place, LINES) for place in places]  # reads nothing else
            samples = [f"{files[file]}.{line}" for file, line in lines]
            yield samples, role, first // BATCH + 1


def at(rank: int, taken: int) -> State:
    """Compute the state after `taken` batches from the sizes of the files alone."""
    order, state = [], dict.fromkeys(range(WORKERS), 0)
    for role in range(WORKERS):
        samples = len(range(FILES)[role * RANKS + rank :: RANKS * WORKERS]) * LINES
        order += [(turn, role) for turn in range(-(-samples // BATCH))]
    return state | Counter(role for _, role in sorted(order)[:taken])


def read(rank: int, state: State, batches: int | None = None) -> list[list[str]]:
    """Return batches (default: all that are left), and keep `state` up to date."""
    found = []
    loader = DataLoader(Stream(rank, state), batch_size=None, num_workers=WORKERS)
    for samples, role, delivered in islice(loader, batches):
        state[role] = delivered  # counts batches that arrived here, not prefetched ones
        found.append(samples)
    return found


WAYS = {  # the state that the resumed run begins with
    "start again": lambda rank, state: at(rank, 0),
    "skip 5 in each worker": lambda rank, state: dict.fromkeys(state, TAKEN),
    "by arithmetic": lambda rank, state: at(rank, TAKEN),
    "state of the batches": lambda rank, state: state,
}


def main() -> None:
    """Resume in four ways; compare each with an uninterrupted run."""
    whole = [read(rank, at(rank, 0)) for rank in range(RANKS)]
    for way in WAYS:
        seen, equal = Counter(), True
        for rank in range(RANKS):
            batches = read(rank, state := at(rank, 0), TAKEN)  # then the loader is gone
            batches += read(rank, WAYS[way](rank, state))
            equal = equal and batches == whole[rank]
            seen.update(sample for batch in batches for sample in batch)
        times, never = Counter(seen.values()), FILES * LINES - len(seen)
        print(f"{way}: {times[1]} used 1x, {times[2]} used 2x, {never} never used")
        print(f"  the same batches as without a break: {equal}")


if __name__ == "__main__":
    main()
