"""Quote the lessons in docs/tutorial/*.md: their code, and what they print.

    python -m tutorial.pages    # run every lesson (two minutes), fill all pages

In a page, what stands between <!-- NAME --> and <!-- /NAME --> is made here. NAME is

    command RUN                 how the lesson is started
    output RUN                  all that it prints
    output RUN / TITLE          only the sections whose first line begins with TITLE
    code FILE / def FUNCTION    a function of a lesson (or "class ...")
    code FILE / TEXT            the lines around TEXT, from one blank line to the next
    region SCRIPT / NAME        a marked place of one of the five scripts
    machine RESULTS             what results/RESULTS.json was measured on and with
"""

import ast
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent

from benchmarks.page import ROOT, fill, machine, results

PAGES = ROOT / "docs" / "tutorial"
MARKER = re.compile(
    r"^<!-- ((?:command|output|code|region|machine) .+) -->$", re.MULTILINE
)
TORCHRUN = (
    "torchrun --nnodes 2 --node-rank {} --nproc-per-node 4 \\\n"
    "    --master-addr 127.0.0.1 --master-port 29500 tutorial/ranks.py{}\n"
)
MPIRUN = "mpirun -np {} --bind-to none --oversubscribe python tutorial/{}.py\n"
RUNS = {
    "ranks": TORCHRUN.format(0, " &") + TORCHRUN.format(1, "") + "wait\n",
    "ranks_spawn": (
        "export MASTER_ADDR=127.0.0.1 MASTER_PORT=29500\n"
        "python tutorial/ranks_spawn.py 0 &\n"
        "python tutorial/ranks_spawn.py 1\n"
        "wait\n"
    ),
    "ranks_horovod": (
        "horovodrun --gloo -np 8 -H localhost:4,127.0.0.1:4 \\\n"
        "    python tutorial/ranks_horovod.py\n"
    ),
    **{
        name: f"python tutorial/{name}.py\n"
        for name in (
            "collectives",
            "collectives_ring",
            "batches",
            "batches_learning_rate",
            "gradients",
            "overlap",
            "accumulation",
            "accumulation_batch_norm",
            "amp",
        )
    },
    "collectives_horovod": MPIRUN.format(4, "collectives_horovod"),
    "gradients_horovod": MPIRUN.format(2, "gradients_horovod"),
    "accumulation_horovod": MPIRUN.format(2, "accumulation_horovod"),
}


def with_free_port(command: str) -> str:
    """The command with a port that nobody listens on in place of 29500."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return command.replace("29500", str(probe.getsockname()[1]))


def sections(output: str, title: str) -> str:
    """The lines that begin with `title`, each with the indented lines below it."""
    pattern = rf"^{re.escape(title)}.*\n(?:[ \t]+.*\n)*"
    return "".join(re.findall(pattern, output, re.MULTILINE))


def code(name: str, what: str) -> str:
    """A function, or the paragraph in which a text stands, from a lesson."""
    text = (ROOT / "tutorial" / name).read_text()
    kind, _, wanted = what.partition(" ")
    if kind in ("def", "class"):
        (node,) = (
            n for n in ast.walk(ast.parse(text)) if wanted == getattr(n, "name", 0)
        )
        lines = text.splitlines(keepends=True)
        return dedent("".join(lines[node.lineno - 1 : node.end_lineno]))
    (paragraph,) = (part for part in text.split("\n\n") if what in part)
    return dedent(paragraph.strip("\n")) + "\n"


def region(script: str, name: str) -> str:
    """A marked place of one of the five scripts."""
    pattern = rf"^ *# \[{re.escape(name)}\].*?# \[/\w+\]\n"
    found = re.search(pattern, (ROOT / script).read_text(), re.DOTALL | re.MULTILINE)
    return dedent(found[0])


def quoted(marker: str, output: Callable[[str], str]) -> str:
    """What belongs behind a marker; `output` gives what a run prints.

    Raises:
        ValueError: there is no such text.
    """
    kind, _, rest = marker.partition(" ")
    source, _, what = rest.partition(" / ")
    if kind == "machine":
        return machine(results(source)).lstrip()
    language = {"command": "bash", "output": "text"}.get(kind, "python")
    if kind == "command":
        text = RUNS[source]
    elif kind == "output":
        text = sections(output(source), what) if what else output(source)
    else:
        text = (code if kind == "code" else region)(source, what)
    if not text:
        raise ValueError(f"nothing for {marker}")
    return f"```{language}\n{text}```\n"


def filled(page: str, output: Callable[[str], str], wanted: str = "") -> str:
    """The page with what its markers name; only `wanted`, or the kind that it names."""
    names = [
        name
        for name in MARKER.findall(page)
        if not wanted or f"{name} ".startswith(f"{wanted} ")
    ]
    return fill(page, {name: quoted(name, output) for name in names})


def printed(run: str) -> str:
    """Run a lesson; return what it prints.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    own = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    return subprocess.run(
        ["bash", "-c", with_free_port(RUNS[run])],
        cwd=ROOT,
        env=os.environ | own,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=200,
    ).stdout


def main() -> None:
    """Run each lesson, two at a time, and fill the pages."""
    with ThreadPoolExecutor(2) as pool:
        outputs = dict(zip(RUNS, pool.map(printed, RUNS), strict=True))
    for path in sorted(PAGES.glob("*.md")):
        path.write_text(filled(path.read_text(), outputs.__getitem__))


if __name__ == "__main__":
    main()
