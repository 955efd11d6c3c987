"""Small folders, imports in one direction, scripts that take little along."""

import ast
import re
import shutil
from graphlib import CycleError, TopologicalSorter

import pytest
from conftest import ROOT

from scripts.sync_scripts import BASE, REGIONS, SIBLINGS, split

SCRIPTS = {name.removesuffix(".py") for name in (BASE, *SIBLINGS)}
# Lines of Python, and of shell in scripts/. They only go down
BUDGETS = {"common": 2180, "launch": 1144, "scripts": 1165}
BUDGETS |= {"benchmarks": 2346, "docs": 628, "tests": 7915}  # docs: 429 draw pictures
IMPORTED = "launch, as imported"  # by distributed.py
BUDGETS[IMPORTED] = 302
FORBIDDEN = dict.fromkeys(("launch", *SCRIPTS), {"scripts", *SCRIPTS})
FORBIDDEN["common"] = {"launch", "scripts", *SCRIPTS, "torch.distributed"}
FORBIDDEN["common"] |= {"torch.nn.parallel", "horovod", "apex"}
MEASURE = ("benchmarks", "tests")


def imports(node):
    if isinstance(node, ast.ImportFrom):
        return {f"{node.module}.{alias.name}" for alias in node.names}
    return {alias.name for alias in node.names} if isinstance(node, ast.Import) else ()


def problems(root):
    """What breaks the layout, a line each."""
    found, texts, graph = set(), {}, {}
    for pattern in ("*.py", "scripts/*.s*h", *(f"{f}/**/*.py" for f in BUDGETS)):
        for path in root.glob(pattern):
            name = str(path.relative_to(root)).removesuffix(".py").replace("/", ".")
            texts[name] = path.read_text()
    for name, text in texts.items():
        if name.endswith((".sh", ".sbatch")):
            continue
        folder, nodes = name.split(".")[0], list(ast.walk(ast.parse(text)))
        imported = set().union(*map(imports, nodes))
        wrong = set() if folder in MEASURE else {"benchmarks"}
        wrong |= FORBIDDEN.get(folder, set())
        for other in imported:
            if any(f"{other}.".startswith(f"{one}.") for one in wrong):
                found.add(f"{name} imports {other}")
        called = {ast.unparse(node.func) for node in nodes if type(node) is ast.Call}
        if called & {f"sys.path.{how}" for how in ("insert", "append")}:
            found.add(f"{name} changes sys.path")
        known = imported | {other.rpartition(".")[0] for other in imported}
        known |= {f"tests.{other}" for other in known}  # they find each other so
        graph[name] = known & texts.keys() - {name}
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return {*found, f"a circle: {' '.join(error.args[1])}"}
    taken = {"distributed"}
    for name in reversed(order):
        taken |= graph.get(name, set()) if name in taken else set()
    counts = {f: [n for n in texts if n.startswith(f"{f}.")] for f in BUDGETS}
    counts[IMPORTED] = [n for n in taken if n.startswith("launch.")]
    for what, names in counts.items():
        lines, most = "".join(map(texts.get, names)).count("\n"), BUDGETS[what]
        found |= {f"{what}: {lines} lines of {most}"} if lines > most else set()
    for name in SCRIPTS:
        regions, tree = split(texts[name], name)[1], ast.parse(texts[name])
        strategy = "".join(line for region in REGIONS for line in regions[region])
        strategy = re.findall(r'^ *(?! |#|""").+', strategy, re.M)
        ours = [
            n for n in tree.body if re.match("common|launch", vars(n).get("module", ""))
        ]
        measured = [(texts[name].count("\n"), "lines", 180, 255)]
        measured += [(len(strategy), "strategy lines", 20, 75)]
        if f"{name}.py" == BASE:
            taken = sum(len(node.names) for node in ours)
            measured += [
                (len(ours), "imports", 0, 12),
                (taken, "imported names", 0, 22),
            ]
        for count, what, low, high in measured:
            found |= set() if low <= count <= high else {f"{name}: {count} {what}"}
    return found


@pytest.fixture(scope="module")
def now():
    return problems(ROOT)


def test_the_layout(now):
    assert not now


@pytest.mark.parametrize(
    "file, added, problem",
    [
        ("common/model.py", "\n" * BUDGETS["common"], "common: "),
        ("launch/agreement.py", "\n" * BUDGETS[IMPORTED], "launch, as imported: "),
        ("common/model.py", "from torch import distributed", "torch.distributed"),
        ("common/model.py", "import launch.ranks", "imports launch.ranks"),
        ("common/errors.py", "def f():\n    import common.data", "a circle: "),
        ("launch/ranks.py", "import horovod_distributed", "imports horovod_"),
        ("scripts/quickstart.py", "import benchmarks.timings", "imports benchmarks"),
        ("docs/make.py", "sys.path.append('')", "docs.make changes"),
        ("distributed.py", "from common.data import a, b\n" * 12, "imported names"),
        ("distributed.py", "import common\n" * 76, "strategy lines"),
    ],
)
def test_a_broken_layout_is_seen(tmp_path, now, file, added, problem):
    for name in [*BUDGETS, *(f"{name}.py" for name in SCRIPTS)]:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name)
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, tmp_path / name)
    opening, mark, rest = (ROOT / file).read_text().partition("# [/imports]")
    (tmp_path / file).write_text(f"{opening}\n{added}\n{mark}{rest}")
    assert any(problem in line for line in problems(tmp_path) - now)
