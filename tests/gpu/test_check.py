"""scripts/gpu_check.sh, and what its rows would take for a mistake, without a GPU."""

import pytest
from conftest import run
from summary import summary
from test_rows import (  # noqa: F401
    LOSS_TOLERANCE,
    commit,
    difference,
    here,
    on_the_cpu,
    photographs,
    states_differ,
)


@pytest.mark.full
def test_a_wrong_training_is_outside_the_tolerance(on_the_cpu):  # noqa: F811
    right, wrong = on_the_cpu(1), on_the_cpu(1, 0, None, "--lr", 0.002)
    assert difference(wrong, right) > LOSS_TOLERANCE["fp32"]
    assert states_differ(wrong.content, right.content)["weights"] > 0
    wrong.losses[0] = float("nan")
    assert difference(wrong, right) == float("inf")


@pytest.mark.full
def test_a_rehearsal_writes_a_summary(tmp_path):
    words = ["-k", "cpu_does and multiprocessing_distributed-1-bf16", "--rehearse-gpu"]
    script = ("bash", "scripts/gpu_check.sh", *words)
    ended = run(*script, OUTPUT=str(tmp_path), MINUTES="3", GPU_TIMINGS="no")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    text = (tmp_path / "summary.md").read_text()
    assert text == summary(tmp_path) and "Rows: 1 passed, 0 failed" in text
    assert "loss differs by" in text
