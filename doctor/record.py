"""Write events and wrap PyTorch's functions in the processes of a job.

hook/sitecustomize.py imports this package in each process that imports PyTorch. The
wrappers change no results, draw no random numbers and do not communicate.
"""

import atexit
import contextlib
import functools
import gc
import multiprocessing
import os
import sys
import sysconfig
import threading
import time
import traceback
import types
from collections import Counter
from collections.abc import Callable

from .event import Compiles, Event, Exit, Failed, Rank, Start, Waits

STEPS = int(os.environ.get("DOCTOR_STEPS", "40"))  # optimizer steps to record
TIMED = 20  # later steps that are only timed
PASSES = 2000  # doctor watches at most this many backward passes (or autograd.grad())
SHORT = int(os.environ.get("DOCTOR_SHORT", "0"))  # batches per epoch; 0: all
GIVEN = "RANK", "WORLD_SIZE", "DOCTOR_CPU"  # environment variables to record
OWN = os.path.dirname(os.path.abspath(__file__))
LIBRARY = sysconfig.get_path("stdlib")
torch = sys.modules.get("torch")  # doctor's own process does not import PyTorch


class Recorder:
    """Writes this process's events to a file, and tracks what the process is doing."""

    def __init__(self):
        self.file, self.written = None, Counter()
        self.rank: int | None = None
        self.step = 0  # number of completed optimizer steps
        self.passes = 0  # see Exit.passes
        self.ticks = 0  # changes whenever something happens: see monitor()
        self.waiting = ""  # the collective that the main thread is calling

    @property
    def watching(self) -> bool:
        """Whether the current step is watched closely."""
        return self.step < STEPS and self.passes < PASSES

    @property
    def timing(self) -> bool:
        """Whether the current step is watched or only timed."""
        return self.step < STEPS + TIMED and self.passes < PASSES

    def full(self, kind: type[Event]) -> bool:
        """Return whether the limit for a kind of event has been reached."""
        return self.written[kind] >= kind.limit

    def write(self, event: Event) -> None:
        """Append an event to this process's file."""
        kind = type(event)
        if "DOCTOR_FOLDER" not in os.environ or self.full(kind):
            return
        if self.file is None:
            self.open()
        self.written[kind] += 1
        event.time, event.step = time.time(), self.step
        os.write(self.file, event.packed())

    def open(self) -> None:
        """Create the file, and record how the process was started."""
        host = os.uname().nodename  # several hosts may share the folder
        path = f"{os.environ['DOCTOR_FOLDER']}/{host}-{os.getpid()}.events"
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        parent = multiprocessing.parent_process()  # also under a fork server
        parent = parent.pid if parent else os.getppid()
        given = {name: os.environ.get(name) for name in GIVEN}
        self.write(Start(parent=f"{host}-{parent}", host=host, environment=given))

    def sign(self, name: str) -> None:
        """Create an empty file, which run.py expects."""
        open(f"{os.environ['DOCTOR_FOLDER']}/{name}", "w").close()

    def joined(self, rank: int, world_size: int) -> None:
        """Record this process's rank."""
        self.rank, self.ticks = rank, self.ticks + 1
        self.write(Rank(own=rank, world_size=world_size))


recorder = Recorder()
builtins = []  # wrapped PyTorch functions that are written in C++
plain = []  # hooks that PyTorch must not compile
# Functions in which a process waits for others
waits = set(
    """backward synchronize rendezvous init_process_group destroy_process_group
    _sync_buffers _sync_module_states _verify_param_shape_across_processes
    connect_to_new_process""".split()
)


def untouchable() -> bool:
    """Return whether PyTorch is compiling this code, or recording a CUDA graph."""
    if torch.compiler.is_compiling():  # such as a hook of a compiled layer
        return True
    with contextlib.suppress(RuntimeError):  # after an earlier kernel's error
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return False


def quiet(method: Callable) -> Callable:
    """Return a hook whose errors cannot end the job."""

    @functools.wraps(method)
    def hook(*args, **kwargs):
        try:  # faster than suppress(), for hooks of all layers
            return None if untouchable() else method(*args, **kwargs)
        except Exception:
            return None

    return hook


def wrap(owner, name: str, method: Callable) -> None:
    """Replace owner.name with a method whose first argument is the original function.

    `method(call, *args, **kwargs)` must return `call(*args, **kwargs)`. If the method
    itself fails, the job gets what `call` returns. Several laws may wrap one function.
    """
    call = getattr(owner, name, None)
    if call is None or method in getattr(call, "_doctor", ()):
        return

    @functools.wraps(call)
    def wrapped(*args, **kwargs):
        if untouchable():
            return call(*args, **kwargs)
        begun, results = [], []

        def original(*args, **kwargs):
            begun.append(True)
            results.append(call(*args, **kwargs))
            return results[-1]

        try:
            return method(original, *args, **kwargs)
        except Exception as error:
            failed = len(results) < len(begun)
            if failed or isinstance(error, StopIteration):
                raise
            recorder.waiting = ""
            return results[-1] if results else call(*args, **kwargs)

    wrapped._doctor = (*getattr(call, "_doctor", ()), method)
    # TorchScript then uses the original function
    wrapped.__script_if_tracing_wrapper = True
    wrapped.__original_fn = getattr(call, "__original_fn", call)
    if known := sys.modules.get("torch.jit._builtins"):
        if operation := known._find_builtin(call):
            known._register_builtin(wrapped, operation)
    if not hasattr(call, "__code__") and isinstance(owner, types.ModuleType):
        builtins.append((owner, name, call))
    with contextlib.suppress(AttributeError, TypeError):  # an unusual sys.stdout
        setattr(owner, name, wrapped)


