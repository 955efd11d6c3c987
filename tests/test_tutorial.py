"""The lessons print what their pages quote, and stay short enough to be read."""

import ast
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ROOT, run

from benchmarks import overlap
from benchmarks.page import results
from tutorial import pages

LESSONS = sorted(
    path.name
    for path in (ROOT / "tutorial").glob("*.py")
    if path.name not in ("__init__.py", "pages.py")
)
PAGES = {path.name: path.read_text() for path in sorted(pages.PAGES.glob("*.md"))}
FULL = ("ranks_spawn", "ranks_horovod")  # eight processes each, like "ranks"


def marks(name):
    needed = [pytest.mark.full] if name in FULL else []
    needed += [pytest.mark.horovod] if "horovod" in name else []
    return needed + ([pytest.mark.mpi] if "mpirun" in pages.RUNS[name] else [])


RUNS = [pytest.param(name, marks=marks(name)) for name in pages.RUNS]


@pytest.fixture(scope="module")
def output(request):
    """What a lesson prints. Each that is asked for runs once, two at a time."""

    def ended(name):
        return run("bash", "-c", pages.with_free_port(pages.RUNS[name]), timeout=150)

    wanted = [
        item.callspec.params["name"]
        for item in request.session.items
        if "output" in item.fixturenames and not item.get_closest_marker("skip")
    ]
    with ThreadPoolExecutor(2) as pool:
        runs = {name: pool.submit(ended, name) for name in wanted}

        def printed(name):
            process = runs[name].result()
            assert process.returncode == 0, process.stderr[-3000:]
            return process.stdout

        yield printed
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", RUNS)
def test_a_lesson_prints_what_its_page_quotes(name, output):
    """To the letter: nothing in it depends on time or chance."""
    quoted = 0
    for page, text in PAGES.items():
        markers = [
            m
            for m in pages.MARKER.findall(text)
            if m.split(" / ")[0] == f"output {name}"
        ]
        for marker in markers:
            assert pages.filled(text, output, marker) == text, f"{page}: {marker}"
            quoted += 1
    assert quoted, f"no page quotes {name}"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_quotes_code_and_commands_as_they_are(page):
    text = PAGES[page]
    for kind in ("code", "region", "command", "machine"):
        assert pages.filled(text, None, kind) == text


def test_every_run_is_started_as_its_page_says():
    everything = "\n".join(PAGES.values())
    for name in pages.RUNS:
        assert f"<!-- command {name} -->" in everything, name
    started = re.findall(r"tutorial/(\w+\.py)", " ".join(pages.RUNS.values()))
    assert set(started) == set(LESSONS)


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
    ended = run("python", ROOT / "tutorial" / name, PYTHONPATH=str(tmp_path))
    assert ended.returncode == 2
    assert ended.stderr == f"{name} needs Horovod: not here\n"


def test_the_picture_is_that_of_the_results():
    steps = results("overlap")["steps"]
    assert overlap.PICTURE.read_text() == overlap.draw(steps)
    sent = [
        sum(what == "gloo:all_reduce" for what, *_ in spans) for spans in steps.values()
    ]
    assert sent == [6, 1]


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
        assert link.startswith("http") or (pages.PAGES / link).exists(), link
