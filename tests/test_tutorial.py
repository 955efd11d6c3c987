"""The lessons print what their pages quote (--figures writes it), and stay short enough to be read."""

import ast
import functools
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ROOT, run
from played import Played, lesson, run_python
from ranks import free_port

LESSONS = sorted(path.name for path in (ROOT / "tutorial").glob("*.py"))
FOLDER = ROOT / "docs" / "tutorial"
PAGES = {path.name: path.read_text() for path in sorted(FOLDER.glob("*.md"))}
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", "".join(PAGES.values()), re.M | re.S)


def command(lesson):
    """How the pages say that a lesson is started."""
    (found,) = {block for block in BLOCKS if f"tutorial/{lesson}" in block}
    return found


RUNS = {lesson.removesuffix(".py"): command(lesson) for lesson in LESSONS}
PRINTED = ROOT / "results" / "lessons"
FULL = ("ranks_spawn", "ranks_horovod")  # eight processes each
# Lessons that are a command of their own also in the short form
COMMANDS = ("collectives", "collectives_horovod", "gradients_horovod")
COMMANDS += ("accumulation_horovod",)


def marks(name):
    needed = [pytest.mark.full] if name in FULL else []
    needed += [pytest.mark.horovod] if "horovod" in name else []
    return needed + ([pytest.mark.mpi] if "mpirun" in RUNS[name] else [])


def by_command(name):
    """What a lesson prints that is started as its page says."""
    line = RUNS[name].replace("29500", str(free_port()))
    ended = run("bash", "-c", line, timeout=150)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def in_forks(name, folder):
    """What a lesson prints in forks of a process that has imported PyTorch."""
    processes, port = [{}], free_port()
    if name == "ranks":
        processes = [as_torchrun_does(rank, port) for rank in range(8)]
    with Played(folder) as played:
        for variables in processes:
            played.start(lesson, ROOT / "tutorial" / f"{name}.py", variables)
        assert not any(played.end(seconds=100)), played.text()
        return played.log(0)


def as_torchrun_does(rank, port):
    """The variables of one of four processes on each of two hosts."""
    node, local_rank = divmod(rank, 4)
    numbers = {"RANK": rank, "LOCAL_RANK": local_rank, "GROUP_RANK": node}
    numbers |= {"WORLD_SIZE": 8, "LOCAL_WORLD_SIZE": 4, "MASTER_PORT": port}
    variables = {name: str(number) for name, number in numbers.items()}
    return {**variables, "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture(scope="module")
def output(request, tmp_path_factory):
    """What a lesson prints; commands that are asked for run once, two at a time."""
    wanted = {
        item.callspec.params["name"]
        for item in request.session.items
        if "output" in item.fixturenames and not item.get_closest_marker("skip")
    }
    if not request.config.getoption("full"):
        wanted &= set(COMMANDS)
    with ThreadPoolExecutor(2) as pool:
        commands = {name: pool.submit(by_command, name) for name in wanted}

        @functools.cache
        def printed(name):
            if name in commands:
                return commands[name].result()
            return in_forks(name, tmp_path_factory.mktemp(name))

        yield printed
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks(name)) for name in RUNS]
)
def test_a_lesson_prints_what_its_page_quotes(name, output, request):
    """To the letter: nothing in it depends on time or chance."""
    file = PRINTED / f"{name}.txt"
    if request.config.getoption("figures"):
        file.write_text(output(name))
    assert output(name) == file.read_text()
    assert any(re.search(f"<!-- output {name}[ /]", text) for text in PAGES.values())


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_is_short_and_stands_alone(name):
    text = (ROOT / "tutorial" / name).read_text()
    assert len(text.splitlines()) < 80
    assert ast.get_docstring(ast.parse(text))
    for node in ast.walk(ast.parse(text)):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module]
        for module in modules:
            top = module.split(".")[0]
            assert not (ROOT / top).exists() and not (ROOT / f"{top}.py").exists(), (
                module
            )


@pytest.mark.parametrize("name", [name for name in LESSONS if "horovod" in name])
def test_without_horovod_a_lesson_says_so_in_one_line(name, tmp_path):
    (tmp_path / "horovod.py").write_text("raise ImportError('not here')")
    copy = shutil.copy(ROOT / "tutorial" / name, tmp_path)  # looks beside itself first
    assert run_python(tmp_path, copy) == (2, f"{name} needs Horovod: not here\n")


def test_the_pages_lead_from_one_to_the_next():
    order = re.findall(
        r"^\| \d \| \[.+?\]\((\w+\.md)\)", PAGES["README.md"], re.MULTILINE
    )
    assert len(order) == len(PAGES) - 1
    for page, after in zip(order, order[1:], strict=False):
        assert PAGES[page].rstrip().splitlines()[-1].endswith(f"({after})")


@pytest.mark.parametrize("page", PAGES)
def test_links_of_the_pages_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)\)", PAGES[page]):
        assert link.startswith("http") or (FOLDER / link).exists(), link
