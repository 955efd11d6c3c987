"""The scripts' main() in processes that a fork server starts: a second each, not a launch.

Also runs under horovodrun, which alone can start Horovod's processes:
    horovodrun -np 2 python tests/ranks.py TASK [ARGUMENTS AS JSON]
A task is a function of this file; what rank R returns is saved as FOLDER/result-R.pt.
"""

import contextlib
import ctypes
import hashlib
import importlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import textwrap
import threading
import time
from argparse import Namespace
from datetime import timedelta
from pathlib import Path

import torch
import torchvision
from torch import nn
from torch.utils.data import Subset

import common.data
import common.images
import common.model
from common.arguments import build_parser, parse_arguments
from common.checkpoint import TrainingState, lock_output, replace_file
from common.data import RandomImages
from common.model import build_model
from common.schedule import build_scheduler
from launch.exits import Stopped, Watchdog

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("dataparallel", "distributed", "multiprocessing_distributed")

# --- starting processes ---


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def fork_server():
    """A process that has imported everything and forks the ranks, free of our threads."""
    own = f"{ROOT}:{ROOT / 'tests'}:"  # the server's imports
    others = os.environ.get("PYTHONPATH", "").removeprefix(own)
    os.environ["PYTHONPATH"] = own + others
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ranks", *SCRIPTS])
    return context


class Ranks:
    """Processes 0 to world_size - 1 that run a task; killed when the block is left."""

    def __init__(self, folder: Path, world_size: int, task, **arguments):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        port = str(free_port())
        self.processes = []
        for rank in range(world_size):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            process = fork_server().Process(
                target=_run, args=(folder, variables, task.__name__, arguments)
            )
            process.start()
            self.processes.append(process)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.join()

    def alive(self, *ranks: int) -> bool:
        """Whether any of these ranks, or of all, still runs."""
        chosen = [self.processes[rank] for rank in ranks] or self.processes
        return any(process.is_alive() for process in chosen)

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid, number)

    def end(self, seconds: float = 60) -> list[int]:
        """Wait for all; their exit statuses, a killed one's below zero."""
        until = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0, until - time.monotonic()))
        assert all(process.exitcode is not None for process in self.processes), (
            f"still running after {seconds} s:\n{self.text()}"
        )
        return [process.exitcode for process in self.processes]

    def text(self) -> str:
        """What all ranks printed."""
        return "\n".join(file.read_text() for file in sorted(self.folder.glob("*.log")))

    def results(self, seconds: float = 60) -> list:
        """What each rank's task returned."""
        statuses = self.end(seconds)
        assert not any(statuses), f"{statuses}\n{self.text()}"
        return results(self.folder)


def results(folder: Path) -> list:
    files = sorted(folder.glob("result-*.pt"), key=lambda file: int(file.stem[7:]))
    return [torch.load(file, weights_only=False) for file in files]


def run_ranks(folder: Path, world_size: int, task, seconds: float = 90, **arguments):
    with Ranks(folder, world_size, task, **arguments) as ranks:
        return ranks.results(seconds)


def _run(folder: Path, variables: dict, task: str, arguments: dict) -> None:
    """What a started process does."""
    os.environ.update(variables)
    rank = int(variables["RANK"])
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # as in a launched script
    signal.signal(signal.SIGINT, signal.default_int_handler)
    returned = globals()[task](**arguments)
    torch.save(returned, folder / f"result-{rank}.pt")


# --- what they run ---


class SmallNet(nn.Sequential):
    """No batch norm and no dropout: its gradient is the same however a batch is split."""

    def __init__(self, classes: int):
        super().__init__(
            nn.Conv2d(3, 16, 3, stride=2),
            nn.GELU(),
            nn.Conv2d(16, 32, 3, stride=2),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(128, classes),
        )


class NormNet(nn.Sequential):
    """With batch norm, whose statistics differ between processes that train on shards."""

    def __init__(self, classes: int):
        super().__init__(
            nn.Conv2d(3, 8, 3, stride=4, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, classes),
        )


class DropNet(nn.Sequential):
    """With dropout, of which every process draws its own."""

    def __init__(self, classes: int):
        super().__init__(
            nn.Conv2d(3, 8, 5, stride=3),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.4),
            nn.Linear(32, classes),
        )


