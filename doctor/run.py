"""Start a command that doctor watches, and end it if it hangs."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from .event import Exit, Failed, Joins, Start
from .job import Job, clashing, read, waiting

HERE = Path(__file__).resolve().parent
SEEN = "doctor: the first steps are recorded; Ctrl-C ends the job and prints the report"
HANG = 40  # end the job if all processes wait for each other for this many seconds


def hangs(folder: Path) -> bool:
    """Return whether all processes have waited for each other for HANG seconds."""
    sign = folder / "waits"
    if not sign.exists() or time.time() - sign.stat().st_mtime > 6:
        return False
    job = read(folder)
    alive = [p for p in job.processes if not (p.of(Exit) or p.of(Failed))]
    launched = any(one.environment.get("RANK") for one in job.of(Start))
    here = not launched and job.of(Joins) and all(x.local for x in job.of(Joins))
    few = len(job.processes) < job.world_size  # more processes may start
    if not alive or (few and not here):
        return False
    waits, most = [waiting(process) for process in alive], HANG * (2 if few else 1)
    return all(one and (one.seconds > most or clashing(job)) for one in waits)


def end(process: subprocess.Popen, folder: Path) -> None:
    """End a command and all processes that write events to the folder."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
            break
    own = f"DOCTOR_FOLDER={folder}\0".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if own in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)


def run(command: list[str], folder: Path, **options: str) -> Job:
    """Watch a command until it ends or hangs, or the user presses Ctrl-C.

    Its processes write events to `folder`; `options` are their environment variables.
    """
    paths = [str(HERE / "hook"), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), **options}
    variables = {**os.environ, **variables, "DOCTOR_FOLDER": str(folder)}
    hung = interrupted = told = False
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C
    process = subprocess.Popen(command, env=variables, start_new_session=True)
    try:
        while process.poll() is None and not hung:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2)
            hung = process.poll() is None and hangs(folder)
            seen = folder / "seen"
            if not told and seen.exists() and time.time() - seen.stat().st_mtime > 20:
                told = True
                print(SEEN, file=sys.stderr)
        if hung:
            print("doctor: the processes are waiting for each other", file=sys.stderr)
    except KeyboardInterrupt:
        interrupted = True
        print("doctor: interrupted; ending the job", file=sys.stderr)
    finally:
        if process.poll() is None:
            end(process, folder)
    time.sleep(0.2)
    job = read(folder)
    job.status, job.hung, job.interrupted = process.returncode, hung, interrupted
    return job
