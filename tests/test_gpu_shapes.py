"""The lines that only run on GPUs, with stand-in objects in place of the GPUs.

torch.cuda, the process group, DDP, nn.DataParallel, Horovod and Apex are replaced by
objects that record how they are called, and tensors that are sent to a GPU stay on the
CPU. The scripts' own lines run. So these tests prove which calls are made, in which order
and with which arguments; they prove nothing about CUDA, NCCL, Horovod or Apex themselves.
tests/gpu is for machines that have GPUs.
"""

import contextlib
import importlib
import json
import os
import threading
from functools import partial
from types import MethodType, SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, TensorDataset

import common.data
from common import seeding
from common.checkpoint import read_checkpoint
from common.data import MEAN, STD, build_loader
from common.device import check_devices, select_device
from common.errors import UserError
from launch.check import processes_per_machine

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
STRATEGIES = "dataparallel distributed multiprocessing_distributed".split()
STRATEGIES += ["horovod_distributed", "apex_distributed"]

# --- the stand-ins ---


class StandInStream:
    """Notes what it waits for. Arrivals of batches are numbered."""

    def __init__(self, gpus, name: str):
        self.gpus, self.name = gpus, name

    def record_event(self) -> int:
        number = len(self.gpus.named("arrival"))
        self.gpus.note("arrival", number, self.name)
        return number

    def wait_event(self, number: int) -> None:
        self.gpus.note("wait", number, self.name)


class StandInMoment:
    """A timed event, 1 ms after the one before."""

    def record(self, stream) -> None:
        stream.gpus.note("moment", stream.name)
        self.at = len(stream.gpus.named("moment"))

    def elapsed_time(self, other) -> float:
        return other.at - self.at


class StandInGpus(TorchFunctionMode):
    """Keeps on the CPU what is sent to a GPU, and the list of what was called."""

    def __init__(self, count: int):
        super().__init__()
        self.calls = []
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
        if getattr(func, "__name__", "") == "to":
            if "non_blocking" in kwargs and CUDA in args[1:]:
                call = ("copy", number_of(args[0]), self.current.name)
                self.note(*call, kwargs["non_blocking"])
            if torch.float32 in args[1:] and args[0].dtype == torch.uint8:
                self.note("normalize", number_of(args[0]), self.current.name)
        on_cpu = {k: CPU if k == "device" else v for k, v in kwargs.items()}
        return func(*(CPU if type(a) is torch.device else a for a in args), **on_cpu)


def number_of(batch: torch.Tensor) -> int:
    """The number that images, or labels, of numbered() are full of."""
    with torch._C.DisableTorchFunction():
        return int(batch.flatten()[0])


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
                "is_bf16_supported": lambda including_emulation=True: True,
                "device_count": lambda: count,
                "set_device": lambda device: found.note("set_device", device),
                "get_device_name": lambda device: f"stand-in {device}",
                "max_memory_allocated": lambda device: (7 + device.index) * 2**20,
                "default_generators": found.generators,
                "current_stream": lambda device: found.current,
                "stream": found.stream,
                "Stream": lambda device: StandInStream(found, "copies"),
                "Event": lambda enable_timing: StandInMoment(),
            }.items():
                monkeypatch.setattr(torch.cuda, name, value)
            monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
            monkeypatch.setattr(
                torch.Tensor,
                "record_stream",
                lambda tensor, on: found.note("keep", number_of(tensor), on.name),
            )
            return stack.enter_context(found)

        yield make


# --- the device ---


def test_the_device_is_that_of_the_local_rank(gpus, monkeypatch):
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
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # driver too old
    assert processes_per_machine("auto") == 2
    with pytest.raises(UserError, match="--backend nccl: "):
        check_devices("auto", 2, "nccl")


def test_each_gpu_of_a_process_drops_other_units(gpus, monkeypatch):
    seeds = [generator.manual_seed for generator in gpus(3).generators]
    for first in (seeding.seed_from(1, 2, 3, 4), 2**32 - 2):
        seeding.seed_step(1, 2, 3, 4)
        assert torch.initial_seed() == first
        called = [seed.call_args.args[0] for seed in seeds]
        assert called == [first, first + 1, (first + 2) % 2**32]
        monkeypatch.setattr(seeding, "seed_from", lambda *key: 2**32 - 2)


