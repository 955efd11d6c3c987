"""Predict ResNet-50's speedup on A100s, and compare it with published measurements.

    python -m benchmarks.scaling    # writes benchmarks/results/scaling.json
    python -m benchmarks.scaling --step-milliseconds 100 --parameters 25.6e6

The second form prints the table for your own model and machines.
"""

import argparse
import json

from benchmarks.comparison import RESULTS
from benchmarks.scaling_model import MIB, Cluster, Link, Range
from common.errors import one_line_errors

# NCCL's own estimates for a ring, in seconds per message:
# https://github.com/NVIDIA/nccl/blob/b6475625fbcaa2c3c0e50eed2fa1255d7514d4a2/src/graph/tuning.cc
NVLINK_ALPHA, PCI_ALPHA, NETWORK_ALPHA = 3.4e-6, 5.7e-6, 14e-6
# NCCL's maximum for eight A100s with NVLink, in bytes per second:
# https://github.com/NVIDIA/nccl/blob/01afd20a77b5804e0ecf1042509dd9d20ebf9e93/src/graph/tuning.cc
A100_NVLINK = 235e9
GPUS = (2, 4, 8, 16, 64, 256, 512, 1024)
GLOBAL_BATCH = 8192  # largest batch size without a loss of accuracy (GOYAL)
RESNET50, INCEPTION, VGG16 = 4 * 25.56e6, 4 * 23.83e6, 4 * 138.36e6  # bytes, fp32
A100, P100 = Link(NVLINK_ALPHA, A100_NVLINK), Link(NVLINK_ALPHA, 4 * 18e9)
PCI = Link(PCI_ALPHA, 12e9)
GITHUB = "https://github.com/"
NVIDIA = "NVIDIA/DeepLearningExamples/tree/master/PyTorch/Classification/ConvNets/"
NVIDIA = f"{GITHUB}{NVIDIA}resnet50v1.5#training-performance-results"
GOOGLE = "tensorflow/docs/blob/master/site/en/r1/guide/performance/benchmarks.md"
GOOGLE = f"{GITHUB}{GOOGLE}"
GOYAL = "https://arxiv.org/abs/1706.02677"
HOROVOD = f"{GITHUB}horovod/horovod/blob/master/docs/benchmarks.rst"
LAMBDA = f"{GITHUB}lambdal/deeplearning-benchmark/tree/master/pytorch/csv_v1_v2"
# GPU: images per GPU, images/s on 1 and 8 GPUs, link (partly assumed: see the page)
SYNTHETIC = {
    "V100": (256, 833, 6174, PCI),
    "RTX 6000 Ada": (928, 1146, 9211, PCI),
    "A100": (1280, 1582, 11439, A100),
    "H100": (1280, 2791, 22059, A100),
    "B200": (3328, 3076, 24461, A100),
}
VISION = "KempnerInstitute/scalable-vision-workflows/tree/main/imagenet1k_resnet50"
# GPUs: seconds of the whole job, 90 epochs of ImageNet, on hosts with 4 A100s each
KEMPNER = {1: 129686, 2: 65752, 4: 33216, 8: 17104, 16: 8914, 32: 4765, 64: 2640}
# If t(n) = work / n + pause, then pause = 2 t(4) - t(2); PAUSE is for one epoch
PAUSE = (2 * KEMPNER[4] - KEMPNER[2]) / 90


def network(gigabits: float) -> Link:
    """Return the link between hosts, given its bandwidth in Gbit/s."""
    return Link(NETWORK_ALPHA, gigabits / 8 * 1e9)


def a100(gigabits: float, speed: float = 2470) -> Cluster:
    """Return a model of hosts with eight A100s; NVIDIA measured the default `speed`."""
    return Cluster(256 / speed, 256, RESNET50, 8, A100, network(gigabits))


def horovod(speed: float, size: float) -> Cluster:
    """Return a model of the hosts in Horovod's benchmark (64 MiB fusion buffer)."""
    return Cluster(64 / speed, 64, size, 4, PCI, network(25), 64 * MIB)


def kempner(pause: float) -> Cluster:
    """Return a model of Kempner's hosts, which wait `pause` seconds between epochs."""
    step = (KEMPNER[1] / 90 - pause) * 256 / 1281167
    return Cluster(step, 256, RESNET50, 4, A100, network(200), pause=pause)


HOSTS = {"25 Gbit/s": a100(25), "100 Gbit/s": a100(100), "8 x 200 Gbit/s": a100(1600)}
HOSTS[f"100 Gbit/s, {PAUSE:.1f} s between epochs"] = a100(100)._replace(pause=PAUSE)
VGG = Cluster(64 / 154, 64, VGG16, 8, P100, network(100))
GOYALS = Cluster(32 / 195, 32, RESNET50, 8, P100, network(50))
FAR = "P100, 128 hosts, 25 Gbit/s"
# Name, source, GPUs, the baseline's GPUs, efficiency, and the model's input
PUBLISHED = (
    ("ResNet-50, TF32, A100", NVIDIA, 8, 1, 7248 / 938 / 8, a100(1600, 938)),
    ("ResNet-50, AMP, A100", NVIDIA, 8, 1, 16621 / 2470 / 8, a100(1600)),
    ("VGG-16, P100", GOOGLE, 8, 1, 1081 / 154 / 8, VGG),
    ("ResNet-50, P100, 32 hosts, 50 Gbit/s", GOYAL, 256, 8, 0.90, GOYALS),
    (f"Inception V3, {FAR}", HOROVOD, 512, 1, 0.90, horovod(142, INCEPTION)),
    (f"VGG-16, {FAR}", HOROVOD, 512, 1, 0.68, horovod(154, VGG16)),
)
for gpu, (images, one, eight, link) in SYNTHETIC.items():
    host = Cluster(images / one, images, RESNET50, 8, link, network(100))
    PUBLISHED += ((f"ResNet-50, AMP, {gpu}", LAMBDA, 8, 1, eight / one / 8, host),)
