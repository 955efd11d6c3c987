"""The tables and the figure of docs/scaling.md.

python -m benchmarks.scaling_page

From results/scaling.json, the model and what others published. The figure needs
matplotlib (requirements-report.txt).
"""

import io
import re
from pathlib import Path
from typing import NamedTuple

from benchmarks.page import ROOT, fill, machine, markdown, results
from benchmarks.scaling import (
    A100_NVLINK,
    GPUS,
    NETWORK_ALPHA,
    NVLINK_ALPHA,
    PCI_ALPHA,
    checked,
    fitted,
    times,
)
from benchmarks.scaling_model import BUCKET, MIB, Cluster, Link, buckets
from common.errors import UserError, exit_status

PAGE = ROOT / "docs" / "scaling.md"
FIGURE = ROOT / "docs" / "scaling.svg"

# Parameters of the networks, as torchvision builds them
RESNET50, INCEPTION, VGG16 = 25.56e6, 23.83e6, 138.36e6
# Images a step with which ResNet-50 is known to train as well as with few (GOYAL)
GLOBAL_BATCH = 8192

NVIDIA = (
    "https://github.com/NVIDIA/DeepLearningExamples/tree/master/PyTorch/Classification/"
    "ConvNets/resnet50v1.5#training-performance-results"
)
GOOGLE = (
    "https://github.com/tensorflow/docs/blob/master/site/en/r1/guide/performance/"
    "benchmarks.md"
)
HOROVOD = "https://github.com/horovod/horovod/blob/master/docs/benchmarks.rst"
GOYAL = "https://arxiv.org/abs/1706.02677"

NVLINK_A100 = Link(NVLINK_ALPHA, A100_NVLINK)
NVLINK_P100 = Link(NVLINK_ALPHA, 4 * 18e9)
PCI = Link(PCI_ALPHA, 12e9)


def cluster(
    images: int,
    speed: float,
    parameters: float,
    gpus_per_host: int,
    inside: Link,
    gigabits: float,
    bucket: float = BUCKET,
) -> Cluster:
    """Hosts whose GPUs train `images` each, at `speed` images/s alone, in fp32."""
    size = 4 * parameters
    network = Link(NETWORK_ALPHA, gigabits / 8 * 1e9)
    return Cluster(images / speed, images, size, gpus_per_host, inside, network, bucket)


def a100(gigabits: float) -> Cluster:
    """Hosts of eight A100 as fast as NVIDIA says that one is with ResNet-50 in AMP."""
    return cluster(256, 2470, RESNET50, 8, NVLINK_A100, gigabits)


def horovod(speed: float, parameters: float) -> Cluster:
    """The hosts of Horovod's benchmark; its fusion buffer is 64 MiB."""
    return cluster(64, speed, parameters, 4, PCI, 25, bucket=64 * MIB)


NETWORKS = {25: "25 Gbit/s", 100: "100 Gbit/s", 1600: "8 x 200 Gbit/s"}


class Published(NamedTuple):
    """A measurement of others."""

    what: str
    source: str
    cluster: Cluster
    gpus: int
    efficiency: float
    baseline: int = 1  # GPUs that the efficiency is relative to


PUBLISHED = (
    Published(
        "ResNet-50, TF32, A100",
        NVIDIA,
        cluster(256, 938, RESNET50, 8, NVLINK_A100, 1600),
        8,
        7248 / 938 / 8,
    ),
    Published("ResNet-50, AMP, A100", NVIDIA, a100(1600), 8, 16621 / 2470 / 8),
    Published(
        "VGG-16, P100",
        GOOGLE,
        cluster(64, 154, VGG16, 8, NVLINK_P100, 100),
        8,
        1081 / 154 / 8,
    ),
    Published(
        "ResNet-50, P100, 32 hosts, 50 Gbit/s",
        GOYAL,
        cluster(32, 195, RESNET50, 8, NVLINK_P100, 50),
        256,
        0.90,
        baseline=8,
    ),
    Published(
        "Inception V3, P100, 128 hosts, 25 Gbit/s",
        HOROVOD,
        horovod(142, INCEPTION),
        512,
        0.90,
    ),
    Published(
        "VGG-16, P100, 128 hosts, 25 Gbit/s", HOROVOD, horovod(154, VGG16), 512, 0.68
    ),
)


def predicted(case: Published) -> tuple[float, float]:
    """Efficiency by the model: nothing hidden, all hidden that fits."""
    whole, base = case.cluster.weak(case.gpus), case.cluster.weak(case.baseline)
    return whole.low / base.low, whole.high / base.high


def outside(low: float, high: float, value: float) -> str:
    """How far the prediction is from the value, in points."""
    points = (max(low - value, 0) + min(high - value, 0)) * 100
    return f"{points:+.0f} points" if round(points) else "inside"


