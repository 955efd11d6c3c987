"""The grader's checks: each check_... function checks one run of a lab.

A lab's header names its checks. A check raises Wrong with the script's mistake.
"""

import re
import textwrap
from dataclasses import replace
from itertools import chain, combinations, pairwise
from pathlib import Path

import torch
from lab import FOLDER
from play import EPOCHS, Forward, Run, Wrong
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

# The images of all scripts, and the network and optimizer of most scripts
TRAINING, VALIDATION = 96, 33
LR, MOMENTUM = 0.1, 0.9
IMAGES = torch.randn(129, 8, generator=torch.Generator().manual_seed(0))
LABELS = IMAGES[:, :3].argmax(1)
# Weight counts of most networks, with batch norm, and with a block (the last weights)
PLAIN, NORM, BLOCK = 195, 227, 467
CHECKPOINT = "checkpoint.pt"


def differ(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors differ by more than rounding."""
    return one.shape != other.shape or not torch.allclose(one, other, atol=1e-5)


def indices(images: Tensor) -> Tensor:
    """Return the dataset indices of N images (N, 8), which may contain added noise."""
    return torch.cdist(images, IMAGES).argmin(1)


def saved(file: Path, *norm: nn.Module, part: str = "") -> tuple[nn.Module, Tensor]:
    """Load the network that most scripts save; return it and its weights."""
    net = nn.Sequential(nn.Linear(8, 16), *norm, nn.ReLU(), nn.Linear(16, 3))
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
        net.load_state_dict(content[part] if part else content)
    except Exception as error:
        text = f"the network without DDP cannot load {file.name}: {error}"
        text = text.replace(str(file), file.name)
        raise Wrong(textwrap.shorten(text, 400)) from None
    return net.eval(), nn.utils.parameters_to_vector(net.parameters()).detach()


def check_weights(run: Run) -> None:
    """Check that all processes have the same weights from the first step to the end."""
    one, other = (rank.weights for rank in (run.ranks[0], run.ranks[-1]))
    if not (one and other):
        raise Wrong("the optimizer takes no step")
    stages = [("before the first step", 0), ("at the end", -1)]
    if len(one) == len(other):  # unlike those of model.join()
        stages[1:1] = [(f"after step {step}", step) for step in range(1, len(one) - 1)]
    for when, stage in stages:
        if differ(one[stage], other[stage]):
            raise Wrong(f"the two processes have different weights {when}")
    for number, (step, later) in enumerate(pairwise(run.ranks[0].steps), 1):
        if len(one) == len(other) and differ(step.after, later.before):
            raise Wrong(f"the weights change between steps {number} and {number + 1}")


def check_shares(
    run: Run, least: int = TRAINING, contrast: float = 0, repeats: int = 0
) -> None:
    """Check that each epoch trains on at least `least` images, in a new order.

    With one process, an epoch may leave out less than one batch of images. Images with
    too little contrast must not be used, nor more than `repeats` images twice.
    """
    good = IMAGES.std(1) > contrast
    count = int(good[:TRAINING].sum())
    if len(run.ranks) == 1 and least < TRAINING:
        least = count - 7
    seen = [rank.epochs() for rank in run.ranks]  # rank, epoch, step: indices
    seen = [[[indices(x.images()).tolist() for x in y] for y in z] for z in seen]
    every_epoch = set()
    for epoch, ranks in enumerate(zip(*seen, strict=True)):
        every = [*chain(*chain(*ranks))]
        used = {*every}
        every_epoch |= used
        if bad := len(used) - int(good[[*used]].sum()):
            raise Wrong(f"{bad} images of too little contrast are used")
        if len(used) < least or len(every) - len(used) > repeats:
            text = f"epoch {epoch} uses {len(every)} images, of which {len(used)} are"
            goal = f"{'at least ' * (least < TRAINING)}{least}"
            raise Wrong(f"{text} different; it should use each of {goal} images once")
    if every_epoch == used and len(used) < count:
        raise Wrong("every epoch leaves out the same images")
    for rank, epochs in enumerate(seen):
        together = [chain(*(combinations(x, 2) for x in one)) for one in epochs]
        order = [pairwise(chain(*one)) for one in epochs]
        for what, kind in (("order", order), ("batches", together)):
            pairs = [{*map(frozenset, one)} for one in kind]
            for a, b in combinations(range(EPOCHS), 2):
                if len(pairs[a] & pairs[b]) > len(pairs[a]) * 2 / 3:
                    text = f"rank {rank} sees the same images in the same {what}"
                    raise Wrong(f"{text} in epochs {a} and {b}")


def check_files(run: Run) -> None:
    """Check that only one process writes each file."""
    files = [{path for one in x.last for path in one.wrote} for x in run.ranks]
    shared = set.intersection(*files)
    if shared and len(run.ranks) > 1:
        raise Wrong(f"both processes write {Path(shared.pop()).name}")


def check_limits(run: Run, averages: float = 1.5, **most: float) -> None:
    """Check that no field of a Step or Last event exceeds its limit."""
    what = {"at_once": "{:g} images pass through the network at once"}
    what["averages"] = "a step sends {:.3g} times as many numbers as it has gradients"
    what["waits"] = "on a GPU, the script would wait for it {:g} times"
    what["collectives"] = "the script itself calls collectives {:g} times"
    for name, limit in {"averages": averages, **most}.items():
        events = [one for rank in run.ranks for one in (*rank.steps, *rank.last)]
        counts = [getattr(one, name) for one in events if hasattr(one, name)]
        if max(counts, default=0) > limit:
            raise Wrong(f"{what[name].format(max(counts))}; the limit is {limit:g}")


def check_steps(
    run: Run,
    *,
    batch: int = 8,  # images per process and step
    images: int = 0,  # images of all processes per step, instead of `batch`
    most: int | None = None,  # number of steps to check
    rate: float | None = LR,  # None: each step's own learning rate
    max_norm: float = float("inf"),
    rounding: float = 1e-3,
    size: int = PLAIN,
) -> None:
    """Check that one process with the same images per step takes the same steps."""
    velocity = torch.zeros(size).double()
    batch = images // len(run.ranks) or batch
    rows = [*zip(*(rank.steps for rank in run.ranks), strict=False)]
    for number, row in enumerate(rows[:most], 1):
        step, passes = row[0], [one for own in row for one in own.passes]
        if len(step.before) != size:
            raise Wrong(f"the network has {len(step.before)} weights instead of {size}")
        for rank, own in enumerate(row):
            if (count := len(own.images())) != batch:
                text = f"in step {number}, rank {rank} uses {count} images"
                raise Wrong(f"{text} instead of {batch}")
        weights, lr = step.before.double(), rate or step.lr
        found = gradient(weights, passes)
        velocity = MOMENTUM * velocity + found * min(1, max_norm / found.norm().item())
        # If all passes skip the block, momentum may or may not move its weights
        part = slice(PLAIN if size == BLOCK else None)
        right, moved = -lr * velocity[part], (step.after - weights)[part]
        if (moved - right).norm() > rounding * right.norm():
            ratio = moved.norm() / right.norm()
            far = abs(ratio - 1) > 0.01
            how = f"{ratio:.2f} times as far as" if far else "differently than"
            text = f"step {number} moves the weights {how} plain SGD does"
            limit = f" and a gradient norm of at most {max_norm}" * (max_norm < 9)
            raise Wrong(f"{text} with the same {batch * len(row)} images{limit}")
    spread = rows[0][0].before[:128].std().item()  # of the first layer
    if not 0.163 < spread < 0.248:  # the watcher scales it by 0.95 to 1.05
        text = f"the first layer starts with a standard deviation of {spread:.2f}"
        raise Wrong(f"{text}; nn.Linear gives its weights about 0.2")


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
    """Return the sum of the losses of images, which may contain added noise."""
    labels = LABELS[indices(images.float())]
    return F.cross_entropy(outputs(weights, images), labels, reduction="sum")


def gradient(weights: Tensor, passes: list[Forward]) -> Tensor:
    """Return the mean loss's gradient without autograd, which may prevent forks."""
    shifts = 1e-8 * torch.eye(len(weights)).double()
    losses, total = vmap(summed_loss, (0, None)), 0
    for one in passes:
        size = PLAIN if leaves_out(weights, one) else len(weights)
        up, down = (weights + shifts)[:, :size], (weights - shifts)[:, :size]
        total += losses(up, one.images.double()) - losses(down, one.images.double())
    return total / 2e-8 / sum(len(one.images) for one in passes)


def leaves_out(weights: Tensor, one: Forward) -> bool:
    """Return whether a forward pass skips the middle block."""
    if len(weights) != BLOCK:
        return False
    return not differ(outputs(weights[:PLAIN].float(), one.images), one.outputs)


def check_blocks(run: Run) -> None:
    """Check that forward passes skip the middle block at random, until the end."""
    for rank, one in enumerate(run.ranks):
        out = [leaves_out(x.before, x.passes[0]) for x in one.steps]
        half = len(out) // 2
        random = all(0 < sum(x) < half for x in (out[:half], out[-half:]))
        if not random or out[:-2] == out[2:]:
            steps = [number for number, left in enumerate(out, 1) if left]
            text = f"rank {rank} leaves out the middle block in steps {steps}"
            raise Wrong(f"{text} of {len(out)}: this is not random")


def check_rates(run: Run) -> None:
    """Check that the learning rate falls over the whole run."""
    rates = [step.lr for step in run.ranks[0].steps]
    first, middle, last = (rates[i] for i in (0, len(rates) // 2, -1))
    falls = [before - after for before, after in pairwise(rates)]
    jump = max(falls) > 2 * LR / len(falls)  # cosine's largest is 1.6 times the mean
    if min(falls) < -1e-6 or jump or abs(first - LR) > 1e-6 or not last < LR / 10:
        text = f"the learning rate is {first:.3f} in the first step, {middle:.3f} in"
        text += f" the middle and {last:.3f} in the last step"
        text += f", and falls by {max(falls):.3f} in one step" * jump
        raise Wrong(f"{text}; it should fall from {LR} to almost 0, step by step")


def check_noise(run: Run, scale: float = 0.1) -> None:
    """Check that each image gets its own noise, not a copy of other images' noise."""
    noise = []
    for number, rank in enumerate(run.ranks):
        images = rank.trained()
        noise.append((images - IMAGES[indices(images)]).flatten())
        if not 0.85 * scale < (spread := noise[-1].std()) < 1.15 * scale:
            text = f"rank {number}'s noise has a standard deviation of {spread:.3f}"
            raise Wrong(f"{text} instead of {scale}")
        if repeated(noise[-1]):
            raise Wrong(f"rank {number} adds the same noise to several images")
    pairs = torch.stack([one[: min(map(len, noise))] for one in noise])
    alike = len(noise) > 1 and torch.corrcoef(pairs)[0, 1].abs() > 0.3
    if alike or repeated(torch.cat(noise)):
        raise Wrong("both processes add the same noise to their images")


def repeated(values: Tensor) -> bool:
    """Return whether many of the absolute values occur several times."""
    return bool((values.abs().sort().values.diff() < 1e-6).float().mean() > 0.1)


def check_pretrained(run: Run) -> None:
    """Check that training starts from the weights in pretrained.pt."""
    if differ(run.ranks[0].weights[0], saved(FOLDER / "pretrained.pt")[1]):
        raise Wrong("training does not start from the weights in pretrained.pt")


def check_accuracy(run: Run, times: int = 1, divided: bool = True) -> None:
    """Check that each printed accuracy counts each validation image once.

    If `divided` is true, each process validates its share of the images.
    """
    passes = [one for rank in run.ranks for one in rank.validated]
    if any(one.training for one in passes):
        raise Wrong("the script validates a network that is in training mode")
    trained = torch.cat([indices(rank.trained()) for rank in run.ranks])
    if both := {*trained.tolist()} & hits(passes).keys():
        count = f"{len(both)} of {len(hits(passes))} validation images"
        raise Wrong(f"{count} are also used for training")
    steps = set()
    for rank in run.ranks:
        ranks = sorted(run.ranks, key=lambda one: one is rank)  # its own passes win
        passes = [one for x in ranks for one in x.validated]
        for line in rank.printed:
            right = hits([one for one in passes if one.step == line.step])
            share = sum(right.values()) / VALIDATION
            for printed in re.findall(r"accuracy (\d\.\d+)", line.text):
                if len(right) != VALIDATION:
                    text = f"{len(right)} of the {VALIDATION} validation images"
                    raise Wrong(f"{text} are validated")
                if abs(float(printed) - share) > 6e-5:
                    text = f"the printed accuracy is {printed} instead of {share:.4f}"
                    raise Wrong(f"{text}: {sum(right.values())} of {VALIDATION}")
                steps.add(line.step)
    if len(steps) < times:
        raise Wrong(f"only {len(steps)} of {times} epochs end with an accuracy")
    share = -(-VALIDATION // len(run.ranks))
    for number, rank in enumerate(run.ranks):
        count = sum(len(one.images) for one in rank.validated) / len(steps)
        if divided and count > share:
            text = f"rank {number} validates {count:g} images; its share is {share} of"
            raise Wrong(f"{text} {VALIDATION}")


def hits(passes: list[Forward]) -> dict[int, bool]:
    """Return {image index: whether it is classified correctly} for validated images."""
    right = {}
    for one in passes:
        numbers = indices(one.images)
        found = one.outputs.argmax(1) == LABELS[numbers]
        right |= zip(numbers.tolist(), found.tolist(), strict=True)
    return right


def check_norm(run: Run) -> None:
    """Check that both processes validate the network that the script saves."""
    net, _ = saved(run.files / "model.pt", nn.BatchNorm1d(16))
    if not net[1].running_mean.any():
        raise Wrong("the means of batch norm in model.pt are not those of training")
    for number, rank in enumerate(run.ranks):
        with torch.no_grad():
            errors = [net(one.images) - one.outputs for one in rank.validated]
        off = max((error.abs().max().item() for error in errors), default=0)
        if off > 1e-4:
            text = f"rank {number} validates a different network from model.pt"
            raise Wrong(f"{text}: their outputs differ by up to {off:.3f}")


def check_export(run: Run, file: str = "model.pt", part: str = "") -> None:
    """Check that the script saves the trained weights."""
    if differ(run.ranks[0].weights[-1], saved(run.files / file, part=part)[1]):
        raise Wrong(f"{file} does not hold the trained weights")


def check_optimizer(run: Run) -> None:
    """Check that the script saves the optimizer's state for all weights."""
    content = torch.load(run.files / CHECKPOINT, weights_only=True)
    state = content.get("optimizer", {}).get("state", {})
    parts = [state[i]["momentum_buffer"].flatten() for i in sorted(state)]
    last = run.ranks[0].steps[-1]
    if differ(LR * torch.cat([torch.empty(0), *parts]), last.before - last.after):
        raise Wrong(f"{CHECKPOINT} does not hold the momentum of all weights")


def check_printed(run: Run, names: tuple[str, ...]) -> None:
    """Check that the script prints each epoch's means over all images of the epoch."""
    for epoch in range(EPOCHS):
        steps = chain(*(rank.epochs()[epoch] for rank in run.ranks))
        passes = [one for step in steps for one in step.passes]
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
    """Check that each epoch prints how many bytes of gradients were sent so far."""
    for epoch in range(EPOCHS):
        count = (epoch + 1) * len(run.ranks[0].steps) // EPOCHS * PLAIN * 4
        if str(count) not in run.ranks[0].text:
            raise Wrong(f"epoch {epoch} ends after {count} bytes; this is not printed")


def check_local(run: Run, every: int = 4) -> None:
    """Check that processes take their own steps, but average weights every 4th step."""
    for rank in run.ranks:
        check_steps(replace(run, ranks=[rank]))
    rows = [*zip(*(rank.steps for rank in run.ranks), strict=True)]
    means = [sum(step.after for step in row) / len(row) for row in rows]
    for number, (row, later) in enumerate(pairwise(rows), 1):
        for step, after in zip(row, later, strict=True):
            start = step.after if number % every else means[number - 1]
            if differ(start, after.before):
                how = "own" if number % every else "mean"
                raise Wrong(f"step {number + 1} does not start from the {how} weights")
    if differ(means[-1], saved(run.files / "model.pt")[1]):
        raise Wrong("model.pt does not hold the mean of both processes' weights")


def check_uses(run: Run, **facts: object) -> None:
    """Check that every Step event of each process has these values in its fields."""
    for rank, one in enumerate(run.ranks):
        for number, step in enumerate(one.steps, 1):
            for name, right in facts.items():
                if (found := getattr(step, name)) != right:
                    text = f"in step {number} of rank {rank}, {name} is {found}"
                    raise Wrong(f"{text} instead of {right}")
