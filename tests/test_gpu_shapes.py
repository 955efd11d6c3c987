"""The lines that only run on GPUs, with stand-in objects in place of the GPUs.

No test here uses a GPU. torch.cuda, the process group, DDP, nn.DataParallel, Horovod and
Apex are replaced by objects that record how they are called, and tensors that are sent to a
GPU stay on the CPU. The scripts' own lines run. So these tests prove which calls are made,
in which order and with which arguments; they prove nothing about CUDA, NCCL, Horovod or
Apex themselves. tests/gpu is for machines that have GPUs.
"""

import contextlib
import importlib
import json
import os
from functools import partial
from types import MethodType, SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset

import common.data
from common import seeding
from common.checkpoint import read_checkpoint
from common.data import MEAN, STD, build_loader
from common.device import select_device
from common.errors import ImageError, UserError
from launch.check import processes_per_machine
from launch.exits import Stopped

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
STRATEGIES = "dataparallel distributed multiprocessing_distributed".split()
STRATEGIES += ["horovod_distributed", "apex_distributed"]
WITH_GROUP = ("distributed", "multiprocessing_distributed", "apex_distributed")

# --- the stand-ins ---


class StandInStream:
    def __init__(self, gpus, name: str):
        self.gpus, self.name = gpus, name

    def record_event(self):
        event = StandInEvent(self.gpus)
        self.gpus.note("arrival", event.number, self.name)
        return event

    def wait_event(self, event) -> None:
        self.gpus.note("wait", event.number, self.name)


class StandInEvent:
    """Arrivals of batches are numbered; of timed events each is 1 ms after another."""

    def __init__(self, gpus, enable_timing: bool = False):
        self.gpus = gpus
        if not enable_timing:
            self.number, gpus.arrivals = gpus.arrivals, gpus.arrivals + 1

    def record(self, stream) -> None:
        self.gpus.note("moment", stream.name)
        self.at = len(self.gpus.named("moment"))

    def elapsed_time(self, other) -> float:
        return other.at - self.at