def percents(low: float, high: float) -> str:
    """A range of shares."""
    low, high = f"{low * 100:.0f}", f"{high * 100:.0f}"
    return f"{low} %" if low == high else f"{low} to {high} %"


def short() -> str:
    """The answer."""
    hosts, eight, many = a100(100), a100(100).weak(8), 1024
    amp, tf32 = (
        8 * case.efficiency
        for kind in ("AMP", "TF32")
        for case in PUBLISHED
        if kind in case.what
    )
    best = max(GPUS, key=lambda gpus: gpus * hosts.strong(gpus, GLOBAL_BATCH).low)
    peak, end = (times(hosts.strong(gpus, GLOBAL_BATCH), gpus) for gpus in (best, many))
    lines = (
        "- **7 times from 8 GPUs of one host: about.** Averaging the gradients takes "
        f"{hosts.all_reduce(8) * 1e3:.0f} ms of a",
        f"  step of {hosts.step * 1e3:.0f} ms, which would leave {times(eight, 8)} "
        f"times. NVIDIA measured {amp:.1f}, and {tf32:.1f} in TF32",
        "  (below): the model does not explain the difference.",
        f"- **900 times from {many:,}: on paper.** The model says "
        f"{times(hosts.weak(many), many)} times with 100 Gbit/s a host,",
        f"  {times(a100(25).weak(many), many)} with 25; but that is {256 * many:,} "
        "images a step, far beyond what ResNet-50",
        f"  trains well with ({GLOBAL_BATCH:,} by [Goyal et al.]({GOYAL})).",
        f"- **With {GLOBAL_BATCH:,} images a step:** {peak} times on {best:,} GPUs, "
        f"{end} on {many:,}. Each",
        "  GPU has less to do, the gradients are as large as ever.",
    )
    return "\n".join(lines) + "\n"


def expected() -> str:
    """Times as fast as one GPU."""
    rows = [
        [
            f"{gpus:,}",
            *(times(a100(speed).weak(gpus), gpus) for speed in NETWORKS),
            times(a100(100).strong(gpus, GLOBAL_BATCH), gpus),
        ]
        for gpus in GPUS
    ]
    header = ["GPUs", *NETWORKS.values(), f"100 Gbit/s, {GLOBAL_BATCH:,} images in all"]
    return markdown(header, rows)


def published() -> str:
    """The model against others' measurements."""
    rows = []
    for case in PUBLISHED:
        low, high = predicted(case)
        since = f", against {case.baseline}" if case.baseline > 1 else ""
        rows.append(
            [
                f"[{case.what}]({case.source})",
                f"{case.gpus}{since}",
                f"{case.efficiency:.0%}".replace("%", " %"),
                percents(low, high),
                outside(low, high, case.efficiency),
            ]
        )
    return markdown(["measured by others", "GPUs", "efficiency", "model", "off"], rows)


def check() -> str:
    """The model against this machine."""
    report = results("scaling")
    link, size = fitted(report), report["gradient_bytes"]
    rows = []
    for processes, row in checked(report).items():
        compute, step = (
            f"{row[name]['median'] * 1e3:.0f}" for name in ("compute", "step")
        )
        alone = f"{row['all_reduce']['median'] * 1e3:.0f}" if processes > 1 else "0"
        errors = [
            "{median:+.0%} ({low:+.0%} to {high:+.0%})".format_map(row[end]["error"])
            for end in ("nothing hidden", "all hidden")
        ]
        numbers = [processes, compute, alone, f"{row['ring'] * 1e3:.0f}", step]
        rows.append([*numbers, *(error.replace("%", " %") for error in errors)])
    header = ["processes", "compute", "all-reduce", "by the model"]
    header += ["DDP step", "error, nothing hidden", "error, all hidden"]
    return (
        f"{report['arch']} at {report['image_size']} px, "
        f"{report['images_per_process']} images per process, {report['precision']}, "
        f"{size / 1e6:.0f} MB of gradients\nin {buckets(size)} buckets; "
        f"alpha {link.alpha * 1e3:.2f} ms, beta {link.beta / 1e9:.2f} GB/s. "
        "Medians in milliseconds; the error is that of\nthe predicted step, "
        "with quartiles:\n\n" + markdown(header, rows) + machine(report)
    )


TABLES = {"short": short, "expected": expected, "published": published, "check": check}


def filled(page: str) -> str:
    """The page with its tables made anew."""
    return fill(page, {name: table() for name, table in TABLES.items()})


# --- the figure ---

