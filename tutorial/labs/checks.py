"""The grader's checks: each check_... function checks one run of a lab.

A lab's header names its checks. A check raises Wrong with the script's mistake.
"""

import re
import textwrap
from collections import Counter
from itertools import chain, combinations, pairwise

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from doctor.loaders import Batch
from tutorial.labs.lab import FOLDER
from tutorial.labs.play import CHECKPOINT, EPOCHS, Forward, Run, Step, Wrong

# The images of all scripts, and the network and optimizer of most scripts
TRAINING, VALIDATION = 96, 33
LR, MOMENTUM = 0.1, 0.9
IMAGES = torch.randn(129, 8, generator=torch.Generator().manual_seed(0))
LABELS = IMAGES[:, :3].argmax(1)
# Weight counts of most networks, with batch norm, and with a block (the last weights)
PLAIN, NORM, BLOCK = 195, 227, 467


def indices(*images: Tensor) -> list[int]:
    """Return the dataset indices of images (N, 8), which may contain added noise."""
    return torch.cdist(torch.cat([IMAGES[:0], *images]), IMAGES).argmin(1).tolist()


def expect(what: str, found: object, right: object) -> None:
    """Raise Wrong if a value is not the right one."""
    if found != right:
        raise Wrong(f"{what}: {found} instead of {right}")


def same(one: Tensor, other: Tensor, wrong: str) -> None:
    """Raise Wrong if two tensors differ by more than rounding."""
    if one.shape != other.shape or not torch.allclose(one, other, atol=1e-5):
        raise Wrong(wrong)


def check_weights(run: Run, every: int = 1) -> None:
    """Check that the processes continue with their mean weights every n-th step.

    After the other steps, each process continues with its own weights.
    """
    rows = [*zip(*(rank.steps for rank in run.ranks), strict=False)]
    if not rows:
        raise Wrong("the optimizer takes no step")
    wrong = "the processes have different weights"
    same(rows[0][0].before, rows[0][-1].before, f"{wrong} before the first step")
    # With model.join(), the processes may take different numbers of steps
    aligned = len({len(rank.steps) for rank in run.ranks}) == 1
    for number, (row, later) in enumerate(pairwise(rows if aligned else []), 1):
        mean = sum(step.after for step in row) / len(row)
        how = "their own" if number % every else "the same"
        text = f"after step {number}, the processes do not continue with {how} weights"
        for step, after in zip(row, later, strict=True):
            same(step.after if number % every else mean, after.before, text)
    if every == 1:
        first, last = run.ranks[0].weights[-1], run.ranks[-1].weights[-1]
        same(first, last, f"{wrong} at the end")