class StandInGpus(TorchFunctionMode):
    """Keeps on the CPU what is sent to a GPU, and the list of what was called."""

    def __init__(self, count: int):
        super().__init__()
        self.calls, self.arrivals = [], 0
        self.current = StandInStream(self, "compute")
        self.generators = tuple(Mock() for _ in range(count))

    def note(self, *call) -> None:
        self.calls.append(call)

    def named(self, *names: str) -> list[tuple]:
        return [call for call in self.calls if call[0] in names]

    @contextlib.contextmanager
    def stream(self, stream: StandInStream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        uint8 = len(args) > 0 and getattr(args[0], "dtype", None) == torch.uint8
        if name == "to" and CUDA in args[1:] and "non_blocking" in kwargs:
            call = ("copy", number_of(args[0]), self.current.name)
            self.note(*call, kwargs["non_blocking"])
        if name == "to" and torch.float32 in args[1:] and uint8:
            self.note("normalise", number_of(args[0]), self.current.name)
        on_cpu = {k: CPU if k == "device" else v for k, v in kwargs.items()}
        return func(*(CPU if type(a) is torch.device else a for a in args), **on_cpu)


def number_of(tensor: torch.Tensor) -> int:
    """Of a batch of Numbered, by its images or its labels."""
    with torch._C.DisableTorchFunction():
        return int(tensor.flatten()[0])


@pytest.fixture
def gpus(monkeypatch):
    """A function that puts the stand-ins for a number of GPUs in place."""
    with contextlib.ExitStack() as stack:

        def make(count: int = 1) -> StandInGpus:
            found = StandInGpus(count)
            for name, value in {
                "is_available": lambda: True,
                "is_initialized": lambda: True,
                "is_current_stream_capturing": lambda: False,
                "is_bf16_supported": lambda including_emulation: True,
                "device_count": lambda: count,
                "set_device": lambda device: found.note("set_device", device),
                "get_device_name": lambda device: f"stand-in {device}",
                "max_memory_allocated": lambda device: (7 + device.index) * 2**20,
                "default_generators": found.generators,
                "current_stream": lambda device: found.current,
                "stream": found.stream,
                "Stream": lambda device: StandInStream(found, "copies"),
                "Event": lambda enable_timing=False: StandInEvent(found, enable_timing),
            }.items():
                monkeypatch.setattr(torch.cuda, name, value)
            monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
            monkeypatch.setattr(
                torch.Tensor,
                "record_stream",
                lambda tensor, on: found.note("keep", number_of(tensor), on.name),
            )
            stack.enter_context(found)
            return found

        yield make


# --- the device ---


def test_the_device_is_that_of_the_local_rank(gpus):
    assert gpus(3) and select_device("cpu", 1) == CPU
    assert not torch.backends.cudnn.benchmark
    assert processes_per_machine("auto") == 3 and processes_per_machine("cpu") == 2
    with pytest.raises(UserError, match="4 processes for 3 GPUs"):
        select_device("auto", 3)
    for count, local_rank, backend, index in (
        *((4, 3, None, 3), (4, 0, "nccl", 0)),
        *((2, 3, "gloo", 1), (2, 4, "gloo", 0)),  # shared by processes
    ):
        found = gpus(count)
        device = select_device("auto", local_rank, backend)
        assert device == torch.device("cuda", index)
        assert found.calls == [("set_device", device)]
        assert torch.backends.cudnn.benchmark


def test_each_gpu_of_a_process_drops_other_units(gpus, monkeypatch):
    seeds = [generator.manual_seed for generator in gpus(3).generators]
    for first in (seeding.seed_from(1, 2, 3, 4), 2**32 - 2):
        seeding.seed_step(1, 2, 3, 4)
        assert torch.initial_seed() == first
        called = [seed.call_args.args[0] for seed in seeds]
        assert called == [first, first + 1, (first + 2) % 2**32]
        monkeypatch.setattr(seeding, "seed_from", lambda *key: 2**32 - 2)


# --- batches ---


class Numbered(Dataset):
    """Image N is full of N, and so is its label; the one at `broken` cannot be read."""

    def __init__(self, length: int, broken: int | None = None):
        self.length, self.broken = length, broken

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int):
        if index == self.broken:
            raise ImageError(f"image {index}")
        return torch.full((3, 2, 2), index, dtype=torch.uint8), index


@pytest.fixture
def loader(monkeypatch):
    """A function that makes a loader of batches of one image; `pinned` tells whether."""

    def make(dataset: Dataset, device: torch.device):
        def stand_in(*given, pin_memory: bool, **options):
            make.pinned = pin_memory
            return DataLoader(*given, **options)

        monkeypatch.setattr(common.data, "DataLoader", stand_in)
        args = SimpleNamespace(seed=0, max_steps=None, no_channels_last=False)
        args.pretrained = args.synthetic = False
        args.global_batch_size, args.evaluate = 1, True
        return build_loader(args, dataset, range(len(dataset)), 1, 0, device, True)

    return make


def test_the_next_batch_is_copied_before_a_batch_is_handed_out(gpus, loader):
    found = gpus()
    list(loader(Numbered(1), CPU))
    assert loader.pinned is False and not found.named("copy", "wait", "keep")
    found.calls.clear()
    batches = loader(Numbered(3), CUDA)
    for images, labels in batches:
        found.note("step", int(labels))
        value = (labels - torch.tensor(MEAN)) / torch.tensor(STD)
        assert torch.allclose(images, value.view(1, 3, 1, 1))
        assert images.is_contiguous(memory_format=torch.channels_last)

    def sent(number: int) -> list[tuple]:
        copy = ("copy", number, "copies", True)  # of the images, of the labels
        return [copy, copy, ("arrival", number, "copies")]

    def used(number: int) -> list[tuple]:
        keep = ("keep", number, "compute")
        wait = [("wait", number, "compute"), keep, keep, idle]
        return [*wait, ("normalise", number, "compute"), ("step", number), idle]

    # A batch waits for its own arrival, not for all that the copies' stream has to do;
    # between two moments the device is idle, so what it waits for is the data
    idle = ("moment", "compute")
    expected = [idle, *sent(0), *sent(1), *used(0), *sent(2), *used(1), *used(2)]
    assert found.calls == expected and loader.pinned is True
    assert batches.wait_seconds() == pytest.approx(0.003)  # each wait 1 ms here
    assert batches.wait_seconds() == 0
    assert len([*batches, *batches]) == 6  # as in validation, where nobody asks
    assert len(batches.waits) == 3