# What matplotlib draws in the first colour is drawn in the second on a light page and
# in the third on a dark one
COLOURS = {
    "ink": ("#010101", "#1f2328", "#e6edf3"),
    "faint": ("#020202", "#8c959f", "#7d8590"),
    "slow": ("#030303", "#bc4c00", "#f0883e"),
    "middle": ("#040404", "#0969da", "#58a6ff"),
    "fast": ("#050505", "#1a7f37", "#3fb950"),
}
PLACEHOLDERS = {name: colours[0] for name, colours in COLOURS.items()}
SPEEDS = ("slow", "middle", "fast")  # the colours of NETWORKS
DASHED = (0, (4, 2))
LEGEND = {
    "frameon": False,
    "fontsize": 11,
    "title_fontsize": 11,
    "alignment": "left",
    "handlelength": 1.4,
    "labelspacing": 0.3,
    "borderaxespad": 0.2,
}


def styled(svg: str) -> str:
    """The drawing, in the reader's font and for a light and a dark page."""
    light, dark = (
        "".join(f"--{name}:{colours[index]};" for name, colours in COLOURS.items())
        for index in (1, 2)
    )
    style = (
        f"<style>:root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
    )
    for name, colour in PLACEHOLDERS.items():
        svg = svg.replace(colour, f"var(--{name})")
    svg = re.sub(r"<metadata>.*?</metadata>\n?", "", svg, flags=re.DOTALL)
    svg = svg.replace("'DejaVu Sans'", "system-ui")
    return re.sub(r"(<svg [^>]*>)", rf"\1\n {style}</style>", svg, count=1)


def drawn() -> str:
    """The figure as SVG.

    Raises:
        UserError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise UserError(
            f"the figure needs matplotlib ({error}): "
            "pip install -c constraints.txt -r requirements-report.txt"
        ) from error
    from matplotlib.figure import Figure

    ink, faint = PLACEHOLDERS["ink"], PLACEHOLDERS["faint"]
    options = {
        "svg.fonttype": "none",
        "svg.hashsalt": "scaling",
        "font.family": "DejaVu Sans",
        "font.size": 12,
        "axes.titlesize": 12,
        "axes.edgecolor": faint,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "text.color": ink,
        "axes.labelcolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "grid.color": faint,
        "grid.alpha": 0.3,
    }
    with matplotlib.rc_context(options):
        figure = Figure(figsize=(5.2, 6.4), layout="constrained")
        panels = figure.subplots(2, 1, sharex=True)
        gpus = [2**power for power in range(11)]
        titles = ("256 images per GPU", f"{GLOBAL_BATCH:,} images in all")
        for axes, title in zip(panels, titles, strict=True):
            for speed, colour in zip(NETWORKS, SPEEDS, strict=True):
                hosts, colour = a100(speed), PLACEHOLDERS[colour]
                ranges = [
                    hosts.weak(number)
                    if axes is panels[0]
                    else hosts.strong(number, GLOBAL_BATCH)
                    for number in gpus
                ]
                low, high = ([100 * one[end] for one in ranges] for end in (0, 1))
                axes.fill_between(gpus, low, high, color=colour, alpha=0.16, lw=0)
                axes.plot(gpus, low, color=colour, lw=1.8)
                axes.plot(gpus, high, color=colour, lw=1, ls=DASHED)
            axes.axhline(100, color=ink, lw=1, ls=(0, (1, 2)))
            axes.set_title(f"Efficiency, {title}", fontweight="bold")
            axes.set_xscale("log", base=2)
            axes.set_ylim(0, 104)
            axes.set_yticks(range(0, 101, 25), [f"{y} %" for y in range(0, 101, 25)])
            axes.grid(axis="y")
            axes.tick_params(length=3)
        ticks = gpus[::2]
        panels[1].set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        panels[1].minorticks_off()
        panels[1].set_xlabel("GPUs, eight in a host")
        legend(panels[0])
        buffer = io.StringIO()
        figure.savefig(
            buffer,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None},
        )
    return styled(buffer.getvalue())


def legend(axes) -> None:
    """Say what colours and lines mean, where the panel is empty."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=PLACEHOLDERS[colour], lw=1.8, label=name)
        for name, colour in zip(NETWORKS.values(), SPEEDS, strict=True)
    ]
    networks = axes.legend(
        handles=handles[::-1], title="network of a host", loc="lower left", **LEGEND
    )
    axes.add_artist(networks)
    ink = {"color": PLACEHOLDERS["ink"]}
    ends = [
        Line2D([], [], lw=1, ls=DASHED, label="as hidden as can be", **ink),
        Line2D([], [], lw=1.8, label="nothing hidden", **ink),
    ]
    axes.legend(handles=ends, title="communication", loc="lower right", **LEGEND)


def main() -> None:
    """Fill the page and draw the figure."""
    page = filled(PAGE.read_text())
    Path(FIGURE).write_text(drawn())
    PAGE.write_text(page)


if __name__ == "__main__":
    with exit_status():
        main()
