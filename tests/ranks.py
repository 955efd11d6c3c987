"""Run the scripts' main() in processes that a fork server starts within a second.

Only horovodrun can start Horovod's processes, so it can run this file, too:
    horovodrun -np 2 python tests/ranks.py TASK [ARGUMENTS AS JSON]
A task is a function in this file; rank R's result is saved as FOLDER/result-R.pt.
"""

import importlib
import json
import os
import signal
import sys
from argparse import Namespace
from functools import partial, partialmethod
from pathlib import Path
from unittest.mock import patch

import torch
from played import Played, free_port
from torch import nn
from torchvision import models
from torchvision.transforms import v2

from common.arguments import build_parser, parse_arguments
from common.checkpoint import Checkpoint, lock_file, replace_file
from common.data import DeviceLoader, SeededDataset
from common.errors import one_line_errors
from common.model import build_scheduler

# --- starting processes ---


class Ranks(Played):
    """Processes 0 to world_size - 1 of a job, which run a task."""

    def __init__(self, folder: Path, world_size: int, task, **arguments):
        super().__init__(folder)
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        job |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        for rank in map(str, range(world_size)):
            place = {**job, "RANK": rank, "LOCAL_RANK": rank}
            self.start(_rank, folder, place, task, arguments)

    def alive(self) -> bool:
        """Return whether any rank is still running."""
        return any(process.is_alive() for process in self.processes)

    def results(self, seconds: float = 60) -> list:
        """Return the result of each rank's task."""
        statuses = self.end(seconds)
        assert not any(statuses), f"{statuses}\n{self.text()}"
        return results(self.folder)


def results(folder: Path) -> list:
    files = sorted(folder.glob("result-*.pt"), key=lambda file: int(file.stem[7:]))
    return [torch.load(file, weights_only=False) for file in files]


def run_ranks(folder: Path, world_size: int, task, seconds: float = 180, **arguments):
    with Ranks(folder, world_size, task, **arguments) as ranks:
        return ranks.results(seconds)


def _rank(folder: Path, place: dict, task, arguments: dict) -> None:
    """Run a task in a started process."""
    os.environ.update(place)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.save(task(**arguments), folder / f"result-{place['RANK']}.pt")


# --- networks ---


class Net(nn.Sequential):
    """A network that multiplies its layers' outputs."""

    def __init__(self, times: float, *layers: nn.Module):
        super().__init__(*layers)
        self.times = times

    def forward(self, images):
        return self.times * super().forward(images)


def small(classes: int) -> Net:
    """A network without batch norm and dropout: splitting a batch does not change its gradient."""
    layers = [nn.Conv2d(3, 16, 3, stride=2), nn.GELU()]
    layers += [nn.Conv2d(16, 32, 3, stride=2), nn.GELU()]
    return Net(1, *layers, *POOLED, nn.Linear(128, classes))


