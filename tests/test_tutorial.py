"""The lessons print what their pages quote (--figures writes it), and are short and alone."""

import ast
import re

import pytest
from conftest import ROOT, run
from played import Played, lesson
from ranks import free_port

LESSONS = {path.stem: path for path in sorted((ROOT / "tutorial").glob("*.py"))}
PAGES = "".join(path.read_text() for path in (ROOT / "docs/tutorial").glob("*.md"))
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGES, re.M | re.S)


def command(name):
    """How the pages say that a lesson is started."""
    (found,) = {block for block in BLOCKS if f"tutorial/{name}.py" in block}
    return found


def marks(name):
    found = [pytest.mark.full] if "horovod" in name or name == "ranks_spawn" else []
    found += [pytest.mark.horovod] if "horovod" in name else []
    return found + ([pytest.mark.mpi] if "mpirun" in command(name) else [])


def by_command(name):
    ended = run("bash", "-c", command(name).replace("29500", str(free_port())))
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def in_forks(name, folder):
    """What it prints in a fork, or eight, of a process that has imported PyTorch."""
    processes = [{}]
    if name == "ranks":  # as torchrun starts four processes on each of two hosts
        job = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}
        job["MASTER_PORT"] = str(free_port())
        places = [(str(r), str(r % 4), str(r // 4)) for r in range(8)]
        names = ("RANK", "LOCAL_RANK", "GROUP_RANK")
        processes = [{**job, **dict(zip(names, p, strict=True))} for p in places]
    with Played(folder) as played:
        for variables in processes:
            played.start(lesson, LESSONS[name], variables)
        assert not any(played.end(seconds=100)), played.text()
        return played.log(0)


@pytest.mark.parametrize("name", [pytest.param(n, marks=marks(n)) for n in LESSONS])
def test_a_lesson_prints_what_its_page_quotes(name, request, tmp_path):
    """To the letter: nothing in it depends on time or chance."""
    launched = request.config.getoption("full")
    printed = by_command(name) if launched else in_forks(name, tmp_path)
    file = ROOT / "results" / "lessons" / f"{name}.txt"
    if request.config.getoption("figures"):
        file.write_text(printed)
    assert printed == file.read_text()
    assert re.search(f"<!-- output {name}[ /]", PAGES)


def test_lessons_are_short_and_need_nothing_of_this_project():
    ours = {path.stem for path in ROOT.iterdir()} - {""}
    for name, path in LESSONS.items():
        text = path.read_text()
        assert text.count("\n") < 80 and ast.get_docstring(ast.parse(text)), name
        modules = re.findall(r"^ *(?:import|from) (\w+)", text, re.M)
        assert modules and not ours & set(modules), name