# --- batches ---


def numbered(length: int) -> TensorDataset:
    """Image N is full of N, and so is its label."""
    labels = torch.arange(length)
    images = labels.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 2, 2)
    return TensorDataset(images, labels)


@pytest.fixture
def loader(monkeypatch):
    """A function that makes a loader of batches of one image; `pinned` tells whether."""

    def make(length: int, device: torch.device):
        def stand_in(*given, pin_memory: bool, **options):
            make.pinned = pin_memory
            return DataLoader(*given, **options)

        monkeypatch.setattr(common.data, "DataLoader", stand_in)
        args = SimpleNamespace(seed=0, max_steps=None, no_channels_last=False)
        args.pretrained, args.global_batch_size, args.evaluate = False, 1, True
        return build_loader(args, numbered(length), range(length), 1, 0, device, True)

    return make


def test_the_next_batch_is_copied_before_a_batch_is_handed_out(gpus, loader):
    found = gpus()
    list(loader(1, CPU))
    assert loader.pinned is False and not found.named("copy", "wait", "keep")
    batches = loader(3, CUDA)
    found.calls.clear()
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
        return [*wait, ("normalize", number, "compute"), ("step", number), idle]

    # A batch waits for its own arrival, not for all that the copies' stream has to do;
    # between two moments the device is idle, so what it waits for is the data
    idle = ("moment", "compute")
    expected = [idle, *sent(0), *sent(1), *used(0), *sent(2), *used(1), *used(2)]
    assert found.calls == expected and loader.pinned is True
    assert batches.wait_seconds() == pytest.approx(0.003)  # each wait 1 ms here
    assert batches.wait_seconds() == 0
    assert len([*batches, *batches]) == 6  # as in validation, where nobody asks
    assert len(batches.waits) == 3


@pytest.mark.parametrize("device", (CUDA, CPU))
def test_short_and_resumed_epochs_have_their_batches(gpus, loader, device):
    gpus()
    for length, first in ((0, 0), (1, 0), (2, 0), (5, 3), (5, 4), (5, 5)):
        batches = loader(length, device)
        assert len(list(batches)) == len(batches) == length
        batches.first_step = first
        assert [int(label) for _, label in batches] == list(range(first, length))


# --- the scripts ---


class Net(nn.Sequential):
    def __init__(self, gpus: StandInGpus, classes: int):
        torch.manual_seed(0)
        super().__init__(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, classes)
        )
        self.gpus = gpus
        gpus.net = self

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
        self.enable_allreduce = partial(gpus.note, "all-reduces")
        self.disable_allreduce = partial(gpus.note, "no all-reduce")

    def forward(self, images):
        self.passes.append(self.training)
        return self.module(images)


def stand_in_horovod(gpus: StandInGpus, *place: int) -> Mock:
    def wrap(optimizer, names, compression, backward_passes_per_step):
        assert [weight for _, weight in names] == optimizer.param_groups[0]["params"]
        gpus.note("wrap", compression.compressor)
        step = optimizer.step

        @contextlib.contextmanager
        def skip_synchronize():
            gpus.note("skip")
            yield
            gpus.note("skip no more")

        def noted_step(_, *given):
            gpus.note("optimizer.step")
            return step(*given)

        optimizer.step = MethodType(noted_step, optimizer)
        optimizer.synchronize = partial(gpus.note, "synchronize")
        optimizer.skip_synchronize = skip_synchronize
        return optimizer

    hvd = Mock(DistributedOptimizer=wrap, allreduce=lambda sums, **_: all_alike(sums))
    hvd.Compression = SimpleNamespace(none="none")
    hvd.SyncBatchNorm = type("HorovodSyncBatchNorm", (nn.BatchNorm2d,), {})
    hvd.broadcast_parameters = lambda weights, root_rank: gpus.note(
        "broadcast", list(weights), root_rank
    )
    for name in ("init", "barrier", "shutdown"):
        setattr(hvd, name, partial(gpus.note, name))
    for name, number in zip(PLACE, place, strict=True):
        getattr(hvd, name).return_value = number
    return hvd


