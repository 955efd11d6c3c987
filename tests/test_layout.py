"""The folders stay small, imports go in one direction, and a script needs few other files."""

import ast
import json
import re
import shutil
import subprocess

from conftest import ROOT, TINY
from played import Played
from test_start import train

from scripts.sync_scripts import BASE, REGIONS, SIBLINGS, split

SCRIPTS = [name.removesuffix(".py") for name in (BASE, *SIBLINGS)]
OPTIONAL = {"common.tar", "common.nvimgcodec"}
# Limits on lines, which we want to lower; the goals of the first six: 1000, 950, none, 220, 235, 85
BUDGETS = {"a script with its imports": 1227, "common": 1147, "optional modules": 155}
BUDGETS |= {"distributed.py": 217, "a script": 235, "a script's strategy": 77}
BUDGETS |= {"modules of common": 9, "scripts": 900, "tests": 6191}
BUDGETS |= {"doctor": 10858, "doctor's tests": 3038, "benchmarks": 2586}
BUDGETS |= {"entries in the root folder": 20}
FOLDERS = ("benchmarks", "docs", "scripts", "tests", "tutorial")
LIBRARIES = ("torch.distributed", "torch.nn.parallel", "horovod", "apex")


def imports(text):
    """Return all modules that a file imports, even in functions, and their packages."""
    for node in ast.walk(ast.parse(text)):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for parts in (name.split(".") for name in names):
            yield from (".".join(parts[: n + 1]) for n in range(len(parts)))


def closure(name, imported):
    """Return a module and all of our modules that it imports, without optional ones."""
    found, left = set(), {name}
    while left:
        found |= left
        left = set().union(*map(imported.get, left)) & imported.keys()
        left -= found | OPTIONAL
    return found


def strategy(text, name):
    """Return the number of lines of code in a script's regions."""
    regions = split(text, name)[1]
    lines = "".join(line for region in REGIONS for line in regions[region])
    return len(re.findall(r'^ *(?! |#|""").+', lines, re.M))


def problems(root):
    """Return the wrong imports in a copy of the project, and the limits that it exceeds."""
    found, texts, imported = set(), {}, {}
    files = [*root.glob("*.py"), *root.glob("scripts/*.s*h")]
    for folder in ("common", "doctor", *FOLDERS):
        files += root.glob(f"{folder}/**/*.py")
    for path in files:
        name = re.sub(r"(/__init__)?\.py$", "", str(path.relative_to(root)))
        name = name.replace("/", ".")
        texts[name], folder = path.read_text(), name.split(".")[0]
        if path.suffix == ".py":
            imported[name] = set(imports(texts[name]))
            wrong = {*FOLDERS, *SCRIPTS} - {folder}
            wrong |= set({"common": LIBRARIES, "doctor": ("common",)}.get(folder, ()))
            if folder != "tests":
                found |= {f"{name} imports {one}" for one in imported[name] & wrong}
                changes = re.search(r"sys\.path *[.+=[]", texts[name])
                found |= {f"{name}: sys.path"} if changes else set()
    counts = {name: text.count("\n") for name, text in texts.items()}

    def lines(names):
        return sum(map(counts.get, names))

    taken = {name: lines(closure(name, imported)) for name in SCRIPTS}
    common = [name for name in counts if name.startswith("common.")]
    tracked = subprocess.run(["git", "ls-files"], cwd=root, stdout=subprocess.PIPE)
    entries = {path.split("/")[0] for path in tracked.stdout.decode().splitlines()}
    now = {
        "a script with its imports": max(taken.values()),
        "optional modules": lines(OPTIONAL & counts.keys()),
        "distributed.py": counts["distributed"],
        "a script": max(map(counts.get, SCRIPTS)),
        "a script's strategy": max(strategy(texts[name], name) for name in SCRIPTS),
        "modules of common": len(common),
        "entries in the root folder": len([one for one in entries if one[0] != "."]),
    }
    for folder in ("common", "scripts", "doctor", "tests", "benchmarks"):
        now[folder] = lines(one for one in counts if one.split(".")[0] == folder)
    now["doctor's tests"] = lines(x for x in counts if re.match("tests.*doctor", x))
    now["tests"] -= now["doctor's tests"]
    now["scripts"] -= counts["scripts.network"]  # users copy this file alone
    more = {what: count for what, count in now.items() if count > BUDGETS[what]}
    return found | {f"{x}: {count} > {BUDGETS[x]}" for x, count in more.items()}


def test_the_layout(tmp_path):
    """The same checks fail for a copy with wrong imports and a script that is too long."""
    assert not problems(ROOT)
    skipped = shutil.ignore_patterns(".*", "__pycache__", "results", "runs", "tests")
    copy = shutil.copytree(ROOT, tmp_path / "copy", ignore=skipped)
    texts = {"common/errors.py": "import torch.distributed\n"}
    texts["distributed.py"] = "import benchmarks\n" + 300 * "\n"
    for name, text in texts.items():
        (copy / name).write_text((copy / name).read_text() + text)
    found = " ".join(sorted(problems(copy)))
    wanted = "common.errors imports torch.distributed", "distributed imports benchmarks"
    assert not [one for one in (*wanted, "distributed.py: 5") if one not in found]


def test_a_script_and_common_train_alone_without_optional_modules(pictures, tmp_path):
    """In a project without our other files, a script and common/ train on image folders."""
    shutil.copytree(ROOT / "common", tmp_path / "common")
    shutil.copy(ROOT / "dataparallel.py", tmp_path)
    for name in OPTIONAL:
        (tmp_path / f"{name.replace('.', '/')}.py").unlink()
    flags = (*TINY, "-b", "8", "-j", "1", "--epochs", "1", "--output", "out", "--data")
    with Played(tmp_path / "logs") as played:
        played.start(train, tmp_path, (*flags, str(pictures)), "dataparallel.py")
        assert played.end() == [0], played.text()
    record = json.loads((tmp_path / "out" / "epochs.jsonl").read_text())
    assert (record["images"], record["val_images"]) == (16, 8)
