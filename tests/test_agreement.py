"""Processes that were started unlike end at once, all of them, and one line says why."""

import re
import shutil
import socket
import subprocess
import sys
import threading
from argparse import Namespace

import numpy
import pytest
import torch
from conftest import ROOT, TINY, environment, run
from ranks import Ranks, free_port, run_ranks, train, train_unlike
from torch.utils.data import Dataset

from common.arguments import build_parser, parse_arguments
from common.data import PackedPaths, build_datasets, share_out
from common.errors import UserError
from launch.agreement import Processes, agree

HOST = socket.gethostname()
EPOCH = [*TINY, "--epochs", "1", "--max-steps", "2", "-j", "0"]


# --- the exchange by itself: ranks are threads, a sum behind a barrier combines ---


def each(world_size, task):
    """Run task(processes) as every rank; returns what each one returned or raised."""
    barrier = threading.Barrier(world_size, timeout=20)
    tables, ended = [None] * world_size, [None] * world_size

    def combine(rank):
        def add_up(table):
            tables[rank] = table
            barrier.wait()
            total = sum(tables)
            barrier.wait()
            return total

        return add_up

    def work(rank):
        processes = Processes(rank, world_size, torch.device("cpu"), combine(rank))
        try:
            ended[rank] = task(processes)
        except Exception as error:
            ended[rank] = error

    threads = [
        threading.Thread(target=work, args=(rank,)) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended


def one_line(ended, capsys):
    """The error that all ranks raised, and that was printed once."""
    assert all(type(error) is UserError and error.said for error in ended), ended
    (message,) = {str(error) for error in ended}
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 1 and printed[0].endswith(f"error: {message}")
    return message


def test_numbers_and_texts_reach_everybody():
    def task(processes):
        big = 2**48 - 1 - processes.rank
        text = "é" * processes.rank
        return processes.numbers([big, processes.rank]), processes.texts(text)

    numbers = [[2**48 - 1 - rank, rank] for rank in range(3)]
    assert each(3, task) == [(numbers, ["", "é", "éé"])] * 3


class Own(Dataset):
    """A dataset of somebody else's, whose paths are a list."""

    def __init__(self, length):
        self.paths = ["a.png"] * length

    def __len__(self):
        return len(self.paths)


def test_one_process_agrees_with_itself(capsys, monkeypatch):
    args = Namespace(world_size=1, synthetic=8, decoder="auto", lr=0.1)
    compare, compared = Processes.compare, {}

    def recorded(everyone, facts):
        compared.update(facts)
        compare(everyone, facts)

    monkeypatch.setattr(Processes, "compare", recorded)
    everyone = agree(args, 0, torch.device("cpu"), lambda sums: sums, Own(8), range(2))
    assert everyone.images == {"train": [8, None], "val": [2, None]}
    assert (compared["--lr"], compared["--device"]) == (0.1, "cpu")
    assert compared["PyTorch"] == torch.__version__.split("+")[0]
    assert (compared["images in train:"], compared["images in val:"]) == (8, 2)
    assert capsys.readouterr().err == ""


def test_what_differs_is_told_in_the_words_of_the_command_line(capsys):
    facts = {"--lr": 0.1, "--max-steps": None, "--no-flip": False, "--seed": 0}

    def task(processes):
        odd = {"--no-flip": True, "--seed": 1} if processes.rank == 2 else {}
        processes.compare({**facts, **odd})

    assert one_line(each(4, task), capsys) == (
        f"rank 2 on {HOST} differs from rank 0 on {HOST}: --no-flip given "
        "(rank 0: not given), --seed 1 (rank 0: 0). Give all processes the same"
    )


def test_several_ranks_and_many_flags_still_make_one_line(capsys):
    def task(processes):
        processes.compare({f"--{name}": processes.rank > 0 for name in "abcd"})

    message = one_line(each(4, task), capsys)
    assert "rank 1 on" in message and "; 2 more differ as well" in message
    assert "--c given (rank 0: not given) ..." in message and "--d" not in message


def test_the_first_file_that_differs(capsys):
    """Against a plain search, on random lists that share a beginning."""
    generator = numpy.random.default_rng(0)
    for _ in range(60):
        lists = [[f"/data/{name}" for name in "abcdefgh"[: generator.integers(9)]]] * 2
        for rank in (0, 1):
            names = generator.integers(0, 3, generator.integers(4))
            lists[rank] = [*lists[rank], *(f"/data/\udcff{name}" for name in names)]

        def task(processes, lists=lists):
            own = lists[processes.rank]
            processes.compare_paths("val", PackedPaths("/data", own))

        ended = each(2, task)
        if lists[0] == lists[1]:
            assert ended == [None, None]
            continue
        message = one_line(ended, capsys)
        place = next(
            index
            for index in range(9 + 4)
            if lists[0][index : index + 1] != lists[1][index : index + 1]
        )
        first = [
            "val" + (one[place][5:] if place < len(one) else "/ (no more)")
            for one in lists
        ]
        first = [
            name.encode(errors="surrogateescape").decode(errors="replace")
            for name in first
        ]
        assert (
            f"{len(lists[1])} images in val/ (rank 0: {len(lists[0])}), of which the "
            f"first that differs is {first[1]} (rank 0: {first[0]})."
        ) in message


def test_paths_are_told_apart_by_where_they_end():
    one, other = PackedPaths("", ["/a/b", "/c/d"]), PackedPaths("", ["/a/b/c", "/d"])
    assert one.bytes.tobytes() == other.bytes.tobytes()
    assert one.digest(2) != other.digest(2) and one.digest(0) == other.digest(0)
    moved = PackedPaths("/elsewhere", ["/elsewhere/a/b", "/elsewhere/c/d"])
    assert one.digest(2) == moved.digest(2)


def test_a_mistake_of_one_process_ends_all(capsys):
    def task(processes):
        with processes.all_or_none():
            if processes.rank == 1:
                raise UserError("no such file")

    message = one_line(each(2, task), capsys)
    assert "rank 1 on" in message and ": error: no such file (rank 0: none)" in message


def test_a_mistake_of_all_is_told_by_each_machine():
    def task(processes):
        with processes.all_or_none():
            raise UserError("no such file")

    for error in each(2, task):
        assert str(error) == "no such file" and not error.said


# --- two processes that train ---


def refused(folder, own, world_size=2, flags=EPOCH, name="distributed"):
    """Start ranks with flags of their own; returns the one line that they end with."""
    with Ranks(
        folder, world_size, train_unlike, name=name, flags=flags, own=own
    ) as ranks:
        statuses, text = ranks.end(45), ranks.text()
    assert statuses == [2] * world_size, text
    return only_line(text)


def only_line(text):
    lines = [line for line in text.splitlines() if " differs from rank 0 on " in line]
    assert (
        len(lines) == 1 and "Traceback" not in text and " lost another" not in text
    ), text
    return lines[0]


@pytest.mark.parametrize(
    "flags, said",
    [
        (("--lr", "0.2"), "--lr 0.2 (rank 0: 0.1)"),
        (("--seed", "1"), "--seed 1 (rank 0: 0)"),
        (("-b", "8"), "--global-batch-size 8 (rank 0: 4), --per-process-batch-size 4"),
        (("--image-size", "64"), "--image-size 64 (rank 0: 32)"),
        (("--arch", "resnet18"), "--arch resnet18 (rank 0: squeezenet1_1)"),
        (("--epochs", "2"), "--epochs 2 (rank 0: 1)"),
        (("--print-interval", "2"), "--print-interval 2 (rank 0: 1)"),
        (("--checkpoint-steps", "1"), "--checkpoint-steps 1 (rank 0: not given)"),
        (("--precision", "bf16"), "--precision bf16 (rank 0: fp32)"),
        (("--decoder", "pil"), "--decoder pil (rank 0: not given)"),
        (("--evaluate", "--resume", "x.pt"), "--evaluate given (rank 0: not given)"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_other_flags(flags, said, capsys):
    def task(processes):
        words = ["--synthetic", "8", *EPOCH, *(flags if processes.rank else ())]
        args = parse_arguments(build_parser("A test."), "distributed", words)
        share_out(args, processes.rank, 2, 2)
        sets = build_datasets(args)
        agree(args, processes.rank, processes.device, processes.combine, *sets)

    message = one_line(each(2, task), capsys)
    start = f"rank 1 on {HOST} differs from rank 0 on {HOST}: {said}"
    assert message.startswith(start)


def test_two_processes_with_other_flags(pictures, tmp_path):
    shared = ["--data", pictures, "--output", tmp_path / "out"]
    line = refused(tmp_path, [shared, [*shared, "--lr", "0.2"]])
    assert line.startswith(f"distributed.py: error: rank 1 on {HOST} differs from ")
    assert "--lr 0.2 (rank 0: 0.1)" in line
    assert not (tmp_path / "out").exists()


def test_the_last_of_three_ranks(pictures, tmp_path):
    shared = ["--data", pictures, "-b", 6, "--output", tmp_path / "out"]
    line = refused(tmp_path, [shared, shared, [*shared, "--seed", "1"]], world_size=3)
    assert "rank 2 on" in line and "--seed 1 (rank 0: 0)." in line


def test_mp_spawn_with_other_flags(pictures, tmp_path):
    shared = ["--data", pictures, "--output", tmp_path / "out"]
    name = "multiprocessing_distributed"
    line = refused(tmp_path, [[*shared, "--no-flip"], shared], name=name)
    assert "--no-flip not given (rank 0: given)." in line


def test_an_image_that_one_host_lacks(pictures, tmp_path):
    here, there = (["--data", folder] for folder in (pictures, tmp_path / "there"))
    shutil.copytree(pictures, tmp_path / "there")
    (tmp_path / "there" / "val" / "dog" / "2.JPEG").unlink()
    line = refused(tmp_path / "run", [here, there])
    assert (
        "7 images in val/ (rank 0: 8), of which the first that differs is "
        "val/dog/3.JPEG (rank 0: val/dog/2.JPEG)."
    ) in line


def test_an_image_of_another_name(pictures, tmp_path):
    here, there = (["--data", folder] for folder in (pictures, tmp_path / "there"))
    shutil.copytree(pictures, tmp_path / "there")
    folder = tmp_path / "there" / "train"
    (folder / "cat" / "7.JPEG").rename(folder / "dog" / "8.JPEG")
    line = refused(tmp_path / "run", [here, there])
    assert (
        "16 images in train/ (rank 0: 16), of which the first that differs is "
        "train/dog/0.JPEG (rank 0: train/cat/7.JPEG)."
    ) in line


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, digits):
    """Checkpoints of two runs of one recipe: after one epoch each, and after two."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, more in (("a", ()), ("b", ()), ("later", ("--epochs", "2"))):
        flags = ["--data", digits, *EPOCH, "--output", folder / name, *more]
        run_ranks(folder / "logs", 2, train, name="distributed", flags=flags)
    return folder


RESUMES = {
    "one has none": (None, "a", r"epoch 1, step 0, digest \w{12} \(rank 0: none\)"),
    "another epoch": ("later", "a", r"epoch 1, step 0, .* \(rank 0: epoch 2, step 0, "),
    "another run": ("a", "b", r"epoch 1, step 0, .* \(rank 0: epoch 1, step 0, "),
}


@pytest.mark.parametrize("case", RESUMES)
def test_other_checkpoints(digits, checkpoints, tmp_path, case):
    *names, said = RESUMES[case]
    own = []
    for rank, name in enumerate(names):
        if name is not None:
            shutil.copytree(checkpoints / name, tmp_path / str(rank))
        own.append(["--output", tmp_path / str(rank)])
    flags = ["--data", digits, *EPOCH, "--epochs", "3", "--resume", "auto"]
    line = refused(tmp_path, own, flags=flags)
    assert re.search(f"rank 1 on .*: checkpoint: {said}", line), line


def test_a_checkpoint_that_one_host_lacks(digits, checkpoints, tmp_path):
    flags = ["--data", digits, *EPOCH, "--output", tmp_path / "out"]
    own = [["--resume", checkpoints / "a" / "best.pt"], ["--resume", "/no.pt"]]
    line = refused(tmp_path, own, flags=flags)
    assert ": error: --resume /no.pt: there is no such file (rank 0: none)." in line


def test_other_weights_to_validate(digits, checkpoints, tmp_path):
    flags = ["--data", digits, *EPOCH, "--evaluate"]
    own = [["--resume", checkpoints / name / "best.pt"] for name in ("a", "b")]
    line = refused(tmp_path, own, flags=flags)
    assert re.search(r"checkpoint: epoch 1, .* \(rank 0: epoch 1, ", line)


def test_what_may_differ_between_hosts(pictures, checkpoints, tmp_path):
    """Folders, loader processes, and a decoder with the same pixels."""
    shutil.copytree(pictures, tmp_path / "there")
    own = [
        ["--data", pictures, "--output", tmp_path / "0", "-j", 0],
        ["--data", tmp_path / "there", "--output", tmp_path / "1", "-j", 2]
        + ["--decoder", "torchvision", "--timeout-seconds", "50"],
    ]
    arguments = {"name": "distributed", "flags": EPOCH, "own": own}
    run_ranks(tmp_path, 2, train_unlike, **arguments)
    assert (tmp_path / "0" / "checkpoint.pt").exists()


# --- through the launchers, as on two hosts ---


def two_nodes(commands):
    """Run one command a node at the same time; their statuses and all that they print."""
    nodes = [
        subprocess.Popen(
            [str(word) for word in command],
            cwd=ROOT,
            env=environment(GLOO_SOCKET_IFNAME="lo"),  # they meet on one machine
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command in commands
    ]
    try:
        printed = [node.communicate(timeout=60)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    return [node.returncode for node in nodes], "".join(printed)


def nodes_flags(pictures, tmp_path):
    flags = ["--data", pictures, *EPOCH, "--output", tmp_path / "out"]
    return flags, [*flags, "--lr", "0.2"]


def test_two_torchruns(pictures, tmp_path):
    port = str(free_port())
    statuses, text = two_nodes(
        ["torchrun", "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1"]
        + ["--master-addr=127.0.0.1", f"--master-port={port}"]
        + [ROOT / "distributed.py", *flags]
        for node, flags in enumerate(nodes_flags(pictures, tmp_path))
    )
    assert statuses == [1, 1], text  # torchrun makes 1 of every status
    assert text.count("differs from rank 0") == 1
    assert text.count("exitcode  : 2") == 2 and " lost another" not in text
    assert (
        f"rank 1 on {HOST} differs from rank 0 on {HOST}: --lr 0.2 (rank 0: 0.1)."
        in text
    )


def test_two_mp_spawns(pictures, tmp_path):
    url = f"tcp://127.0.0.1:{free_port()}"
    statuses, text = two_nodes(
        [sys.executable, ROOT / "multiprocessing_distributed.py", *flags]
        + ["--nprocs", 1, "--nnodes", 2, "--node-rank", node, "--dist-url", url]
        for node, flags in enumerate(nodes_flags(pictures, tmp_path))
    )
    assert statuses == [2, 2] and "--lr 0.2 (rank 0: 0.1)." in only_line(text), text


@pytest.mark.horovod
def test_horovodrun(pictures, tmp_path):
    first, second = nodes_flags(pictures, tmp_path)
    script = ROOT / "horovod_distributed.py"
    words = " ".join(f"'{word}'" for word in [sys.executable, script, *first])
    chosen = "$([ $HOROVOD_RANK = 0 ] || echo --lr 0.2)"
    ended = run(
        *("horovodrun", "-np", "2", "-H", "localhost:2", "--gloo"),
        *("bash", "-c", f"exec {words} {chosen}"),
        timeout=60,
    )
    assert ended.returncode == 1
    ours = (ended.stdout + ended.stderr).split("Traceback")[0]  # then horovodrun's own
    assert "--lr 0.2 (rank 0: 0.1)." in only_line(ours)
    assert ours.count("exit with status code 2") == 2


@pytest.mark.mpi
@pytest.mark.full
def test_mpirun(pictures, tmp_path):
    first, second = nodes_flags(pictures, tmp_path)
    command = (sys.executable, ROOT / "horovod_distributed.py")
    ended = run(
        *("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"),
        *("-np", "1", *command, *first, ":", "-np", "1", *command, *second),
        timeout=60,
    )
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "--lr 0.2 (rank 0: 0.1)." in only_line(ended.stdout + ended.stderr)