def norm(classes: int) -> Net:
    """A network with batch norm: processes that train on shards have different statistics."""
    layers = [nn.Conv2d(3, 8, 3, stride=4, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    return Net(1, *layers, *POOLED, nn.Linear(32, classes))


def drop(classes: int, times: float = 1) -> Net:
    """A network with dropout: every process draws its own masks."""
    layers = [nn.Conv2d(3, 8, 5, stride=3), nn.ReLU(), *POOLED, nn.Dropout(0.4)]
    return Net(times, *layers, nn.Linear(32, classes))


def flat(classes: int) -> Net:
    """A network that compiles quickly, for images of 32 pixels."""
    layers = nn.Conv2d(3, 4, 3, stride=4), nn.Flatten()
    return Net(1, *layers, nn.Linear(256, classes))


POOLED = (nn.AdaptiveAvgPool2d(2), nn.Flatten())
NETS = {"small": small, "norm": norm, "drop": drop, "flat": flat}
# In fp16, its first gradients are infinite, until the loss scale is lower
NETS |= {"loud": partial(drop, times=30)}

GET_MODEL = models.get_model

# --- running a script ---


class Images(list):
    """A dataset of which a checkpoint records only the numbers of images and classes."""

    def __init__(self, length: int, classes: int = 3):
        super().__init__(range(length))
        self.classes = range(classes)


def parse(*flags) -> Namespace:
    """Parse command-line flags as all scripts do."""
    with patch("sys.argv", [sys.argv[0], *map(str, flags)]):
        return parse_arguments(build_parser("A test."))


def load_script(name: str, net: str | None):
    """Load a script as a module that trains one of the networks above."""
    models.get_model = GET_MODEL
    if net is not None:
        models.get_model = lambda arch, num_classes: NETS[net](num_classes)
    return importlib.import_module(name)


def start(script, flags: list) -> None:
    """Run main() in the same way as the script does in each of its processes."""
    sys.argv = [f"{script.__name__}.py", *map(str, flags)]
    with one_line_errors():
        if script.__name__ != "multiprocessing_distributed":
            return script.main(script.arguments())
        sys.argv += ["--nprocs", os.environ["WORLD_SIZE"]]
        args = script.arguments()
        args.dist_url = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"
        args.local_rank = int(os.environ["RANK"])
        script.main(args)


def before_each_step(script, act) -> None:
    """Make train() call act(state, images, labels) before each training step.

    `state` contains train()'s arguments: model, optimizer, scheduler, scaler and checkpoint.
    """
    train = script.train
    names = "model optimizer scheduler scaler checkpoint".split()

    def watched(args, rank, loader, *others):
        state = Namespace(**dict(zip(names, others, strict=True)))

        class Watched(DeviceLoader):
            def __iter__(self):
                for batch in super().__iter__():
                    act(state, *batch)
                    yield batch

        loader.__class__ = Watched
        result = train(args, rank, loader, *others)
        loader.__class__ = DeviceLoader
        return result

    script.train = watched


def train(name: str, flags: list, net: str | None = None):
    """Train, and return nothing, because the caller reads the output folder."""
    start(load_script(name, net), flags)


def train_unlike(name: str, flags: list, own: list[list], net: str | None = None):
    """Train with different flags on each rank: rank R also gets own[R]."""
    train(name, [*flags, *own[int(os.environ["RANK"])]], net)


def train_compiled(name: str, flags: list, net: str) -> int:
    """Train a network that is compiled without a compiler; return the number of its graphs."""
    nn.Module.compile = partialmethod(nn.Module.compile, backend="eager")
    train(name, flags, net)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


# --- the results of a run ---


def count_bytes(script) -> list[int]:
    """Return a list that will receive the number of bytes of each gradient all-reduce."""
    sent = []

    def counted(send):
        def call(tensor, *others, **options):
            result = send(tensor, *others, **options)
            first = result[0] if isinstance(result, tuple) else tensor
            sent.extend([first.nbytes] * (tensor.dtype != torch.float64))
            return result

        return call

    if hasattr(script, "hvd"):
        for kind in (script.hvd.Compression.none, script.hvd.Compression.fp16):
            kind.compress = staticmethod(counted(kind.compress))
    else:
        wrap = script.DDP

        def wrapped(*parts, **options):
            model = wrap(*parts, **options)
            if "--compress-gradients" not in sys.argv:
                model.register_comm_hook(None, script.hooks.allreduce_hook)
            return model

        script.DDP, script.dist.all_reduce = wrapped, counted(script.dist.all_reduce)
    return sent


def recorded(name: str, runs: list, counted: bool = False) -> list[dict]:
    """Train for each (net, flags, stop, port) of `runs`, one after the other.

    Unless `stop` is None, a run ends after this step, as if it were killed. Return each run's
    results in this process: the learning rate and strides of each step, the crop box and flip of
    each (epoch, index) if there are no loader processes, and the final weights, momenta and scaler;
    if `counted`, also the bytes of each all-reduce of gradients.
    """
    script = load_script(name, None)
    read, flip = SeededDataset.__getitem__, v2.RandomHorizontalFlip.transform
    choose = v2.RandomResizedCrop.make_params
    key, found, end = None, {}, {}

    class Killed(BaseException):
        pass

    def getitem(dataset, where):
        nonlocal key
        _, epoch, _, index = where
        key = epoch, index
        return read(dataset, where)

    def make_params(crop, images):
        box = choose(crop, images)
        if not torch.utils.data.get_worker_info():
            found["crops"][key] = [tuple(box.values()), False]
        return box

    def mirror(step, image, params):
        if not torch.utils.data.get_worker_info():
            found["crops"][key][1] = True
        return flip(step, image, params)

    def act(state, images, labels):
        end["state"] = state
        if len(found["rates"]) == found["stop"]:
            raise Killed
        found["rates"].append(state.optimizer.param_groups[0]["lr"])
        found["strides"].append(images.stride())

    SeededDataset.__getitem__ = getitem
    v2.RandomResizedCrop.make_params = make_params
    v2.RandomHorizontalFlip.transform = mirror
    before_each_step(script, act)
    horovod = name == "horovod_distributed"
    if horovod:  # Horovod can be started only once per process
        script.hvd.init()
        script.hvd.init = script.hvd.shutdown = lambda: None
    came_to, sent = [], count_bytes(script) if counted else []
    for net, flags, stop, port in runs:
        os.environ["MASTER_PORT"] = str(port)  # the old store may still be closing
        load_script(name, net)
        found = {"crops": {}, "rates": [], "strides": [], "stop": stop}
        try:
            start(script, flags)
        except Killed:
            if "distributed" in name and not horovod:
                script.dist.destroy_process_group()
        found["sent"] = sent.copy()
        sent.clear()
        state = end["state"]
        if "lock" in vars(state.checkpoint):
            state.checkpoint.lock.close()  # as when the process ends
        momenta = state.optimizer.state_dict()["state"].values()
        found["momenta"] = [one.get("momentum_buffer") for one in momenta]
        found["weights"] = state.checkpoint.objects["state_dict"].state_dict()
        found["scaler"] = state.scaler.state_dict()
        came_to.append(found)
    return came_to


def save_for_ever(output: str) -> None:
    """Save checkpoints in a loop; all values in the Nth checkpoint's tensors are N.

    Every second checkpoint, starting with the first, is the best so far.

    Write N to the file `acknowledged` after save() has returned.
    """
    args = parse("--synthetic", "--output", output, "--precision", "fp32")
    model = nn.Linear(512, 256)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    objects = {"state_dict": model, "optimizer": optimizer}
    objects |= {"scheduler": build_scheduler(args, optimizer, 10)}
    state = Checkpoint(args, (Images(8), Images(8)), objects)
    state.lock = lock_file(Path(output, "lock"))
    for weight in model.parameters():
        optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    acknowledged = Path(output, "acknowledged")
    number = int(acknowledged.read_text()) if acknowledged.exists() else 0
    state.best = float(number - 1 + number % 2)
    while True:
        number += 1
        with torch.no_grad():
            for weight in model.parameters():
                weight.fill_(number)
                optimizer.state[weight]["momentum_buffer"].fill_(number)
        state.epoch, state.step = number, 0
        top1 = float(number * (number % 2))
        state.records = [{"epoch": number - 1, "val_top1": top1}]
        state.save()
        replace_file(acknowledged, str(number).encode())


if __name__ == "__main__":
    task, arguments = sys.argv[1], json.loads(sys.argv[2])
    folder = Path(arguments.pop("folder"))
    returned = globals()[task](**arguments)
    rank = os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
    torch.save(returned, folder / f"result-{rank}.pt")