WHOLE_RUNS = [
    (what, GITHUB + VISION, n, 1, KEMPNER[1] / KEMPNER[n] / n, kempner(pause))
    for what, pause in (("ResNet-50, A100", 0.0), ("the same, with the pause", PAUSE))
    for n in (8, 16, 32, 64)
]


def times(factor: Range, gpus: int) -> str:
    """Format a speedup over one GPU."""
    low, high = (f"{share * gpus:,.{1 if gpus < 10 else 0}f}" for share in factor)
    return low if low == high else f"{low} to {high}"


def compared(
    what: str, source: str, gpus: int, base: int, measured: float, hosts: Cluster
) -> dict[str, str]:
    """Return a published measurement, the model's range, and the gap between them."""
    low, high = (a / b for a, b in zip(hosts.weak(gpus), hosts.weak(base), strict=True))
    points = 100 * (max(low - measured, 0) + min(high - measured, 0))
    ends = dict.fromkeys(f"{100 * share:.0f}" for share in (low, high))
    return {
        "measured by others": f"[{what}]({source})",
        "GPUs": f"{gpus}, against {base}",
        "efficiency": f"{100 * measured:.0f} %",
        "model": f"{' to '.join(ends)} %",
        "off": f"{points:+.0f} points" if round(points) else "inside",
    }


def expected(gpus: int) -> dict[str, str]:
    """Return speedups over one GPU; the last is for a fixed global batch size."""
    row = {"GPUs": f"{gpus:,}"}
    row |= {name: times(hosts.weak(gpus), gpus) for name, hosts in HOSTS.items()}
    strong = times(a100(100).strong(gpus, GLOBAL_BATCH), gpus)
    return {**row, f"100 Gbit/s, {GLOBAL_BATCH:,} images in all": strong}


def tables() -> dict[str, list[dict[str, str]]]:
    """Return the tables of docs/understand.md."""
    published, runs = ([compared(*case) for case in t] for t in (PUBLISHED, WHOLE_RUNS))
    rows = [expected(gpus) for gpus in GPUS]
    return {"expected": rows, "published": published, "whole_runs": runs}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling")
    add = parser.add_argument
    add("--step-milliseconds", type=float, help="one GPU's step time; prints a table")
    add("--images-per-gpu", type=int, default=256, help="images per step (256)")
    add("--global-batch-size", type=int, default=8192, help="of the last column (8192)")
    add("--parameters", type=float, default=25.6e6, help="in the model (25.6e6)")
    add("--gpus-per-host", type=int, default=8, help="(%(default)s)")
    add("--link-gigabytes", type=float, default=A100_NVLINK / 1e9, help="GB/s (235)")
    add("--network-gigabits", type=float, default=100, help="per host (100)")
    add("--pause", type=float, default=0, help="seconds between ImageNet epochs (0)")
    return parser.parse_args(argv)


def print_table(args: argparse.Namespace) -> None:
    """Print the predictions for up to 1,024 GPUs like the user's."""
    inside = Link(NVLINK_ALPHA, args.link_gigabytes * 1e9)
    per_gpu = args.step_milliseconds / 1e3, args.images_per_gpu, 4 * args.parameters
    between = network(args.network_gigabits)
    hosts = Cluster(*per_gpu, args.gpus_per_host, inside, between, pause=args.pause)
    print("speedup over one GPU, from no overlap of the all-reduce to full overlap")
    total = args.global_batch_size
    batches = f"{hosts.images} images per GPU", f"{total} images in all"
    print("{:>6}{:>14}{:>24}{:>24}".format("GPUs", "all-reduce", *batches))
    gpus = 1
    while gpus <= 1024:
        weak = times(hosts.weak(gpus), gpus)
        strong = times(hosts.strong(gpus, total), gpus)
        print(f"{gpus:6}{hosts.all_reduce(gpus) * 1e3:11.1f} ms{weak:>24}{strong:>24}")
        gpus *= 2 if gpus >= hosts.gpus_per_host else hosts.gpus_per_host


def main() -> None:
    """Write the tables of docs/understand.md, or print the user's table."""
    args = arguments()
    if args.step_milliseconds:
        print_table(args)
        return
    (RESULTS / "scaling.json").write_text(json.dumps(tables(), indent=1) + "\n")


if __name__ == "__main__":
    with one_line_errors():
        main()
