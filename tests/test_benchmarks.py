"""Check what the benchmarks compare, and how; no test asserts a time."""

import json
import os
import re
import time
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from played import Played, free_port

from benchmarks import comparison, gpu, memory, usual
from benchmarks.photographs import write_photographs
from common import images
from common.meters import Timer


def test_the_usual_pipeline_is_our_pillow_pipeline_normalized(tmp_path):
    """Both do the same work, so that comparing their speeds makes sense."""
    facts = write_photographs(tmp_path, 12, 6, classes=2)
    assert facts["images"] == 18 and abs(facts["mean_bytes"] / 100_000 - 1) < 0.1
    val = usual.folder(tmp_path / "val", usual.VAL)
    for number, (path, _) in enumerate(val.samples):
        content = Path(path).read_bytes()
        ours = images.val_transform(partial(images.decode_with_pillow, content), 224)
        normalized = usual.NORMALIZE(ours.float() / 255)
        torch.testing.assert_close(val[number][0], normalized, rtol=0, atol=1e-6)
    crop = usual.TRAIN[0]
    assert crop.scale == (0.08, 1.0) and crop.size == (224, 224)


def test_ratios_are_of_one_round_and_rows_are_medians():
    found = {"base": [1.0, 2.0, 4.0], "other": [3.0, 2.0, 400.0]}
    row = comparison.compared(found, "base")["other"]
    assert row["value"] == {"median": 3.0, "low": 2.5, "high": 201.5}
    assert row["ratio"] == {"median": 3.0, "low": 2.0, "high": 51.5}
    called = []
    works = {name: lambda name=name: called.append(name) or 1.0 for name in found}
    assert comparison.interleave(works, 3) == {"base": [1.0] * 3, "other": [1.0] * 3}
    assert called.count("base") == called.count("other") == 4  # with a warm-up round


def hold(size: int) -> None:
    kept = bytearray(size)
    time.sleep(60 + len(kept) * 0)


def test_memory_is_in_mib():
    """Linux reports a process's peak, and the private memory of loader processes."""
    timer = Timer()
    timer.interval(1, 8, 0.0)
    peak = timer.figures(torch.device("cpu"))["peak_memory_mib"]
    status = Path("/proc/self/status").read_text()
    kib = int(re.search(r"VmHWM:\s+(\d+)", status)[1])
    assert peak == pytest.approx(kib / 1024, 0.02)
    sizes = (0, 100 * 2**20, 400 * 2**20)
    fork = get_context("fork")
    children = [fork.Process(target=hold, args=(size,), daemon=True) for size in sizes]
    for child in children:
        child.start()
    time.sleep(2)
    assert memory.unique_mib() == pytest.approx(100, abs=40)  # the median
    for child in children:
        child.kill()
        child.join()


def compare_on_one_process(folder: Path) -> None:
    os.environ.update(MASTER_PORT=str(free_port()), CUDA_VISIBLE_DEVICES="")
    flags = "--synthetic 40 -b 4 --image-size 32 --arch squeezenet1_1 --precision fp32"
    found = gpu.compare("distributed", "1", *flags.split(), "--output", str(folder))
    (folder / "found.json").write_text(json.dumps(found))


def test_train_takes_turns_with_minimal_loops(tmp_path):
    with Played(tmp_path) as played:
        played.start(compare_on_one_process, tmp_path)
        assert played.end(180) == [0], played.text()
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    names = ["minimal loop", "conventional loop: fp32, NCHW", "distributed.py"]
    assert [*rows] == names
    assert all(row["value"]["median"] > 0 for row in rows.values())