PLACE = ("rank", "size", "local_rank", "local_size")


def all_alike(sums):
    """The sum over all processes, where each has what this one has in a row of its own."""
    return sums.copy_(sums.sum(0).expand_as(sums)) if sums.dim() == 2 else sums


class StandInAmp:
    """Scales the loss; with O2 the optimizer has copies of the weights, the masters.

    It gets them in its first zero_grad(), and here they alone take its steps.
    """

    SCALE = 128.0

    def __init__(self, gpus: StandInGpus):
        self.gpus, self.masters, self.loaded = gpus, [], None

    def initialize(self, model, optimizer, opt_level):
        self.weights = list(model.parameters())
        plain = all(weight.is_contiguous() for weight in self.weights)
        self.gpus.note("amp.initialize", opt_level, plain)
        step = optimizer.step

        def zero_grad():
            if opt_level == "O2" and not self.masters:
                self.masters = [weight.detach().clone() for weight in self.weights]
                optimizer.param_groups[0]["params"] = self.masters
            model.zero_grad()

        def noted_step(_):
            self.gpus.note("optimizer.step")
            step()

        optimizer.zero_grad = zero_grad
        optimizer.step = MethodType(noted_step, optimizer)
        return model, optimizer

    @staticmethod
    def master_params(optimizer):
        return iter(optimizer.param_groups[0]["params"])

    @contextlib.contextmanager
    def scale_loss(self, loss, optimizer, delay_unscale):
        self.gpus.note("scale_loss")
        scaled = loss * self.SCALE
        scaled.register_hook(lambda _: self.gpus.note("backward of the scaled loss"))
        yield scaled
        if delay_unscale:
            return
        self.gpus.note("unscale")
        for weight, own in zip(self.weights, self.masters or self.weights, strict=True):
            own.grad = weight.grad / self.SCALE

    def state_dict(self):
        return {"loss_scaler0": {"loss_scale": 4096.0, "unskipped": 3}}

    def load_state_dict(self, content):
        self.loaded = content


