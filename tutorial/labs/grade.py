"""Run broken training scripts in two processes, and print what each run does wrong.

    python tutorial/labs/grade.py 07    # one lab
    python tutorial/labs/grade.py all   # all of them

The grader watches the processes from outside: the images that go through the network,
the weights before and after each step, the printed text, and the saved files.
Exit status: 0 if the labs pass, 1 if one does not, 2 for an unknown lab. A run without
progress for 10 seconds counts as hanging; the variable PATIENCE sets this limit.
"""

import contextlib
import importlib.util
import os
import re
import resource
import signal
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F
from watch import FORK, PATIENCE, Pass, Run, Wrong, job, recorder, started

FOLDER = Path(__file__).resolve().parent
# The images of all scripts, and the network and optimizer of most scripts
EPOCHS, TRAINING, VALIDATION = 3, 96, 33
LR, MOMENTUM = 0.1, 0.9
IMAGES = torch.randn(129, 8, generator=torch.Generator().manual_seed(0))
LABELS = IMAGES[:, :3].argmax(1)
# Weights of most networks; with batch norm; with a block, whose weights are last
PLAIN, NORM, BLOCK = 195, 227, 467
CHECKPOINT = "checkpoint.pt"
HOROVOD = importlib.util.find_spec("horovod")


def name(script: Path) -> str:
    """Return the number of a lab, or the name of a script that has no number."""
    return script.stem.split("_")[0]


