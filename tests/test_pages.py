"""README.md and docs/: links, commands, code and layout hold."""

import ast
import html
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pages
import pytest
from conftest import BROWSERS, ROOT, run
from pages import PAGES
from torch.distributed.run import get_args_parser

STRATEGIES = ("dataparallel", "distributed", "multiprocessing_distributed")
STRATEGIES += ("apex_distributed", "horovod_distributed")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
PITFALLS = ROOT / "docs" / "pitfalls.md"


def name(page):
    return str(page.relative_to(ROOT))


each_page = pytest.mark.parametrize("page", PAGES, ids=name)


# --- all pages ---


def missing_links(page):
    missing = []
    for link in pages.links(page):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in pages.anchors(target)):
            missing.append(link)
    return missing


@each_page
def test_links_and_anchors_lead_somewhere(page):
    assert not missing_links(page)


def test_a_broken_link_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A *b* `c_d`: e/f?\n\n## Again\n\n## Again\n\n[1](#a-b-c_d-ef) [2](#again-1) "
        "[3](page.md) [4](#again-2) [5](other.md) [6](page.md#nowhere) ![7](no.svg)\n"
    )
    expected = ["#again-2", "other.md", "page.md#nowhere", "no.svg"]
    assert missing_links(page) == expected


@each_page
def test_headings_are_in_order(page):
    levels = [int(t.tag[1]) for t in pages.tokens(page) if t.type == "heading_open"]
    assert levels[0] == 1 and levels.count(1) == 1
    for before, after in zip(levels, levels[1:], strict=False):
        assert after <= before + 1


@each_page
def test_blocks_are_named_and_fit_on_a_line(page):
    for token in pages.tokens(page):
        assert token.type != "code_block", f"indented: {token.content}"
        if token.type == "fence":
            assert token.info in ("bash", "python", "text", "diff", "yaml", "json")
            longest = max(token.content.splitlines(), key=len, default="")
            assert token.info == "text" or len(longest) <= 96, longest


def test_python_blocks_compile(tmp_path):
    for page in PAGES:
        for number, block in enumerate(pages.fences(page, "python")):
            ast.parse(block, name(page))
            if re.match(r"(import|from) ", block):  # a program, so its names resolve
                file = tmp_path / name(page) / f"{number}.py"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(block)
    ruff = ("ruff", "check", "--isolated", "--select=F", "--output-format=concise")
    ended = run(sys.executable, "-m", *ruff, tmp_path)
    assert ended.returncode == 0, ended.stdout


@each_page
def test_bash_blocks_are_bash(page):
    for block in pages.fences(page, "bash"):
        ended = subprocess.run(
            ["bash", "-n"], input=block, text=True, capture_output=True
        )
        assert ended.returncode == 0, block + ended.stderr


def sources(script):
    """Text of the files that know a script's flags."""
    path, strategy = Path(script), Path(script).stem
    files = [path, path.with_suffix(".py")]
    if strategy in STRATEGIES:
        files += [Path(f"{strategy}.py"), Path("common", "arguments.py")]
    if script == "scripts/test.sh":
        files.append(Path("tests", "conftest.py"))
    if path.parent.name == "benchmarks":
        files.append(Path("benchmarks", "comparison.py"))
    return "".join(
        (ROOT / file).read_text() for file in files if (ROOT / file).exists()
    )


def unknown(words):
    """Files of a command that do not exist, and flags that nobody knows."""
    words = [word for word in words if not re.match(r"[A-Z_]+=", word)]
    launcher = get_args_parser()._option_string_actions if "torch" in words[0] else ()
    if "torch.distributed.launch" in words:
        launcher = {*get_args_parser()._option_string_actions, "--use-env"}
    if words[0] == "horovodrun" and importlib.util.find_spec("horovod"):
        found = importlib.util.find_spec("horovod.runner.launch").origin
        launcher = re.findall(r"'(-[\w-]+)'", Path(found).read_text())
    wrong, known = [], None  # the text that knows what flags the script has
    for before, word in zip(["", *words], words, strict=False):
        if before == "-m" and word.startswith("benchmarks."):
            word = word.replace(".", "/") + ".py"
        if word == "train.py":  # the reader's
            known = ""
        elif re.fullmatch(r"[a-z][\w/.]*\.(py|sh)", word) and "diff" not in words:
            wrong += [] if (ROOT / word).exists() else [word]
            known = sources(word)
            known += " -k -q -x" if word == "scripts/test.sh" else ""  # pytest's
        elif word.startswith("-") and known is not None:
            flag = word.split("=")[0]
            if known and not re.search(rf"{flag}(?![\w-])", known):
                wrong.append(word)
        elif word.startswith("--") and launcher:
            wrong += [] if word.split("=")[0] in launcher else [word]
    return wrong


