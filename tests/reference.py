"""Train in plain PyTorch; the five scripts must produce the same results.

This file imports nothing from the project. It receives two facts that only the project knows: the
network, and the crop box and the flip that a run drew for each (epoch, index).
"""

import math
from argparse import Namespace

import numpy
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.transforms.v2 import functional as V

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MEAN = torch.tensor([255 * 0.485, 255 * 0.456, 255 * 0.406]).view(3, 1, 1)
STD = torch.tensor([255 * 0.229, 255 * 0.224, 255 * 0.225]).view(3, 1, 1)


def listing(folder):
    """Return [(file, label), ...], with class folders and their files sorted by name."""
    folders = enumerate(sorted(folder.iterdir()))
    return [(file, label) for label, one in folders for file in sorted(one.iterdir())]


def picture(r, file, crop):
    """Return the network's input (3, S, S); `crop` is (box, flip), or None in validation."""
    pil = r.decoder == "pil"
    image = Image.open(file).convert("RGB")
    image = image if pil else V.pil_to_tensor(image)
    if crop is None:
        image = V.resize(image, [r.image_size * 256 // 224])
        image = V.center_crop(image, [r.image_size])
    else:
        image = V.resized_crop(image, *crop[0], [r.image_size] * 2)
        image = V.horizontal_flip(image) if crop[1] and not r.no_flip else image
    return ((V.pil_to_tensor(image) if pil else image).float() - MEAN) / STD


def learning_rate(r, step, steps):
    """Return the learning rate of the run's step `step` (from 0), with `steps` steps per epoch."""
    full, warmup = r.lr * r.batch / 256, r.warmup_epochs * steps
    if step + 1 < warmup:
        return full * (step + 1) / warmup
    if r.schedule == "step":
        return full * 0.1 ** (step // (30 * steps))
    done = max(0, step - warmup) / (r.epochs * steps - warmup or 1)
    return full * (1 + math.cos(math.pi * done)) / 2


def forward(run, samples, sums, smoothing=0.0):
    """Return the loss of [(file, label, crop), ...]; add loss, top-1, top-5 and images to `sums`."""
    r, labels = run.recipe, torch.tensor([label for _, label, _ in samples])
    images = torch.stack([picture(r, file, crop) for file, _, crop in samples])
    images = images.contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", TYPES[r.precision], enabled=r.precision != "fp32"):
        outputs = run.model(images).float()
    loss = F.cross_entropy(outputs, labels, label_smoothing=smoothing)
    hits = outputs.topk(5).indices == labels.view(-1, 1)
    run.stride, size = images.stride(), len(labels)
    sums += numpy.array([loss.item() * size, hits[:, 0].sum(), hits.sum(), size])
    return loss


@torch.no_grad()
def take_step(run, gradients, rate):
    """Take an SGD step. In fp16, an infinite scaled gradient halves the scale instead."""
    gradients = [gradient / run.scale for gradient in gradients]
    if run.recipe.precision == "fp16":
        if not all(gradient.isfinite().all() for gradient in gradients):
            run.scale, run.growth = run.scale / 2, 0
            return
        run.growth += 1  # at 2,000, the scale would double; no test takes as many steps
    for i, (weight, gradient) in enumerate(zip(run.weights, gradients, strict=True)):
        step = gradient.add(weight, alpha=run.recipe.weight_decay)
        if run.momenta[i] is not None:
            step = run.momenta[i].mul(run.recipe.momentum).add(step)
        run.momenta[i] = step
        weight.add_(step, alpha=-rate)


def train(data, build, crops, r, processes=1):
    """Train build(classes) with recipe `r`, as if this number of processes shared each batch."""
    train_set, val_set = listing(data / "train"), listing(data / "val")
    run = Namespace(recipe=r, scale=2.0**16 if r.precision == "fp16" else 1.0, growth=0)
    torch.manual_seed(r.seed)
    model = run.model = build(1 + train_set[-1][1])
    model.to(memory_format=torch.channels_last)
    run.weights = list(model.parameters())
    run.momenta, run.rates, run.epochs = [None] * len(run.weights), [], []
    steps = min(len(train_set) // r.batch, r.max_steps or len(train_set))
    for epoch in range(r.epochs):
        shuffle = torch.manual_seed(r.seed + epoch)
        order = torch.randperm(len(train_set), generator=shuffle).tolist()
        samples = [(*train_set[i], crops[epoch, i]) for i in order[: steps * r.batch]]
        train_sums, val_sums = numpy.zeros(4), numpy.zeros(4)
        for step in range(steps):
            gradients, buffers = [], []
            for rank in range(processes):
                key = numpy.random.SeedSequence((r.seed, epoch, step + 1, rank + 1))
                torch.manual_seed(int(key.generate_state(1)[0]))  # for dropout
                batch = samples[step * r.batch : (step + 1) * r.batch][rank::processes]
                model.train().zero_grad()
                size = len(batch) // r.accumulate
                for first in range(0, len(batch), size):
                    part = batch[first : first + size]
                    loss = forward(run, part, train_sums, r.label_smoothing)
                    (loss / r.accumulate * run.scale).backward()
                gradients.append([weight.grad for weight in run.weights])
                buffers.append([buffer.clone() for buffer in model.buffers()])
            run.rates.append(learning_rate(r, epoch * steps + step, steps))
            means = [sum(own) / processes for own in zip(*gradients, strict=True)]
            take_step(run, means, run.rates[-1])
            for buffer, first in zip(model.buffers(), buffers[0], strict=True):
                buffer.copy_(first)  # keep rank 0's buffers
        model.eval()
        for rank in range(processes):
            own = [(*sample, None) for sample in val_set[rank::processes]]
            size = r.batch // processes // r.accumulate
            for first in range(0, len(own), size):
                forward(run, own[first:][:size], val_sums)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        run.epochs.append((weights, train_sums, val_sums))
    return run
