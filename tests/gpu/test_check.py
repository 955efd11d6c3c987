"""scripts/gpu_check.sh, and what its rows would take for a mistake, without a GPU."""

import math

import pytest
from conftest import run
from summary import summary
from test_rows import TOLERANCE, difference


def test_what_rows_take_for_a_mistake():
    right = [{"train_loss": 2.0, "val_loss": 2.1}]
    wrong = [{"train_loss": 2.0 + 2 * TOLERANCE["fp32"], "val_loss": 2.1}]
    assert difference(right, right) == 0 < TOLERANCE["fp32"] < difference(right, wrong)
    assert difference(right, [{"train_loss": 2.0, "val_loss": math.nan}]) == math.inf


@pytest.mark.full
def test_a_rehearsal_writes_a_summary(tmp_path):
    words = ["-k", "cpu_does and multiprocessing_distributed-bf16", "--rehearse-gpu"]
    script = ("bash", "scripts/gpu_check.sh", *words)
    ended = run(*script, OUTPUT=str(tmp_path), MINUTES="2", GPU_TIMINGS="no")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    text = (tmp_path / "summary.md").read_text()
    assert text == summary(tmp_path) and "Rows: 1 passed, 0 failed" in text
    assert "loss differs by" in text
