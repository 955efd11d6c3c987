"""Put code, output and tables into README*.md, docs/ and tutorial/.

    python docs/make.py            # write the pages that change
    python docs/make.py --check    # only list these pages; status 1 if there are any

The script generates the text between <!-- KIND ... --> and <!-- /KIND --> in a page:

    region SCRIPT.py NAME      a marked region of one of the five scripts
    statement FILE.py TEXT     the statement that begins with TEXT: a call, a function
    paragraph FILE.py TEXT     the lines around TEXT, from one blank line to the next
    diff ONE.py OTHER.py       the lines that differ between two programs
    output NAME [TITLE]        a program's output, or the parts that begin with TITLE
    file PATH                  the unchanged text of a file
    table RESULTS PART         a part of benchmarks/results/RESULTS.json: rows, or
                               figures whose names are PART / ROW / COLUMN
    ratios UNIT RESULTS PART   measurements, and their ratios to the first one
    machine RESULTS            the machine and versions in that file
    checks PACKAGE             doctor's laws and checks
    labs all                   the labs by lesson, with their symptoms
    labs LESSON [zh-CN]        the labs of one lesson
"""

import ast
import difflib
import importlib
import json
import re
import runpy
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SECTION = re.compile(r"^(<!-- (\w+) (.+?) -->\n)(.*?)^<!-- /\2 -->\n", re.M | re.S)


def block(language: str, text: str) -> str:
    """Return a fenced code block."""
    return f"```{language}\n{dedent(text).rstrip()}\n```\n"


def python(found: list[str]) -> str:
    """Return the only match as a Python block; raise ValueError if there is not one."""
    if len(found) != 1:
        raise ValueError(f"expected one match, found {len(found)}")
    return block("python", found[0].strip("\n"))


def region(source: str) -> str:
    """Return a marked region of a script."""
    script, _, name = source.partition(" ")
    pattern = rf"^ *# \[{re.escape(name)}\].*?# \[/\w+\]\n"
    return python(re.findall(pattern, (ROOT / script).read_text(), re.M | re.S))


def statement(source: str) -> str:
    """Return the only statement in a file that begins with a given text."""
    file, _, beginning = source.partition(" ")
    text = (ROOT / file).read_text()
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    found = [ast.get_source_segment(text, node, padded=True) for node in nodes]
    return python([code for code in found if code.lstrip().startswith(beginning)])


def paragraph(source: str) -> str:
    """Return the lines around a given text, from one blank line to the next."""
    file, _, wanted = source.partition(" ")
    parts = (ROOT / file).read_text().split("\n\n")
    return python([part for part in parts if wanted in part])


def diff(source: str) -> str:
    """Return the lines that differ between two programs, ignoring the docstrings."""
    texts = [(ROOT / name).read_text() for name in source.split()]
    texts = [text.partition('"""\n\n')[2].splitlines() for text in texts]
    found = difflib.unified_diff(*texts, n=1, lineterm="")
    lines = ["@@" if line.startswith("@@") else line for line in found]
    return block("diff", "\n".join(lines[3:]))  # skip the file names and the first @@


def output(source: str) -> str:
    """Return a lesson's output, or the parts that begin with a given title."""
    name, _, title = source.partition(" ")
    (path,) = ROOT.glob(f"tutorial/*/output/{name}.txt")
    text = path.read_text()
    pattern = rf"^{re.escape(title)}.*\n(?:[ \t]+.*\n)*"  # with indented lines below
    text = "".join(re.findall(pattern, text, re.M))
    if not text:
        raise ValueError("no match")
    return f"```text\n{text}```\n"


def file(source: str) -> str:
    """Return a file's text unchanged."""
    return (ROOT / source).read_text()


def results(source: str) -> dict | list:
    """Return a file's measurements from benchmarks/results/, or part of them."""
    name, _, part = source.partition(" ")
    report, rows = json.loads((RESULTS / f"{name}.json").read_text()), {}
    if not part or part in report:
        return report[part] if part else report
    for key, value in report.get("figures", {}).items():
        kind, row, column = (*key.split(" / "), "", "")[:3]
        if kind == part:
            rows.setdefault(row, {})[column] = value
    if not rows:
        raise ValueError(f"{name}.json has no such part")
    return rows


def cell(value: object) -> str:
    """Format a value for a table."""
    if isinstance(value, list):
        return ", ".join(map(cell, value))
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    text = "-" if value is None else str(value).replace("|", r"\|")
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{28}\b", r"\1", text)  # shorten commits