def differ(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors differ by more than rounding."""
    return one.shape != other.shape or not torch.allclose(one, other, atol=1e-5)


def indices(images: Tensor) -> Tensor:
    """Return the index of each image in (N, 8) images, which may be noisy."""
    return torch.cdist(images, IMAGES).argmin(1)


def saved(file: Path, *norm: nn.Module, part: str = "") -> tuple[nn.Module, Tensor]:
    """Load the network that most scripts save; return it and its weights."""
    net = nn.Sequential(nn.Linear(8, 16), *norm, nn.ReLU(), nn.Linear(16, 3))
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception:
        how = "cannot be read" if file.exists() else "is missing"
        raise Wrong(f"{file.name} {how} at the end") from None
    try:
        net.load_state_dict(content[part] if part else content)
    except (RuntimeError, TypeError, AttributeError, LookupError):
        names = ", ".join(map(str, [*content][:2]))
        text = f"cannot load {file.name}, which holds {names}, ..."
        raise Wrong(f"the network without DDP {text}") from None
    return net.eval(), nn.utils.parameters_to_vector(net.parameters()).detach()


# --- checks of a run ---


def check_weights(run: Run) -> None:
    """All processes have the same weights, from the first step to the end."""
    one, other = run.ranks
    if not (one.steps and other.steps):
        raise Wrong("the optimizer takes no step")
    stages = {"before the first step": (one.weights[0], other.weights[0])}
    if len(one.steps) == len(other.steps):
        for number, pair in enumerate(zip(one.steps, other.steps, strict=True), 1):
            stages[f"after step {number}"] = pair[0].weights, pair[1].weights
    stages["at the end"] = one.weights[-1], other.weights[-1]
    for when, pair in stages.items():
        if differ(*pair):
            raise Wrong(f"the two processes have different weights {when}")


def check_shares(run: Run) -> None:
    """Each epoch trains the network once on each image, in a new order."""
    seen = [indices(rank.trained()) for rank in run.ranks]
    count = sum(map(len, seen))
    if count != EPOCHS * TRAINING:
        text = f"{EPOCHS} epochs of {TRAINING} images are {EPOCHS * TRAINING}"
        raise Wrong(f"{text}; the two processes train on {count}")
    epochs = [rank.chunk(EPOCHS) for rank in seen]
    for epoch, pair in enumerate(zip(*epochs, strict=True)):
        if missing := TRAINING - torch.cat(pair).unique().numel():
            text = f"epoch {epoch} leaves out {missing} of {TRAINING} images"
            raise Wrong(f"{text} and uses as many others twice")
    for a, b in combinations(range(EPOCHS), 2):
        if epochs[0][a].equal(epochs[0][b]):
            text = "rank 0 sees the same images in the same order"
            raise Wrong(f"{text} in epochs {a} and {b}")
    for number, step in enumerate(run.ranks[0].steps, 1):
        if not all(one.training for one in step.passes):
            raise Wrong(f"step {number} trains a network that is in evaluation mode")


def check_steps(
    run: Run, max_norm: float = float("inf"), rates=(LR,) * 99, rounding=1e-3
) -> None:
    """One process with the same images in each step ends with the same weights."""
    weights = run.ranks[0].weights[0].double()
    velocity = torch.zeros_like(weights)
    pairs = zip(*(rank.steps for rank in run.ranks), rates, strict=False)
    for number, (one, other, lr) in enumerate(pairs, 1):
        passes = *one.passes, *other.passes
        try:
            found = gradient(weights, passes)
        except RuntimeError:
            raise Wrong("the network is not the original one") from None
        velocity = MOMENTUM * velocity + found * min(1, max_norm / found.norm().item())
        # If all passes skip the block, momentum may or may not move its weights
        part = slice(PLAIN if len(weights) == BLOCK else None)
        right, moved = -lr * velocity[part], (one.weights - weights)[part]
        if (moved - right).norm() > rounding * right.norm():
            ratio = moved.norm() / right.norm()
            far = abs(ratio - 1) > 0.01
            how = f"{ratio:.2f} times as far as" if far else "differently than"
            text = f"step {number} moves the weights {how} one process does"
            limit = f" and a gradient norm of at most {max_norm}" * (max_norm < 9)
            count = sum(len(one.images) for one in passes)
            raise Wrong(f"{text} with the same {count} images{limit}")
        weights = one.weights.double()


def outputs(weights: Tensor, images: Tensor) -> Tensor:
    """Return the outputs of the network with these weights, in training mode."""
    norm, block = [16, 16] * (len(weights) == NORM), [256, 16] * (len(weights) == BLOCK)
    a, b, *rest = weights.split([128, 16, *norm, 48, 3, *block])
    x = F.linear(images, a.view(16, 8), b)
    if norm:
        scale, shift, *rest = rest
        x = F.batch_norm(x, None, None, scale, shift, training=True)
    c, d, *rest = rest
    if block:
        x = x + F.linear(x.relu(), rest[0].view(16, 16), rest[1])
    return F.linear(x.relu(), c.view(3, 16), d)


def summed_loss(weights: Tensor, images: Tensor) -> Tensor:
    """Return the sum of the losses of images, which may be noisy."""
    labels = LABELS[indices(images.float())]
    return F.cross_entropy(outputs(weights, images), labels, reduction="sum")


def gradient(weights: Tensor, passes: tuple[Pass, ...]) -> Tensor:
    """Return the mean loss's gradient, by differences: autograd can prevent forks."""
    shifts = 1e-6 * torch.eye(len(weights))
    losses, total = vmap(summed_loss, (0, None)), 0
    for one in passes:
        size = PLAIN if leaves_out(weights, one) else len(weights)
        up, down = (weights + shifts)[:, :size], (weights - shifts)[:, :size]
        total += losses(up, one.images.double()) - losses(down, one.images.double())
    return total / 2e-6 / sum(len(one.images) for one in passes)


def leaves_out(weights: Tensor, one: Pass) -> bool:
    """Return whether a forward pass skips the middle block."""
    if len(weights) != BLOCK:
        return False
    return not differ(outputs(weights[:PLAIN].float(), one.images), one.outputs)


def check_blocks(run: Run) -> None:
    """Some forward passes skip the middle block, and some use it."""
    left_out = []
    for rank in run.ranks:
        weights = rank.weights[0]
        for step in rank.steps:
            left_out += [leaves_out(weights, one) for one in step.passes]
            weights = step.weights
    if len({*left_out}) == 1:
        how = "leaves out" if left_out[0] else "uses"
        raise Wrong(f"every forward pass {how} the middle block")


def check_rates(run: Run) -> None:
    """The learning rate falls over the whole run."""
    rates = [step.lr for step in run.ranks[0].steps]
    if abs(rates[0] - LR) > 1e-6:
        raise Wrong(f"the learning rate of the first step is {rates[0]:.4f}, not {LR}")
    if any(after > before + 1e-6 for before, after in pairwise(rates)):
        raise Wrong("the learning rate rises again after it has fallen")
    if rates[-1] > LR / 10:
        raise Wrong(f"the learning rate falls from {LR:.4f} to only {rates[-1]:.4f}")
    if rates[len(rates) // 2] < LR / 10:
        raise Wrong("the learning rate is almost 0 after half of the steps")


def check_schedule(run: Run) -> None:
    """Each step moves the weights as in one process with this step's learning rate."""
    check_steps(run, rates=[step.lr for step in run.ranks[0].steps])


def check_averages(run: Run) -> None:
    """DDP averages the gradients once per step."""
    if (count := max(step.averages for step in run.ranks[0].steps)) > 1:
        raise Wrong(f"a step averages the gradients {count} times instead of once")


def check_noise(run: Run) -> None:
    """Each image gets its own noise."""
    images = [rank.trained() for rank in run.ranks]
    noise = [some - IMAGES[indices(some)] for some in images]
    if noise[0][:8].allclose(noise[1][:8], atol=1e-5):
        raise Wrong("both processes add the same noise to their images")
    every = torch.cat(noise)
    if len((1000 * every).round().unique(dim=0)) < len(every):
        raise Wrong("the same noise is added to several images")
    if every.std() < 0.05:
        raise Wrong("there is hardly any noise")


def check_pretrained(run: Run) -> None:
    """Training starts from the given weights."""
    if differ(run.ranks[0].weights[0], saved(FOLDER / "pretrained.pt")[1]):
        raise Wrong("training does not start from the weights in pretrained.pt")


def check_accuracy(run: Run, times: int = 1) -> None:
    """Each printed accuracy counts each validation image once."""
    passes = [one for rank in run.ranks for one in rank.validated]
    validated = {int(i) for one in passes for i in indices(one.images)}
    trained = {int(i) for rank in run.ranks for i in indices(rank.trained())}
    if both := trained & validated:
        count = f"{len(both)} of {len(validated)} validation images"
        raise Wrong(f"{count} are also used for training")
    if any(one.training for one in passes):
        raise Wrong("the script validates a network that is in training mode")
    steps = set()
    for rank, other in (run.ranks, run.ranks[::-1]):
        for step, text in rank.printed:
            for number in re.findall(r"accuracy (\d\.\d+)", text):
                passes = [*other.validated, *rank.validated]
                compare_accuracy(number, [one for one in passes if one.step == step])
                steps.add(step)
    if len(steps) < times:
        raise Wrong(f"an accuracy follows only {len(steps)} of {times} epochs")


def compare_accuracy(printed: str, passes: list[Pass]) -> None:
    """A printed accuracy matches the accuracy of these passes."""
    right = {}
    for one in passes:
        numbers = indices(one.images)
        hits = one.outputs.argmax(1) == LABELS[numbers]
        right |= zip(numbers.tolist(), hits.tolist(), strict=True)
    if len(right) != VALIDATION:
        raise Wrong(f"{len(right)} of the {VALIDATION} validation images are validated")
    hits = sum(right.values())
    if abs(float(printed) - hits / VALIDATION) > 6e-5:
        text = f"{hits} of {VALIDATION} validation images are right"
        text += f", which is {hits / VALIDATION:.4f}"
        raise Wrong(f"the printed accuracy is {printed}; {text}")


def check_norm(run: Run) -> None:
    """Both processes validate the network that is saved."""
    net, _ = saved(run.files / "model.pt", nn.BatchNorm1d(16))
    for number, rank in enumerate(run.ranks):
        with torch.no_grad():
            errors = [net(one.images) - one.outputs for one in rank.validated]
        off = max((error.abs().max().item() for error in errors), default=0)
        if off > 1e-4:
            text = f"rank {number} validates a different network from model.pt"
            raise Wrong(f"{text}: their outputs differ by up to {off:.3f}")


def check_filter(run: Run) -> None:
    """Only images with low contrast are left out."""
    used = indices(torch.cat([rank.trained() for rank in run.ranks]))
    good = (IMAGES[:TRAINING].std(1) > 0.7).nonzero().flatten()
    if bad := set(used.tolist()) - set(good.tolist()):
        raise Wrong(f"{len(bad)} images of too little contrast are used")
    if len(used) < EPOCHS * (len(good) - 16) or len(used.unique()) < len(good) - 8:
        raise Wrong(f"only {len(used)} of {EPOCHS} x {len(good)} images are used")


def check_export(run: Run) -> None:
    """The trained weights are saved."""
    if differ(run.ranks[0].weights[-1], saved(run.files / "model.pt")[1]):
        raise Wrong("model.pt does not hold the trained weights")


def check_optimizer(run: Run) -> None:
    """The state of the whole optimizer is saved."""
    if differ(run.ranks[0].weights[-1], saved(run.files / CHECKPOINT, part="model")[1]):
        raise Wrong(f"{CHECKPOINT} does not hold the trained weights")
    content = torch.load(run.files / CHECKPOINT, weights_only=True)
    state = content.get("optimizer", {}).get("state", {})
    buffers = [state[i].get("momentum_buffer") for i in sorted(state)]
    parts = [one.flatten() for one in buffers if one is not None]
    momentum = torch.cat([torch.empty(0), *parts])
    if len(momentum) != PLAIN:
        count = len(momentum)
        raise Wrong(f"{CHECKPOINT} has the momentum of {count} of {PLAIN} weights")
    before, last = (step.weights for step in run.ranks[0].steps[-2:])
    if (LR * momentum - (before - last)).abs().max() > 1e-5:
        raise Wrong(f"{CHECKPOINT} does not hold the momentum of the last step")
    if any(step.held == PLAIN for rank in run.ranks for step in rank.steps):
        raise Wrong("a process holds the optimizer's whole state while it trains")


def check_waits(run: Run) -> None:
    """The host does not wait for the device in every step."""
    steps = len(run.ranks[0].steps)
    for process in job.read(run.records).processes:
        for one in process.of("exit"):
            if (count := sum(often for _, often in one["syncs"])) > steps / 2:
                raise Wrong(f"on a GPU, {steps} steps would wait for it {count} times")


def check_collectives(run: Run) -> None:
    """The script itself calls few collectives."""
    steps = len(run.ranks[0].steps)
    if (count := len(run.ranks[0].collectives)) > 4 * EPOCHS:
        raise Wrong(f"in {steps} steps, the script itself calls {count} collectives")


def check_printed(run: Run, names: tuple[str, ...]) -> None:
    """After each epoch, the script prints the means over all images of this epoch."""
    for epoch in range(EPOCHS):
        passes = []
        for rank in run.ranks:
            share = len(rank.steps) // EPOCHS
            steps = rank.steps[epoch * share : (epoch + 1) * share]
            passes += [one for step in steps for one in step.passes]
        outputs = torch.cat([one.outputs for one in passes])
        labels = LABELS[indices(torch.cat([one.images for one in passes]))]
        right = {"loss": F.cross_entropy(outputs, labels)}
        right["accuracy"] = (outputs.argmax(1) == labels).float().mean()
        for name in names:
            line = rf"^epoch {epoch}\b.*\b{name} (\d+\.\d+)"
            found = re.search(line, run.ranks[0].text, re.M)
            if not found or abs(float(found[1]) - right[name]) > 6e-5:
                text = f"epoch {epoch}'s {name} is {right[name]:.4f}; the script prints"
                raise Wrong(f"{text} {found[1] if found else 'none'}")


def check_bytes(run: Run) -> None:
    """After each epoch, the script prints the bytes of all gradients so far."""
    for epoch in range(EPOCHS):
        count = (epoch + 1) * 6 * PLAIN * 4
        if str(count) not in run.ranks[0].text:
            raise Wrong(f"epoch {epoch} ends after {count} bytes; they are not printed")


def check_local(run: Run, every: int = 4) -> None:
    """Each process takes its own steps; every fourth step averages the weights."""
    weights = [rank.weights[0].double() for rank in run.ranks]
    velocity = [torch.zeros_like(one) for one in weights]
    rows = enumerate(zip(*(rank.steps for rank in run.ranks), strict=False), 1)
    for number, row in rows:
        for rank, step in enumerate(row):
            found = gradient(weights[rank], step.passes)
            velocity[rank] = MOMENTUM * velocity[rank] + found
            right, moved = -LR * velocity[rank], step.weights - weights[rank]
            if (moved - right).norm() > 1e-3 * right.norm():
                raise Wrong(f"in step {number}, rank {rank} does not take its own step")
            weights[rank] = step.weights.double()
        if number % every == 0:
            weights = [sum(weights) / 2] * 2
    if differ((sum(weights) / 2).float(), saved(run.files / "model.pt")[1]):
        raise Wrong("model.pt does not hold the mean of both processes' weights")


def check_files(run: Run) -> None:
    """No epoch uses an image twice; each uses at least 64, and all together more."""
    seen = [indices(rank.trained()).chunk(EPOCHS) for rank in run.ranks]
    for epoch, pair in enumerate(zip(*seen, strict=True)):
        used = torch.cat(pair)
        if len(used.unique()) < max(len(used), 64):
            text = f"epoch {epoch} uses {len(used.unique())} of {TRAINING} images"
            raise Wrong(f"{text}, {len(used)} times in all")
    used = indices(torch.cat([rank.trained() for rank in run.ranks])).unique()
    if len(used) <= 64:
        raise Wrong(f"{TRAINING - len(used)} of {TRAINING} images are used in no epoch")


def check_workers(run: Run) -> None:
    """Two workers read the images of each process."""
    if (count := min(rank.steps[0].workers for rank in run.ranks)) < 2:
        raise Wrong(f"a process reads its images with {count} workers instead of 2")


def check_batches(run: Run, size: int) -> None:
    """Each step uses `size` images per process."""
    for rank, one in enumerate(run.ranks):
        for number, step in enumerate(one.steps, 1):
            count = sum(len(x.images) for x in step.passes)
            if count != size:
                text = f"in step {number}, rank {rank} uses {count} images"
                raise Wrong(f"{text} instead of {size}")


def check_scaler(run: Run) -> None:
    """The loss is scaled, and the learning rate is the given one."""
    if any(abs(step.lr - LR) > 1e-6 for step in run.ranks[0].steps):
        raise Wrong(f"the learning rate is not {LR}")
    steps = job.read(run.records).processes[0].of("step")
    if any((one["scale"] or 1) <= 1 for step in steps for one in step["passes"]):
        raise Wrong("the loss is not multiplied by a gradient scaler's scale")


def check_bf16(run: Run) -> None:
    """The network computes in bf16."""
    passes = [one for step in run.ranks[0].steps for one in step.passes]
    if any(one.outputs.dtype != torch.bfloat16 for one in passes):
        raise Wrong("the network does not compute in bf16")


def check_sharded(run: Run) -> None:
    """The optimizer updates shards of the weights."""
    if not all(step.sharded for rank in run.ranks for step in rank.steps):
        raise Wrong("each process holds all weights: FSDP2 does not shard them")


def check_network(run: Run, size: int = NORM) -> None:
    """The network has `size` weights."""
    if (count := len(run.ranks[0].weights[0])) != size:
        raise Wrong(f"the network has {count} weights instead of {size}")


SHARED = check_weights, check_shares
USUAL = *SHARED, check_steps
CHECKS = {  # of the labs that need other checks
    "06": (*USUAL, partial(check_printed, names=("loss",))),
    "09": (check_weights, check_noise, check_shares, check_steps),
    "10": (*USUAL, check_accuracy),
    "11": (*USUAL, check_accuracy),
    "12": (*SHARED, check_rates, check_schedule),
    "13": (check_accuracy, *USUAL),
    "14": (*SHARED, partial(check_steps, max_norm=0.3)),
    "15": (*USUAL, check_blocks),
    "16": (*USUAL, check_norm, check_accuracy),
    "18": (*USUAL, check_averages),
    # The first 4 batches are full
    "19": (check_weights, check_filter, partial(check_steps, rates=(LR,) * 4)),
    "20": (*USUAL, check_network, partial(check_accuracy, times=EPOCHS)),
    "21": (*USUAL, check_export),
    "22": (*USUAL, check_pretrained),
    "25": (*USUAL, check_bytes),
    "26": (*SHARED, check_scaler, partial(check_steps, max_norm=0.3)),
    "27": (
        *SHARED,
        partial(check_steps, rates=(0.001,) * 99, rounding=0.05),
        check_bf16,
    ),
    "28": (*USUAL, check_optimizer),
    "29": (*USUAL, check_sharded, check_export),
    "30": (*SHARED, partial(check_steps, max_norm=0.3)),
    "31": (*USUAL, partial(check_printed, names=("loss",)), check_waits),
    "32": (
        *USUAL,
        partial(check_printed, names=("loss", "accuracy")),
        check_collectives,
    ),
    "33": (*USUAL, check_sharded),
    "35": (*USUAL, check_workers),
    "36": (check_weights, check_files, partial(check_batches, size=8), check_steps),
    "37": (check_shares, check_local),
}


# --- runs to check ---


def play(script: Path, files: Path, checks=None, **options) -> Run:
    """Run a script to its end, then run its lab's checks or the given ones."""
    with started(script, files, **options) as run:
        run.end()
    check(run, script, checks)
    return run


def check(run: Run, script: Path, checks=None) -> None:
    """Run the checks of a script's lab, or the given ones."""
    for one in checks or CHECKS.get(name(script), USUAL):
        one(run)
    if not checks and name(script) != "19":  # its batches vary in size
        check_batches(run, 16 if name(script) in ("17", "18") else 8)


@contextlib.contextmanager
def under(condition: str) -> Iterator[None]:
    """Put the condition under which a Wrong occurs before its message."""
    try:
        yield
    except Wrong as wrong:
        raise Wrong(f"{condition}, {wrong}") from None


def play_on_machines(script: Path, files: Path) -> None:
    """Run a script on two machines with one process each."""
    with under("on two machines with one process each"):
        play(script, files, machines=2)
    play(script, files)


def play_twice(script: Path, files: Path) -> None:
    """Run a script twice at the same time."""
    ready, go = FORK.Semaphore(0), FORK.Event()

    def hold(_) -> None:
        ready.release()
        go.wait()

    with started(script, files, disturb=hold) as first:
        all(ready.acquire(timeout=PATIENCE) for _ in range(2))
        with under("if another run is in progress"):
            play(script, files)
        go.set()
        first.end()
        check(first, script)


def play_killed(script: Path, files: Path) -> None:
    """Run a script once uninterrupted, and once killed and resumed."""
    compare_killed(play(script, files), script, files)


def compare_killed(whole: Run, script: Path, files: Path) -> None:
    """A run that is killed and resumed ends with an uninterrupted run's weights."""
    files = files.with_name("again")
    kill = lambda steps: steps == 12 and os._exit(1)  # noqa: E731
    with started(script, files, disturb=kill) as run:
        run.end(may_fail=True)
    again = play(script, files, (check_weights,)).ranks[0]
    if len(again.steps) != 6:
        text = "after a run that was killed in epoch 2, the next run takes"
        raise Wrong(f"{text} {len(again.steps)} steps instead of the last 6")
    if differ(again.weights[-1], whole.ranks[0].weights[-1]):
        text = "a run that is killed in epoch 2 and then resumed"
        raise Wrong(f"{text} ends with different weights than an uninterrupted run")


def play_killed_while_saving(script: Path, files: Path) -> None:
    """Run a script once uninterrupted, and once killed during its second save."""
    steps = play(script, files).ranks[0].steps

    def check_checkpoint(file: Path) -> int:
        _, weights = saved(file, part="model")
        if all(differ(weights, step.weights) for step in steps[5::6]):
            raise Wrong(f"{file.name} does not hold the weights after an epoch")
        return file.stat().st_size

    size = check_checkpoint(files / CHECKPOINT)

    def limit(steps: int) -> None:  # the kernel kills a process that writes more
        if steps == 6:
            recorder.watch.write = lambda *_, **__: None  # must not hit the limit
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, size - 1))

    files = files.with_name("again")
    with started(script, files, disturb=limit) as run:
        run.end(may_fail=True)
    with under("if the run is killed during its second save"):
        check_checkpoint(files / CHECKPOINT)


