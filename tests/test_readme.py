"""The README says what is true: numbers from results/, flags and files that exist."""

import json
import re
import sys

import pytest
from conftest import ROOT, run

sys.path.insert(0, str(ROOT / "scripts"))
import quickstart

README = (ROOT / "README.md").read_text()


def test_the_quickstart_reached_its_accuracy():
    runs = json.loads((ROOT / "results" / "quickstart.json").read_text())
    done = [run for run in runs if run["status"] == "done"]
    assert len(done) == 4 and all(run["report"]["val_top1"] >= 98 for run in done)
    assert all(run["report"]["commit"] and run["report"]["argv"] for run in done)
    table = (ROOT / "results" / "quickstart.md").read_text()
    assert table == quickstart.render(runs)


def test_the_diff_is_that_of_the_scripts():
    """Applied to one script, it makes the other."""
    one, other = (
        (ROOT / f"{name}.py").read_text().partition('"""\n\nfrom')[2].splitlines()
        for name in ("distributed", "horovod_distributed")
    )
    (block,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    shown = block.splitlines()[2:]
    removed = [line[1:] for line in shown if line[0] == "-"]
    added = [line[1:] for line in shown if line[0] == "+"]
    assert 20 < len(removed) < len(added) < 60
    rest = list(one)
    for line in removed:
        rest.remove(line)
    assert sorted([*rest, *added]) == sorted(other)


def test_a_strategy_that_cannot_run_has_its_reason_in_place_of_numbers():
    run = {"strategy": "s", "launcher": "l", "status": "no GPU", "report": None}
    assert quickstart.render([run]).splitlines()[-1].split() == (
        "| s | l | - | - | - | - | - | - | no GPU |".split()
    )


def test_the_example_to_copy_runs_as_it_stands(tmp_path):
    (block,) = re.findall(r"```python\n(import os\n.*?)```", README, re.DOTALL)
    (tmp_path / "example.py").write_text(block)
    command = (
        "torchrun",
        "--standalone",
        "--nproc-per-node=2",
        tmp_path / "example.py",
    )
    ended = run("bash", "-c", f"cd {tmp_path} && exec {' '.join(map(str, command))}")
    assert ended.returncode == 0, ended.stderr
    assert re.fullmatch(r"(epoch [01]: \d+ of 199 right\n){2}", ended.stdout), (
        ended.stdout
    )
    assert (tmp_path / "model.pt").exists()


def test_quickstart_ends_where_its_training_was_stopped(tmp_path, monkeypatch, capfd):
    """By a signal that did not reach the quickstart itself."""
    launcher = tmp_path / "scripts" / "distributed.sh"
    launcher.parent.mkdir()
    launcher.write_text(
        "echo 'distributed.py: stopped after step 3, which is saved' >&2\n"
        "echo 'Traceback (most recent call last):' >&2\nexit 1\n"
    )
    monkeypatch.setattr(quickstart, "ROOT", tmp_path)
    with pytest.raises(KeyboardInterrupt):
        quickstart.train("distributed", "data", tmp_path / "out")
    assert capfd.readouterr().err == (
        "distributed.py: stopped after step 3, which is saved\n"
    )


def test_quickstart_uses_the_recipe_it_prints():
    recipe = " ".join(quickstart.RECIPE)
    assert "--epochs 8" in recipe and "--no-flip" in recipe


def test_the_figures_of_the_reliability_page_are_of_a_whole_run():
    report = json.loads((ROOT / "results" / "reliability.json").read_text())
    assert (
        report["sessions"][0]["passed"] > 150 and report["sessions"][-1]["failed"] == 0
    )


def test_the_bounds_of_the_reliability_page_are_those_of_the_tests():
    import test_equality

    page = (ROOT / "docs" / "reliability.md").read_text()
    weights, momenta = (
        f"{bound:.1e}".replace("e-0", "e-")
        for bound in (test_equality.WEIGHT_BOUND, test_equality.MOMENTUM_BOUND)
    )
    assert f"assert is {weights} for weights and {momenta} for momenta" in page