def test_short_and_resumed_epochs_have_the_batches_that_a_cpu_has(gpus, loader):
    gpus()
    for batches, first in ((0, 0), (1, 0), (2, 0), (5, 0), (5, 3), (5, 4), (5, 5)):
        epochs = []
        for device in (CUDA, CPU):
            one = loader(Numbered(batches), device)
            assert len(list(one)) == len(one) == batches
            one.first_step = first
            epochs.append(list(one))
        assert [int(n) for _, n in epochs[0]] == list(range(first, batches))
        for (images, _), (expected, _) in zip(*epochs, strict=True):
            assert torch.equal(images, expected)


def test_an_image_that_cannot_be_read_ends_the_epoch(gpus, loader):
    """On a GPU one step early, when the batch would have been copied."""
    gpus()
    for device, whole in ((CUDA, [0]), (CPU, [0, 1])):
        seen = []
        with pytest.raises(ImageError, match="image 2"):
            for _, labels in loader(Numbered(4, broken=2), device):
                seen.append(int(labels))
        assert seen == whole


# --- the scripts ---


class Net(nn.Sequential):
    def __init__(self, gpus: StandInGpus, classes: int):
        torch.manual_seed(0)
        super().__init__(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, classes)
        )
        self.gpus = gpus

    def compile(self):
        self.gpus.note("compile")

    def to(self, *given, **named):
        if given:
            self.gpus.note("model.to", *given)
        return super().to(*given, **named)


class Wrapper(nn.Module):
    """In place of DDP and DataParallel: records how it is called, and passes calls on."""

    def __init__(self, gpus, module, *given, **options):
        super().__init__()
        gpus.note("wrap", *given, options)
        gpus.wrappers.append(self)
        self.module, self.passes = module, []

    def forward(self, images):
        self.passes.append(self.training)
        return self.module(images)


class StandInHorovod:
    Sum, Compression = "sum", SimpleNamespace(none=None, fp16=None)

    def __init__(self, gpus: StandInGpus, *place: int):
        self.gpus = gpus
        self.rank, self.size, self.local_rank, self.local_size = (
            lambda number=number: number for number in place
        )
        self.nccl_built = lambda: True
        self.init, self.barrier, self.shutdown = (
            partial(gpus.note, call) for call in ("hvd.init", "barrier", "leave")
        )

    def broadcast_parameters(self, weights, root_rank):
        self.gpus.note("broadcast", list(weights), root_rank)

    def DistributedOptimizer(self, optimizer, names, compression):
        """Whose step() waits once more for averages, unless it is told to skip that."""
        assert [weight for _, weight in names] == optimizer.param_groups[0]["params"]
        self.gpus.note("wrap")
        waits, step = [True], optimizer.step

        @contextlib.contextmanager
        def skip_synchronize():
            waits[0] = False
            yield
            waits[0] = True

        def step_of_averages(_, *given):
            self.gpus.note("optimizer.step", waits[0])
            return step(*given)

        optimizer.step = MethodType(step_of_averages, optimizer)
        optimizer.synchronize = lambda: self.gpus.note("synchronize")
        optimizer.skip_synchronize = skip_synchronize
        return optimizer

    def allreduce(self, sums, op, name):
        return all_alike(sums)


