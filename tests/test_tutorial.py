"""The lessons' pages quote their programs' output, and all exercises have answers.

The tests run programs, changed programs and answers; `--figures` updates tutorial/*/output/.
"""

import ast
import json
import re
import runpy

import pytest
from conftest import ROOT, run
from played import Played, lesson
from ranks import free_port

TUTORIAL = ROOT / "tutorial"
LESSONS = {path.stem: path for path in sorted(TUTORIAL.glob("[0-9]*/*.py"))}
TEXTS = {p.parent.name: p.read_text() for p in sorted(TUTORIAL.glob("**/README.md"))}
PAGES = "".join(TEXTS.values())
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGES, re.M | re.S)
CHANGE = r"^```diff\n--- tutorial/\w+/(\w+)\.py\n(.*?)^```\n.*?<!-- output (\w+)"
CHANGES = {name: one for *one, name in re.findall(CHANGE, PAGES, re.M | re.S)}
ANSWER = r"<details>.*?</details>"


def command(name):
    """Return the command with which a page starts its lesson's program."""
    (found,) = {block for block in BLOCKS if f"/{name}.py" in block}
    return found


def marks(name):
    # Three processes are too many for two cores; restarts are launched; the others take long
    slow = "build_ddp_three restarts_change restarts_weights restarts_hosts "
    slow += "network_crossing talk_less_change overlap_two step_cost_change"
    if name in slow.split():
        return [pytest.mark.full]
    program = CHANGES.get(name, [name])[0]
    if "horovod" not in program:
        return []
    found = [pytest.mark.full, pytest.mark.horovod]
    return found + ([pytest.mark.mpi] if "mpirun" in command(program) else [])


def programs(names):
    found = [pytest.param(name, marks=marks(name)) for name in names]
    return pytest.mark.parametrize("name", found)


