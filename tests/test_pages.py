"""README*.md and docs/: links, commands and code hold, and both READMEs say the same."""

import ast
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter

import pytest
from conftest import ROOT, run
from markdown_it import MarkdownIt
from torch.distributed.run import get_args_parser

from scripts import quickstart
from scripts.sync_scripts import BASE, SIBLINGS

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
TEXTS = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}
GENERATED = re.compile(r"<!-- ((\w+) .+?) -->\n(.*?)<!-- /\2 -->\n", re.DOTALL)


def tokens(text):
    for token in MarkdownIt("commonmark", {"html": True}).enable("table").parse(text):
        yield token
        yield from token.children or ()


def fences(text, *languages):
    found = [token for token in tokens(text) if token.type == "fence"]
    return [token.content for token in found if token.info in languages]


# --- links ---


def anchors(text):
    """What GitHub calls the headings of a page."""
    found, all_tokens = [], list(tokens(text))
    for opening, inline in zip(all_tokens, all_tokens[1:], strict=False):
        if opening.type == "heading_open":
            kinds = ("text", "code_inline")
            words = [one.content for one in inline.children if one.type in kinds]
            name = re.sub(r"[^\w\- ]", "", "".join(words).strip().lower())
            found.append(name.replace(" ", "-"))
    before = [found[:number].count(name) for number, name in enumerate(found)]
    return [f"{n}-{b}" if b else n for n, b in zip(found, before, strict=True)]


def missing_links(page):
    text = page.read_text()
    links = [token.attrs.get("href", token.attrs.get("src")) for token in tokens(text)]
    for link in filter(None, links):
        if not re.match(r"\w+:", link):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            known = anchors(target.read_text()) if anchor and target.exists() else ()
            if not target.exists() or (anchor and anchor not in known):
                yield link


def test_links_and_anchors_lead_somewhere(tmp_path):
    assert not {page: missing for page in PAGES if (missing := [*missing_links(page)])}
    page = tmp_path / "page.md"
    page.write_text(
        "# A *b* `c_d`: e/f?\n\n## Again\n\n## Again\n\n[1](#a-b-c_d-ef) [2](#again-1) "
        "[3](page.md) [4](#again-2) [5](other.md) [6](page.md#nowhere) ![7](no.svg)\n"
    )
    wrong = ["#again-2", "other.md", "page.md#nowhere", "no.svg"]
    assert list(missing_links(page)) == wrong


# --- code and commands ---


def test_blocks_parse(tmp_path):
    shell = []
    for name, text in TEXTS.items():
        languages = {token.info for token in tokens(text) if token.type == "fence"}
        assert languages <= {"bash", "python", "text", "diff", "yaml", "json"}, name
        shell += fences(text, "bash")
        for number, block in enumerate(fences(text, "python")):
            ast.parse(block, name)
            if re.match("(import|from) ", block):  # a program, so its names resolve
                (tmp_path / f"{name.replace('/', '-')}-{number}.py").write_text(block)
    ended = subprocess.run(["bash", "-n"], input="\n".join(shell), text=True)
    assert ended.returncode == 0
    ruff = ("ruff", "check", "--isolated", "--select=F", "--output-format=concise")
    ended = run(sys.executable, "-m", *ruff, tmp_path)
    assert ended.returncode == 0, ended.stdout


def commands(text):
    """Command lines of the bash blocks, and those in the middle of a sentence."""
    found = "\n".join(fences(text, "bash")).replace("\\\n", " ").splitlines()
    inline = [token.content for token in tokens(text) if token.type == "code_inline"]
    found += [c for c in inline if re.match(r"(bash|python|torchrun|horovodrun) \S", c)]
    return [words for line in found if (words := shlex.split(line, comments=True))]


def flags_of(script):
    """Text of the files that know a script's flags."""
    path = ROOT / script
    files = [path, path.with_suffix(".py")]
    if f"{path.stem}.py" in (BASE, *SIBLINGS):
        files += [ROOT / f"{path.stem}.py", ROOT / "common" / "arguments.py"]
    if path.name == "test.sh":
        files.append(ROOT / "tests" / "conftest.py")
    if path.name == "timings.sh":
        files.append(ROOT / "timings" / "plan.py")
    if path.parent.name == "benchmarks":
        files += path.parent.glob("comparison.py")
    text = "".join(file.read_text() for file in files if file.exists())
    return text + " -k -q -x -m" * (path.name == "test.sh")  # pytest's