class StandInAmp:
    """Does with O2 what Apex does, with bfloat16 for fp16, which not every CPU computes.

    The model is cast in initialize(); the optimizer gets fp32 copies of its weights, the
    masters, in its first zero_grad(). At the end of scale_loss() gradients go to the masters.
    """

    SCALE = 128.0

    def __init__(self, gpus: StandInGpus):
        self.gpus, self.masters, self.loaded = gpus, [], None

    def initialize(self, model, optimizer, opt_level):
        plain = all(weight.is_contiguous() for weight in model.parameters())
        self.gpus.note("amp.initialize", opt_level, plain)
        self.model, self.opt_level = model, opt_level
        zero_grad, step = optimizer.zero_grad, optimizer.step

        def first_zero_grad():
            if opt_level == "O2" and not self.masters:
                self.masters = [w.detach().float() for w in model.parameters()]
                optimizer.param_groups[0]["params"] = self.masters
            model.zero_grad()
            zero_grad()

        def step_of_masters(_):
            self.gpus.note("optimizer.step")
            step()
            for weight, master in zip(model.parameters(), self.masters):  # noqa: B905
                weight.data.copy_(master)

        optimizer.zero_grad = first_zero_grad
        optimizer.step = MethodType(step_of_masters, optimizer)
        if opt_level == "O2":
            nn.Module.to(model, torch.bfloat16)
            forward = model.forward
            model.forward = lambda images: forward(images.bfloat16()).float()
        return model, optimizer

    @staticmethod
    def master_params(optimizer):
        return iter(optimizer.param_groups[0]["params"])

    @contextlib.contextmanager
    def scale_loss(self, loss, optimizer):
        self.gpus.note("scale_loss", loss.item())
        scaled = loss * self.SCALE
        scaled.register_hook(lambda _: self.gpus.note("backward of the scaled loss"))
        yield scaled
        self.gpus.note("unscale")
        weights = list(self.model.parameters())
        for weight, target in zip(weights, self.masters or weights, strict=True):
            target.grad = weight.grad.to(target.dtype) / self.SCALE

    def state_dict(self):
        return {"loss_scaler0": {"loss_scale": 4096.0, "unskipped": 3}}

    def load_state_dict(self, content):
        self.loaded = content


def all_alike(sums):
    """The sum over all processes, where each has what this one has in a row of its own."""
    if sums.dim() == 2:
        sums.copy_(sums.sum(0).expand_as(sums))
    return sums


@pytest.fixture
def main(gpus, monkeypatch, tmp_path):
    """A function that runs a script's main() on stand-ins, as one process of a job.

    Returns the stand-ins, with `wrappers` and `amp` of this run.
    """

    def make(
        name, *flags, count=1, machines=1, rank=0, world_size=1, stop_requested=False
    ):
        """`rank` of `world_size` processes on `machines`, each with `count` GPUs."""
        found = gpus(count)
        local_world_size = world_size // machines
        node, local_rank = divmod(rank, local_world_size)
        numbers = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size}
        numbers |= {"LOCAL_WORLD_SIZE": local_world_size, "MASTER_PORT": 1}
        numbers |= {"MASTER_ADDR": "127.0.0.1", "HOROVOD_GLOO_TIMEOUT_SECONDS": 1}
        for variable, number in numbers.items():
            monkeypatch.setenv(variable, str(number))
        monkeypatch.delenv("HOROVOD_GLOO_TIMEOUT_SECONDS")  # also afterwards

        def init_process_group(backend, url, timeout, *place):
            found.note("init_process_group", backend, *place)
            found.note("meets", url, timeout.total_seconds())

        def scaler(device, enabled):
            found.note("GradScaler", device, enabled)
            return SCALER("cpu", enabled=enabled)

        found.wrappers, found.amp = [], StandInAmp(found)
        wrap = partial(Wrapper, found)
        place = (rank, world_size, local_rank, local_world_size)
        horovod = StandInHorovod(found, *place)
        watchdog = SimpleNamespace(stop_requested=stop_requested, feed=lambda: None)
        dist, script = torch.distributed, importlib.import_module(name)
        for module, stand_ins in {
            torch.amp: {"GradScaler": scaler},
            nn: {"DataParallel": wrap},
            dist: {
                "init_process_group": init_process_group,
                "all_reduce": all_alike,
                "broadcast": lambda buffer, src: None,
                "barrier": lambda device_ids: found.note("barrier", device_ids),
                "destroy_process_group": lambda: found.note("leave"),
            },
            script: {
                "DDP": wrap,
                "ApexDDP": wrap,
                "amp": found.amp,
                "hvd": horovod,
                "use_fork_server": lambda: None,
                "build_model": lambda args, images: Net(found, len(images.classes)),
                "Watchdog": lambda timeout, catch: watchdog,  # no signal handlers
            },
        }.items():
            for attribute, stand_in in stand_ins.items():
                monkeypatch.setattr(module, attribute, stand_in, raising=False)
        # Two steps, then one validation image for each process
        words = ["--synthetic", 25 * world_size, "-b", 2 * world_size, "--max-steps", 2]
        words += ["--epochs", 1, "--output", tmp_path, "--warmup-epochs", 0]
        words += ["--image-size", 8, "--print-interval", 1, "--workers", 0, *flags]
        if name == "multiprocessing_distributed":
            words += ["--nprocs", local_world_size, "--nnodes", machines]
            words += ["--node-rank", node, "--dist-url", "tcp://127.0.0.1:1"]
        args = script.arguments([str(word) for word in words])
        args.local_rank = local_rank
        found.note("main")
        script.main(args)
        return found

    return make