def check_shares(
    run: Run,
    least: int = TRAINING,
    contrast: float = 0,
    repeats: int = 0,
    divided: bool = False,
) -> None:
    """Check that each epoch trains on at least `least` images, in a new order.

    With one process, an epoch may leave out less than one batch of images. Images with
    too little contrast must not be used, nor more than `repeats` images twice. If
    `divided`, a process's images must not go to one process again in another epoch.
    """
    good = {*torch.nonzero(IMAGES.std(1) > contrast).flatten().tolist()}
    most = len(good & {*range(TRAINING)})
    if len(run.ranks) == 1 and least < TRAINING:
        least = most - 7
    seen = []  # rank, epoch, step: indices
    for rank in run.ranks:
        batches = [indices(step.images) for step in rank.steps]
        size = -(-len(batches) // EPOCHS)
        seen.append([batches[size * epoch :][:size] for epoch in range(EPOCHS)])
    each = [[*chain(*chain(*ranks))] for ranks in zip(*seen, strict=True)]
    for epoch, used in enumerate(each):
        expect("images of too little contrast", len({*used} - good), 0)
        if (count := len({*used})) < least or len(used) - count > repeats:
            text = f"epoch {epoch} uses {len(used)} images, of which {count} are"
            goal = f"{'at least ' * (least < TRAINING)}{least}"
            raise Wrong(f"{text} different; it should use each of {goal} images once")
    if len({*each[-1]}) == len({*chain(*each)}) < most:
        raise Wrong("every epoch leaves out the same images")
    for rank, epochs in enumerate(seen):
        order = [pairwise(chain(*one)) for one in epochs]
        together = [chain(*(combinations(x, 2) for x in one)) for one in epochs]
        kinds = [("next to the same images", order)]
        kinds += [("in the same batches", together)] * (least == TRAINING)
        for what, pairs in kinds:
            for a, b in combinations([{*map(frozenset, one)} for one in pairs], 2):
                if len(a) > 8 and len(a & b) > len(a) * 2 / 3:
                    raise Wrong(f"rank {rank} sees most images {what} in two epochs")
    parts = [frozenset(chain(*one)) for epochs in seen for one in epochs]
    shared = any(len(a & b) > 0.8 * len(a) for a, b in combinations(parts, 2))
    if divided and len(seen) > 1 and shared:
        raise Wrong("a process's images go to one process again in another epoch")


def check_centered(run: Run) -> None:
    """Check that all training images are images minus the mean of all of them."""
    right = IMAGES[:TRAINING] - IMAGES[:TRAINING].mean(0)
    images = torch.cat([step.images for rank in run.ranks for step in rank.steps])
    nearest = right[torch.cdist(images, right).argmin(1)]
    if (most := (images - nearest).abs().max()) > 1e-4:
        raise Wrong(f"the images minus their mean are wrong by up to {most:.2g}")


def check_batches(run: Run) -> None:
    """Check that the script trains on all images that its workers load."""
    for rank, one in enumerate(run.ranks):
        loaded = sum(len(batch.labels or ()) for batch in one.process.of(Batch))
        if loaded > (used := sum(len(step.images) for step in one.steps)):
            raise Wrong(f"rank {rank} loads {loaded} images but trains on {used}")


def check_facts(run: Run, **facts: object) -> None:
    """Check fields of all Step and Last events: a limit, or a list of right values.

    Also check that only one process writes each file, none of them beside the script,
    and, with two processes, that the script calls few collectives.
    """
    events = [one for rank in run.ranks for one in (*rank.steps, *rank.last)]
    files = Counter(chain(*(one.wrote for rank in run.ranks for one in rank.last)))
    if shared := [path.name for path, count in files.items() if count > 1]:
        raise Wrong(f"several processes write {shared[0]}")
    outside = [path for path in files if not path.is_relative_to(run.files.resolve())]
    here = run.script.parent
    if beside := [path.name for path in outside if path.is_relative_to(here)]:
        raise Wrong(f"the script writes {beside[0]} beside itself, for all later runs")
    # The lab's own limits come first: their messages say more
    limits = facts | {"all_reduces_per_step": 1, "collectives": 17} | facts
    if len(run.ranks) != 2:
        del limits["collectives"]  # it depends on the number of steps
    for name, right in limits.items():
        for found in [getattr(one, name) for one in events if hasattr(one, name)]:
            if found not in right if isinstance(right, list) else found > right:
                raise Wrong(f"{name.replace('_', ' ')}: {found}, but allowed: {right}")


def check_waits(run: Run, most: int) -> None:
    """Check in how many steps the script's own code would wait for a GPU."""
    for waits in [one.waits for rank in run.ranks for one in rank.last]:
        if len(waits) > most:
            text = f"the script would wait for the GPU in {len(waits)} steps"
            call, _ = Counter(waits.values()).most_common(1)[0]
            example = f"such as in {call}()"
            raise Wrong(f"{text} instead of at most {most}, {example}")


def check_steps(
    run: Run,
    *,
    batch: int = 8,  # images per process and step
    images: int | None = 0,  # of all processes per step, instead of `batch`; None: any
    most: int | None = None,  # number of steps to check
    rate: float | None = LR,  # None: each step's own learning rate
    max_norm: float = float("inf"),
    rounding: float = 1e-3,
    size: int = PLAIN,
    alone: bool = False,  # each process uses only its own gradients
) -> None:
    """Check that one process with the same images per step takes the same steps."""
    for ranks in [[one] for one in run.ranks] if alone else [run.ranks]:
        velocity = torch.zeros(size).double()
        batch = images // len(ranks) if images else batch
        rows = [*zip(*(rank.steps for rank in ranks), strict=False)]
        for number, row in enumerate(rows[:most], 1):
            counts = [len(own.images) for own in row]
            if images is None and len({*counts}) > 1:
                return  # DDP does not weight the images equally
            goal = sum(counts) if images is None else images
            if sum(counts) != goal or max(counts) > -(-goal // len(row)):
                right = [batch] * len(row)
                expect(f"images per process in step {number}", counts, right)
            weights = row[0].before.double()
            expect("weights of the network", len(weights), size)
            found = gradient(weights, [one for own in row for one in own.passes])
            shorter = min(1, max_norm / found.norm().item())
            velocity = MOMENTUM * velocity + shorter * found
            # If all passes skip the block, momentum may or may not move its weights
            part = slice(PLAIN if size == BLOCK else None)
            moved = (row[0].after - weights)[part]
            right = -(rate or row[0].lr) * velocity[part]
            if (moved - right).norm() > rounding * right.norm():
                text = f"step {number} does not do what plain SGD does with the same"
                text += f" {sum(counts)} images"
                text += f" and a gradient norm of at most {max_norm}" * (max_norm < 9)
                ratio = moved.norm().item() / right.norm().item()
                how = f"moves the weights {ratio:.2f} times as far"
                if abs(ratio - 1) < 0.005:
                    how = f"is off by {(moved - right).norm() / right.norm():.2%}"
                raise Wrong(f"{text}: it {how}")
    spread = rows[0][0].before[:128].std().item()  # of the first layer
    if not 0.163 < spread < 0.248:  # the watcher scales it by 0.95 to 1.05
        text = "the first layer starts with a standard deviation of"
        raise Wrong(f"{text} {spread:.2f}, not about 0.2 as in nn.Linear")


def outputs(weights: Tensor, images: Tensor) -> Tensor:
    """Return the outputs of the network with these weights, in training mode."""
    rest = weights[144:]
    x = F.linear(images, weights[:128].view(16, 8), weights[128:144])
    if len(weights) == NORM:
        x = F.batch_norm(x, None, None, rest[:16], rest[16:32], training=True)
        rest = rest[32:]
    if len(weights) == BLOCK:
        x = x + F.linear(x.relu(), weights[PLAIN:-16].view(16, 16), weights[-16:])
    return F.linear(x.relu(), rest[:48].view(3, 16), rest[48:51])


def gradient(weights: Tensor, passes: list[Forward]) -> Tensor:
    """Return the mean loss's gradient without autograd, which may prevent forks."""
    sizes = [PLAIN if leaves_out(weights, one) else len(weights) for one in passes]
    labels = LABELS[indices(*(one.images for one in passes))]

    def loss(weights: Tensor) -> Tensor:
        pairs = zip(sizes, passes, strict=True)
        scores = [outputs(weights[:size], x.images.double()) for size, x in pairs]
        return F.cross_entropy(torch.cat(scores), labels)

    shifts, losses = 1e-8 * torch.eye(len(weights)).double(), vmap(loss)
    return (losses(weights + shifts) - losses(weights - shifts)) / 2e-8


def leaves_out(weights: Tensor, one: Forward) -> bool:
    """Return whether a forward pass skips the middle block."""
    short = outputs(weights[:PLAIN].float(), one.images)
    return len(weights) == BLOCK and torch.allclose(short, one.outputs, atol=1e-5)


def check_blocks(run: Run) -> None:
    """Check that forward passes skip the middle block at random, until the end."""
    for rank, one in enumerate(run.ranks):
        out = [leaves_out(x.before, x.passes[0]) for x in one.steps]
        third = len(out) // 3
        most = out[third:], out[:-third]
        rare = not 0.1 < sum(out) / len(out) < 0.9
        epochs = {tuple(out[n : n + third]) for n in range(0, len(out), third or 1)}
        again = out[:-2] == out[2:] or (third > 5 and len(epochs) == 1)
        if rare or again or any(len({*x}) == 1 for x in most):
            steps = [number for number, left in enumerate(out, 1) if left]
            text = f"rank {rank} leaves out the middle block in steps {steps}"
            raise Wrong(f"{text}: this is not random")
        if torch.equal(one.weights[0][PLAIN:], one.weights[-1][PLAIN:]):
            raise Wrong("the weights of the middle block never change")
        if any(last.varies for last in one.last):
            raise Wrong("in evaluation mode, the network also skips its middle block")


def check_rates(run: Run, rise: float = 1e-6) -> None:
    """Check that the learning rate falls until the end; it may rise by `rise`."""
    rates = [step.lr for step in run.ranks[0].steps]
    falls = [before - after for before, after in pairwise(rates)]
    last = max(LR / 10, 1.5 * LR / len(rates))
    jumps = max(falls) > 2 * LR / len(falls)  # cosine's largest is 1.6 times the mean
    ends = rates[-1] <= last and max(rates[-2:]) > 0  # and is not 0 earlier
    if jumps or min(falls) < -rise or abs(rates[0] - LR) > 1e-6 or not ends:
        text = f"the learning rate should fall from {LR} to almost 0, step by step"
        raise Wrong(f"{text}, but is {', '.join(f'{rate:.3f}' for rate in rates)}")


def check_noise(run: Run) -> None:
    """Check that each image gets its own noise, not a copy of other images' noise."""
    noise = []
    for rank in run.ranks:
        images = torch.cat([step.images for step in rank.steps])
        noise.append((images - IMAGES[indices(images)]).flatten())
    spreads = [round(one.std().item(), 3) for one in noise]
    if min(spreads) < 0.085 or max(spreads) > 0.115:
        raise Wrong(f"the noise has standard deviations of {spreads}, not 0.1")
    values = [one.abs().sort().values for one in (*noise, torch.cat(noise))]
    copied = any((one.diff() < 1e-6).float().mean() > 0.1 for one in values)
    pairs = torch.stack([one[: min(map(len, noise))] for one in noise])
    if copied or (len(noise) > 1 and torch.corrcoef(pairs).tril(-1).abs().max() > 0.3):
        raise Wrong("the script adds the same noise to several images")


def check_printed(
    run: Run, names: tuple[str, ...], times: int = EPOCHS, divided: bool = True
) -> None:
    """Check the means over images that the script prints in `times` or more steps.

    A line shows the mean over the images that were validated since the last step. If
    there are none, or for a loss, it shows the mean over the last epoch's training
    images. If `divided`, each process validates its share of the images.
    """
    passes = [one for rank in run.ranks for one in rank.validated]
    if any(one.training for one in passes):
        raise Wrong("the script validates a network that is in training mode")
    known = {step: {x.buffers for x in passes if x.step == step} for step in range(99)}
    if any(max(x) - min(x) > 1e-6 for x in known.values() if x):
        raise Wrong("the processes validate networks with different buffers")
    both = {*indices(*(one.images for one in passes))}
    trained = {*indices(*(step.images for rank in run.ranks for step in rank.steps))}
    expect("validation images that are also used for training", len(both & trained), 0)
    means = [IMAGES[[*one]].mean(0) for one in (both, trained) if one]
    if (means[0] - means[-1]).abs().max() > 1:  # five standard errors
        raise Wrong("the validation images are of another kind than those for training")
    share = -(-VALIDATION // len(run.ranks)) * len({one.step for one in passes})
    for rank in run.ranks if divided else ():
        count = sum(len(one.images) for one in rank.validated)
        expect("validation images of each process", max(count, share), share)
    for name in names:
        ends = set()
        for rank, line in [(own, line) for own in run.ranks for line in own.printed]:
            for printed in re.findall(rf"\b{name} (\d+\.?\d*)", line.text):
                ends.add(line.step)
                right = mean([*run.ranks, rank], name, line.step)
                if abs(float(printed) - right) > 6e-5:
                    text = f"the printed {name} is {printed} instead of {right:.6g}"
                    raise Wrong(f"after step {line.step}, {text}")
        expect(f"number of times that {name} is printed", min(len(ends), times), times)


def check_losses(run: Run) -> None:
    """Check that a printed loss is about the mean of a pass, a step or an epoch."""
    for rank, line in [(own, line) for own in run.ranks for line in own.printed]:
        means = []
        for ranks in ([rank], run.ranks):
            for count in (1, len(rank.steps) // EPOCHS):
                steps = [x for y in ranks for x in y.steps[: line.step][-count:]]
                means += [loss_of([x for one in steps for x in one.passes])]
            means += [loss_of([x.passes[-1] for x in steps[-1:]])]
        for printed in re.findall(r"^epoch \d+: loss (\d+\.?\d*)", line.text):
            if all(abs(float(printed) - x) > 6e-5 + 0.2 * x for x in means):
                text = f"after step {line.step}, the printed loss is {printed}"
                raise Wrong(
                    f"{text}, which is no mean: the last images' is {means[0]:.4f}"
                )


def loss_of(passes: list[Forward]) -> float:
    """Return the mean loss over the images of forward passes."""
    scores = torch.cat([torch.empty(0, 3), *(one.outputs for one in passes)])
    labels = LABELS[indices(*(one.images for one in passes))]
    return F.cross_entropy(scores, labels).item()


def mean(ranks: list, name: str, step: int) -> float:
    """Return what the last of these processes should print after a step."""
    if name == "bytes":
        return step * PLAIN * 4  # each step sends the gradients (float32) once
    first = step - len(ranks[-1].steps) // EPOCHS
    passes = [x for one in ranks for x in one.validated if x.step == step]
    passes = [] if name == "loss" else passes
    total = VALIDATION if passes else TRAINING
    if not passes:
        passes = [x for y in ranks for one in y.steps[first:step] for x in one.passes]
    scores = torch.cat([torch.empty(0, 3), *(one.outputs for one in passes)])
    labels = LABELS[numbers := indices(*(one.images for one in passes))]
    found = (scores.argmax(1) == labels).float()
    if name == "loss":
        found = F.cross_entropy(scores, labels, reduction="none")
    values = dict(zip(numbers, found.tolist(), strict=True))
    expect(f"images of which {name} is printed", len(values), total)
    return sum(values.values()) / total


def check_export(
    run: Run,
    file: str = "model.pt",
    part: str = "",
    epochs: tuple[int, ...] = (EPOCHS,),
) -> None:
    """Check that a file has the processes' mean weights after these numbers of epochs.

    If it has several parts, it also has the momentum of SGD. The network that the
    processes validate is the one in the file.
    """
    weights = zip(*(rank.weights for rank in run.ranks), strict=True)
    weights = [sum(one) / len(one) for one in weights]
    norm = [nn.BatchNorm1d(16)] * (len(weights[0]) == NORM)
    net = nn.Sequential(nn.Linear(8, 16), *norm, nn.ReLU(), nn.Linear(16, 3)).eval()
    for epoch in epochs:
        stage = epoch * len(run.ranks[0].steps) // EPOCHS  # number of steps
        # Before step 7, the watcher has copied checkpoint.pt to 6.pt
        path = {0: FOLDER / file, EPOCHS: run.files / file}
        path = path.get(epoch, run.files / f"{stage}.pt")
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
            net.load_state_dict(content[part] if part else content)
        except Exception as error:
            text = f"the network without DDP cannot load {file}: {error}"
            raise Wrong(textwrap.shorten(text.replace(str(path), file), 400)) from None
        own = nn.utils.parameters_to_vector(net.parameters())
        sizes = [one.numel() for one in net.parameters()]
        text = f"{file} does not hold the processes' mean weights"
        same(own, weights[stage], f"{text} after {epoch} epochs")
        if part:
            moved = (weights[stage - 1] - weights[stage]).split(sizes)
            there = [
                LR * x.flatten() for x in tree_leaves(content) if torch.is_tensor(x)
            ]
            for one in moved:
                alike = [x for x in there if x.shape == one.shape]
                if not any(torch.allclose(one, x, atol=1e-5) for x in alike):
                    raise Wrong(f"{file} does not hold the momentum of all weights")
    if norm:
        check_statistics(run, net[1])
    for one in chain(*(rank.validated for rank in run.ranks)):
        same(net(one.images), one.outputs, f"the processes do not validate {file}")


def check_statistics(run: Run, norm: nn.BatchNorm1d) -> None:
    """Check batch norm's statistics: some mean of those of the processes' images."""

    def moved(values: Tensor, step: Step) -> Tensor:
        layer = step.before[:128].view(16, 8), step.before[128:144]
        x = F.linear(step.images, *layer)
        return values.lerp(torch.cat([x.mean(0), x.var(0)]), 0.1)

    values = torch.tensor([0.0, 1.0]).repeat_interleave(16)
    for step in run.ranks[0].steps[:-1]:  # DDP then sends rank 0's to all
        values = moved(values, step)
    each = torch.stack([moved(values, rank.steps[-1]) for rank in run.ranks])
    means, variances = each.mean(0).split(16)
    lowest, highest = each[:, :16].amin(0) + 1e-6, each[:, :16].amax(0) - 1e-6
    found = norm.running_mean
    outside = (found > highest).all() or (found < lowest).all()
    far = (found - means).norm() > 0.6
    # Another mean than rank 0's is right, too, such as that of all images at the end
    far = far or not 0.35 < norm.running_var.sum() / variances.sum() < 1.6
    if far or (outside and len(each) > 1):
        raise Wrong("batch norm's statistics in the file are not those of training")


def check_machines(run: Run) -> None:
    """Check that the script also works on several machines."""
    for machines, each in (2, 2), (2, 1), (3, 2):
        count = f"{each} process" + "es" * (each > 1)
        when = f"on {machines} machines with {count} each, "
        size = machines * each
        with Run(run.script, when=when, size=size, machines=machines).started() as one:
            check_shares(one)


def check_another_run(run: Run) -> None:
    """Check that the script works while another run is in progress in its folder."""
    with Run(run.script, pause=0).started() as first:
        when = "if another run is in progress, "
        with Run(run.script, first.files, when=when).started() as other:
            check_shares(other)


def check_old_file(run: Run, name: str) -> None:
    """Check that no process uses a file that an earlier run has left."""
    with Run(run.script, pause=0).started() as old:
        torch.save(torch.full((8,), 9.0), old.files / name)
        with Run(
            run.script, old.files, when=f"with an old {name} in the folder, "
        ).started() as new:
            check_centered(new)


def check_uneven(
    run: Run, size: int = 11, contrast: float = 0, **also: dict[str, object]
) -> None:
    """Check a run in `size` processes, which cannot get equally many batches.

    The run must also pass other checks, `also` (options by their names).
    """
    when = f"with {size} processes on two machines, "
    with Run(run.script, when=when, size=size, machines=2).started() as other:
        check_weights(other)
        least = 1 if contrast else TRAINING - size + 1
        check_shares(other, least, contrast, repeats=TRAINING)
        for name, options in also.items():
            globals()[f"check_{name}"](other, **options)


def check_resumes(run: Run) -> None:
    """Check that the run after a killed run ends like an uninterrupted run.

    It finds no other file than the checkpoint.
    """
    when = "after a run that was killed in epoch 2, the next run fails: "
    with Run(run.script, pause=12).started() as killed:
        killed.kill()
        file = killed.files / CHECKPOINT
        for path in {*killed.files.iterdir()} - {file, file.resolve()}:
            if path.is_file():
                path.unlink()
        with Run(run.script, killed.files, when=when).started() as again:
            check_weights(again)
            own, whole = again.ranks[0], run.ranks[0]
            expect("steps instead of the last 6", len(own.steps), 6)
            wrong = "its final weights are not those of an uninterrupted run"
            same(own.weights[-1], whole.weights[-1], wrong)