def unknown(words):
    """Files of a command that do not exist, and flags that nobody knows."""
    words = [word for word in words if not re.match(r"[A-Z_]+=", word)]
    launcher = [*get_args_parser()._option_string_actions, "--use-env"]
    if words[0] == "horovodrun" and importlib.util.find_spec("horovod"):
        source = importlib.util.find_spec("horovod.runner.launch").origin
        launcher = re.findall(r"'(-[\w-]+)'", open(source).read())
    elif "torch" not in " ".join(words[:3]):
        launcher = None
    wrong, known = [], None  # the text that knows what flags the script has
    for before, word in zip(["", *words], words, strict=False):
        flag = word.split("=")[0]
        if before == "-m" and re.match(r"(benchmarks|scripts|launch|tests)\.", word):
            word = word.replace(".", "/") + ".py"
        if word == "train.py":  # the reader's
            known = ""
        elif re.fullmatch(r"[a-z][\w/.]*\.(py|sh)", word) and "diff" not in words:
            wrong += [] if (ROOT / word).exists() else [word]
            known = flags_of(word)
        elif word.startswith("-") and known is not None:
            wrong += [word] * bool(known and not re.search(rf"{flag}(?![\w-])", known))
        elif word.startswith("--") and launcher:
            wrong += [word] * (flag not in launcher)
    return wrong


def test_commands_name_files_and_flags_that_exist():
    found = [words for text in TEXTS.values() for words in commands(text)]
    assert len(found) >= 30
    assert not [(wrong, words) for words in found if (wrong := unknown(words))]
    for wrong in (
        "bash scripts/distributed.sh --data DIR --epoch 3",
        "torchrun --standalone --nprocs=4 distributed.py --data DIR",
        "torchrun --standalone --nproc-per-node=4 ddp.py --data DIR",
        "python -m benchmarks.stepp",
        "OMP_NUM_THREADS=1 python dataparallel.py --nprocs 3",
        "bash scripts/test.sh --complete",
    ):
        assert len(unknown(wrong.split())) == 1, wrong


def test_named_tests_exist_and_every_pitfall_has_its_parts():
    for file, function in re.findall(r"(tests/\w+\.py)::(\w+)", str(TEXTS)):
        assert f"def {function}(" in (ROOT / file).read_text(), f"{file}::{function}"
    index, *sections = TEXTS["docs/pitfalls.md"].split("\n## ")
    assert [int(text.split(".")[0]) for text in sections] == list(range(1, 21))
    for text in sections:
        title = text.splitlines()[0]
        assert index.count(f"- [{title}](#") == 1, title
        parts = "Symptom. Cause. Cure. Tests. Reported"
        assert re.findall(r"\n\*\*(\w+\.?)", text) == parts.split(), title
        assert re.search(r"tests/\w+\.py::\w+|no test here", text), title


def test_no_page_or_result_names_a_path_of_this_machine():
    results = [*ROOT.glob("results/**/*.json"), *ROOT.glob("results/**/*.txt")]
    for file in [*PAGES, *results]:
        text = file.read_text()
        assert str(ROOT) not in text and sys.prefix not in text, file
        assert not re.search(r"(?<![\w.])/(home|root|Users)/\w", text), file


# --- docs/make.py ---


