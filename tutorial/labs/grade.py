"""Run broken training scripts on two processes, and say what is wrong with each run.

    python tutorial/labs/grade.py 07    # one lab
    python tutorial/labs/grade.py all   # all of them

The grader watches the processes from outside: the images that go through the network,
the weights before and after each step, what is printed, and which files are saved.
Exit status: 0 if the labs pass, 1 if one does not, 2 for an unknown lab. A run without
progress for 10 seconds hangs; the variable PATIENCE sets another number of seconds.
"""

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import re
import resource
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

FOLDER = Path(__file__).resolve().parent
PATIENCE = float(os.environ.get("PATIENCE", "10"))  # seconds
LIFE = 60  # seconds that a process has at most, even without the grader
# What the scripts have in common: images, and the network and optimizer of most
EPOCHS, TRAINING, VALIDATION = 3, 96, 33
LR, MOMENTUM = 0.1, 0.9
IMAGES = torch.randn(129, 8, generator=torch.Generator().manual_seed(0))
LABELS = IMAGES[:, :3].argmax(1)
# What a stuck process waits in, by the innermost of these functions in its stack
CALLS = {
    "barrier": "barrier()",
    "all_reduce": "all_reduce()",
    "broadcast": "broadcast()",
    "init_process_group": "init_process_group()",
    "destroy_process_group": "destroy_process_group()",
    "_verify_param_shape_across_processes": "DDP(...)",
    "backward": "backward()",
    "forward": "the forward pass",
}
# The first sentence of an error
ERROR = r"^(?:[a-z_]\w*\.)*(\w*(?:Error|Exception)\b.*?)(?:\. .*)?$"


class Wrong(Exception):
    """What a script does wrong, in one line."""


class Step(NamedTuple):
    """One step of an optimizer; all weights are one vector."""

    images: Tensor  # (N, 8): went through the network since the step before
    lr: float
    before: Tensor
    after: Tensor


@dataclass
class Rank:
    """What one process did."""

    printed: str
    steps: list[Step] = field(default_factory=list)
    validated: Tensor = IMAGES[:0]  # (N, 8)
    outputs: Tensor = torch.empty(0, 3)  # (N, 3), of the validated images
    weights: Tensor | None = None  # in the end

    def trained(self) -> Tensor:
        """All images of all steps, shape (N, 8)."""
        return torch.cat([IMAGES[:0], *(step.images for step in self.steps)])


# --- in the processes that run the script ---


def flat(optimizer: torch.optim.Optimizer) -> Tensor:
    """A copy of all weights of an optimizer, as one vector."""
    groups = optimizer.param_groups
    weights = [weight for group in groups for weight in group["params"]]
    return torch.cat([weight.detach().flatten() for weight in weights])


class Watch:
    """Writes what the networks and optimizers of this process do to a file."""

    def __init__(self, file: Path, disturb: Callable[[int], bool | None]):
        self.file, self.disturb = file.open("wb"), disturb
        self.depth = self.steps = 0
        self.optimizer = self.weights = None
        register_module_forward_pre_hook(self.enter)
        register_module_forward_hook(self.leave)
        register_optimizer_step_pre_hook(self.before_step)
        register_optimizer_step_post_hook(self.after_step)

    def record(self, *event) -> None:
        """Add an event, unless nothing more can be written."""
        if self.file:
            pickle.dump(event, self.file)
            self.file.flush()

    def enter(self, *_) -> None:
        """Count modules inside modules: only the outermost one's images count."""
        self.depth += 1

    def leave(self, _, inputs: tuple, output: Tensor) -> None:
        """Record the images of a forward pass."""
        self.depth -= 1
        images = inputs[0].detach() if inputs else None
        if self.depth == 0 and images is not None and images.shape[1:] == (8,):
            kind = "trained" if torch.is_grad_enabled() else "validated"
            self.record(kind, images.clone(), output.detach().clone())

    def before_step(self, optimizer: torch.optim.Optimizer, *_) -> None:
        """Remember the weights."""
        if self.disturb(self.steps):
            self.file = None
        self.optimizer, self.weights = optimizer, flat(optimizer)
        self.steps += 1

    def after_step(self, optimizer: torch.optim.Optimizer, *_) -> None:
        """Record the step."""
        lr = optimizer.param_groups[0]["lr"]
        self.record("stepped", lr, self.weights, flat(optimizer))

    def end(self) -> None:
        """Record the last weights."""
        if self.optimizer:
            self.record("ended", flat(self.optimizer))


