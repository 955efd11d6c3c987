"""What the grader checks: each check_... function checks one run of a lab.

A lab's header names its checks. They raise Wrong with what the script does wrong.
"""

import re
from collections.abc import Iterator
from itertools import combinations, pairwise
from pathlib import Path

import torch
from play import Forward, Run, Wrong
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

FOLDER = Path(__file__).resolve().parent
# The images of all scripts, and the network and optimizer of most scripts
EPOCHS, TRAINING, VALIDATION = 3, 96, 33
LR, MOMENTUM = 0.1, 0.9
IMAGES = torch.randn(129, 8, generator=torch.Generator().manual_seed(0))
LABELS = IMAGES[:, :3].argmax(1)
# Weights of most networks; with batch norm; with a block, whose weights are last
PLAIN, NORM, BLOCK = 195, 227, 467
CHECKPOINT = "checkpoint.pt"


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


def epochs(run: Run) -> Iterator[tuple[int, Tensor]]:
    """Yield each epoch's number and image indices; raise Wrong if an order repeats."""
    shares = [indices(rank.trained()).chunk(EPOCHS) for rank in run.ranks]
    for epoch, pair in enumerate(zip(*shares, strict=True)):
        yield epoch, torch.cat(pair)
    for a, b in combinations(range(EPOCHS), 2):
        if shares[0][a].equal(shares[0][b]):
            text = "rank 0 sees the same images in the same order"
            raise Wrong(f"{text} in epochs {a} and {b}")


def check_shares(run: Run) -> None:
    """Each epoch trains the network once on each image, in a new order."""
    if (count := sum(len(rank.trained()) for rank in run.ranks)) != EPOCHS * TRAINING:
        text = f"{EPOCHS} epochs of {TRAINING} images are {EPOCHS * TRAINING}"
        raise Wrong(f"{text}; the two processes train on {count}")
    for epoch, used in epochs(run):
        if missing := TRAINING - used.unique().numel():
            text = f"epoch {epoch} leaves out {missing} of {TRAINING} images"
            raise Wrong(f"{text} and uses as many others twice")
    for number, step in enumerate(run.ranks[0].steps, 1):
        if not all(one.training for one in step.passes):
            raise Wrong(f"step {number} trains a network that is in evaluation mode")


def check_steps(
    run: Run, max_norm: float = float("inf"), rate: float = LR, rates=(), rounding=1e-3
) -> None:
    """One process with the same images in each step ends with the same weights."""
    rates = rates or (rate,) * 99
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


def gradient(weights: Tensor, passes: tuple[Forward, ...]) -> Tensor:
    """Return the mean loss's gradient, by differences: autograd can prevent forks."""
    shifts = 1e-6 * torch.eye(len(weights))
    losses, total = vmap(summed_loss, (0, None)), 0
    for one in passes:
        size = PLAIN if leaves_out(weights, one) else len(weights)
        up, down = (weights + shifts)[:, :size], (weights - shifts)[:, :size]
        total += losses(up, one.images.double()) - losses(down, one.images.double())
    return total / 2e-6 / sum(len(one.images) for one in passes)


def leaves_out(weights: Tensor, one: Forward) -> bool:
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


def check_noise(run: Run, scale: float = 0.1) -> None:
    """Each image gets its own noise: no copy, nor a scaled or reordered one."""
    images = [rank.trained() for rank in run.ranks]
    one, other = (some - IMAGES[indices(some)] for some in images)
    count = min(len(one), len(other))
    pairs = one[:count].flatten(), other[:count].flatten()
    ordered = [part.abs().sort().values for part in pairs]
    if torch.corrcoef(torch.stack(pairs))[0, 1].abs() > 0.3 or ordered[0].allclose(
        ordered[1], atol=1e-5
    ):
        raise Wrong("both processes add the same noise to their images")
    every = torch.cat([one, other])
    if not 0.8 * scale < every.std() < 1.2 * scale:
        text = f"a standard deviation of {every.std():.3f} instead of {scale}"
        raise Wrong(f"the noise has {text}")
    every = F.normalize(every)
    for rows in (every, every.abs().sort(1).values):
        near = torch.cdist(rows, rows) < 1e-3
        near |= torch.cdist(rows, -rows) < 1e-3
        if near.fill_diagonal_(False).any():
            raise Wrong("the same noise is added to several images")


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
        for line in rank.printed:
            for number in re.findall(r"accuracy (\d\.\d+)", line.text):
                passes = [*other.validated, *rank.validated]
                passes = [one for one in passes if one.step == line.step]
                compare_accuracy(number, passes)
                steps.add(line.step)
    if len(steps) < times:
        raise Wrong(f"an accuracy follows only {len(steps)} of {times} epochs")


def compare_accuracy(printed: str, passes: list[Forward]) -> None:
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
    """Only images with low contrast are left out, and each epoch has a new order."""
    good = IMAGES[:TRAINING].std(1) > 0.7
    shares = [int(good[rank::2].sum()) for rank in (0, 1)]  # of processes
    least = 2 * 8 * (min(shares) // 8)  # if both drop what only one of them has
    for epoch, found in epochs(run):
        if bad := int((~good[used := found.unique()]).sum()):
            raise Wrong(f"{bad} images of too little contrast are used")
        if len(used) < least:
            text = f"epoch {epoch} uses only {len(used)} of {int(good.sum())} images"
            raise Wrong(f"{text} with enough contrast")


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
    steps = run.ranks[0].steps
    if (count := sum(step.waits for step in steps)) > len(steps) / 2:
        text = f"on a GPU, {len(steps)} steps would wait for it {count} times"
        raise Wrong(f"{text}; at most {len(steps) // 2} are allowed")


def check_collectives(run: Run) -> None:
    """The script itself calls few collectives."""
    steps, most = len(run.ranks[0].steps), 4 * EPOCHS
    if (count := len(run.ranks[0].collectives)) > most:
        text = f"in {steps} steps, the script itself calls {count} collectives"
        raise Wrong(f"{text}; at most {most} are allowed")


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
    every = set()
    for epoch, used in epochs(run):
        if len(used.unique()) < max(len(used), 64):
            text = f"epoch {epoch} uses {len(used.unique())} of {TRAINING} images"
            raise Wrong(f"{text}, {len(used)} times in all")
        every |= {*used.tolist()}
    if len(every) <= 64:
        raise Wrong(
            f"{TRAINING - len(every)} of {TRAINING} images are used in no epoch"
        )


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
    if any(step.scale <= 1 for step in run.ranks[0].steps):
        raise Wrong("the loss is not multiplied by a gradient scaler's scale")


def check_bf16(run: Run) -> None:
    """The network computes in bf16."""
    passes = [one for step in run.ranks[0].steps for one in step.passes]
    if any(one.dtype != "torch.bfloat16" for one in passes):
        raise Wrong("the network does not compute in bf16")


def check_sharded(run: Run) -> None:
    """The optimizer updates shards of the weights."""
    if not all(step.sharded for rank in run.ranks for step in rank.steps):
        raise Wrong("each process holds all weights: FSDP2 does not shard them")


def check_network(run: Run, size: int = NORM) -> None:
    """The network has `size` weights."""
    if (count := len(run.ranks[0].weights[0])) != size:
        raise Wrong(f"the network has {count} weights instead of {size}")