def compiles(call, *args, **kwargs):
    """Restore PyTorch's functions, because its compiler expects the originals."""
    while builtins:
        setattr(*builtins.pop())
    recorder.write(Compiles())
    with contextlib.suppress(ImportError):  # older versions compile the hooks
        from torch._dynamo import eval_frame, types

        alone = types.FrameExecStrategy(*2 * [types.FrameAction.SKIP])
        for hook in (quiet(call), *plain):
            eval_frame.set_code_exec_strategy(hook.__code__, alone)
    return call(*args, **kwargs)


def traced() -> bool:
    """Return whether PyTorch is compiling, tracing or transforming the current code."""
    if untouchable() or torch.jit.is_tracing():
        return True
    functions = torch._C._functorch.peek_interpreter_stack()  # vmap(), grad()
    return functions is not None or torch._C._len_torch_dispatch_stack() > 0


def runs_normally() -> bool:
    """Return whether this is the main thread and nothing is being traced."""
    return not traced() and threading.current_thread() is threading.main_thread()


def not_the_users() -> tuple[str, ...]:
    """Return the path prefixes of the files of this package and of PyTorch."""
    return OWN, os.path.dirname(torch.__file__), "<"


def place(frame=None) -> str:
    """Return the innermost line of the user's (or else a library's) code: file:line."""
    other = ""
    for one, line in traceback.walk_stack(frame or sys._getframe(1)):
        file = one.f_code.co_filename
        if not file.startswith(not_the_users()):
            where = f"{os.path.relpath(file)}:{line}"
            if "site-packages" not in file and not file.startswith(LIBRARY):
                return where
            other = other or where
    return other


def excepthook(call, kind, error, trace) -> None:
    """Record the exception that ends the process."""
    if not issubclass(kind, (SystemExit, KeyboardInterrupt)):
        where, path = "", getattr(error, "filename", None)
        for frame, line in traceback.walk_tb(trace):
            file = frame.f_code.co_filename
            if not file.startswith((*not_the_users(), LIBRARY)):
                where = f"{os.path.relpath(file)}:{line}"
        text = f"{kind.__name__}: {error}"[:2000]
        path = os.path.abspath(path) if isinstance(path, str) else ""
        cuda = torch.cuda.is_available()
        recorder.write(Failed(text=text, place=where, path=path, cuda=cuda))
    if call:
        call(kind, error, trace)


def spawned(call, function, *args):
    """Record the exceptions of a process that torch.multiprocessing.spawn starts."""

    def guarded(*inside):
        try:
            return function(*inside)
        except Exception:
            excepthook(None, *sys.exc_info())
            raise

    return call(guarded, *args)


def leave() -> None:
    """Record the final state when the process ends."""
    from .watcher import tell

    if recorder.file is not None:
        tell("on_exit")
        recorder.write(Exit(passes=recorder.passes))
        gc.collect()  # frees the process groups: see Gloo's threads in docs/pitfalls.md


def monitor() -> None:
    """Record where the main thread waits if nothing happens for 4 seconds."""
    seen, since, main = -1, time.monotonic(), threading.main_thread().ident
    while True:
        time.sleep(1)
        if recorder.ticks != seen:
            seen, since = recorder.ticks, time.monotonic()
        seconds = time.monotonic() - since
        if seconds < 4 or recorder.file is None:
            continue
        inner = sys._current_frames().get(main)
        names = [one.f_code.co_name for one, _ in traceback.walk_stack(inner)]
        what = recorder.waiting or next((x for x in names if x in waits), "")
        recorder.write(Waits(what=what, place=place(inner), seconds=seconds))
        recorder.sign("waits")
        time.sleep(2)


def torch_is_there() -> None:
    """Install all hooks right after the process has imported PyTorch."""
    from torch.utils import _device

    from . import laws, moments  # noqa: F401  their watchers
    from .watcher import watchers

    # torch.set_default_device() looks up the functions that the wrappers replace
    getattr(_device, "_device_constructors", int)()
    for watcher in watchers:
        quiet(watcher.hooks)()
    wrap(sys, "excepthook", excepthook)
    wrap(torch, "compile", compiles)
    wrap(sys.modules.get("torch.multiprocessing.spawn"), "_wrap", spawned)
    atexit.register(leave)
    threading.Thread(target=monitor, daemon=True, name="doctor").start()


os.register_at_fork(after_in_child=recorder.__init__)
