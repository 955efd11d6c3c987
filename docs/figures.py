"""Draw the lessons' figures as SVG from the data below and from measurements.

python docs/figures.py            # write the figures that change
python docs/figures.py --check    # only list these figures; status 1 if there are any
"""

import json
import math
import sys
from collections.abc import Callable, Iterable
from math import log
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
R = "abcd"  # colors of ranks 0 to 3: blue, orange, green, pink
# Text on a block of color "a" has color "on-a"
NAMES = "page ink note empty a b c d on-a on-b on-c on-d on-empty"
LIGHT = "#ffffff #1f2328 #57606a #e4e8ec #0969da #e8912d #117a5b #c77fb0 "
LIGHT += "#ffffff #1f2328 #ffffff #1f2328 #1f2328"
DARK = "#0d1117 #e6edf3 #9da7b3 #30363d #4493f8 #f0a050 #2fb58a #d896c4 "
DARK += "#0d1117 #0d1117 #0d1117 #0d1117 #e6edf3"


def rules(colors: str) -> str:
    """Return CSS rules: each color has one class for shapes and text, one for lines."""
    rule = ".{0} {{ fill: {1} }} .line.{0} {{ fill: none; stroke: {1} }}"
    pairs = zip(NAMES.split(), colors.split(), strict=True)
    return "\n".join(rule.format(name, color) for name, color in pairs)


HEAD = f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 360 HEIGHT"
  font-family="system-ui, sans-serif" font-size="13">