@each_page
def test_commands_name_files_and_flags_that_exist(page):
    for words in pages.commands(page):
        assert not unknown(words), words


def test_commands_are_found_and_mistakes_in_them_seen():
    for wrong in (
        "bash scripts/distributed.sh --data DIR --epoch 3",
        "torchrun --standalone --nprocs=4 distributed.py --data DIR",
        "torchrun --standalone --nproc-per-node=4 ddp.py --data DIR",
        "python -m benchmarks.stepp",
        "OMP_NUM_THREADS=1 python dataparallel.py --nprocs 3",
        "bash scripts/test.sh --complete",
    ):
        assert len(unknown(wrong.split())) == 1, wrong
    assert sum(len(pages.commands(page)) for page in PAGES) >= 30


# --- tests that pages name ---


def test_named_tests_exist():
    named = [
        (page, *found)
        for page in PAGES
        for found in re.findall(r"(tests/\w+\.py)::(\w+)", page.read_text())
    ]
    assert len(named) >= 50
    for page, file, function in named:
        tree = ast.parse((ROOT / file).read_text())
        functions = {node.name for node in tree.body if hasattr(node, "name")}
        assert function in functions, f"{name(page)}: {file}::{function}"


def test_every_pitfall_has_its_parts_and_its_test():
    page = PITFALLS.read_text()
    index, *sections = page.split("\n## ")
    assert [int(text.split(".")[0]) for text in sections] == list(range(1, 21))
    for text in sections:
        title = text.splitlines()[0]
        assert index.count(f"- [{title}](#") == 1, title
        parts = ("Symptom.", "Cause.", "Cure.", "Tests.", "Reported in")
        places = [text.find(f"\n**{part}**") for part in parts]
        assert -1 not in places and places == sorted(places), title
        assert re.search(r"tests/\w+\.py::\w+|no test here", text), title
        assert len(re.findall(r"\(https://github\.com/\S+/\d+\)", text)) >= 2, title


# --- docs/make.py ---


def make(root, *flags):
    return run(sys.executable, root / "docs" / "make.py", *flags)