def play_capstone(script: Path, files: Path) -> None:
    """Run uninterrupted, and killed and resumed; count the mistakes that are left."""
    run = play(script, files, (check_weights, check_averages))
    left = 0
    checks = check_noise, check_rates, check_schedule, check_shares
    for one in *checks, partial(check_accuracy, times=EPOCHS):
        try:
            one(run)
        except Wrong:
            left += 1
    try:
        compare_killed(run, script, files)
    except Wrong:
        left += 1
    if left:
        raise Wrong(f"{left} of 6 mistakes are left")


PLAYS = {
    "capstone": play_capstone,
    "01": play_on_machines,
    "02": play_twice,
    "23": play_killed,
    "24": play_killed_while_saving,
}


def grade(script: Path) -> str | None:
    """Return what is wrong with a script, or None."""
    with tempfile.TemporaryDirectory(prefix="lab-") as folder:
        try:
            PLAYS.get(name(script), play)(script, Path(folder, "files"))
        except Wrong as wrong:
            return str(wrong)
        except Exception as error:
            return f"the script cannot be graded: {error}"
    return None


def main(words: list[str]) -> int:
    """Grade labs; return the exit status."""
    paths = [*sorted(FOLDER.glob("[0-9][0-9]_*.py")), FOLDER / "capstone.py"]
    scripts = {name(path): path for path in paths}
    chosen = list(scripts) if words in ([], ["all"]) else [w.zfill(2) for w in words]
    if unknown := [number for number in chosen if number not in scripts]:
        labs = f"the labs are {', '.join(scripts)}"
        print(f"grade.py: error: no lab {unknown[0]}; {labs}", file=sys.stderr)
        return 2
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the labs need no GPU
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and end the processes
    passed = 0
    try:
        for number in [*chosen]:
            if "import horovod" in scripts[number].read_text() and not HOROVOD:
                print(f"{number} is not graded, because it needs Horovod", flush=True)
                chosen.remove(number)
                continue
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