@pytest.fixture
def project(tmp_path):
    """A project of one page, which the function writes, and makes or checks."""
    for name in ("docs/make.py", "distributed.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "results").mkdir()

    def make(*flags, text=None):
        if text:
            (tmp_path / "README.md").write_text(text)
        return run(sys.executable, tmp_path / "docs" / "make.py", *flags)

    make.folder = tmp_path
    return make


def test_pages_show_what_scripts_lessons_and_results_are():
    ended = run(sys.executable, "docs/make.py", "--check")
    assert (ended.returncode, ended.stdout + ended.stderr) == (0, "")
    assert TEXTS["docs/six_places.md"].count("<!-- region ") == 40


def test_what_differs_is_named_and_then_written(project):
    report = {
        "figures": {"end / killed / torchrun": [1, "a|b"], "end / hangs / x": 0.5}
    }
    (project.folder / "results" / "made.json").write_text(json.dumps(report))
    page = "<!-- region distributed.py 6/6 finish -->\n<!-- /region -->\n"
    page += "<!-- table made end -->\n<!-- /table -->\nend\n"
    checked = project("--check", text=page)
    assert (checked.returncode, checked.stdout) == (1, "README.md differs\n")
    assert project().stdout == "README.md written\n"
    assert project("--check").returncode == 0
    text = (project.folder / "README.md").read_text()
    assert text.count("```python\n# [6/6 finish]") == 1 and text.endswith("-->\nend\n")
    assert (
        "|  | torchrun | x |\n| --- | --- | --- |\n| killed | 1, a\\|b | - |\n" in text
    )
    with (project.folder / "distributed.py").open("r+") as script:
        changed = script.read().replace("# [/finish]", "# more\n# [/finish]")
        script.seek(0)
        script.write(changed)
    assert project("--check").returncode == 1


@pytest.mark.parametrize(
    "text, problem",
    [
        ("<!-- tabel a b -->\n<!-- /tabel -->\n", "of no known kind"),
        ("<!-- region distributed.py start -->\n", "not closed"),
        ("<!-- region distributed.py 7/6 rest -->\n<!-- /region -->\n", "0 times"),
        ("<!-- table none rows -->\n<!-- /table -->\n", "No such file"),
    ],
)
def test_a_wrong_marker_is_one_line(project, text, problem):
    ended = project("--check", text=text)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert problem in ended.stderr


# --- the READMEs ---


def test_the_example_to_copy_runs_as_it_is(tmp_path):
    (block,) = re.findall(r"```python\n(import os\n.*?)```", TEXTS["README.md"], re.S)
    (tmp_path / "example.py").write_text(block)
    command = "exec torchrun --standalone --nproc-per-node=2 example.py"
    ended = run("bash", "-c", f"cd {tmp_path} && {command}")
    assert ended.returncode == 0, ended.stderr
    assert re.fullmatch(r"(epoch [01]: \d+ of 199 right\n){2}", ended.stdout)
    assert (tmp_path / "model.pt").exists()


def test_the_quickstart_reached_its_accuracy():
    runs = json.loads((ROOT / "results" / "quickstart.json").read_text())
    done = [one["report"] for one in runs if one["status"] == "done"]
    assert len(done) == 4 and all(one["val_top1"] >= 98 for one in done)
    table = (ROOT / "results" / "quickstart.md").read_text()
    assert table == quickstart.render(runs)


def test_both_readmes_have_the_same_headings_code_tables_links_and_numbers():
    def facts(page):
        made = GENERATED.findall(page)
        page = GENERATED.sub("", page)
        blocks = re.findall(r"^```.*?^```$", page, re.M | re.S)
        blocks = [re.sub(r"(^|\s+)#.*", "", block, flags=re.M) for block in blocks]
        page = re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S)
        for text in re.split(r"^#+ .*\n", page, flags=re.M):
            prose = re.sub(r"`[^`]+`|\]\([^)]+\)", "", text)
            yield {
                "rows of tables": [
                    row.count("|") for row in prose.splitlines() if row[:1] == "|"
                ],
                "links": Counter(re.findall(r"\]\(([^)]+)\)", text)),
                "code": {" ".join(c.split()) for c in re.findall(r"`([^`]+)`", text)},
                "numbers": Counter(re.findall(r"\d+(?:[.,]\d+)*", prose)),
            }
        yield {"levels": re.findall(r"^#+ ", page, re.M), "made": made, "code": blocks}

    english = TEXTS["README.md"].replace("(README.zh-CN.md)", "(README.md)", 1)
    pairs = zip(facts(english), facts(TEXTS["README.zh-CN.md"]), strict=True)
    for number, (one, other) in enumerate(pairs):
        missing = one.pop("numbers", Counter()) - other.pop("numbers", Counter())
        assert (one, missing) == (other, Counter()), f"section {number}"
