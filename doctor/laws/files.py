"""Law 8: files are complete, and have one writer. Records which files are written."""

import contextlib
import os
import sys
import zipfile

from ..event import Event, Start
from ..law import RISK, WRONG, Breach, Doubt, Law, check, explains, need, several
from ..record import LIBRARY, OWN, not_the_users, place, recorder
from ..sample import digest
from ..watcher import Watcher

LAW = Law(8, "files", "Files are complete, and have one writer")
WRITES = os.O_WRONLY | os.O_RDWR
SYSTEM = "/dev/", "/proc/", "/sys/"
THROUGH = "logging", "pathlib", "shutil", "gzip", "bz2", "lzma", "zipfile"
WRITERS = "numpy", "pandas", "PIL", "imageio", "soundfile"  # write where one says
PREFIXES = "module.", "_orig_mod."  # in the names of wrapped networks' weights
CACHES = "cache", ".lock", "__pycache__"


class Opened(Event, limit=300):
    """A file was opened for writing, written by torch.save(), or renamed."""

    path: str
    saved: bool = False
    mark: int = 0  # a hash of the file's contents, if it was renamed to `path`
    place: str


class Restored(Event, limit=200):
    """The script has called load_state_dict()."""

    what: str  # weights, optimizer or schedule
    lost: bool  # no name in the file matches
    place: str
    wrapped: bool = False  # its argument has DDP's or torch.compile's names


class Files(Watcher):
    """Records which files a process writes."""

    def __init__(self):
        self.own = set()  # paths that Python code has opened for writing

    def hooks(self) -> None:
        sys.addaudithook(self.audit)  # also sees calls of a stored open()

    def audit(self, name: str, args: tuple) -> None:
        """Record a file opened for writing; Python calls this for all audit events."""
        if name == "open" and isinstance(args[2], int) and args[2] & WRITES:
            with contextlib.suppress(Exception):
                self.opened(args[0], args[2] & (os.O_CREAT | os.O_TRUNC))
        if name == "os.rename":  # as of a temporary file, whose name only one rank uses
            with contextlib.suppress(Exception):
                old, new = (os.path.abspath(os.fsdecode(x)) for x in args[:2])
                if old in self.own:
                    self.opened(new, os.O_CREAT, contents(old))

    def opened(self, file, creates: int, mark: int = 0) -> None:
        if not isinstance(file, (str, os.PathLike)) or recorder.full(Opened):
            return
        path, frame = os.path.abspath(os.fsdecode(file)), sys._getframe(2)
        self.own |= {path} if len(self.own) < 10_000 else set()
        code, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
        if code.startswith(OWN) or path.startswith(SYSTEM):
            return
        installed = "-packages" in code and not code.startswith(not_the_users())
        standard = code.startswith((*not_the_users(), LIBRARY)) and not installed
        if standard and not module.startswith(THROUGH):
            return  # such as code that PyTorch has compiled
        inside = os.path.relpath(path)
        writes = creates and module.startswith(WRITERS)
        outside = inside.startswith("..") and not writes
        known = outside or any(one in inside for one in CACHES)
        if not (installed and known):
            recorder.write(Opened(path=path, mark=mark, place=place(frame)))


def contents(path: str) -> int:
    """Return a hash of a file's contents, without the time in a compressed file."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as file:
            return digest(*((x.filename, x.CRC) for x in file.infolist())) | 1
    with open(path, "rb") as file:
        size, first = os.path.getsize(path), file.read(2**20)
        file.seek(max(0, size - 2**20))
        last = file.read()
    gzip = first[:2] == b"\x1f\x8b"  # its last bytes are a checksum
    return (digest(last[-8:]) if gzip else digest(size, first, last)) | 1


def wrapped(state: dict) -> bool:
    """Return whether a state's names are those of DDP or of torch.compile()."""
    return bool(state) and all(str(name).startswith(PREFIXES) for name in state)


def base(path: str | None) -> str:
    """Return a file's name for a finding."""
    return os.path.basename(path or "a file")


@check(LAW, RISK, general=True, read="pitfall 20")
def several_write(job):
    """Several ranks write the same file.

    Write files on rank 0 only, or give each rank its own file.
    Not a mistake if: all ranks write the same content, or append whole lines.
    """
    several(job)
    files, shared, alone = {}, [], []
    for process in job.processes:  # each host has its own paths
        host = process.of(Start)[0].host
        for one in process.of(Opened):
            files.setdefault((host, one.path), []).append(one)
    for (_, path), events in sorted(need(files, "no file was written").items()):
        ranks = sorted({one.rank for one in events})
        told = ", ".join(map(str, ranks))
        marks = [[x.mark for x in events if x.rank == rank] for rank in ranks]
        if len(ranks) > 1 and all(marks[0]) and all(one == marks[0] for one in marks):
            continue  # each rank puts an equal file in its place
        if len({one.rank for one in events if one.saved}) > 1:
            what = f"{base(path)} is saved by ranks {told}"
            yield Breach(what, events[0].place, facts=events)
        elif len(ranks) > 1:
            shared.append((f"{base(path)} is written by ranks {told}", events[0].place))
        else:
            alone.append(ranks[0])
    if shared:
        more = f"; {len(shared) - 1} more likewise" * (len(shared) > 1)
        yield Breach(shared[0][0] + more, shared[0][1])
    if any(len(process.of(Opened)) >= Opened.limit for process in job.processes):
        raise Doubt(f"only the first {Opened.limit} files of each rank were seen")
    if alone:
        who = f"rank {alone[0]}" if len({*alone}) == 1 else "one rank each"
        yield f"{len(alone)} of {len(files)} files written by {who}"


@explains(several_write, WRONG)
def several_save(job, breach):
    """Several ranks save the same file, and overwrite each other's data.

    Save on rank 0 only.
    """
    what = f"{breach.what}, which overwrite each other's data"
    return Breach(what, breach.place) if breach.facts else None