class LoudNet(DropNet):
    """Its first gradients are infinite in fp16, until the loss scale is lower."""

    def forward(self, images):
        return 30 * super().forward(images)


class SteepNet(SmallNet):
    """Likewise, without dropout, which is another one on a GPU."""

    def forward(self, images):
        return 8 * super().forward(images)


NETS = {"small": SmallNet, "norm": NormNet, "drop": DropNet, "loud": LoudNet}
NETS["steep"] = SteepNet


def load_script(name: str, net: str | None):
    """A script as a module, with one of our networks in place of torchvision's."""
    script = importlib.import_module(name)
    if net is not None:

        def build(args: Namespace, dataset) -> nn.Module:
            torch.manual_seed(args.seed)
            script.raw_model = NETS[net](len(dataset.classes))
            return script.raw_model

        script.build_model = build
    return script


def start(script, flags: list) -> None:
    """Run main() as the script itself does in one of its processes."""
    flags = [str(flag) for flag in flags]
    sys.argv = [f"{script.__name__}.py", *flags]
    if script.__name__ != "multiprocessing_distributed":
        with script.exit_status():
            script.main(script.arguments(flags))
        return
    args = script.arguments([*flags, "--nprocs", os.environ["WORLD_SIZE"]])
    args.dist_url = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"
    script.worker(int(os.environ["RANK"]), args)


def before_each_step(script, act) -> None:
    """Have act(state, images, labels) called before each training step."""
    train_step = script.train_step

    def step(args, model, state, images, labels):
        act(state, images, labels)
        return train_step(args, model, state, images, labels)

    script.train_step = step


def train(name: str, flags: list, net: str | None = None):
    """Train; whoever asks looks at the output folder."""
    start(load_script(name, net), flags)


def train_at_gate(gate: str, name: str, flags: list):
    """Train, and wait for turns."""
    os.environ["TIMINGS_GATE"] = gate
    train(name, flags)


def train_watched(
    name: str, flags: list, net: str | None, skipped: int, gpus: str
) -> list[torch.Tensor] | int:
    """Train without TF32; returns what the first convolution got in the first epoch.

    The first `skipped` steps leave the weights alone, as steps with infinite gradients
    do. Of a compiled network returns how many graphs it has.
    """
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    script = load_script(name, net)
    build, train_step, seen = script.build_model, script.train_step, []

    def watched(args, dataset):
        model = build(args, dataset)
        first = next(part for part in model.modules() if isinstance(part, nn.Conv2d))

        def keep(part, given):
            if part.training and len(seen) < args.max_steps:
                seen.append(given[0].detach().float().cpu())

        if not args.compile:
            first.register_forward_pre_hook(keep)
        return model

    def step(args, model, state, images, labels):
        take = state.optimizer.step
        if state.scheduler.last_epoch < skipped:
            state.optimizer.step = lambda: None
        returned = train_step(args, model, state, images, labels)
        state.optimizer.step = take
        return returned

    script.build_model, script.train_step = watched, step
    start(script, flags)
    if "--compile" in flags:
        from torch._dynamo.utils import counters

        return counters["stats"]["unique_graphs"]
    return seen


def train_compiled(name: str, flags: list) -> int:
    """Train a tiny network of which torch.compile has little to make.

    Returns how many graphs of it were compiled.
    """
    from torch._dynamo.utils import counters
    from torch._inductor import config

    config.compile_threads = 1  # in this process
    common.model.get_model = lambda arch, num_classes, **_: nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=4), nn.Flatten(), nn.Linear(256, num_classes)
    )
    train(name, flags)
    return counters["stats"]["unique_graphs"]


def train_unlike(name: str, flags: list, own: list[list]):
    """Train; rank R has the flags own[R] besides."""
    rank = int(os.environ.get("HOROVOD_RANK") or os.environ["RANK"])
    start(load_script(name, None), [*flags, *own[rank]])