def be_rank(script: Path, folder: Path, variables: dict[str, str], disturb) -> None:
    """Run the script as one process of two; records go to `folder`."""
    rank = variables["RANK"]
    os.setsid()  # its own processes end with it
    signal.alarm(LIFE)
    for number, name in ((1, "out"), (2, "errors")):
        os.dup2(os.open(folder / f"{name}{rank}", os.O_CREAT | os.O_WRONLY), number)
    faulthandler.register(signal.SIGUSR1, (folder / f"stack{rank}").open("wb"))
    os.environ.update(variables)
    os.chdir(folder.parent / "files")
    sys.argv = [str(script)]
    torch.set_num_threads(1)
    watch = Watch(folder / f"events{rank}", disturb)
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        watch.end()


# --- in the grader ---


class Play:
    """Runs one script, as often as its judge wants."""

    def __init__(self, script: Path, folder: Path):
        self.script, self.folder, self.count = script, folder, 0
        self.files = folder / "files"  # the current folder of all runs
        self.files.mkdir()

    def __call__(self, **options) -> list[Rank]:
        """Run the script on two processes; returns what they did."""
        with self.started(**options) as job:
            return job.wait()

    @contextlib.contextmanager
    def started(
        self, machines: int = 1, disturb: Callable[[int], bool | None] = lambda _: None
    ) -> Iterator["Job"]:
        """Start the script, and end it at the end of the block.

        Args:
            machines: 2 for two machines with one process each.
            disturb: is called before each step, with the number of steps done; if it
                returns True, nothing more is recorded.
        """
        self.count += 1
        folder = self.folder / str(self.count)
        folder.mkdir()
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        variables |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": str(2 // machines)}
        fork, processes = multiprocessing.get_context("fork"), []
        try:
            for rank in (0, 1):
                local = str(rank % (2 // machines))
                place = {**variables, "RANK": str(rank), "LOCAL_RANK": local}
                for name in ("events", "out", "errors", "stack"):
                    (folder / f"{name}{rank}").touch()
                task = self.script, folder, place, disturb
                processes.append(fork.Process(target=be_rank, args=task))
                processes[-1].start()
            yield Job(folder, processes)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join()

    def clear(self) -> None:
        """Remove the files that the runs have left."""
        shutil.rmtree(self.files)
        self.files.mkdir()


@dataclass
class Job:
    """Two processes that run a script."""

    folder: Path
    processes: list

    def state(self) -> list:
        """Changes whenever a process makes progress or ends."""
        names = "events0", "events1", "out0", "out1"
        files = [self.folder / name for name in names]
        sizes = [file.exists() and file.stat().st_size for file in files]
        return [*sizes, *(process.exitcode for process in self.processes)]

    def wait(self, may_fail: bool = False) -> list[Rank]:
        """Wait until both have ended; raise Wrong if one fails or hangs."""
        state, since = None, time.monotonic()
        while None in (codes := [process.exitcode for process in self.processes]):
            if state != (state := self.state()):
                since = time.monotonic()
            # A process that has failed soon takes the other along
            if time.monotonic() - since > (2 if any(codes) else PATIENCE):
                break
            time.sleep(0.02)
        ranks = [self.read(rank) for rank in (0, 1)]
        if not may_fail and codes != [0, 0]:
            raise Wrong(self.failure(codes, ranks))
        return ranks

    def failure(self, codes: list[int | None], ranks: list[Rank]) -> str:
        """How the processes ended; an exit code is None if one is stuck."""
        lines = []
        for rank, code in enumerate(codes):
            steps = len(ranks[rank].steps)
            when = f"after step {steps}" if steps else "before the first step"
            lines.append(f"{when} rank {rank} {self.ending(rank, code)}")
        if not any(codes):
            return f"nothing happens for {PATIENCE:g} s: {' and '.join(lines)}"
        # A lost connection only says that the other process ended before
        own = [r for r in (0, 1) if codes[r] and "onnection" not in lines[r]]
        return lines[own[0]] if own else " and ".join(lines)

    def ending(self, rank: int, code: int | None) -> str:
        """How a process ended, or what it waits in."""
        if code is None:
            return self.stack(rank)
        if code == 0:
            return "ends"
        if code == -signal.SIGALRM:
            return f"does not end within {LIFE} s"
        text = (self.folder / f"errors{rank}").read_text(errors="replace")
        found = re.findall(ERROR, text, re.M)
        error = re.sub(r"\[/\S+\] ", "", found[-1]) if found else f"exit status {code}"
        return f"fails with {error}"

    def stack(self, rank: int) -> str:
        """What a process waits in."""
        os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.3)
        text = (self.folder / f"stack{rank}").read_text(errors="replace")
        names = re.findall(r"in (\w+)$", text, re.M)
        found = [CALLS[name] for name in names if name in CALLS]
        return f"still waits in {found[0]}" if found else "does not end"

    def read(self, rank: int) -> Rank:
        """What a process has recorded."""
        did = Rank((self.folder / f"out{rank}").read_text(errors="replace"))
        fed = [IMAGES[:0]]
        with (self.folder / f"events{rank}").open("rb") as file:
            while True:
                try:
                    kind, *event = pickle.load(file)
                except (EOFError, pickle.UnpicklingError):
                    return did
                if kind == "trained":
                    fed.append(event[0])
                elif kind == "validated":
                    did.validated = torch.cat([did.validated, event[0]])
                    did.outputs = torch.cat([did.outputs, event[1]])
                elif kind == "stepped":
                    did.steps.append(Step(torch.cat(fed), *event))
                    fed = [IMAGES[:0]]
                else:
                    did.weights = event[0]


# --- what every script has to do ---


def differ(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors differ by more than rounding."""
    return one.shape != other.shape or not torch.allclose(one, other, atol=1e-5)


def indices(images: Tensor) -> Tensor:
    """The numbers of images of shape (N, 8), which may have some noise."""
    return torch.cdist(images, IMAGES).argmin(1)


def check_weights(ranks: list[Rank]) -> None:
    """All processes have the same weights, from the first step to the end."""
    steps = [rank.steps for rank in ranks]
    if not all(steps):
        raise Wrong("the optimizer takes no step")
    if differ(steps[0][0].before, steps[1][0].before):
        raise Wrong("the two processes have different weights before the first step")
    for number, (one, other) in enumerate(zip(*steps, strict=False), start=1):
        if len(steps[0]) == len(steps[1]) and differ(one.after, other.after):
            raise Wrong(f"the two processes have different weights after step {number}")
    if differ(ranks[0].weights, ranks[1].weights):
        raise Wrong("the two processes have different weights in the end")


def check_shares(ranks: list[Rank]) -> list[list[Tensor]]:
    """Each epoch uses each image once; returns the images of each rank and epoch."""
    seen = [indices(rank.trained()) for rank in ranks]
    count = sum(map(len, seen))
    if count != EPOCHS * TRAINING:
        text = f"{EPOCHS} epochs of {TRAINING} images are {EPOCHS * TRAINING}"
        raise Wrong(f"{text}; the two processes train on {count}")
    parts = [one.chunk(EPOCHS) for one in seen]
    for epoch, pair in enumerate(zip(*parts, strict=True)):
        missing = TRAINING - torch.cat(pair).unique().numel()
        if missing:
            text = f"epoch {epoch} leaves out {missing} of {TRAINING} images"
            raise Wrong(f"{text} and uses as many others twice")
    return parts


def check_steps(ranks: list[Rank], max_norm: float = float("inf")) -> None:
    """One process, with the same images in each step, arrives at the same weights."""
    weights = ranks[0].steps[0].before
    velocity = torch.zeros_like(weights)
    for number, pair in enumerate(zip(*(r.steps for r in ranks), strict=False), 1):
        images = torch.cat([step.images for step in pair])
        before = weights
        try:
            velocity = MOMENTUM * velocity + gradient(weights, images, max_norm)
        except RuntimeError:
            raise Wrong("the network is not the original one") from None
        weights = before - LR * velocity
        right = (weights - before).norm()
        if (pair[0].after - weights).norm() > 1e-3 * right:
            ratio = (pair[0].after - before).norm() / right
            how = f"{ratio:.2f} times as far as" if abs(ratio - 1) > 0.01 else "unlike"
            text = f"step {number} moves the weights {how} one process does"
            clipped = f" and a gradient of at most {max_norm}" * (max_norm < 9)
            raise Wrong(f"{text} with the same {len(images)} images{clipped}")


def gradient(weights: Tensor, images: Tensor, max_norm: float) -> Tensor:
    """The clipped gradient of the mean loss, without autograd: it can prevent forks."""
    a, b, c, d = weights.split([128, 16, 48, 3])
    a, c = a.view(16, 8), c.view(3, 16)
    before = F.linear(images, a, b)
    hidden = before.relu()
    targets = F.one_hot(LABELS[indices(images)], 3)
    error = (F.linear(hidden, c, d).softmax(1) - targets) / len(images)
    back = error @ c * (before > 0)
    parts = back.T @ images, back.sum(0), error.T @ hidden, error.sum(0)
    found = torch.cat([part.flatten() for part in parts])
    return found * min(1, max_norm / found.norm().item())


def check_all(ranks: list[Rank], **options) -> None:
    """What the scripts with the usual network have to do."""
    check_weights(ranks)
    check_shares(ranks)
    check_steps(ranks, **options)


def check_accuracy(ranks: list[Rank]) -> None:
    """The printed accuracy counts each validation image once."""
    images = torch.cat([rank.validated for rank in ranks])
    outputs = torch.cat([rank.outputs for rank in ranks])
    right = {
        int(i): bool(LABELS[i] == o.argmax())
        for i, o in zip(indices(images), outputs, strict=True)
    }
    if len(right) != VALIDATION:
        raise Wrong(f"{len(right)} of the {VALIDATION} validation images are validated")
    hits = sum(right.values())
    found = re.findall(r"accuracy (\d\.\d+)", "".join(r.printed for r in ranks))
    if not found:
        raise Wrong("no accuracy is printed")
    for text in found:
        if abs(float(text) - hits / VALIDATION) > 6e-5:
            raise Wrong(
                f"it prints accuracy {text}; {hits} of {VALIDATION} validation images "
                f"are right, which is {hits / VALIDATION:.4f}"
            )


def load(file: Path) -> dict:
    """Read a file that a script has saved."""
    if not file.exists():
        raise Wrong(f"there is no {file.name} at the end")
    try:
        return torch.load(file, weights_only=True)
    except Exception:
        raise Wrong(f"{file.name} cannot be read at the end") from None


def load_network(state: dict, name: str, *norm: nn.Module) -> nn.Module:
    """The network of most scripts, without DDP, with saved weights."""
    net = nn.Sequential(nn.Linear(8, 16), *norm, nn.ReLU(), nn.Linear(16, 3))
    try:
        net.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError):
        names = ", ".join(list(state)[:2])
        text = f"the network without DDP cannot load {name}, which holds {names}, ..."
        raise Wrong(text) from None
    return net


# --- what each lab is about ---


def judge_usual(play: Play) -> None:
    """Scripts without anything else to see."""
    check_all(play())


def judge_shared(play: Play) -> list[Rank]:
    """Scripts with another network or another rule for the steps; what they did."""
    ranks = play()
    check_weights(ranks)
    check_shares(ranks)
    return ranks


def judge_machines(play: Play) -> None:
    """On two machines with one process each."""
    try:
        check_all(play(machines=2))
    except Wrong as wrong:
        raise Wrong(f"on two machines with one process each, {wrong}") from None
    check_all(play())


def judge_start(play: Play) -> None:
    """Twice at the same time."""
    go = play.folder / "go"

    def hold(_) -> None:
        while not go.exists():
            time.sleep(0.02)

    with play.started(disturb=hold) as first:
        until = time.monotonic() + PATIENCE
        while not all(first.state()[:2]) and time.monotonic() < until:
            time.sleep(0.02)  # until both have recorded something
        try:
            check_all(play())
        except Wrong as wrong:
            raise Wrong(f"if another run of it is under way, {wrong}") from None
        go.touch()
        check_all(first.wait())


def judge_epochs(play: Play) -> None:
    """The order of the images."""
    ranks = play()
    for rank, parts in enumerate(check_shares(ranks)):
        if parts[0].equal(parts[1]):
            raise Wrong(
                f"rank {rank} sees the same images, in one order, in each epoch"
            )
    check_all(ranks)


def judge_noise(play: Play) -> None:
    """The difference to the images without noise."""
    ranks = play()
    noise = [rank.trained() - IMAGES[indices(rank.trained())] for rank in ranks]
    if noise[0][:8].allclose(noise[1][:8], atol=1e-5):
        raise Wrong("both processes add the same noise to their images")
    every = torch.cat(noise)
    if len((1000 * every).round().unique(dim=0)) < len(every):
        raise Wrong("the same noise is added to several images")
    if every.std() < 0.05:
        raise Wrong("there is hardly any noise")
    check_all(ranks)


def judge_validation(play: Play) -> None:
    """The printed accuracy."""
    ranks = play()
    check_accuracy(ranks)
    check_all(ranks)


def judge_schedule(play: Play) -> None:
    """The learning rate."""
    ranks = judge_shared(play)
    first, last = (ranks[0].steps[number].lr for number in (0, -1))
    if abs(first - LR) > 1e-6 or last > LR / 10:
        raise Wrong(f"the learning rate falls from {first:.4f} to only {last:.4f}")


def judge_split(play: Play) -> None:
    """Images for training and for validation."""
    ranks = play()
    trained = {int(i) for rank in ranks for i in indices(rank.trained())}
    validated = {int(i) for rank in ranks for i in indices(rank.validated)}
    if both := trained & validated:
        count = f"{len(both)} of {len(validated)} validation images"
        raise Wrong(f"{count} are trained on as well")
    judge_validation(play)


def judge_clip(play: Play) -> None:
    """The clipped mean gradient."""
    check_all(play(), max_norm=0.3)


def judge_norm(play: Play) -> None:
    """The network that is validated and saved."""
    ranks = play()
    state = load(play.files / "model.pt")
    net = load_network(state, "model.pt", nn.BatchNorm1d(16)).eval()
    for number, rank in enumerate(ranks):
        with torch.no_grad():
            errors = (net(rank.validated) - rank.outputs).abs().flatten()
        off = max(errors.tolist(), default=0)
        if off > 1e-4:
            text = f"rank {number} validates with another network than model.pt"
            raise Wrong(f"{text}: their outputs differ by up to {off:.3f}")
    check_accuracy(ranks)
    check_weights(ranks)
    check_shares(ranks)


def judge_filter(play: Play) -> None:
    """Images that are left out."""
    ranks = play()
    check_weights(ranks)
    used = indices(torch.cat([rank.trained() for rank in ranks]))
    good = (IMAGES[:TRAINING].std(1) > 0.7).nonzero().flatten()
    if bad := set(used.tolist()) - set(good.tolist()):
        raise Wrong(f"{len(bad)} images of too little contrast are used")
    if len(used) < EPOCHS * (len(good) - 16) or len(used.unique()) < len(good) - 8:
        raise Wrong(f"only {len(used)} of {EPOCHS} x {len(good)} images are used")


def judge_best(play: Play) -> None:
    """Validation in each epoch."""
    ranks = judge_shared(play)
    if "".join(rank.printed for rank in ranks).count("accuracy ") < EPOCHS:
        raise Wrong(f"the accuracy is not printed {EPOCHS} times")


def judge_export(play: Play) -> None:
    """The saved weights."""
    ranks = play()
    net = load_network(load(play.files / "model.pt"), "model.pt")
    if differ(nn.utils.parameters_to_vector(net.parameters()), ranks[0].weights):
        raise Wrong("model.pt does not hold the trained weights")
    check_all(ranks)


def judge_resume(play: Play) -> None:
    """A run that is killed."""
    ranks = play()
    check_all(ranks)
    load(play.files / "checkpoint.pt")
    play.clear()
    with play.started(disturb=lambda steps: steps == 12 and os._exit(1)) as job:
        job.wait(may_fail=True)
    again = play()
    if len(again[0].steps) != 6:
        text = "after a run that was killed in epoch 2, the next one takes"
        raise Wrong(f"{text} {len(again[0].steps)} steps instead of the last 6")
    check_weights(again)
    if differ(again[0].weights, ranks[0].weights):
        text = "a run that is killed in epoch 2 and then resumed"
        raise Wrong(f"{text} ends with other weights than a run without a break")


def judge_checkpoint(play: Play) -> None:
    """A run that is killed while it saves."""
    ranks = play()
    check_all(ranks)
    file = play.files / "checkpoint.pt"

    def check_file() -> None:
        content = load(file)
        if not isinstance(content, dict):
            raise Wrong(f"{file.name} does not hold a dictionary")
        net = load_network(content.get("model", {}), file.name)
        weights = nn.utils.parameters_to_vector(net.parameters())
        if all(differ(weights, step.after) for step in ranks[0].steps[5::6]):
            raise Wrong(f"{file.name} does not hold the weights after an epoch")

    check_file()
    size = file.stat().st_size
    play.clear()
    with play.started(disturb=lambda steps: steps == 6 and die_at_size(size)) as job:
        job.wait(may_fail=True)
    try:
        check_file()
    except Wrong as wrong:
        raise Wrong(f"if the run is killed during its second save, {wrong}") from None


def die_at_size(size: int) -> bool:
    """Have the kernel kill this process when a file of it grows to `size` bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, size - 1))
    return True