SCALER = torch.amp.GradScaler


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_process_uses_its_gpu_from_the_first_call_to_the_last(
    main, name, tmp_path
):
    """Local rank 1 of the second machine; nn.DataParallel's process has both GPUs."""
    alone = name == "dataparallel"
    place = {} if alone else {"machines": 2, "rank": 3, "world_size": 4}
    found = main(name, count=2, **place)
    device = torch.device("cuda", 0 if alone else 1)
    names = ("main", "set_device", "init_process_group", "hvd.init", "model.to")
    names += ("GradScaler", "amp.initialize", "wrap", "barrier", "leave")
    begin = [("set_device", device), ("init_process_group", "nccl", 4, 3)]
    model = [("model.to", device), ("GradScaler", "cuda", False)]
    end = [("barrier", [1]), ("leave",)]
    both = {"device_ids": [0, 1], "output_device": 0}
    ddp = {"device_ids": [1], "gradient_as_bucket_view": True}
    horovod = [("hvd.init",), begin[0], *model, ("wrap",), ("barrier",), ("leave",)]
    # amp prepares the model, in plain memory format, before Apex's DDP wraps it
    amp = [("amp.initialize", "O1", True), ("wrap", {})]
    expected = {
        "dataparallel": [begin[0], *model, ("wrap", both)],
        "distributed": [*begin, *model, ("wrap", ddp), *end],
        "multiprocessing_distributed": [*begin, *model, ("wrap", ddp), *end],
        "horovod_distributed": horovod,
        "apex_distributed": [*begin, *model, *amp, *end],
    }
    assert found.named(*names) == [("main",), *expected[name]]
    # A bare model validates where the wrapped one communicates
    for wrapped in found.wrappers:
        assert wrapped.passes == [True, True] + [False] * alone
    if name in ("distributed", "multiprocessing_distributed"):
        assert found.wrappers[0].broadcast_buffers is False
    if alone:
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["device_name"] == "stand-in cuda:0"
        assert (
            json.loads((tmp_path / "epochs.jsonl").read_text())["peak_memory_mib"] == 7
        )