def train_disturbed(name: str, flags: list, at: int, what: str, net: str | None = None):
    """Train; in step `at` of the run rank 1 gets a signal, or a loss that is no number.

    With one process that is rank 0. Prints (epoch, step) of each torch.save.
    """
    script, save = load_script(name, net), torch.save
    last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"] != "1"))

    def act(state, images, labels):
        if last and state.scheduler.last_epoch + 1 == at:
            if what == "nan":
                with torch.no_grad():
                    images.fill_(float("nan"))
            else:
                os.kill(os.getpid(), getattr(signal, what))

    def printed(content, file):
        print("torch.save", content["epoch"], content["step"], flush=True)
        save(content, file)

    before_each_step(script, act)
    torch.save = printed
    start(script, flags)
    torch.save = save


def lock_and_fork(output: str) -> None:
    """Lock the folder; a forked process is there as long, or longer."""
    lock = lock_output(Path(output))
    child = os.fork()
    if child:
        print("forked", child, flush=True)
    time.sleep(60)
    lock.close()


def save_for_ever(output: str) -> None:
    """Save one checkpoint after the other; all tensors of the Nth are N.

    Each second one, from the first, is the best so far.

    Writes N to the file `acknowledged` once save() has returned.
    """
    argv = ["--data", "x", "--output", output, "--precision", "fp32"]
    args = parse_arguments(build_parser("A test."), "test", argv)
    model = nn.Linear(512, 256)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = build_scheduler(args, optimizer, 10)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    images = RandomImages(8, 8), RandomImages(8, 8)
    state = TrainingState(args, images, model, optimizer, scheduler, scaler)
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
        text = str(number).encode()
        replace_file(acknowledged, lambda file, text=text: file.write(text))


def watched(how: str, limit: int = 60) -> None:
    """Finish batches under a Watchdog of `limit` seconds, or none."""
    Watchdog.GRACE, Watchdog.PATIENCE = 1, 0.1 if how == "signalled twice" else 0.5
    watchdog = Watchdog(timedelta(seconds=limit))
    watchdog.feed()
    print("begins", flush=True)
    if how == "waits":
        threading.Event().wait()
    if how == "waits in C":  # as for a GPU: no Python handler runs any more
        mutex, libc = (ctypes.c_char * 64)(), ctypes.CDLL(None)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)
    for number in range(20):
        watchdog.feed()
        if how == "signalled twice" and number in (2, 17):
            signal.raise_signal(signal.SIGTERM)
        time.sleep(0.1)


def batches(name: str, flags: list, net: str | None = None):
    """Train, and return for each step the digests of this process's (pixels, label)."""
    script, seen = load_script(name, net), []

    def act(state, images, labels):
        digests = [
            hashlib.sha256(image.contiguous().numpy().tobytes()).hexdigest()[:16]
            + f"-{label}"
            for image, label in zip(images, labels.tolist(), strict=True)
        ]
        seen.append((state.epoch, digests))

    before_each_step(script, act)
    start(script, flags)
    return seen


def recorded(name: str, runs: list) -> list[dict]:
    """Train for each (net, flags, stop, port) of `runs`, one after the other.

    A run is asked to stop in its step `stop`, unless that is None. Returns what each
    came to in this process: the learning rate and strides of each step, the crop box and
    flip of each (epoch, index), and at the end weights, momenta and the loss scaler.
    """
    script = load_script(name, None)
    build, seed = script.build_model, common.data.seed_augmentation
    box, flip = common.images.random_box, common.images.F.horizontal_flip
    key, found, end = None, {}, {}

    def seed_augmentation(number, epoch, index):
        nonlocal key
        key = epoch, index
        return seed(number, epoch, index)

    def random_box(height, width, min_crop):
        drawn = box(height, width, min_crop)
        found["crops"][key] = [drawn, False]
        return drawn

    def horizontal_flip(pixels):
        found["crops"][key][1] = True
        return flip(pixels)

    def act(state, images, labels):
        found["rates"].append(state.optimizer.param_groups[0]["lr"])
        found["strides"].append(images.stride())
        if len(found["rates"]) == found["stop"]:
            os.kill(os.getpid(), signal.SIGTERM)
        end["state"] = state

    common.data.seed_augmentation = seed_augmentation
    common.images.random_box = random_box
    common.images.F.horizontal_flip = horizontal_flip
    if name == "horovod_distributed":
        script.hvd.shutdown = lambda: None
    before_each_step(script, act)
    script.exit_status = lambda *_: contextlib.suppress(Stopped)  # not os._exit
    came_to = []
    for net, flags, stop, port in runs:
        os.environ["MASTER_PORT"] = port  # the last one's store may be closing
        script.build_model = build
        load_script(name, net)
        found = {"crops": {}, "rates": [], "strides": [], "stop": stop}
        start(script, flags)
        state = end["state"]
        momenta = state.optimizer.state_dict()["state"].values()
        found["momenta"] = [one.get("momentum_buffer") for one in momenta]
        found["weights"] = state.raw_model.state_dict()
        found["scaler"] = state.scaler.state_dict()
        came_to.append(found)
        if name == "horovod_distributed":  # is started once in a process
            script.use_fork_server = script.hvd.init = lambda: None
    return came_to