def table(source: str) -> str:
    """Return a table of rows, given as a list or by name."""
    rows = results(source)
    if isinstance(rows, dict):
        rows = [{"": name, **row} for name, row in rows.items()]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [[column.replace("_", " ") for column in columns], ["---"] * len(columns)]
    lines += [[cell(row.get(column)) for column in columns] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def ratios(source: str) -> str:
    """Return a table of candidates: medians, and ratios to the first candidate."""
    unit, _, source = source.partition(" ")
    text = f"|  | {unit} | ratio (quartiles) |\n| --- | --- | --- |\n"
    for name, row in results(source).items():
        ratio = "**{median:.2f}** ({low:.2f} to {high:.2f})".format(**row["ratio"])
        text += f"| {name} | {cell(row['value']['median'])} | {ratio} |\n"
    return text


def machine(source: str) -> str:
    """Return all scalar values in the results as one sentence."""
    facts = []
    for name, value in results(source).items():
        if name == "argv":
            facts.append(f"`{' '.join(value)}`")
        elif not isinstance(value, list | dict):
            facts.append(f"{name.replace('_', ' ')} {cell(value)}")
    return ", ".join(facts) + ".\n"


def checks(source: str) -> str:
    """Return doctor's laws, each with its checks: the fault, then the fix."""
    folder = ROOT / source
    spec = spec_from_file_location(source, folder / "__init__.py")
    sys.modules[source] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[source])
    importlib.import_module(f"{source}.laws")
    laws = {}
    for one in sys.modules[f"{source}.law"].CHECKS.values():
        text = f"`{one.name}` ({one.level}): {one.fault}. {one.mend}"
        laws.setdefault(one.law, []).append(text)
    text = ""
    for law in sorted(laws, key=lambda one: one.number):
        text += f"\n**{law.number}. {law.text}** (`{law.name}`)\n\n"
        text += "".join(f"- {one}\n" for one in laws[law])
    return f"{text}\n"


def labs(source: str) -> str:
    """Return the labs' symptoms, from their headers."""
    lesson, _, language = source.partition(" ")
    folder = ROOT / "tutorial" / "labs"
    read = runpy.run_path(str(folder / "lab.py"))["labs"]
    found = [lab for lab in read(folder).values() if lab.number != "capstone"]
    found.sort(key=lambda lab: (lab.lesson, lab.number))
    symptoms, page = {lab.number: lab.symptom for lab in found}, "README.md"
    if language:  # only the page itself contains the Chinese symptoms
        page = f"README.{language}.md"
        rows = r"^\|(?:.*\|)? \**\[?(\d\d)\]?(?:\(\S+\))?\** \| (.*) \|$"
        symptoms = dict(re.findall(rows, (folder / page).read_text(), re.M))
        if missing := [x.number for x in found if x.number not in symptoms]:
            row = f"| {missing[0]} | SYMPTOM |"
            raise ValueError(f"tutorial/labs/{page} needs a row: {row}")
    if lesson == "all":
        head = (
            "学完第几课 | 实验 | 症状" if language else "after lesson | lab | symptom"
        )
        text = f"| {head} |\n|---|---|---|\n"
        for lab in found:
            number = f"[{int(lab.lesson[:2])}](../{lab.lesson}/{page})"
            strong = "**" * (lab.path == "core")
            text += f"| {number} | {strong}[{lab.number}]({lab.script}){strong} "
            text += f"| {symptoms[lab.number]} |\n"
        return text
    found = [lab for lab in found if lab.lesson == lesson]
    if not found:
        raise ValueError("no lab belongs to this lesson")
    text, name = ("现在做实验：", "实验") if language else ("Now do:", "lab")
    lines = [f"- [{name} {x.number}](../labs/{x.script}): " for x in found]
    lines = [a + symptoms[x.number] for a, x in zip(lines, found, strict=True)]
    return "\n".join([text, "", *lines, ""])


MAKERS = (region, statement, paragraph, diff, output, file, table, ratios, machine)
MAKERS += (checks, labs)
KINDS = {make.__name__: make for make in MAKERS}


def made(page: Path) -> str:
    """Fill in the blocks of a page; raise ValueError if one cannot be filled in."""
    shown: dict[str, str] = {}

    def section(match: re.Match) -> str:
        opening, kind, source, before = match.groups()
        where = f"{page.relative_to(ROOT)}: {opening.strip()}"
        if kind not in KINDS or "<!--" in before:
            raise ValueError(f"{where}: not closed, or its kind is unknown")
        try:
            text = KINDS[kind](source)
        except (OSError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from error
        script = shown.setdefault(text, source.split()[0])
        if kind == "region" and not source.startswith(script):
            text = f"These lines are the same as in {script}, above.\n"
        return f"{opening}{text}<!-- /{kind} -->\n"

    text = SECTION.sub(section, page.read_text())
    for line in re.findall(r"^<!--.*", SECTION.sub("", text), re.M):
        raise ValueError(f"{page.relative_to(ROOT)}: {line}: not closed, or not opened")
    return text


def main(arguments: list[str]) -> int:
    """Write or check all pages; return the exit status."""
    patterns = ("*.md", "docs/*.md", "tutorial/**/*.md")
    pages = sorted(page for pattern in patterns for page in ROOT.glob(pattern))
    try:
        if arguments not in ([], ["--check"]):
            raise ValueError("usage: docs/make.py [--check]")
        texts = {page: made(page) for page in pages}
    except ValueError as error:
        print(f"docs/make.py: error: {error}", file=sys.stderr)
        return 2
    changed = [page for page in pages if texts[page] != page.read_text()]
    for page in changed:
        print(f"{page.relative_to(ROOT)} {'differs' if arguments else 'written'}")
        if not arguments:
            page.write_text(texts[page])
    return 1 if arguments and changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
