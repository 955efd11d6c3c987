"""Test the errors and the summary of scripts/gpu_check.sh, and the notebook, without a GPU."""

import json
import sys

import pytest
from conftest import ROOT

from benchmarks.gpu_summary import problems

COMMIT = 40 * "0"
ROW = {"status": "passed", "line": "", "commit": COMMIT}


def summary():
    """Return a summary with invented figures of two strategies on one and on two GPUs."""
    timings = []
    for strategy in ("distributed", "dataparallel"):
        for number in (1, 2):
            found = {"steps": 120, "images": 120 * 64 * number}
            found |= {"images_per_second": 100.0 * number, "peak_memory_mib": 6000.0}
            row = {"name": f"{strategy} {number}", "strategy": strategy, **ROW}
            row |= {"processes": number, "batch": 64 * number, "found": found}
            timings.append(row)
    tests = [{"name": "bf16", **ROW, "status": "skipped", "line": "no native bf16"}]
    gpus = [{"memory.total": 15360.0}] * 2
    machine = {"gpus": gpus}
    return {"commit": COMMIT, "machine": machine, "tests": tests, "timings": timings}


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("commit", f"{COMMIT}-dirty", "undo or commit your changes"),
        ("tests/0/commit", "1", "bf16 is from commit 1"),
        ("tests/0/status", "failed", "bf16: failed: no native bf16"),
        ("timings/0/status", "not run", "distributed 1: not run"),
        ("timings/0/found/images_per_second", 0, "distributed 1: 0 images/s"),
        ("timings/1/found/images_per_second", 211, "2.11 times as fast as one GPU"),
        ("timings/0/found/peak_memory_mib", 15361, "more than the GPU's 15360 MiB"),
        ("timings/0/found/images", 7000, "7000 images in 120 steps"),
        ("timings", [], "timings are missing"),
    ],
)
def test_impossible_figures_are_refused(field, value, words):
    part = whole = summary()
    assert not problems(whole)
    *keys, last = field.split("/")
    for key in keys:
        part = part[int(key) if key.isdecimal() else key]
    part[int(last) if last.isdecimal() else last] = value
    assert any(words in line for line in problems(whole)), problems(whole)


def test_the_notebook_runs_without_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(ROOT / "deploy")
    check = f"bash scripts/gpu_check.sh; GPU_TIMINGS=no OUTPUT={tmp_path} bash"
    settings = {"INSTALL": False, "HOROVOD": False, "APEX": False}
    settings["SUMMARY"] = f"{tmp_path}/summary.json"
    settings["CHECK"] = f"{check} scripts/gpu_check.sh --rehearse-gpu -k nothing"
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
    assert "summary.json: timings are missing" in printed
    assert printed.count("(exit status 0)") == 6, printed