def output(name, path, folder, request):
    """Return a lesson's output; start it with its page's command or, faster, in forked processes."""
    launched = name.startswith("restarts") or "horovod" in name
    if launched or request.config.getoption("full"):
        words = command(name).replace("29500", str(free_port()))
        ended = run("bash", "-c", re.sub(rf"tutorial/\w+/{name}\.py", str(path), words))
        print(ended.stderr)  # pytest shows this if the test fails
        assert ended.returncode == 0
        return ended.stdout
    processes = [{}]
    if name == "ranks":  # like torchrun with four processes on each of two hosts
        job = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}
        job["MASTER_PORT"] = str(free_port())
        places = [(str(r), str(r % 4), str(r // 4)) for r in range(8)]
        names = ("RANK", "LOCAL_RANK", "GROUP_RANK")
        processes = [{**job, **dict(zip(names, p, strict=True))} for p in places]
    with Played(folder) as played:
        for number, variables in enumerate(processes):
            played.start(lesson, path, variables, folder / f"errors{number}.log")
        assert not any(played.end(seconds=100)), played.text()
        return played.log(0)


def said(name, program):
    """Return the file with the output of a program or of a changed program."""
    return LESSONS[program].parent / "output" / f"{name}.txt"


def compare(name, program, printed, request):
    file = said(name, program)
    if request.config.getoption("figures"):
        file.write_text(printed)
    assert printed == file.read_text()
    assert re.search(rf"<!-- output {name}[ /-]", PAGES)


@programs(LESSONS)
def test_a_lesson_prints_what_its_page_quotes(name, request, tmp_path):
    """A program's output is identical in each run: nothing depends on time or chance."""
    compare(name, name, output(name, LESSONS[name], tmp_path, request), request)


@programs(CHANGES)
def test_a_changed_lesson_prints_what_its_page_quotes(name, request, tmp_path):
    program, diff = CHANGES[name]
    text = LESSONS[program].read_text()
    for hunk in re.split(r"^@@.*\n", diff, flags=re.M):
        lines = [(line[:1], line[1:]) for line in hunk.splitlines(keepends=True)]
        old = "".join(rest for sign, rest in lines if sign != "+")
        assert text.count(old) == 1, f"{program}.py has this {text.count(old)} times"
        text = text.replace(old, "".join(rest for sign, rest in lines if sign != "-"))
    path = tmp_path / f"{program}.py"
    path.write_text(text)
    printed = output(program, path, tmp_path, request)
    compare(name, program, printed, request)
    assert printed != said(program, program).read_text()


@pytest.mark.parametrize("page", TEXTS)
def test_answers_that_are_code_hold(page, tmp_path):
    for number, answer in enumerate(re.findall(ANSWER, TEXTS[page], re.S)):
        answer = re.sub(r"<!-- (\w+) .*?<!-- /\1 -->", "", answer, flags=re.S)
        for code in re.findall(r"^```python\n(.*?)^```$", answer, re.M | re.S):
            path = tmp_path / f"{number}.py"
            path.write_text(code)
            assert "assert " in code
            with Played(tmp_path) as played:
                played.start(lesson, path, {}, tmp_path / "errors.log")
                assert played.end(seconds=60) == [0], played.text()


def test_every_change_is_run():
    assert len(CHANGES) == PAGES.count("```diff\n--- tutorial/")


def test_lessons_are_short_and_need_nothing_of_this_project():
    ours = {path.stem for path in ROOT.iterdir()} - {""}
    for name, path in LESSONS.items():
        text = path.read_text()
        assert text.count("\n") <= 80 and ast.get_docstring(ast.parse(text)), name
        modules = re.findall(r"^ *(?:import|from) (\w+)", text, re.M)
        assert not ours & set(modules), name


def test_exposed_communication_is_what_no_kernel_hides(tmp_path):
    names = "ProfilerStep#1", "gemm", "ncclDevKernel_AllReduce", "gemm", "aten::add"
    spans = (0, 2000), (100, 900), (500, 800), (1150, 350), (990, 500)  # began, us
    events = [{"ph": "X", "tid": 1, "cat": "kernel"} for _ in names]
    for event, name, (began, took) in zip(events, names, spans, strict=True):
        event |= {"name": name, "ts": began, "dur": took}
    events[0]["cat"], events[4]["cat"] = "user_annotation", "cpu_op"
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    lesson = runpy.run_path(str(LESSONS["step_cost_exposed"]))
    assert lesson["steps"](tmp_path / "trace.json") == [[2.0, 1.25, 0.8, 0.15]]


def test_a_fit_finds_latency_and_bandwidth():
    lesson, found = runpy.run_path(str(LESSONS["network_fit"])), pytest.approx
    times = {size: 5e-5 + size / 1e10 for size in (1024, 10**5, 10**7)}
    assert lesson["fit"](times) == found((5e-5, 1e10))


def test_a_batch_for_which_communication_takes_as_long_is_predicted():
    lesson = runpy.run_path(str(LESSONS["network_crossing"]))
    size, same = 8e6, 8e9 / lesson["LINK"]
    rows = [[n, n / 1000, n / 1000, same / 1000] for n in lesson["BATCHES"]]
    text = lesson["report"](size, rows)
    assert f"predicted {same:.0f}, measured {same:.0f} samples (+0%)" in text
    lesson = runpy.run_path(str(LESSONS["network_batch"]))
    assert lesson["crossing"](2000, 0.2e9, 12.5e9) == 32


def test_the_core_path_and_the_tracks_are_the_whole_course():
    labs = runpy.run_path(str(TUTORIAL / "labs" / "lab.py"))["labs"]()
    core, tracks = {*range(1, 10), 11, 12, 14}, {}
    row = r"^\| \w.*: .* \| ([\d, ]+) \| ([\d, ]+) \|$"
    for lessons, numbers in re.findall(row, TEXTS["tutorial"], re.M):
        tracks |= dict.fromkeys(map(int, lessons.split(",")), numbers)
    numbers = {int(path.parent.name[:2]) for path in LESSONS.values()}
    assert core | tracks.keys() == numbers and not core & tracks.keys()
    assert sum(lab.path == "core" for lab in labs.values()) == 16
    for lab in labs.values():
        lesson = int(lab.lesson[:2])
        assert lesson in core or lab.path == "optional" and lab.number in tracks[lesson]
    plan, taught = (TUTORIAL / "TEACHING.md").read_text(), set()
    rows = re.findall(r"^\| (\d+) \| (\d.*) \| (.*) \|$", plan, re.M)
    for week, lessons, due in rows:
        taught = taught if week != "1" else set()
        taught |= {f"{int(lesson):02}" for lesson in re.findall(r"\d+", lessons)}
        assert {labs[lab].lesson[:2] for lab in re.findall(r"\d+", due)} <= taught, due
