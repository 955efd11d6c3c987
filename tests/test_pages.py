"""The links, commands and code on all pages work, and translations agree."""

import ast
import re
import runpy
import shlex
import subprocess
import sys
from collections import Counter
from urllib.parse import unquote

import pytest
from conftest import ROOT, run, run_torchrun
from markdown_it import MarkdownIt
from torch.distributed.run import get_args_parser
from torch.utils.data.distributed import DistributedSampler

PATTERNS = ("*.md", ".github/*.md", "docs/*.md", "tutorial/**/*.md")
PAGES = sorted(page for pattern in PATTERNS for page in ROOT.glob(pattern))
TEXTS = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}
RESULTS = ROOT / "benchmarks" / "results"
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
    """Return GitHub's anchors for the headings of a page."""
    found, all_tokens = [], list(tokens(text))
    for opening, inline in zip(all_tokens, all_tokens[1:], strict=False):
        if opening.type == "heading_open":
            words = "".join(one.content for one in inline.children)
            name = re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-")
            count = found.count(name)
            found.append(f"{name}-{count}" if count else name)
    return found


def missing_links(page):
    text = page.read_text()
    links = [token.attrs.get("href", token.attrs.get("src")) for token in tokens(text)]
    links += re.findall(r'<img src="([^"]+)"', text)
    for link in filter(None, links):
        if not re.match(r"\w+:", link):
            path, _, anchor = unquote(link).partition("#")
            target = (page.parent / path).resolve() if path else page
            known = anchors(target.read_text()) if anchor and target.exists() else ()
            if not target.exists() or (anchor and anchor not in known):
                yield link


def test_links_and_anchors_lead_somewhere():
    assert not {page: missing for page in PAGES if (missing := [*missing_links(page)])}


# --- code and commands ---


def test_blocks_parse():
    shell = []
    for name, text in TEXTS.items():
        languages = {token.info for token in tokens(text) if token.type == "fence"}
        assert languages <= {"bash", "python", "text", "diff", "yaml", "json"}, name
        inline = [token.content for token in tokens(text) if token.type == "inline"]
        assert "---|" not in " ".join(inline), f"{name}: a table's lines were joined"
        shell += fences(text, "bash")
        for block in fences(text, "python"):
            ast.parse(block, name)
    ended = subprocess.run(["bash", "-n"], input="\n".join(shell), text=True)
    assert ended.returncode == 0


def commands(text):
    """Return the commands in bash blocks and in inline code."""
    found = "\n".join(fences(text, "bash")).replace("\\\n", " ").splitlines()
    inline = [token.content for token in tokens(text) if token.type == "code_inline"]
    found += [c for c in inline if re.match(r"(bash|python|torchrun|horovodrun) \S", c)]
    return [words for line in found if (words := shlex.split(line, comments=True))]


def flags_of(script):
    """Return the text of all files that may define a script's flags."""
    path = ROOT / script
    files = [path, path.with_suffix(".py"), ROOT / f"{path.stem}.py"]
    shared = ["common/arguments.py", "benchmarks/comparison.py", "tests/conftest.py"]
    files += [ROOT / name for name in (*shared, "benchmarks/timings/__main__.py")]
    text = "".join(file.read_text() for file in files if file.exists())
    return text + " --help -k -q -x -m"  # the last three are pytest's


def unknown(words):
    """Return a command's files that do not exist, and its flags that no parser defines."""
    wrong, known = [], None  # text that defines the flags
    launcher = words[0] == "torchrun" or words[1:3] == ["-m", "torch.distributed.run"]
    launcher = launcher and [*get_args_parser()._option_string_actions]
    for before, word in zip(["", *words], words, strict=False):
        flag = word.split("=")[0]
        if before == "-m" and re.match(r"(benchmarks|scripts|tests)\.", word):
            word = word.replace(".", "/") + ".py"
        if word == "train.py":  # the reader's own script
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
    ours = TEXTS.keys() - {"docs/found.md"}
    found = [words for name in ours for words in commands(TEXTS[name])]
    assert len(found) >= 30
    assert not [(wrong, words) for words in found if (wrong := unknown(words))]
    wrong = "torchrun --nprocs=4 ddp.py", "python -m benchmarks.step --rouds 3"
    assert [len(unknown(words.split())) for words in wrong] == [2, 1]


def test_named_tests_exist():
    for file, function in re.findall(r"(tests/\w+\.py)::(\w+)", str(TEXTS)):
        assert f"def {function}(" in (ROOT / file).read_text(), f"{file}::{function}"