@pytest.mark.parametrize("name", STRATEGIES[1:])
def test_the_first_process_of_the_second_machine_knows_its_place(
    main, name, monkeypatch, capsys, tmp_path
):
    """Its local rank is 0, its rank 3: it neither prints nor writes."""
    script, calls = importlib.import_module(name), {}
    of_rank_0, output = tmp_path / "of rank 0", tmp_path / "of rank 3"
    flags = ("--synthetic", 300, "--checkpoint-steps", 1, "--timeout-seconds", 90)
    job = {"count": 3, "machines": 2, "world_size": 6}
    main(name, *flags, "--output", of_rank_0, **job)
    printed = capsys.readouterr().out
    assert "6 processes on stand-in cuda:0" in printed and "epoch 1/1: " in printed
    for called in ("DistributedSampler", "build_loader", "agree", "seed_step"):
        original = getattr(script, called)

        def recorded(*given, original=original, called=called, **named):
            calls.setdefault(called, []).append((*given, *named.values()))
            if called == "build_loader":
                given = (*given[:4], 0, *given[5:])  # no loader processes here
            return original(*given, **named)

        monkeypatch.setattr(script, called, recorded)
    flags += ("--output", output, "--workers", 6)
    found = main(name, *flags, rank=3, **job)
    evaluate = ("--evaluate", "--resume", of_rank_0 / "checkpoint.pt")
    main(name, *flags, *evaluate, rank=3, **job)
    assert not capsys.readouterr().out and not list(output.iterdir())

    assert calls["DistributedSampler"][0][1:3] == (6, 3)
    train, val = calls["build_loader"][:2]
    assert train[3:] == (2, 2, torch.device("cuda", 0), True)
    assert val[2:] == (range(3, 12, 6), *train[3:6], False)
    assert calls["agree"][0][1:3] == (3, 6)
    assert calls["seed_step"] == [(0, 0, 1, 3), (0, 0, 2, 3)]
    url = "tcp://127.0.0.1:1" if name.startswith("mult") else None
    if name == "horovod_distributed":
        assert os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "90"
        weights = read_checkpoint(of_rank_0 / "checkpoint.pt")["state_dict"]
        buffers = [key for key in weights if "running" in key or "tracked" in key]
        waits = [("synchronize",), ("optimizer.step", False)]
        assert found.named("synchronize", "optimizer.step") == [*waits, *waits]
        assert found.named("broadcast") == [
            ("broadcast", list(weights), 0),  # before the first step
            ("broadcast", buffers, 0),  # before validation
        ]
    else:
        assert found.named("meets") == [("meets", url, 90)]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_run_that_is_stopped_and_resumed_is_the_same_run(
    main, name, capsys, tmp_path
):
    flags = ("--max-steps", 3, "--epochs", 2, "--print-interval", 2)
    whole, output = tmp_path / "whole", tmp_path / "stopped"
    main(name, *flags, "--output", whole)
    flags = (*flags, "--output", output, "--resume", "auto")
    with pytest.raises(Stopped, match="step 2 of epoch 1"):
        main(name, *flags, stop_requested=True)
    capsys.readouterr()
    main(name, *flags)
    lines = capsys.readouterr().out.splitlines()
    resumed = "resumed at epoch 1, after step 2 of it (image 4 of its order)"
    assert any(line.startswith(resumed) for line in lines)
    said = [" from step 2 on" in line for line in lines if "train loss" in line]
    assert said == [True, False]
    one, other = (read_checkpoint(run / "checkpoint.pt") for run in (whole, output))
    for key, weight in one["state_dict"].items():
        assert torch.equal(weight, other["state_dict"][key]), key
    assert [record["first_step"] for record in other["records"]] == [2, 0]
    for record, right in zip(other["records"], one["records"], strict=True):
        for key in ("epoch", "steps", "learning_rate", "train_loss", "val_loss"):
            assert record[key] == right[key], key
        assert (record["steps"], record["images"]) == (3, 6)


@pytest.mark.parametrize("name", WITH_GROUP)
def test_a_cpu_and_gloo(main, name):
    found = main(name, "--backend", "gloo", count=2, world_size=4, rank=3)
    assert found.named("init_process_group", "barrier") == [
        ("init_process_group", "gloo", 4, 3),  # lets processes share a GPU
        ("barrier", [1]),
    ]
    if name != "apex_distributed":
        found = main(name, "--device", "cpu", count=2, world_size=2, rank=1)
        assert found.named("set_device", "init_process_group", "wrap", "barrier") == [
            ("init_process_group", "gloo", 2, 1),
            ("wrap", {"device_ids": None, "gradient_as_bucket_view": True}),
            ("barrier", None),
        ]


