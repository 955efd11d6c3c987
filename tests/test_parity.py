"""The five scripts are one: the same outside their regions, and strategy only inside."""

import ast
import re
import shutil
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import sync_scripts

SCRIPTS = (sync_scripts.BASE, *sync_scripts.SIBLINGS)
STRATEGY_WORDS = re.compile(
    r"torch\.distributed\b|\bdist\.|\bDDP\b|DataParallel|\bapex\b|\bamp\.(?!GradScaler)|horovod"
    r"|\bhvd\b|\bmp\.|nccl|gloo|torchrun|multiprocessing|spawn",
    re.IGNORECASE,
)
# A line that only names the file's own strategy in the docstring is not among the
# shared ones.


def parts(name):
    return sync_scripts.split((ROOT / name).read_text(), name)


def code_lines(lines):
    """Lines of code: no blank lines, no comments, no one-line docstrings."""
    stripped = [line.strip() for line in lines]
    return [line for line in stripped if line and not line.startswith(("#", '"""'))]


def test_five_scripts_share_all_lines_outside_their_regions():
    shared = {name: "".join(parts(name)[0]) for name in SCRIPTS}
    assert len(shared) == 5
    assert set(shared.values()) == {shared["distributed.py"]}
    assert len(shared["distributed.py"].splitlines()) > 120


def test_every_script_has_eight_regions_that_say_something():
    for name in SCRIPTS:
        _, regions = parts(name)
        assert set(regions) == {"docstring", *sync_scripts.REGIONS}
        assert len(sync_scripts.REGIONS) == 8
        for region in sync_scripts.REGIONS:
            opening, *inside, closing = regions[region]
            explained = bool(re.search(r"\] \S", opening)) or any(
                "#" in line for line in inside
            )
            assert code_lines(inside) or explained, (name, region)


def test_strategy_stays_inside_the_regions():
    shared = "".join(parts("distributed.py")[0])
    assert not STRATEGY_WORDS.findall(shared)
    # and the search would find it
    assert STRATEGY_WORDS.search("    dist.barrier()") and STRATEGY_WORDS.search(
        "import horovod"
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_budget(name):
    text = (ROOT / name).read_text()
    assert 180 <= len(text.splitlines()) <= 240
    _, regions = parts(name)
    strategy = [
        line for region in sync_scripts.REGIONS for line in code_lines(regions[region])
    ]
    assert 20 <= len(strategy) <= 60
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno + 1 <= 80, node.name


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_imports_another(name):
    modules = {path.removesuffix(".py") for path in SCRIPTS}
    for node in ast.walk(ast.parse((ROOT / name).read_text())):
        if isinstance(node, ast.Import):
            assert not modules & {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.module not in modules


def test_common_knows_no_strategy():
    files = sorted((ROOT / "common").glob("*.py"))
    assert len(files) > 10
    forbidden = ("torch.distributed", "torch.nn.parallel", "horovod", "apex")
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [
                    node.module,
                    *(f"{node.module}.{alias.name}" for alias in node.names),
                ]
            for name in names:
                assert not name.startswith(forbidden), f"{file.name} imports {name}"


@pytest.fixture
def copy(tmp_path):
    for name in SCRIPTS:
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_check_passes_on_an_untouched_copy(copy):
    assert sync_scripts.main(["--check"], copy) == 0


@pytest.mark.parametrize("name", sync_scripts.SIBLINGS)
def test_check_sees_a_changed_shared_line_and_sync_mends_it(copy, name, capsys):
    original = (copy / name).read_text()
    changed = original.replace("model.train()", "model.train(True)")
    assert changed != original
    (copy / name).write_text(changed)
    assert sync_scripts.main(["--check"], copy) == 1
    assert name in capsys.readouterr().out
    assert sync_scripts.main([], copy) == 0
    assert (copy / name).read_text() == original


def test_check_sees_a_line_added_to_the_base(copy):
    base = copy / sync_scripts.BASE
    base.write_text(
        base.read_text().replace("    model.train()\n", "    model.train()\n    pass\n")
    )
    assert sync_scripts.main(["--check"], copy) == 1


@pytest.mark.parametrize(
    "old, new",
    [
        ("# [/step]", ""),
        ("# [4/6 step]", "# [4/6 stop]"),
        ("# [/wrap]", "# [/shard]"),
    ],
)
def test_check_refuses_broken_regions(copy, old, new, capsys):
    script = copy / "horovod_distributed.py"
    script.write_text(script.read_text().replace(old, new))
    assert sync_scripts.main(["--check"], copy) == 1
    assert "horovod_distributed.py" in capsys.readouterr().err
