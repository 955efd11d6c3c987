"""The five scripts differ only in their regions."""

import re

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