@pytest.mark.parametrize("name", STRATEGIES[:-1])
@pytest.mark.parametrize(
    "flags, scaler",
    [
        (("--precision", "fp16"), ("cuda", True)),
        (("--precision", "bf16"), ("cuda", False)),
        (("--precision", "fp16", "--device", "cpu"), ("cpu", True)),
    ],
)
def test_gradients_are_scaled_in_fp16_only(main, name, flags, scaler):
    assert main(name, *flags).named("GradScaler") == [("GradScaler", *scaler)]


# --- what one strategy has alone ---


def test_dataparallel_has_all_gpus_and_autocast_inside(main, tmp_path):
    (wrapped,) = main("dataparallel", "--compile", count=1).wrappers
    assert type(wrapped.module).__name__ == "AutocastModel"
    assert wrapped.module.dtype == torch.bfloat16  # the stand-in has it
    assert isinstance(wrapped.module.module, Net)
    assert wrapped.passes == [True, True, False]  # validates on all of them, too
    flags = ("dataparallel", "--output", tmp_path / "2")
    assert not main(*flags, "--device", "cpu", count=2).named("wrap")
    with pytest.raises(UserError, match="--compile: nn.DataParallel's replicas cannot"):
        main(*flags, "--compile", "--resume", "auto", count=2)


def test_a_horovod_without_nccl_is_refused_on_a_gpu(gpus, monkeypatch):
    import horovod_distributed

    hvd = StandInHorovod(gpus(), 0, 1, 0, 1)
    monkeypatch.setattr(horovod_distributed, "hvd", hvd)
    horovod_distributed.arguments(["--data", "x"])
    hvd.nccl_built = lambda: False
    horovod_distributed.arguments(["--data", "x", "--device", "cpu"])
    with pytest.raises(UserError, match="this Horovod lacks NCCL"):
        horovod_distributed.arguments(["--data", "x"])


@pytest.mark.parametrize(
    "flag, value, opt_level",
    [
        *(("--precision", "fp32", "O0"), ("--precision", "fp16", "O1")),
        *(("--opt-level", level, level) for level in ("O0", "O1", "O2", "O3")),
    ],
)
def test_apex_has_an_opt_level_and_scales_the_loss_once(main, flag, value, opt_level):
    found = main("apex_distributed", flag, value)
    assert found.named("amp.initialize") == [("amp.initialize", opt_level, True)]
    # amp scales the loss and casts; PyTorch's do neither
    assert found.named("GradScaler") == [("GradScaler", "cuda", False)]
    names = ("scale_loss", "backward of the scaled loss", "unscale", "optimizer.step")
    assert [call[0] for call in found.named(*names)] == [*names, *names]  # two steps


def test_apex_saves_and_restores_masters_and_scale(main, tmp_path):
    main("apex_distributed", "--opt-level", "O1", "--output", tmp_path / "O1")
    content = read_checkpoint(tmp_path / "O1" / "checkpoint.pt")
    assert "masters" not in content and "amp" in content
    found = main("apex_distributed", "--opt-level", "O2")
    content = read_checkpoint(tmp_path / "checkpoint.pt")
    assert content["amp"] == found.amp.state_dict()
    masters = content["masters"]["tensors"]
    for master, own in zip(masters, found.amp.masters, strict=True):
        assert master.dtype == torch.float32 and torch.equal(master, own)
    # A master knows more than the weight that is cast from it
    assert any(not torch.equal(m, m.bfloat16().float()) for m in masters)
    assert content["state_dict"]["0.weight"].dtype == torch.bfloat16
    resumed = main("apex_distributed", "--opt-level", "O2", "--resume", "auto")
    assert resumed.amp.loaded == content["amp"]
    assert not resumed.named("optimizer.step")  # it was complete
    for master, saved in zip(resumed.amp.masters, masters, strict=True):
        assert torch.equal(master, saved)
