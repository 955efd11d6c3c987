"""Check scripts/gpu_check.sh's errors and summary, and the notebook, without a GPU."""

import json
import math
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from test_rows import TOLERANCE, difference

from benchmarks.gpu_problems import problems

MADE_UP = Path(__file__).with_name("made_up.json")
REFUSED = Path(__file__).with_name("refused.txt").read_text().splitlines()


def test_what_rows_take_for_a_mistake():
    right = [{"train_loss": 2.0, "val_loss": 2.1}]
    wrong = [{"train_loss": 2.0 + 2 * TOLERANCE["fp32"], "val_loss": 2.1}]
    assert difference(right, right) == 0 < TOLERANCE["fp32"] < difference(right, wrong)
    assert difference(right, [{"train_loss": 2.0, "val_loss": math.nan}]) == math.inf


@pytest.mark.parametrize("field, value, words", [x.split(" | ") for x in REFUSED])
def test_impossible_figures_are_refused(field, value, words):
    part = summary = json.loads(MADE_UP.read_text())
    assert not problems(summary)
    *keys, last = field.split("/")
    for key in keys:
        part = part[int(key) if key.isdecimal() else key]
    part[last] = json.loads(value)
    assert any(words in line for line in problems(summary)), problems(summary)


def test_a_summary_is_a_row_per_strategy(tmp_path):
    gpus = runpy.run_path(str(ROOT / "docs" / "make.py"))["gpus"]
    assert gpus(str(tmp_path)) == "No summaries have been received yet.\n"
    shutil.copy(MADE_UP, tmp_path / "reader.json")
    assert "| 2 x Tesla T4 | distributed | 100 | 200 | 2.00 |" in gpus(str(tmp_path))
    for file in ROOT.glob("benchmarks/results/gpus/*.json"):
        assert not problems(json.loads(file.read_text())), file


@pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_notebook_runs_without_a_gpu(long, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(ROOT / "deploy")
    tests = "cpu_does and multiprocessing_distributed-bf16-1" if long else "nothing"
    check = f"bash scripts/gpu_check.sh; GPU_TIMINGS=no OUTPUT={tmp_path} bash"
    settings = {"INSTALL": False, "HOROVOD": False, "APEX": False}
    settings["SUMMARY"] = f"{tmp_path}/summary.json"
    settings["CHECK"] = f"{check} scripts/gpu_check.sh --rehearse-gpu -k '{tests}'"
    if not long:
        settings["QUICKSTART"] = "bash scripts/quickstart.sh --help"
        settings["TIMINGS"] = "bash scripts/timings.sh --help"
    cells = json.loads((ROOT / "deploy" / "kaggle.ipynb").read_text())["cells"]
    first, *others = [one["source"] for one in cells if one["cell_type"] == "code"]
    space = {}
    exec("".join(first), space)
    space |= settings
    for cell in others:
        exec("".join(cell), space)
    printed = capsys.readouterr().out
    assert "error: PyTorch sees no CUDA GPU" in printed
    assert "summary.json: machine.gpus is []" in printed
    assert printed.count("(exit status 0)") == 6, printed
