"""A killed or stopped run ends, leaves no process behind, and resumes with identical results."""

import json
import random
import time

import pytest
import torch
from conftest import wait_until
from ranks import Ranks, run_ranks, train
from torch.utils._pytree import tree_leaves

from benchmarks import kills

COURSE = """--image-size 32 -b 8 --lr 0.4 --min-crop 0.5 --warmup-epochs 1 --epochs 4
    --max-steps 12 --print-interval 2 --save-minutes 0""".split()
# test_start.py kills torchrun; benchmarks/kills.py has more moments, victims and launchers
WAYS = [
    pytest.param("horovodrun", ("SIGTERM", "launcher"), marks=pytest.mark.horovod),
    pytest.param("torchrun", ("SIGKILL", "training process"), marks=pytest.mark.full),
]


@pytest.fixture(scope="module")
def few(digits, tmp_path_factory):
    """Return a data set of 96 training and 30 validation images."""
    folder = tmp_path_factory.mktemp("data") / "few"
    for part, count in (("train", 10), ("val", 3)):
        for source in sorted((digits / part).iterdir()):
            (folder / part / source.name).mkdir(parents=True)
            for file in sorted(source.iterdir())[:count]:
                (folder / part / source.name / file.name).symlink_to(file)
    return folder


def came_to(output):
    """Return everything that a run has saved, except times and speeds."""
    names = ("checkpoint.pt", "best.pt")
    found = [torch.load(output / name, weights_only=True) for name in names]
    lines = (output / "epochs.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == found[0]["records"]
    for content in found:
        del content["recipe"]  # the flags differ between strategies
        for record in content["records"]:
            for name in kills.TIMES:
                del record[name]
    leaves = tree_leaves(found)
    return [x.flatten().tolist() if torch.is_tensor(x) else x for x in leaves]


def whole(folder, processes, *flags, **how):
    """Return the results of an uninterrupted run."""
    name = "dataparallel" if processes == 1 else "distributed"
    flags = [*flags, "--output", folder / "whole"]
    run_ranks(folder, processes, train, name=name, flags=flags, **how)
    return came_to(folder / "whole")


# --- under each launcher ---


@pytest.fixture(scope="module")
def right(few, tmp_path_factory):
    flags = [*kills.FLAGS.split(), "--data", few]
    return whole(tmp_path_factory.mktemp("right"), 2, *flags)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("way, event", WAYS)
def test_killed_or_stopped_a_launched_run_ends_with_the_same_bits(
    way, event, few, right, tmp_path
):
    """After a process is killed or the launcher is stopped, all processes end."""
    how, draw = (way, few, tmp_path / "out", "--resume"), random.Random(way)
    run = kills.Run(*how)
    row = run.interrupt(*event, draw.choice(kills.MOMENTS), draw)
    # After SIGTERM, horovodrun itself sometimes returns 0
    assert not row["left"] and (run.process.poll() or way == "horovodrun"), row
    run = kills.Run(*how)
    assert run.process.wait() == 0, run.log.read_text()
    assert came_to(tmp_path / "out") == right


# --- in processes that start faster ---


def test_killed_again_and_again_with_other_numbers_of_processes(few, tmp_path):
    """A run gets SIGKILL at random moments, from the first step to the last write.

    Another strategy may resume the run. With another number of processes, sums are added in another
    order.
    """
    flags = ["--data", few, *COURSE, "--precision", "fp32", "-j", 1]
    right = whole(tmp_path / "whole", 1, *flags, net="small")
    output, draw = tmp_path / "out", random.Random(4)
    how = {"flags": [*flags, "--output", output, "--resume"], "net": "small"}
    names = ("distributed", "multiprocessing_distributed")
    for number in range(30):
        size = (1, 2, 4)[number % 3]
        name = "dataparallel" if size == 1 else names[number % 2]
        with Ranks(tmp_path, size, train, name=name, **how) as ranks:
            for _ in range(draw.randrange(1, 10)):  # a whole run has 24
                wait_for_a_save(output, ranks)
            time.sleep(draw.uniform(0, 0.3))
            if not ranks.alive():
                assert number and not any(ranks.end()), ranks.text()
                break
    for one, other in zip(came_to(output), right, strict=True):
        rounded = isinstance(other, (float, list))
        assert one == (pytest.approx(other, 1e-4, 1e-6) if rounded else other)


def wait_for_a_save(output, ranks):
    """Wait until the run saves a checkpoint or ends."""

    def saved():
        path = output / "checkpoint.pt"
        return path.exists() and path.stat().st_mtime_ns

    before = saved()
    wait_until(lambda: saved() != before or not ranks.alive(), 60, ranks.text, 0.005)