JUDGES = {
    "01": judge_machines,
    "02": judge_start,
    "08": judge_epochs,
    "09": judge_noise,
    "10": judge_validation,
    "11": judge_validation,
    "12": judge_schedule,
    "13": judge_split,
    "14": judge_clip,
    "15": judge_shared,
    "16": judge_norm,
    "19": judge_filter,
    "20": judge_best,
    "21": judge_export,
    "23": judge_resume,
    "24": judge_checkpoint,
}


def grade(script: Path) -> str | None:
    """What is wrong with a script, or None."""
    with tempfile.TemporaryDirectory(prefix="lab-") as folder:
        try:
            JUDGES.get(script.name[:2], judge_usual)(Play(script, Path(folder)))
        except Wrong as wrong:
            return str(wrong)
        except Exception as error:
            return f"this cannot be judged: {error}"
    return None


def warm_up() -> None:
    """Import what a script would import at its first step, for all of them at once."""
    importlib.import_module("torch.distributed.distributed_c10d")
    importlib.import_module("torch.nn.parallel.distributed")
    importlib.import_module("torch.utils.data.distributed")
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.SGD([weight], 0.1, momentum=0.9).step()


def main(words: list[str]) -> int:
    """Grade labs; return the exit status."""
    scripts = {path.name[:2]: path for path in sorted(FOLDER.glob("[0-9][0-9]_*.py"))}
    chosen = list(scripts) if words in ([], ["all"]) else [w.zfill(2) for w in words]
    if unknown := [number for number in chosen if number not in scripts]:
        labs = f"labs are {min(scripts)} to {max(scripts)}"
        print(f"grade.py: error: no lab {unknown[0]}; {labs}", file=sys.stderr)
        return 2
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the labs need no GPU
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and end what was started
    warm_up()
    passed = 0
    try:
        for number in chosen:
            problem = grade(scripts[number])
            print(f"{number}: {problem}" if problem else f"{number} passes", flush=True)
            passed += not problem
    except KeyboardInterrupt:
        return 130
    if len(chosen) > 1:
        print(f"{passed} of {len(chosen)} labs pass")
    return 0 if passed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
