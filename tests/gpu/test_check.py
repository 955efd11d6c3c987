"""scripts/gpu_check.sh on a machine without a GPU."""

import pytest
from conftest import run
from summary import summary


@pytest.mark.full
def test_a_rehearsal_writes_a_summary(tmp_path):
    words = ["-k", "cpu_does and multiprocessing_distributed-1-bf16", "--rehearse-gpu"]
    script = ("bash", "scripts/gpu_check.sh", *words)
    ended = run(*script, OUTPUT=str(tmp_path), MINUTES="1", GPU_TIMINGS="no")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    text = (tmp_path / "summary.md").read_text()
    assert text == summary(tmp_path) and "Rows: 1 passed, 0 failed" in text
    assert "loss differs by" in text