def test_pages_count_the_labs():
    count = len([*ROOT.glob("tutorial/labs/[0-9]*.py")])
    assert f" {count} broken scripts" in TEXTS["README.md"]
    assert f" {count} short scripts" in TEXTS["tutorial/README.md"]


def test_pages_are_short():
    lines = {name: text.count("\n") for name, text in TEXTS.items()}
    assert lines["README.md"] <= 300
    assert sum(lines[name] for name in lines if name.startswith("docs/")) <= 2200


def test_no_page_or_result_names_a_path_of_this_machine():
    results = [*RESULTS.glob("**/*.json"), *ROOT.glob("tutorial/*/output/*")]
    for file in [*PAGES, *results]:
        text = file.read_text()
        assert str(ROOT) not in text and sys.prefix not in text, file
        assert not re.search(r"(?<![\w.])/(home|root|Users)/\w", text), file


# --- the contents of other files ---


def test_pages_show_what_scripts_lessons_and_results_are():
    ended = run(sys.executable, "docs/make.py", "--check")
    assert (ended.returncode, ended.stdout + ended.stderr) == (0, "")


def test_the_pictures_are_drawn_from_what_is_there_now():
    ended = run(sys.executable, "docs/figures.py", "--check")
    assert (ended.returncode, ended.stdout + ended.stderr) == (0, "")
    orders = runpy.run_path(str(ROOT / "docs" / "figures.py"))["ORDERS"].values()
    for epoch, (images, drawn) in enumerate(zip((10, 10, 9), orders, strict=True)):
        for rank in range(2):
            sampler = DistributedSampler(range(images), 2, rank, shuffle=images == 10)
            sampler.set_epoch(epoch)
            assert drawn[rank::2] == list(sampler)


# --- the READMEs, and the Chinese pages ---


def test_the_example_to_copy_runs_as_it_is(tmp_path):
    (block,) = re.findall(r"```python\n(import os\n.*?)```", TEXTS["README.md"], re.S)
    (tmp_path / "example.py").write_text(block)
    command = "torchrun --standalone --nproc-per-node=2 example.py"
    ended = run_torchrun(tmp_path, command)
    assert ended.returncode == 0, ended.stderr
    assert re.fullmatch(r"(epoch [01]: accuracy \d+\.\d\d%\n){2}", ended.stdout)
    assert (tmp_path / "model.pt").exists()


CHINESE = [name for name in TEXTS if "zh-CN" in name]


def english(path):
    """Return the English page of a Chinese one."""
    return str(path).replace(".zh-CN", "")


@pytest.mark.parametrize("chinese", CHINESE)
def test_chinese_pages_lead_to_chinese_pages(chinese):
    links = re.findall(r"\]\(([^)#]+)", TEXTS[chinese])
    targets = [((ROOT / chinese).parent / link).resolve() for link in links]
    translated = {ROOT / english(name) for name in CHINESE}
    assert [one for one in targets if one in translated] == [ROOT / english(chinese)]


@pytest.mark.parametrize("chinese", CHINESE)
def test_chinese_pages_have_the_headings_code_tables_links_and_numbers(chinese):
    def target(name, link):
        """Return a link's target: the English page, and the number of the heading."""
        path, _, anchor = unquote(link).partition("#")
        if re.match(r"\w+:", path):
            return link
        path = (ROOT / name).parent / path if path else ROOT / name
        heading = anchors(path.read_text()).index(anchor) if anchor else ""
        return f"{english(path.resolve())}#{heading}"

    def facts(name):
        """Return what must be equal in all languages, and the numbers in a page's text."""
        text, fence = TEXTS[name], re.compile(r"^```.*?^```$", re.M | re.S)
        made = GENERATED.findall(text)
        found = {"made": [one for one in made if one[1] != "labs"]}  # translated
        text = GENERATED.sub("", text)
        comment = re.compile(r"(^|\s+)#.*", re.M)
        found["blocks"] = [comment.sub("", block) for block in fence.findall(text)]
        text = fence.sub("", text)
        found["headings"] = re.findall(r"^#+ ", text, re.M)
        links = re.findall(r"(?:\]\(|src=\")([^)\"]+)", text)
        found["links"] = Counter(target(name, link) for link in links)
        code = re.findall(r"`([^`]+)`", text)
        found["code"] = {" ".join(words.split()) for words in code}
        prose = re.sub(r"`[^`]+`|\]\([^)]+\)", "", text)
        rows = [line for line in prose.splitlines() if line.startswith("|")]
        found["columns"] = [row.count("|") for row in rows]
        return found, Counter(re.findall(r"\d+(?:[.,]\d+)*", prose))

    (one, numbers), (other, translated) = facts(english(chinese)), facts(chinese)
    assert one == other
    assert not numbers - translated
