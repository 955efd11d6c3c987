"""Time the loader processes of a machine alone, with nothing to compute beside them.

    python -m timings.loader_alone --data DIR [-b N] [--workers N] [--max-steps N]

Takes the flags of the training scripts; prints JSON. What the loader processes prepare
while they start, two batches of each, does not count.
"""

import json
import time

import torch
from torch.utils.data.distributed import DistributedSampler

from common.arguments import build_parser, parse_arguments
from common.data import PREFETCH, build_datasets, build_loader
from common.device import select_device
from common.errors import UserError
from launch.exits import exit_status


def main() -> None:
    """Print images per second."""
    args = parse_arguments(build_parser(__doc__), "loader_alone", None)
    device = select_device(args.device)
    torch.set_num_threads(1)
    train_set, _ = build_datasets(args)
    sampler = DistributedSampler(train_set, 1, 0, seed=args.seed, drop_last=True)
    share = args.global_batch_size, args.workers, device
    loader = build_loader(args, train_set, sampler, *share, training=True)
    warmup = PREFETCH * args.workers
    if len(loader) <= warmup:
        raise UserError(
            f"{len(loader)} batches are none beyond the {warmup} of the warm-up: give "
            "more images, smaller batches or fewer --workers"
        )
    images, start = 0, time.perf_counter()
    for step, (batch, _) in enumerate(loader, start=1):
        images += len(batch)
        if step == warmup:
            images, start = 0, time.perf_counter()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    found = {"images_per_second": images / seconds, "images": images}
    found |= {"workers": args.workers, "decoder": args.decoder}
    print(json.dumps(found))


if __name__ == "__main__":
    with exit_status():
        main()