@pytest.fixture
def project(tmp_path):
    """A project with one page; returns what writes that page."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "results").mkdir()
    shutil.copy(ROOT / "docs" / "make.py", tmp_path / "docs")
    shutil.copy(ROOT / "distributed.py", tmp_path)
    return tmp_path


def test_pages_show_what_scripts_lessons_and_results_are():
    ended = make(ROOT, "--check")
    assert (ended.returncode, ended.stdout + ended.stderr) == (0, "")
    page = (ROOT / "docs" / "six_places.md").read_text()
    assert page.count("<!-- region ") == 40
    assert page.count("```python") > 20 and page.count("The same lines as in") > 5


def test_what_differs_is_named_and_then_written(project):
    page = project / "README.md"
    page.write_text(
        "<!-- region distributed.py 6/6 finish -->\n<!-- /region -->\nend\n"
    )
    checked = make(project, "--check")
    assert (checked.returncode, checked.stdout) == (1, "README.md differs\n")
    assert make(project).stdout == "README.md written\n"
    assert make(project, "--check").returncode == 0
    text = page.read_text()
    assert text.count("```python\n# [6/6 finish]") == 1 and text.endswith("-->\nend\n")
    script = project / "distributed.py"
    script.write_text(script.read_text().replace("# [/finish]", "# more\n# [/finish]"))
    assert make(project, "--check").returncode == 1


def test_tables_of_results(project):
    commit = "0123456789abcdef0123456789abcdef01234567"
    tried = {"name": "a | b", "tests": ["x", "y"], "survived": False, "seconds": 2000.4}
    figures = {"end / killed / torchrun": [1, "0.5 s"], "end / hangs / mpirun": 1e-9}
    report = {"commit": commit, "cpu_cores": 2, "figures": figures, "tried": [tried]}
    (project / "results" / "made.json").write_text(json.dumps(report))
    page = project / "README.md"
    for kind, expected in (
        ("machine made", "commit 0123456789ab, cpu cores 2.\n"),
        (
            "table made tried",
            "| name | tests | survived | seconds |\n| --- | --- | --- | --- |\n"
            "| a \\| b | x, y | False | 2,000 |\n",
        ),
        (
            "table made end",
            "|  | torchrun | mpirun |\n| --- | --- | --- |\n"
            "| killed | 1, 0.5 s | - |\n| hangs | - | 1e-09 |\n",
        ),
    ):
        name = kind.split()[0]
        page.write_text(f"<!-- {kind} -->\n<!-- /{name} -->\n")
        make(project)
        assert page.read_text() == f"<!-- {kind} -->\n{expected}<!-- /{name} -->\n"


@pytest.mark.parametrize(
    "text, problem",
    (
        ("<!-- tabel a b -->\n<!-- /tabel -->\n", "of no known kind"),
        ("<!-- region distributed.py start -->\n", "not closed"),
        ("<!-- file a -->\n<!-- file a -->\n<!-- /file -->\n", "not closed"),
        ("<!-- /region -->\n", "not opened"),
        ("<!-- region distributed.py 7/6 rest -->\n<!-- /region -->\n", "0 times"),
        ("<!-- statement distributed.py import -->\n<!-- /statement -->\n", " times"),
        ("<!-- table none rows -->\n<!-- /table -->\n", "No such file"),
    ),
)
def test_a_wrong_marker_is_one_line(project, text, problem):
    (project / "README.md").write_text(text)
    ended = make(project, "--check")
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("docs/make.py: error: README.md: <!-- ")
    assert problem in ended.stderr


# --- how it looks ---

MEASURE = """
<script>
async function measure() {
  const found = [];
  for (const width of [360, 1100]) for (const [name, text] of Object.entries(PAGES)) {
    const frame = document.createElement("iframe");
    frame.style.cssText = `border: 0; height: 800px; width: ${width}px`;
    const loaded = new Promise(done => frame.onload = done);
    frame.srcdoc = text;
    document.body.append(frame);
    await loaded;
    const page = frame.contentDocument;
    const wide = [...page.body.querySelectorAll("*")].filter(
      e => !e.parentElement.closest("pre, table") &&
        e.getBoundingClientRect().right > width + 1);
    found.push([name, width, page.documentElement.scrollWidth,
      wide.slice(0, 3).map(e => e.outerHTML.slice(0, 200)), page.body.innerText.length]);
    frame.remove();
  }
  const result = document.createElement("pre");
  result.id = "result";
  result.textContent = JSON.stringify(found);
  document.body.append(result);
}
</script>
<body onload="measure()">
"""


@pytest.mark.chromium
def test_no_page_is_wider_than_a_phone(tmp_path):
    """Tables and code scroll in themselves; all else has to fit."""
    texts = {name(page): pages.html(page) for page in PAGES}
    texts["too wide"] = "<body>text<div style='width: 700px'>wide</div></body>"
    data = json.dumps(texts).replace("</", "<\\/")
    (tmp_path / "host.html").write_text(f"<script>PAGES = {data}</script>{MEASURE}")
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
    flags += ("--allow-file-access-from-files", "--virtual-time-budget=60000")
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    url = (tmp_path / "host.html").as_uri()
    ended = run(BROWSER, *flags, profile, "--dump-dom", url)
    (result,) = re.findall(r'<pre id="result">(.*?)</pre>', ended.stdout, re.DOTALL)
    measured = json.loads(html.unescape(result))
    assert len(measured) == 2 * len(texts)
    for page, width, needed, wide, letters in measured:
        assert letters > (3 if page == "too wide" else 500)
        fits = needed <= width and not wide
        assert fits == (page != "too wide" or width == 1100), (page, width, wide)