@pytest.fixture
def main(gpus, monkeypatch, tmp_path):
    """A function that runs a script's main() on stand-ins, as one process of a job.

    Returns the stand-ins, with `wrappers` and `amp` of this run.
    """
    scaler = torch.amp.GradScaler

    def make(name, *flags, count=1, machines=1, rank=0, world_size=1):
        """`rank` of `world_size` processes on `machines`, each with `count` GPUs."""
        found = gpus(count)
        local_world_size = world_size // machines
        node, local_rank = divmod(rank, local_world_size)
        place = (rank, world_size, local_rank, local_world_size)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        ranks = dict(zip(names, map(str, place), strict=True))
        monkeypatch.setattr(os, "environ", {**os.environ, **ranks})

        def init_process_group(backend, url, timeout, *place):
            found.note("init_process_group", backend, *place)
            found.note("meets", url, timeout.total_seconds())

        def noted_scaler(device, enabled):
            found.note("GradScaler", device, enabled)
            return scaler("cpu", enabled=enabled)

        found.wrappers, found.amp = [], StandInAmp(found)
        wrap = partial(Wrapper, found)
        watchdog = SimpleNamespace(stop_requested=False, feed=lambda: None)
        dist, script = torch.distributed, importlib.import_module(name)
        for module, stand_ins in {
            torch.amp: {"GradScaler": noted_scaler},
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
                "hvd": stand_in_horovod(found, *place),
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
        script.main(args)
        return found

    return make


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_process_uses_its_gpu_from_the_first_call_to_the_last(
    main, name, tmp_path
):
    """Local rank 1 of the second machine; nn.DataParallel's process has both GPUs."""
    alone = name == "dataparallel"
    place = {} if alone else {"machines": 2, "rank": 3, "world_size": 4}
    found = main(name, count=2, **place)
    device = torch.device("cuda", 0 if alone else 1)
    use, group = ("set_device", device), ("init_process_group", "nccl", 4, 3)
    model = [("model.to", device), ("GradScaler", "cuda", False)]
    wrap = ("wrap", {"device_ids": [1], "gradient_as_bucket_view": True})
    both = ("wrap", {"device_ids": [0, 1], "output_device": 0})
    # amp prepares the model, in plain memory format, before Apex's DDP wraps it
    amp = [("amp.initialize", "O1", True), ("wrap", {})]
    end = [("barrier", [1]), ("leave",)]
    hvd = ("init",), ("wrap", "none"), ("barrier",), ("shutdown",)
    expected = {
        "dataparallel": [use, *model, both],
        "distributed": [use, group, *model, wrap, *end],
        "multiprocessing_distributed": [use, group, *model, wrap, *end],
        "horovod_distributed": [hvd[0], use, *model, *hvd[1:]],
        "apex_distributed": [use, group, *model, *amp, *end],
    }
    names = {name for calls in expected.values() for name, *_ in calls}
    assert found.named(*names) == expected[name]
    # A bare model validates where the wrapped one communicates
    for wrapped in found.wrappers:
        assert wrapped.passes == [True, True] + [False] * alone
    if name in ("distributed", "multiprocessing_distributed"):
        assert found.wrappers[0].broadcast_buffers is False
    if alone:
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["device_name"] == "stand-in cuda:0"
        record = json.loads((tmp_path / "epochs.jsonl").read_text())
        assert record["peak_memory_mib"] == 7


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
    assert train[3:] == (2, 2, CUDA, True)
    assert val[2:] == (range(3, 12, 6), 2, 2, CUDA, False)
    assert calls["agree"][0][1:3] == (3, 6)
    assert calls["seed_step"] == [(0, 0, 1, 3), (0, 0, 2, 3)]
    if name != "horovod_distributed":
        url = "tcp://127.0.0.1:1" if name.startswith("mult") else None
        assert found.named("meets") == [("meets", url, 90)]
        return
    assert os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "90"
    weights = read_checkpoint(of_rank_0 / "checkpoint.pt")["state_dict"]
    buffers = [key for key in weights if "running" in key or "tracked" in key]
    steps = 2 * [("synchronize",), ("skip",), ("optimizer.step",), ("skip no more",)]
    before, of_buffers = ("broadcast", list(weights), 0), ("broadcast", buffers, 0)
    called = found.named("broadcast", *(step[0] for step in steps))
    assert called == [before, *steps, of_buffers]  # the last for validation


def test_a_cpu_gloo_and_scaled_gradients(main):
    for name in ("distributed", "multiprocessing_distributed", "apex_distributed"):
        job = {"count": 2, "world_size": 4, "rank": 3}
        found = main(name, "--backend", "gloo", "--precision", "fp16", **job)
        assert found.named("init_process_group", "GradScaler", "barrier") == [
            ("init_process_group", "gloo", 4, 3),  # lets processes share a GPU
            ("GradScaler", "cuda", name != "apex_distributed"),
            ("barrier", [1]),
        ]
    for name in ("distributed", "multiprocessing_distributed"):
        found = main(name, "--device", "cpu", count=2, world_size=2, rank=1)
        assert found.named("set_device", "init_process_group", "wrap", "barrier") == [
            ("init_process_group", "gloo", 2, 1),
            ("wrap", {"device_ids": None, "gradient_as_bucket_view": True}),
            ("barrier", None),
        ]


# --- what one strategy has alone ---


def test_dataparallel_has_all_gpus(main, tmp_path):
    (wrapped,) = main("dataparallel", count=1).wrappers
    assert isinstance(wrapped.module, Net)
    assert wrapped.passes == [True, True, False]  # validates on all of them, too
    assert wrapped.parallel_apply.__qualname__.startswith("lasting_threads.")
    flags = ("dataparallel", "--output", tmp_path / "2")
    assert not main(*flags, "--device", "cpu", count=2).named("wrap")
    with pytest.raises(UserError, match="--compile: nn.DataParallel's replicas cannot"):
        main(*flags, "--compile", "--resume", "auto", count=2)


def test_dataparallel_keeps_its_threads(gpus, monkeypatch):
    """nn.DataParallel's own are new in each step; these compute as their caller would."""
    gpus(2)
    streams = {}

    def use(stream):
        streams[threading.current_thread()] = stream
        return contextlib.nullcontext()

    def how():
        on = torch.is_autocast_enabled("cuda")
        return torch.is_grad_enabled(), on, torch.get_autocast_dtype("cuda")

    def replica(images, size):
        thread = threading.current_thread()
        return [images, size, streams[thread], how(), thread]

    monkeypatch.setattr(torch.cuda, "current_stream", "stream of {}".format)
    monkeypatch.setattr(torch.cuda, "stream", use)
    apply = importlib.import_module("dataparallel").lasting_threads([0, 1])
    first, second = apply([replica, replica], ["x", "y"], [{"size": 1}, {"size": 2}])
    assert first[:4] == ["x", 1, "stream of 0", how()] and len(streams) == 2
    assert second[:4] == ["y", 2, "stream of 1", how()]
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        (third,) = apply([replica], ["z"], [{"size": 3}])
    assert third[3:] == [(False, True, torch.bfloat16), first[4]]
    with pytest.raises(TypeError):  # as in the thread
        apply([replica], ["z"], [{}])


@pytest.mark.parametrize("name", STRATEGIES)
def test_batch_norm_is_synchronized_and_keeps_the_optimizers_weights(
    main, name, monkeypatch
):
    if name == "dataparallel":
        with pytest.raises(UserError, match="nn.DataParallel has no synchronized"):
            main(name, "--sync-bn")
        return
    monkeypatch.setattr(nn.SyncBatchNorm, "forward", nn.BatchNorm2d.forward)
    layer = main(name, "--sync-bn").net[1]
    kinds = {"horovod_distributed": "HorovodSyncBatchNorm"}
    assert type(layer).__name__ == kinds.get(name, "SyncBatchNorm")
    assert not torch.equal(layer.weight, torch.ones(4))  # the optimizer's steps


def test_horovod_needs_nccl_on_a_gpu(main):
    main("horovod_distributed")
    script = importlib.import_module("horovod_distributed")
    script.hvd.nccl_built = lambda: False
    script.arguments(["--data", "x", "--device", "cpu"])
    with pytest.raises(UserError, match="this Horovod lacks NCCL"):
        script.arguments(["--data", "x"])


def test_apex_unscales_and_averages_micro_batches_once(main):
    found = main("apex_distributed", "--accumulate", 2)
    parts = ("no all-reduce", "scale_loss", "all-reduces", "scale_loss", "unscale")
    names = (*parts, "optimizer.step")
    assert [call[0] for call in found.named(*names)] == [*names, *names]


def test_apex_scales_the_loss_once_and_saves_masters_and_scale(main, tmp_path):
    main("apex_distributed", "--output", tmp_path / "O1")
    content = read_checkpoint(tmp_path / "O1" / "checkpoint.pt")
    assert "masters" not in content and "amp" in content
    found = main("apex_distributed", "--opt-level", "O2")
    assert found.named("amp.initialize") == [("amp.initialize", "O2", True)]
    names = ("scale_loss", "backward of the scaled loss", "unscale", "optimizer.step")
    assert [call[0] for call in found.named(*names)] == [*names, *names]  # two steps
    content = read_checkpoint(tmp_path / "checkpoint.pt")
    assert content["amp"] == found.amp.state_dict()
    masters = list(content["masters"].values())
    torch.testing.assert_close(masters, found.amp.masters, rtol=0, atol=0)
    assert not torch.equal(masters[0], content["state_dict"]["0.weight"])
    resumed = main("apex_distributed", "--opt-level", "O2", "--resume", "auto")
    assert resumed.amp.loaded == content["amp"]
    assert not resumed.named("optimizer.step")  # it was complete
    torch.testing.assert_close(resumed.amp.masters, masters, rtol=0, atol=0)
