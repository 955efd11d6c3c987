"""What docs/scaling.md expects of ResNet-50 on A100, and what others measured.

python -m benchmarks.scaling_expected    # results/scaling_expected.json, scaling.svg
"""

import json
from collections.abc import Callable

from benchmarks.comparison import RESULTS
from benchmarks.scaling import A100_NVLINK, GPUS, NETWORK_ALPHA, NVLINK_ALPHA, times
from benchmarks.scaling_model import MIB, Cluster, Link, Range

FIGURE = RESULTS.parent / "docs" / "scaling.svg"
GLOBAL_BATCH = 8192  # images a step; ResNet-50 trains as well as with few (GOYAL)
RESNET50, INCEPTION, VGG16 = 4 * 25.56e6, 4 * 23.83e6, 4 * 138.36e6  # bytes, fp32
A100, P100 = Link(NVLINK_ALPHA, A100_NVLINK), Link(NVLINK_ALPHA, 4 * 18e9)
PCI = Link(5.7e-6, 12e9)  # alpha as NCCL reckons
GITHUB = "https://github.com/"
NVIDIA = "NVIDIA/DeepLearningExamples/tree/master/PyTorch/Classification/ConvNets/"
NVIDIA = f"{GITHUB}{NVIDIA}resnet50v1.5#training-performance-results"
GOOGLE = "tensorflow/docs/blob/master/site/en/r1/guide/performance/benchmarks.md"
GOOGLE = f"{GITHUB}{GOOGLE}"
GOYAL = "https://arxiv.org/abs/1706.02677"
HOROVOD = f"{GITHUB}horovod/horovod/blob/master/docs/benchmarks.rst"


def network(gigabits: float) -> Link:
    """What hosts are connected by."""
    return Link(NETWORK_ALPHA, gigabits / 8 * 1e9)


def a100(gigabits: float, speed: float = 2470) -> Cluster:
    """Hosts of eight A100 as fast as NVIDIA says that one is with ResNet-50 in AMP."""
    return Cluster(256 / speed, 256, RESNET50, 8, A100, network(gigabits))


def horovod(speed: float, size: float) -> Cluster:
    """Hosts of Horovod's benchmark; its fusion buffer is 64 MiB."""
    return Cluster(64 / speed, 64, size, 4, PCI, network(25), 64 * MIB)


HOSTS = {"25 Gbit/s": a100(25), "100 Gbit/s": a100(100), "8 x 200 Gbit/s": a100(1600)}
VGG = Cluster(64 / 154, 64, VGG16, 8, P100, network(100))
GOYALS = Cluster(32 / 195, 32, RESNET50, 8, P100, network(50))
FAR = "P100, 128 hosts, 25 Gbit/s"
# What, where, GPUs, against how many, efficiency, and what the model is told
PUBLISHED = (
    ("ResNet-50, TF32, A100", NVIDIA, 8, 1, 7248 / 938 / 8, a100(1600, 938)),
    ("ResNet-50, AMP, A100", NVIDIA, 8, 1, 16621 / 2470 / 8, a100(1600)),
    ("VGG-16, P100", GOOGLE, 8, 1, 1081 / 154 / 8, VGG),
    ("ResNet-50, P100, 32 hosts, 50 Gbit/s", GOYAL, 256, 8, 0.90, GOYALS),
    (f"Inception V3, {FAR}", HOROVOD, 512, 1, 0.90, horovod(142, INCEPTION)),
    (f"VGG-16, {FAR}", HOROVOD, 512, 1, 0.68, horovod(154, VGG16)),
)


def compared(
    what: str, source: str, gpus: int, base: int, measured: float, hosts: Cluster
) -> dict[str, str]:
    """A measurement of others, what the model says, and how far its range misses."""
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
    """Times as fast as one GPU; last, where the global batch stays."""
    row = {"GPUs": f"{gpus:,}"}
    row |= {name: times(hosts.weak(gpus), gpus) for name, hosts in HOSTS.items()}
    strong = times(a100(100).strong(gpus, GLOBAL_BATCH), gpus)
    return {**row, f"100 Gbit/s, {GLOBAL_BATCH:,} images in all": strong}


STYLE = """text { font: 11px sans-serif; fill: #1f2328 } line { stroke: #8c959f66 }
polyline { fill: none; stroke: var(--ink); stroke-width: 1.8 } .key { fill: var(--ink) }
.x { text-anchor: middle } .dashed { stroke-width: 1; stroke-dasharray: 4 2 }
.n0 { --ink: #bc4c00 } .n1 { --ink: #0969da } .n2 { --ink: #1a7f37 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 }
  .n0 { --ink: #f0883e } .n1 { --ink: #58a6ff } .n2 { --ink: #3fb950 } }"""


def panel(top: int, title: str, efficiency: Callable[[Cluster, int], Range]) -> str:
    """Efficiency against GPUs: a line with nothing hidden, a dashed one with all."""
    svg = f'<text x="4" y="{top - 12}">Efficiency, {title}</text>\n'
    for y in range(top, top + 161, 40):
        svg += f'<text x="4" y="{y + 4}">{100 - (y - top) * 5 // 8} %</text>'
        svg += f'<line x1="42" x2="350" y1="{y}" y2="{y}"/>\n'
    for number, (name, hosts) in enumerate(HOSTS.items()):
        svg += f'<g class="n{number}">\n'
        svg += f'<text class="key" x="46" y="{top + 150 - 15 * number}">{name}</text>\n'
        ranges = [efficiency(hosts, 2**power) for power in range(11)]
        for style, ends in (("line", "low"), ("dashed", "high")):
            ys = [top + 160 - 160 * getattr(one, ends) for one in ranges]
            points = [f"{46 + 30 * i},{y:.1f}" for i, y in enumerate(ys)]
            svg += f'<polyline class="{style}" points="{" ".join(points)}"/>\n'
        svg += "</g>\n"
    for power in range(0, 11, 2):
        place = f'class="x" x="{46 + 30 * power}" y="{top + 176}"'
        svg += f"<text {place}>{2**power:,}</text>\n"
    return svg


def drawn() -> str:
    """The figure."""
    panels = panel(30, "256 images per GPU", Cluster.weak) + panel(
        245, "8,192 images in all", lambda one, gpus: one.strong(gpus, GLOBAL_BATCH)
    )
    words = "GPUs, eight in a host. Lines: nothing hidden; dashed: all that fits"
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 364 446" width="560">\n'
        f'<style>{STYLE}</style>\n{panels}<text x="4" y="441">{words}</text>\n</svg>\n'
    )


def tables() -> dict[str, list[dict[str, str]]]:
    """The tables."""
    published = [compared(*case) for case in PUBLISHED]
    return {"expected": [expected(gpus) for gpus in GPUS], "published": published}


if __name__ == "__main__":
    file = RESULTS / "scaling_expected.json"
    file.write_text(json.dumps(tables(), indent=1) + "\n")
    FIGURE.write_text(drawn())