def validate_sizes(name: str, flags: list, sizes: list, output: str):
    """Train, then validate on N images for each N of `sizes`, and save as main() does.

    Every process begins with batch norm statistics of its own, as after its shard.
    Returns {N: (the averages, this process's buffers)}; rank 0 writes OUTPUT/N.pt.
    """
    script, found = load_script(name, "norm"), {}
    validate = script.validate

    def all_sizes(args, loader, eval_model, watchdog):
        train_set, val_set = script.build_datasets(args)
        rank, world_size = place(name)
        region = shard_region(Path(script.__file__))
        for size in sizes:
            generator = torch.Generator().manual_seed(1000 * size + rank)
            raw_model = script.raw_model
            norm = raw_model[1]
            norm.running_mean.normal_(generator=generator)
            norm.running_var.uniform_(0.5, 2, generator=generator)
            subset = Subset(val_set, chosen(len(val_set), size))
            names = {"args": args, "train_set": train_set, "val_set": subset}
            names |= {"rank": rank, "world_size": world_size}
            exec(region, vars(script), names)  # the script's own choice of images
            share = args.global_batch_size // world_size, 0, loader.device
            one = common.data.build_loader(
                args, subset, names["val_sampler"], *share, training=False
            )
            figures = validate(args, one, eval_model, watchdog)
            buffers = {n: buffer.clone() for n, buffer in raw_model.named_buffers()}
            found[size] = figures, buffers
            if rank == 0:
                torch.save(raw_model.state_dict(), Path(output, f"{size}.pt"))
        return validate(args, loader, eval_model, watchdog)

    script.validate = all_sizes
    start(script, flags)
    return found


def download(file: str):
    """Build the pretrained model whose weights FOLDER/ARCH.pth holds; returns them."""
    arch = Path(file).stem
    torchvision.models.get_model_weights(arch).DEFAULT.value.url = Path(file).as_uri()
    torch.hub.set_dir(Path(file).parent / "hub")
    fetch = torch.hub.download_url_to_file

    def slowly(*arguments, **options):
        time.sleep(0.5)  # for the others to come
        fetch(*arguments, **options)

    torch.hub.download_url_to_file = slowly
    flags = ["--data", "x", "--arch", arch, "--pretrained"]
    args = parse_arguments(build_parser("A test."), "test", flags)
    return build_model(args, RandomImages(8, 8)).state_dict()


def shard_region(script: Path) -> str:
    """The lines of the script that say which images are whose."""
    lines = script.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if "# [2/6 shard]" in line)
    return textwrap.dedent("\n".join(lines[first : lines.index("    # [/shard]")]))


def chosen(images: int, size: int) -> list[int]:
    """Indices of `size` images of all classes."""
    order = torch.randperm(images, generator=torch.Generator().manual_seed(size))
    return order[:size].tolist()


def place(name: str) -> tuple[int, int]:
    """Rank and world size."""
    if name == "dataparallel":
        return 0, 1
    if name == "horovod_distributed":
        import horovod.torch as hvd

        return hvd.rank(), hvd.size()
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


if __name__ == "__main__":
    task, arguments = sys.argv[1], json.loads(sys.argv[2])
    folder = Path(arguments.pop("folder"))
    returned = globals()[task](**arguments)
    rank = os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
    torch.save(returned, folder / f"result-{rank}.pt")
