"""Test what the benchmarks compare, and how; no test asserts a time."""

import importlib
import json
import os
import sys
from itertools import count, pairwise
from pathlib import Path
from unittest.mock import Mock

import torch
from played import Played, free_port

from benchmarks import comparison, input, step
from benchmarks.photographs import write_photographs
from common import images
from common.data import build_datasets
from scripts import network


def test_the_usual_pipeline_is_our_pillow_pipeline_normalized(tmp_path):
    """Both pipelines do the same work; otherwise, comparing their speeds would be meaningless."""
    facts = write_photographs(tmp_path, 12, 6, classes=2)
    assert facts["images"] == 18 and abs(facts["mean_bytes"] / 100_000 - 1) < 0.1
    val = input.usual_folder(tmp_path / "val", input.USUAL_VAL)
    _, val_set = build_datasets(input.arguments(tmp_path, "--decoder", "pil"))
    for number, (path, _) in enumerate(val.samples):
        content = Path(path).read_bytes()
        ours = val_set.transform(images.decode(content, "pil"))
        normalized = input.NORMALIZE(ours.float() / 255)
        torch.testing.assert_close(val[number][0], normalized, rtol=0, atol=1e-6)
    crop = input.USUAL_TRAIN[0]
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


def test_a_gpu_has_finished_whenever_the_clock_is_read(monkeypatch):
    calls = Mock(**{"clock.side_effect": count(), "dist.get_rank.return_value": 0})
    calls.dist.get_world_size.return_value = 1
    monkeypatch.setattr("time.perf_counter", calls.clock)
    monkeypatch.setattr(network, "perf_counter", calls.clock)
    monkeypatch.setattr(network, "dist", calls.dist)
    monkeypatch.setattr(torch.cuda, "synchronize", calls.wait)
    network.all_reduce_seconds(Mock(is_cuda=True, nbytes=2**21), [0])
    step.timed(calls.work, 1, torch.device("cuda"))()
    names = [name for name, *_ in calls.mock_calls]
    waited = [one == "wait" for one, name in pairwise(names) if name == "clock"]
    assert waited == [True] * 14 and "work" in names


def compare_on_one_process(folder: Path) -> None:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", CUDA_VISIBLE_DEVICES="")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    flags = "--synthetic 40 -b 4 --image-size 32 --arch squeezenet1_1 --precision fp32"
    sys.argv = ["distributed.py", *flags.split(), "--output", str(folder)]
    rows = step.measure_in_turns(importlib.import_module("distributed"), 1)
    (folder / "found.json").write_text(json.dumps(rows))


def test_train_takes_turns_with_minimal_loops(tmp_path):
    with Played(tmp_path) as played:
        played.start(compare_on_one_process, tmp_path)
        assert played.end(180) == [0], played.text()
    rows = json.loads((tmp_path / "found.json").read_text())
    names = ["minimal loop", "conventional loop: fp32, NCHW", "distributed.py"]
    assert [*rows] == names
    assert all(row["value"]["median"] > 0 for row in rows.values())
