"""The five scripts differ only in their regions."""

import re
import shutil

import pytest
from conftest import ROOT

from scripts import sync_scripts

SCRIPTS = (sync_scripts.BASE, *sync_scripts.SIBLINGS)
STRATEGY_WORDS = re.compile(
    r"torch\.distributed\b|\bdist\.|\bDDP\b|DataParallel|\bapex\b|\bamp\.(?!GradScaler)"
    r"|horovod|\bhvd\b|\bmp\.|nccl|gloo|torchrun|multiprocessing|spawn",
    re.IGNORECASE,
)


def test_five_scripts_differ_in_eight_regions_only():
    parts = [sync_scripts.split((ROOT / name).read_text(), name) for name in SCRIPTS]
    assert len(parts) == 5 and len({"".join(shared) for shared, _ in parts}) == 1
    planted = (ROOT / SCRIPTS[0]).read_text().replace("model.train()", "dist.barrier()")
    assert STRATEGY_WORDS.findall("".join(sync_scripts.split(planted, "")[0]))
    shared = "".join(parts[0][0])
    assert shared.count("\n") > 100 and not STRATEGY_WORDS.findall(shared)
    for name, (_, regions) in zip(SCRIPTS, parts, strict=True):
        assert regions.keys() == {"docstring", *sync_scripts.REGIONS}
        assert len(regions) == 9
        for region in sync_scripts.REGIONS:
            opening, *inside, _ = regions[region]
            assert "".join(inside).strip() or "] " in opening, (name, region)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_changed_shared_line_is_seen_and_copied_from_the_base(name, tmp_path, capsys):
    for script in SCRIPTS:
        shutil.copy(ROOT / script, tmp_path)
    script = tmp_path / name
    original = script.read_text()
    script.write_text(original.replace("model.train()", "model.train(True)"))
    sync_scripts.main(tmp_path)
    updated = capsys.readouterr().out.splitlines()
    assert (f"{name} updated" in updated) == (name != sync_scripts.BASE)
    assert (script.read_text() == original) == (name != sync_scripts.BASE)
    texts = [(tmp_path / script).read_text() for script in SCRIPTS]
    parts = [sync_scripts.split(*pair) for pair in zip(texts, SCRIPTS, strict=True)]
    assert len({"".join(shared) for shared, _ in parts}) == 1
