"""Small folders, imports in one direction, scripts that take little along."""

import ast
import json
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, environment

from scripts.sync_scripts import BASE, REGIONS, SIBLINGS, split

SCRIPTS = {name.removesuffix(".py") for name in (BASE, *SIBLINGS)}
OPTIONAL = {"common.tar", "common.nvimgcodec"}
# Lines, unless it says otherwise. They only go down
BUDGETS = {
    "a script with its imports": 1176,  # wanted: 900
    "distributed.py": 225,  # wanted: 205
    "another script": 240,  # wanted: 230
    "a script's strategy": 75,  # wanted: 70
    "common/": 1106,  # wanted: 900
    "modules in common/": 9,
    "optional modules": 170,
    "scripts/": 800,
    "doctor/": 1500,
    "tests/": 7500,  # wanted: 5000
    "entries in the root folder": 20,
}
PROGRAMS = {"benchmarks", "tests", "scripts", "docs", "tutorial", *SCRIPTS}
LIBRARIES = {"torch.distributed", "torch.nn.parallel", "horovod", "apex"}


def imports(tree):
    """Dotted names of what is imported anywhere in a file, in a function too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def closure(name, imported):
    """A script, and all modules of ours that it imports; optional ones left out."""
    found, left = set(), [name]
    while left:
        one = left.pop()
        if one in imported and one not in found | OPTIONAL:
            found.add(one)
            for other in imported[one]:  # a.b.c, its module a.b and package a
                parts = other.split(".")
                left += [".".join(parts[: n + 1]) for n in range(len(parts))]
    return found


def strategy(text, name):
    """Lines of code in a script's regions."""
    regions = split(text, name)[1]
    lines = "".join(line for region in REGIONS for line in regions[region])
    return len(re.findall(r'^ *(?! |#|""").+', lines, re.M))


def measured(texts, imported):
    """{what: lines}, for each row of BUDGETS the largest."""
    count = {name: text.count("\n") for name, text in texts.items()}
    trees = {name: closure(name, imported) for name in SCRIPTS}
    taken = {name: sum(map(count.get, tree)) for name, tree in trees.items()}
    print("lines of a script with its imports:", taken)

    def lines_in(folder):
        return sum(count[name] for name in count if f"{name}.".startswith(f"{folder}."))

    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, stdout=subprocess.PIPE)
    entries = {path.split("/")[0] for path in tracked.stdout.decode().splitlines()}
    common = {name for name in count if name.startswith("common.")}
    return {
        "a script with its imports": max(taken.values()),
        "distributed.py": count["distributed"],
        "another script": max(map(count.get, SCRIPTS - {"distributed"})),
        "a script's strategy": max(strategy(texts[name], name) for name in SCRIPTS),
        "common/": lines_in("common"),
        "modules in common/": len(common),
        "optional modules": sum(map(count.get, common & OPTIONAL)),
        **{f"{folder}/": lines_in(folder) for folder in ("scripts", "doctor", "tests")},
        "entries in the root folder": len([e for e in entries if e[0] != "."]),
    }


def problems(root):
    """What breaks the layout, a line each."""
    found, texts, imported = set(), {}, {}
    files = [*root.glob("*.py"), *root.glob("scripts/*.s*h")]
    for folder in ("common", "doctor", *(PROGRAMS - SCRIPTS)):
        files += root.glob(f"{folder}/**/*.py")
    for path in files:
        name = str(path.relative_to(root)).removesuffix(".py").replace("/", ".")
        name = name.removesuffix(".__init__")
        texts[name] = path.read_text()
        if path.suffix != ".py":
            continue
        folder, tree = name.split(".")[0], ast.parse(texts[name])
        imported[name] = set(imports(tree))
        wrong = PROGRAMS - {folder} if folder != "tests" else set()
        wrong |= LIBRARIES if folder == "common" else set()
        wrong |= {"common"} if folder == "doctor" else set()
        for other in imported[name]:
            if any(f"{other}.".startswith(f"{one}.") for one in wrong):
                found.add(f"{name} imports {other}")
        if folder != "tests" and "sys.path" in texts[name]:
            found.add(f"{name} changes sys.path")
    for what, count in measured(texts, imported).items():
        if count > BUDGETS[what]:
            found.add(f"{what}: {count} of {BUDGETS[what]}")
    return found


def test_the_layout():
    assert not problems(ROOT)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copy")
    for name in ("common", "scripts", "docs", "benchmarks", "tutorial"):
        ignored = shutil.ignore_patterns("*.json", "*.svg", "*.md", "__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in SCRIPTS:
        shutil.copy(ROOT / f"{name}.py", folder)
    assert not problems(folder)
    return folder


@pytest.mark.parametrize(
    "file, added, problem",
    [
        ("common/model.py", "\n" * 500, "common/: "),
        ("common/errors.py", "\n" * 500, "a script with its imports: "),
        ("common/tar.py", "\n" * 100, "optional modules: "),
        ("scripts/launcher.sh", "\n" * 100, "scripts/: "),
        ("common/model.py", "from torch import distributed", "torch.distributed"),
        ("common/data.py", "def f():\n    import horovod.torch", "imports horovod"),
        ("common/errors.py", "from tests.ranks import Net", "imports tests."),
        ("common/model.py", "import distributed as d", "imports distributed"),
        ("horovod_distributed.py", "import distributed", "imports distributed"),
        ("apex_distributed.py", "from benchmarks import usual", "imports benchmarks"),
        ("docs/make.py", "from scripts import quickstart", "imports scripts"),
        ("docs/make.py", "import sys\nsys.path.append('')", "docs.make changes"),
        ("distributed.py", "import common\n" * 76, "strategy: "),
    ],
)
def test_a_broken_layout_is_seen(copy, file, added, problem):
    original = (copy / file).read_text()
    opening, mark, rest = original.partition("# [/imports]")
    (copy / file).write_text(f"{opening}\n{added}\n{mark}{rest}")
    try:
        assert any(problem in line for line in problems(copy))
    finally:
        (copy / file).write_text(original)


def test_a_script_and_common_train_alone_without_optional_modules(pictures, tmp_path):
    """From folders, in a project where nothing else of ours is."""
    shutil.copytree(ROOT / "common", tmp_path / "common")
    shutil.copy(ROOT / "dataparallel.py", tmp_path)
    for name in OPTIONAL:
        (tmp_path / f"{name.replace('.', '/')}.py").unlink()
    words = "dataparallel.py --image-size 32 -b 8 -j 1 --epochs 1 --precision fp32 "
    words += "--arch squeezenet1_1 --output out --data"
    command = [sys.executable, *words.split(), pictures]
    variables = environment(CUDA_VISIBLE_DEVICES="")
    subprocess.run(command, cwd=tmp_path, env=variables, check=True, timeout=300)
    record = json.loads((tmp_path / "out" / "epochs.jsonl").read_text())
    assert (record["images"], record["val_images"]) == (16, 8)