<style>
{rules(LIGHT)}
.line {{ stroke-width: 1.5 }} .dashed {{ stroke-dasharray: 4 3 }}
.arrow {{ marker-end: url(#head) }} .title {{ font-weight: 600 }}
.note, .small {{ font-size: 12px }}
.middle {{ text-anchor: middle }} .end {{ text-anchor: end }}
@media (prefers-color-scheme: dark) {{
{rules(DARK)}
}}
</style>
<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"
  markerUnits="userSpaceOnUse" orient="auto"><path class="note" d="M0 0L8 4L0 8z"/>
</marker>
<rect class="page" width="360" height="HEIGHT" rx="8"/>
"""


class Picture(list[str]):
    """A list of SVG elements; x and y are pixels from the top left, for a phone."""

    def text(self, x: float, y: float, words: str, kind: str = "note") -> None:
        """Draw text on baseline y; `kind` makes it start, center or end at x."""
        self.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{words}</text>')

    def block(self, x, y, width, height, color: str, *lines: str) -> None:
        """Draw a rectangle, or an outline (color "line a"), with centered text."""
        size = f'width="{width:g}" height="{height:g}"'
        place = f'x="{x:g}" y="{y:g}" {size} rx="{min(4, width / 8, height / 8):g}"'
        self.append(f'<rect class="{color}" {place}/>')
        kind = f"{'ink' if 'line' in color else f'on-{color}'} small middle"
        first = y + height / 2 + 12.5 - 8 * len(lines)
        for number, words in enumerate(lines):
            self.text(x + width / 2, first + 16 * number, words, kind)

    def row(self, x, y, cells: Iterable[tuple], height=28, title="") -> float:
        """Draw blocks (color or "" for a gap, width, label); return the right edge."""
        if title:
            self.text(x, y - 10, title, "ink title")
        for color, width, label in cells:
            if color:
                self.block(x, y, width - 2, height, color, *label.splitlines())
            x += width
        return x - 2

    def sum(self, x, y, width, height, ranks: str, fields: str) -> None:
        """Draw a block with one field per rank, filled if the sum includes the rank."""
        self.block(x, y, width, height, "empty")
        part = width / len(fields)
        for number, rank in enumerate(fields):
            if rank in ranks:
                self.block(x + part * number, y, part, height, rank)

    def line(self, *points: float, kind: str = "arrow") -> None:
        """Draw an arrow, or a plain or dashed line, through points x, y, x, y, ..."""
        path = " ".join(f"{value:g}" for value in points)
        self.append(f'<path class="line note {kind}" d="M{path}"/>')

    def legend(self, y: float, **names: str) -> None:
        """Draw a legend that explains the colors."""
        x = 8
        for color, words in names.items():
            self.block(x, y - 10, 12, 12, color)
            self.text(x + 17, y, words)
            x += 32 + 6.9 * len(words)


# Each of the following functions draws one figure and returns its height.


def tree(draw: Picture) -> float:
    """Draw two hosts, each with a launcher and four processes that use one GPU each."""
    for host, color in enumerate("ab"):
        y = 8 + 196 * host
        draw.block(8, y, 344, 176, f"line {color}")
        draw.text(18, y + 25, f"host {host}", "ink title")
        draw.block(120, y + 10, 120, 24, "empty", "launcher: torchrun")
        for local in range(4):
            x = 16 + 83 * local
            draw.line(180, y + 34, x + 39.5, y + 60)
            rank = f"rank {4 * host + local}"
            draw.block(x, y + 62, 79, 62, color, "process", rank, f"local rank {local}")
            draw.line(x + 39.5, y + 124, x + 39.5, y + 140)
            draw.block(x, y + 142, 79, 24, "empty", f"GPU {local}")
    draw.line(180, 184, 180, 204, kind="plain")
    draw.text(188, 198, "network")
    draw.text(180, 402, "ranks 0 to 7: the world size is 8", "note middle")
    return 416


def all_reduce(draw: Picture) -> float:
    """Draw a broadcast and an all-reduce among four ranks that hold 1, 2, 3 and 4."""
    draw.text(8, 22, "broadcast", "ink title")
    draw.text(100, 22, "rank 0's number goes to every rank")
    draw.text(8, 180, "all-reduce", "ink title")
    draw.text(100, 180, "every rank gets the sum")
    for top in (28, 186):
        draw.text(114, top + 14, "before", "note middle")
        draw.text(264, top + 14, "after", "note middle")
        for rank, color in enumerate(R):
            y = top + 22 + 25 * rank
            draw.text(8, y + 15, f"rank {rank}")
            draw.block(64, y, 100, 21, color, str(rank + 1))
            draw.line(170, y + 10.5, 208, y + 10.5)
            if top == 28:
                draw.block(214, y, 100, 21, "a", "1")
            else:
                draw.sum(214, y, 100, 21, R, R)
                draw.text(320, y + 15, "10", "ink")
    draw.text(8, 324, "10 = 1 + 2 + 3 + 4: one number, the sum over all ranks.")
    return 338


# What rank r holds in slot c before and after: colors, and a part's number
COLLECTIVES = {
    "reduce: one rank gets the sum": lambda r, c: (R[r] * (c == 0), R * (r == c == 0)),
    "scatter: one rank's parts": lambda r, c: (f"a{c}" * (r == 0), f"a{c}" * (r == c)),
    "gather: one rank collects": lambda r, c: (R[r] * (r == c), R[c] * (r == 0)),
    "all-gather: every rank collects": lambda r, c: (R[r] * (r == c), R[c]),
    "reduce-scatter: the sum in parts": lambda r, c: (f"{R[r]}{c}", R * (r == c)),
    "all-to-all: part i of each to rank i": lambda r, c: (f"{R[r]}{c}", f"{R[c]}{r}"),
}


def collectives(draw: Picture) -> float:
    """Draw what each of four ranks holds before and after six collectives."""
    for number, (name, state) in enumerate(COLLECTIVES.items()):
        left, top = 8 + 180 * (number % 2), 132 * (number // 2)
        draw.text(left, top + 20, name.split(": ")[0], "ink title")
        draw.text(left, top + 36, name.split(": ")[1])
        draw.line(left + 81, top + 81, left + 95, top + 81)
        for rank in range(4):
            y = top + 44 + 19 * rank
            draw.text(left, y + 13, str(rank))
            for place in range(4):
                for x, held in zip((11, 97), state(rank, place), strict=True):
                    x, colors = left + x + 17 * place, held.rstrip("0123")
                    draw.sum(x, y, 16, 17, colors, colors or R)
                    if part := held.lstrip(R):
                        draw.text(x + 8, y + 13, part, f"on-{colors} small middle")
    draw.legend(416, a="rank 0's", b="rank 1's", c="rank 2's", d="rank 3's")
    draw.sum(8, 424, 12, 12, R, R)
    draw.text(25, 434, "the sum; a number in a block: the part")
    return 448


def ring(draw: Picture) -> float:
    """Draw a ring all-reduce: in each of six steps, each rank sends one part onward."""
    held = [[rank] * 4 for rank in R]  # the ranks whose values each part's sum includes
    draw.text(8, 22, "reduce-scatter", "ink title")
    draw.text(8, 38, "the sums grow")
    draw.text(188, 22, "all-gather", "ink title")
    draw.text(188, 38, "the sums travel around")
    for step in range(6):
        left, top = 8 + 180 * (step // 3), 58 + 146 * (step % 3)
        draw.text(left, top + 4, f"step {step + 1}")
        for rank in range(4):
            part, following = (rank - step) % 4, (rank + 1) % 4
            own = held[following][part] if step < 3 else ""
            held[following][part] = held[rank][part] + own
            x, y = left + 28 + 34 * part, top + 18 + 28 * rank
            draw.line(x, y + 15, x, y + (23 if rank == 3 else 27))
            if rank == 3:
                draw.line(x, top + 9, x, top + 17)
        for rank, parts in enumerate(held):
            y = top + 18 + 28 * rank
            draw.text(left, y + 11, str(rank))
            for part, ranks in enumerate(parts):
                draw.sum(left + 14 + 34 * part, y, 28, 14, ranks, R)
    draw.text(8, 500, "An arrow at the edge leads from rank 3 to rank 0.")
    draw.text(8, 518, "Each row is a rank, each column a part of the data.")
    draw.text(8, 536, "A block's colors show which ranks its sum includes.")
    draw.legend(558, a="rank 0", b="rank 1", c="rank 2", d="rank 3")
    return 570


ORDERS = {  # from DistributedSampler; a test compares them with it
    "10 images, after set_epoch(0)": [4, 1, 7, 5, 3, 9, 0, 8, 6, 2],
    "10 images, after set_epoch(1)": [5, 6, 1, 2, 0, 8, 9, 3, 7, 4],
    "9 images, not shuffled: 0 is used twice (*)": [0, 1, 2, 3, 4, 5, 6, 7, 8, 0],
}


def shards(draw: Picture) -> float:
    """Draw the images that DistributedSampler gives to each of two processes."""
    for number, (title, order) in enumerate(ORDERS.items()):
        top = 116 * number
        draw.text(8, top + 22, title, "ink title")
        for row, words in enumerate(("order", "rank 0", "rank 1")):
            y = top + 32 + 27 * row
            draw.text(8, y + 15, words)
            for place, image in enumerate(order):
                if row in (0, 1 + place % 2):
                    label = str(image) + "*" * (image in order[:place])
                    draw.block(58 + 29.5 * place, y, 27, 22, R[place % 2], label)
    draw.text(8, 370, "Each rank takes every second image of the order.")
    return 384


def buckets(draw: Picture) -> float:
    """Draw how each bucket's all-reduce begins when its last gradient is ready."""
    x = 8
    draw.text(8, 22, "Backward computes the last layer's gradients first.")
    draw.text(8, 48, "gradients of layer")
    draw.text(8, 102, "buckets")
    for number, layers in enumerate(("6", "54", "321"), start=1):
        color, width = R[number - 1], 42 * len(layers)
        draw.row(x, 54, [(color, 42, n) for n in layers], 26)
        draw.block(x, 108, width - 2, 26, f"line {color}")
        draw.row(x + 9 * len(layers), 112, [(color, 24, n) for n in layers], 18)
        x += width
        draw.line(x - 2, 134, x - 2, 170)
        draw.text(x + 4, 149, f"bucket {number}:")
        draw.text(x + 4, 165, "all-reduce")
        draw.row(x - 2, 172, [(color, 26 * len(layers), "")], 26)
    draw.line(x - 2, 40, x - 2, 222, kind="dashed")
    draw.text(x - 6, 218, "backward ends", "note end")
    draw.text(x + 4, 218, "the step waits")
    draw.text(8, 244, "The step waits for what has not been sent by then.")
    draw.text(8, 262, "The first bucket is small, so that sending starts early.")
    return 276


def accumulation(draw: Picture) -> float:
    """Draw four micro-batches: an all-reduce after each, or only after the last."""
    each = [cell for n in "1234" for cell in (("a", 46, n), ("b", 36, ""))]
    last = [*each[::2], each[-1]]
    end = draw.row(8, 32, [*each, ("c", 16, "")], 28, "four all-reduces")
    sooner = draw.row(8, 108, [*last, ("c", 16, "")], 28, "no_sync(): one all-reduce")
    draw.line(end, 140, end, 156, kind="plain")
    draw.line(sooner, 140, sooner, 156, kind="plain")
    draw.line(end - 1, 148, sooner + 2, 148)
    draw.text(sooner - 10, 152, "three fewer all-reduces", "note end")
    draw.legend(182, a="a micro-batch", b="all-reduce", c="optimizer's step")
    draw.text(8, 202, "1 to 4: forward and backward; .grad adds up.")
    draw.text(8, 220, "Drawn without overlap: part of an all-reduce runs during")
    draw.text(8, 236, "the backward pass before it.")
    return 250


FORMATS = {"fp32": (8, 23), "TF32": (8, 10), "bf16": (8, 7), "fp16": (5, 10)}


def formats(draw: Picture) -> float:
    """Draw the bits of four number formats, with their range and precision."""
    for number, (name, (exponent, fraction)) in enumerate(FORMATS.items()):
        top = 74 * number
        largest = (2 - 2.0**-fraction) * 2.0 ** (2 ** (exponent - 1) - 1)
        written = f"{largest:,.0f}" if largest < 1e6 else f"{largest:.2g}"
        draw.text(54, top + 22, f"1 + {exponent} + {fraction} bits")
        bits = "d" + "b" * exponent + "a" * fraction
        draw.row(8, top + 32, [(color, 10.8, "") for color in bits], 20, name)
        next_to_1 = f"after 1 comes 1 + {2.0**-fraction:.2g}"
        draw.text(8, top + 68, f"largest {written}; {next_to_1}")
    draw.legend(320, d="sign", b="exponent: range", a="fraction: precision")
    return 334


def hang(draw: Picture) -> float:
    """Draw rank 0, which waits in an all-reduce that rank 1 never calls."""
    steps = [cell for n in "12" for cell in (("a", 36, n), ("b", 16, ""))]
    waits = ("a", 36, "3"), ("line b dashed", 138, "waits in all_reduce")
    never = ("empty", 174, "never calls all_reduce")
    draw.row(8, 34, [*steps, *waits, ("d", 66, "error")], title="rank 0")
    draw.row(8, 110, [*steps, never, ("d", 66, "stopped")], title="rank 1")
    draw.line(285, 26, 285, 150, kind="dashed")
    draw.text(285, 164, "timeout: 10 minutes with NCCL,", "note end")
    draw.text(285, 180, "30 with Gloo, unless you change it", "note end")
    draw.line(8, 192, 352, 192)
    draw.legend(214, a="forward and backward", b="all-reduce", d="the end")
    return 226


def restarts(draw: Picture) -> float:
    """Draw a restart: rank 1 dies in step 5; both ranks load step 4's checkpoint."""
    for rank, (saved, last) in enumerate((("c", 26), ("", 14))):
        steps = [cell for n in "23467" for cell in (("a", 26, n), (saved, 10, ""))]
        killed = ("d", last, "5"), ("", 50 - last, "")
        again = ("empty", 46, "start"), ("line c", 10, ""), ("a", 26, "5"), steps[1]
        cells = [*steps[:6], *killed, *again, *steps[6:]]
        draw.row(8, 34 + 76 * rank, cells, title=f"rank {rank}")
    draw.text(104, 24, "torchrun stops it", "ink small")
    draw.text(104, 100, "killed", "ink small")
    draw.line(129, 117, 143, 131, kind="plain")
    draw.line(129, 131, 143, 117, kind="plain")
    draw.line(112, 64, 112, 80, 216, 80, 216, 65)
    draw.line(216, 80, 216, 108)
    draw.text(164, 76, "checkpoint", "note middle")
    draw.line(8, 154, 352, 154)
    draw.legend(176, a="a step", d="a step that is lost")
    draw.legend(196, **{"c": "checkpoint saved", "line c": "checkpoint loaded"})
    return 208


HOROVOD = (  # A line of code, what it does with DDP, and what it does with Horovod
    (
        "before the first step",
        "DDP(model), which also\nbroadcasts the weights",
        "DistributedOptimizer, and\nbroadcast_parameters()",
    ),
    ("model(x)", "arms the hooks", "a plain forward"),
    (
        "loss.backward()",
        "hooks fill buckets,\nstart their all-reduce;\nwaits for the last",
        "hooks pass gradients\nto a thread, which\nall-reduces them",
    ),
    ("optimizer.step()", "a plain step", "waits for the thread,\nthen updates weights"),
)


def horovod(draw: Picture) -> float:
    """Draw what DDP and Horovod do in each line of a training step."""
    y = 30
    draw.text(92, 22, "DDP wraps the model", "ink title small middle")
    draw.text(268, 22, "Horovod: the optimizer", "ink title small middle")
    for code, *columns in HOROVOD:
        height = 14 + 16 * max(words.count("\n") + 1 for words in columns)
        draw.text(180, y + 13, code, "note middle")
        for x, color, words in zip((8, 184), "ab", columns, strict=True):
            color = "empty" if "plain" in words else color
            draw.row(x, y + 19, [(color, 170, words)], height)
        y += height + 23
    draw.legend(y + 22, a="DDP acts", b="Horovod acts", empty="PyTorch alone")
    return y + 36


def measured(file: str) -> dict:
    """Return the measurements that a lesson's program wrote."""
    return json.loads((ROOT / "tutorial" / file).read_text())


def timeline(draw: Picture) -> float:
    """Draw when a training step computes and sends, with two bucket sizes."""
    steps = measured("06_overlap/output/overlap.json")
    longest = max(end for spans in steps.values() for _, _, end in spans)
    colors = {"forward": "d", "backward": "a", "send": "b", "optimizer": "c"}
    for number, (title, spans) in enumerate(steps.items()):
        top = 128 * number
        draw.text(8, top + 22, title, "ink title")
        total = max(end for _, _, end in spans)
        draw.text(352, top + 22, f"{total:.0f} ms", "ink title end")
        for y, lane in ((32, "compute"), (66, "link")):
            draw.text(8, top + y + 17, lane)
            draw.block(66, top + y, 286, 26, "line note dashed")
        for what, began, ended in spans:
            x, width = 66 + 286 * began / longest, 286 * (ended - began) / longest
            y = top + (66 if what.startswith("send") else 32)
            draw.block(x, y, max(width - 1, 1), 26, colors[what.split()[0]])
        computed = max(end for what, _, end in spans if what.startswith("backward"))
        x = 66 + 286 * computed / longest
        draw.line(x, top + 28, x, top + 96, kind="dashed")
        draw.text(min(x, 306), top + 108, "backward ends", "note middle")
    draw.legend(270, d="forward", a="backward", b="sending", c="optimizer")
    return 284


def memory(draw: Picture) -> float:
    """Draw the memory of each process with DDP and with ZeRO 1, 2 and 3."""
    ways = measured("10_memory/output/memory_zero.json")
    largest = max(sum(parts.values()) for parts in ways.values())
    for number, (name, parts) in enumerate(ways.items()):
        top, total = 58 * number, sum(parts.values()) / 1024
        draw.text(352, top + 22, f"{total:,.0f} KiB per process", "note end")
        widths = [max(344 * size / largest, 3) for size in parts.values()]
        draw.row(8, top + 32, zip(R, widths, [""] * 4, strict=False), 24, name)
    bottom = 18 + 58 * len(ways)
    draw.legend(bottom, **dict(zip(R, ways["DDP"], strict=False)))
    return bottom + 14


def exposed(draw: Picture) -> float:
    """Draw a traced step of two processes, and its communication that nothing hides."""
    for rank in range(2):
        trace = measured(f"14_step_cost/output/rank{rank}.json")["traceEvents"]
        step = [e for e in trace if e["name"].startswith("ProfilerStep#")][2]
        top, scale = 132 * rank, 262 / step["dur"]
        spans = {"computes": [], "sends": []}
        for event in trace:
            began, lane = event["ts"] - step["ts"], None
            if event["name"] in ("gloo:all_reduce", "link"):
                lane = "sends"
            elif event["name"].startswith("aten::") and event["tid"] == step["tid"]:
                lane = "computes"
            if lane and 0 <= began < step["dur"]:
                took = min(event["dur"], step["dur"] - began)
                spans[lane].append((90 + began * scale, took * scale))
        draw.text(8, top + 22, f"rank {rank}", "ink title")
        draw.text(352, top + 22, f"{step['dur'] / 1000:.0f} ms", "ink title end")
        lanes = ("computes", "a"), ("sends", "b"), ("exposed", "d")
        for lane, (name, color) in enumerate(lanes):
            y = top + 32 + 30 * lane
            draw.text(8, y + 17, name)
            for x, width in spans["sends" if name == "exposed" else name]:
                draw.block(x, y, width, 24, color)
            for x, width in spans["computes"] if name == "exposed" else ():
                draw.block(x, y, width, 24, "page")  # leaves only exposed communication
            draw.block(90, y, 262, 24, "line note dashed")
    draw.legend(286, a="computing", b="communication", d="exposed")
    return 300


def fit(draw: Picture) -> float:
    """Draw all-reduce times by size, the fitted line and its predictions for a step."""
    found = measured("15_network/output/network_fit.json")
    latency, bandwidth = found["fit"]

    def place(size: float, seconds: float) -> tuple[float, float]:
        return 54 + 284 * log(size / 1024, 4096), 190 - 140 * log(seconds * 5e3, 50)

    draw.text(8, 22, "one all-reduce", "ink title")
    for seconds in (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01):
        y = place(1024, seconds)[1]
        draw.text(48, y + 4, f"{seconds * 1000:g} ms", "note end")
        draw.line(54, y, 352, y, kind="dashed")
    for power, words in enumerate(("1 KiB", "16 KiB", "256 KiB", "4 MiB")):
        draw.text(place(1024 * 16**power, 1)[0], 208, words, "note middle")
    sizes = [1024 * 2 ** (step / 8) for step in range(97)]
    points = [place(size, latency + size / bandwidth) for size in sizes]
    draw.line(*(value for point in points for value in point), kind="plain")
    for size, seconds in found["sizes"].items():
        x, y = place(int(size), seconds)
        draw.block(x - 4, y - 4, 8, 8, "a")
    draw.text(8, 240, "a step's gradients, 8.4 MB", "ink title")
    steps = found["steps"].items()
    scale = 260 / max(seconds for _, (*_, seconds) in steps)
    for number, (name, (count, size, seconds)) in enumerate(steps):
        y = 252 + 56 * number
        draw.text(8, y + 12, f"{name}: {count} all-reduce{'s' * (count > 1)}")
        predicted = count * latency + size / bandwidth
        for row, (color, value) in enumerate((("b", predicted), ("a", seconds))):
            draw.block(8, y + 18 + 14 * row, scale * value, 12, color)
            x = 14 + scale * value
            draw.text(x, y + 28 + 14 * row, f"{value * 1000:.1f} ms", "note small")
    draw.legend(434, a="measured", b="predicted by the fit")
    return 446


def leaving(calls: list) -> float:
    """Return how many KiB one machine sends to the other in ring collectives."""
    total = 0
    for name, ranks, _, kib, times in calls:
        here, n = sum(rank < 2 for rank in ranks), len(ranks)
        if here < n:  # each of the machine's 2 / here rings crosses the link once
            passes = 2 if name == "all_reduce" else 1
            total += times * kib * passes * (n - 1) / n * 2 / here
    return total


def sharded(draw: Picture) -> float:
    """Draw the weights that each of four ranks keeps, and what two machines send."""
    forms = measured("16_sharded/output/sharded.json")
    everything = 2 * 256 * 4  # KiB of weights, gradients and two moments
    most = max(leaving(form["calls"]) for form in forms.values())
    titles = "4 shards, fp32", "4 shards, bf16", "2 replicas of 2 shards, bf16 (HSDP)"
    for number, (title, form) in enumerate(zip(titles, forms.values(), strict=True)):
        top, sent = 168 * number, leaving(form["calls"])
        draw.text(8, top + 22, title, "ink title")
        height = 64 * form["kept"] / everything
        crossing = sum(call[4] for call in form["calls"] if {0, 2} <= {*call[1]})
        for rank, color in enumerate(R):
            x = 16 + 60 * rank + 92 * (rank // 2)
            draw.block(x, top + 44, 52, 64, "empty")
            y = top + 44 + height * (rank % round(64 / height))
            draw.block(x, y, 52, height, color if number < 2 else R[rank % 2])
            draw.text(x + 26, top + 124, f"rank {rank}", "note middle")
        for x in (8, 220):
            draw.block(x, top + 32, 128, 98, "line note")
        draw.line(136, top + 76, 220, top + 76, kind="plain")
        draw.text(178, top + 68, f"{crossing} calls", "note middle")
        draw.text(178, top + 94, "network", "note middle")
        width = 140 * sent / most
        draw.block(8, top + 140, width, 14, "note")
        words = f"{sent:,.0f} KiB per machine and step"
        draw.text(14 + width, top + 152, words)
    draw.text(8, 524, "Filled: the rows of the weights that a rank keeps.")
    return 536


def large_batches(draw: Picture) -> float:
    """Draw the steps to a target accuracy, by batch and rule, on logarithmic axes."""
    rules = measured("17_large_batches/output/large_batches.json")
    scales = measured("17_large_batches/output/large_batches_noise.json")
    batches = 64, 256, 1024, 4096

    def place(batch: float, steps: float) -> tuple[float, float]:
        return 40 + 49 * math.log2(batch / 64), 244 - 30 * math.log2(steps)

    draw.text(8, 22, "steps to 95%, by batch", "ink title")
    (left, _), (right, _) = place(min(scales), 1), place(max(scales), 1)
    draw.block(left, 34, right - left, 210, "empty")
    words = f"noise scale: {min(scales):.0f} to {max(scales):.0f}"
    draw.text((left + right) / 2, 236, words, "on-empty small middle")
    draw.line(*place(64, 1), *place(4096, 1), kind="plain")
    for steps in (1, 10, 100):
        draw.text(34, place(64, steps)[1] + 4, str(steps), "note end")
    for batch in batches:
        draw.text(place(batch, 1)[0], 260, f"{batch:,}", "note middle")
    first = min(rules["linear"]) * 4096 / 64
    draw.line(*place(64, first), *place(4096, first / 64), kind="dashed")
    draw.text(338, 200, "ideal", "note end")
    for color, epochs in zip(R, rules.values(), strict=True):
        steps = [e * 4096 / batch for e, batch in zip(epochs, batches, strict=True)]
        reached = [pair for pair in zip(batches, steps, strict=True) if pair[1] < 1e9]
        points = [place(*pair) for pair in reached]
        path = " ".join(f"{x:g} {y:g}" for x, y in points)
        draw.append(f'<path class="line {color}" d="M{path}"/>')
        for x, y in points:
            draw.block(x - 4, y - 4, 8, 8, color)
    draw.legend(286, a="same rate", b="square root", c="linear", d="LARS")
    draw.text(8, 308, "With 4,096, the same rate and linear do not reach it.")
    return 320


# For each split: how often a file is read, and which workers read file 0, 1, 2, ...
SPLITS = {
    "no split": ("each file is read 4 times", ["abcd"]),
    "by rank": ("each file is read twice", ["ab", "cd"]),
    "by worker": ("each file is read twice", ["ac", "bd"]),
    "rank * workers + worker": ("rank 0: 6 files, rank 1: 4", R),
    "worker * ranks + rank": ("5 files for each rank", "acbd"),
}


def streams(draw: Picture) -> float:
    """Draw ten files, and which workers of two ranks read each of them."""
    for number, (name, (result, readers)) in enumerate(SPLITS.items()):
        top = 62 * number
        draw.text(8, top + 22, name, "ink title")
        draw.text(352, top + 22, result, "note end")
        for file in range(10):
            colors = readers[file % len(readers)]
            draw.sum(8 + 34.6 * file, top + 30, 32, 24, colors, colors)
    draw.text(8, 334, "Each block is a file, in the order after the shuffle.")
    draw.legend(358, a="rank 0, worker 0", b="rank 0, worker 1")
    draw.legend(380, c="rank 1, worker 0", d="rank 1, worker 1")
    return 394


def talk_less(draw: Picture) -> float:
    """Draw how the weights of two processes move with DDP, local SGD and DiLoCo."""
    ways = {
        "DDP": "averages the gradients in each step",
        "local SGD": "averages the weights at intervals",
        "DiLoCo": "then takes an outer step from there",
    }
    for number, (way, words) in enumerate(ways.items()):
        top, every = 124 * number, 1 if way == "DDP" else 5
        draw.text(8, top + 22, way, "ink title")
        draw.text(352, top + 22, words, "note end")
        for step in range(every, 16, every):
            draw.block(1 + 22.4 * step, top + 108, 6, 10, "d")
        y = top + 86
        if way == "DDP":
            for color in ("a", "b dashed"):  # draw one line in two colors
                draw.line(10, y, 346, y - 18, kind=color)
            draw.text(10, y - 28, "one line: both ranks have the same weights")
            continue
        for turn in range(3):
            x, end, mean = 10 + 112 * turn, 122 + 112 * turn, y - 6
            for color, side in (("a", -18), ("b", 18)):
                draw.line(x, y, end - 6, mean + side, end, mean, kind=color)
            if way == "DiLoCo":
                draw.block(end - 2, mean - 10, 4, 10, "c")
                mean -= 10
            y = mean
    draw.text(8, 396, "From left to right: 15 steps. Up and down: the weights.")
    draw.legend(418, a="rank 0", b="rank 1", c="outer step", d="all-reduce")
    return 432


LESSONS = {"01_ranks": [tree], "02_all_reduce": [all_reduce], "04_batches": [shards]}
LESSONS |= {"05_build_ddp": [buckets], "06_overlap": [timeline]}
LESSONS |= {"07_accumulation": [accumulation], "08_collectives": [collectives, ring]}
LESSONS |= {"09_mixed_precision": [formats], "10_memory": [memory]}
LESSONS |= {"11_hangs": [hang], "12_restarts": [restarts], "13_horovod": [horovod]}
LESSONS |= {"14_step_cost": [exposed], "15_network": [fit]}
LESSONS |= {"16_sharded": [sharded], "17_large_batches": [large_batches]}
LESSONS |= {"18_streams": [streams], "19_talk_less": [talk_less]}
FIGURES = {
    f"tutorial/{lesson}/{draw.__name__}.svg": draw
    for lesson, figures in LESSONS.items()
    for draw in figures
}


def drawn(figure: Callable[[Picture], float]) -> str:
    """Return a figure as SVG."""
    picture = Picture()
    height = figure(picture)
    return HEAD.replace("HEIGHT", f"{height:g}") + "\n".join([*picture, "</svg>\n"])


def main(arguments: list[str]) -> int:
    """Write or check all figures; return the exit status."""
    try:
        if arguments not in ([], ["--check"]):
            raise ValueError("usage: docs/figures.py [--check]")
        texts = {ROOT / name: drawn(figure) for name, figure in FIGURES.items()}
    except (OSError, ValueError) as error:
        print(f"docs/figures.py: error: {error}", file=sys.stderr)
        return 2
    before = {path: path.read_text() for path in texts if path.exists()}
    changed = [path for path in texts if texts[path] != before.get(path)]
    for path in changed:
        print(f"{path.relative_to(ROOT)} {'differs' if arguments else 'written'}")
        if not arguments:
            path.write_text(texts[path])
    return 1 if arguments and changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
