"""Draw docs/tutorial/overlap.svg from a run of the lesson `overlap`.

python -m benchmarks.overlap    # run it, write results/overlap.json, draw
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "overlap.json"
PICTURE = ROOT / "docs" / "tutorial" / "overlap.svg"
LEFT, WIDTH, ROW = 78, 360, 18  # units of the picture; a phone is 360 wide
STYLE = """
text { font: 11px sans-serif; fill: #1f2328 } .title { font-weight: bold }
.paper { fill: #ffffff } .line { stroke: #8c959f; stroke-dasharray: 3 3 }
.compute { fill: #4f8ecb } .send { fill: #e08a2c }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .paper { fill: #0d1117 } .line { stroke: #6e7681 }
}
"""


def bar(y: int, begin: float, end: float, scale: float, kind: str) -> str:
    """One bar, from `begin` to `end` milliseconds."""
    x, width = LEFT + begin * scale, max((end - begin) * scale, 1)
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="12"/>\n'
    )


def text(x: float, y: int, words: str, kind: str = "", anchor: str = "start") -> str:
    """Some words."""
    place = f'x="{x:.1f}" y="{y}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{words}</text>\n'


def draw(steps: dict[str, list]) -> str:
    """The picture: a panel for each step, a row for the layers and each all-reduce."""
    longest = max(end for spans in steps.values() for _, _, end in spans)
    scale, y, parts = (WIDTH - LEFT - 8) / longest, 4, []
    for title, spans in steps.items():
        parts.append(text(4, y + 14, f"DDP, {title}", "title"))
        y += 22
        rows = [
            ("forward", "forward", "compute"),
            ("backward", "AddmmBackward0", "compute"),
        ]
        top = y
        for label, name, kind in rows:
            parts.append(text(4, y + 10, label))
            parts += [bar(y, b, e, scale, kind) for what, b, e in spans if what == name]
            y += ROW
        sent = sorted((b, e) for what, b, e in spans if what == "gloo:all_reduce")
        for number, (begin, end) in enumerate(sent, start=1):
            parts.append(text(4, y + 10, f"all-reduce {number}"))
            parts.append(bar(y, begin, end, scale, "send"))
            y += ROW
        parts.append(text(4, y + 10, "optimizer"))
        parts += [
            bar(y, b, e, scale, "compute")
            for what, b, e in spans
            if what == "optimizer"
        ]
        y += ROW
        computed = LEFT + scale * max(
            e for what, _, e in spans if what == "AddmmBackward0"
        )
        parts.append(f'<path class="line" d="M{computed:.1f} {top - 2}V{y}"/>\n')
        y += 8
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500) if longest / s <= 6)
    for tick in range(0, int(longest) + 1, step):
        parts.append(text(LEFT + tick * scale, y + 10, str(tick), anchor="middle"))
    parts.append(text(4, y + 10, "milliseconds"))
    y += 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" '
        f'width="{2 * WIDTH}" role="img">\n'
        "<title>One training step: when its buckets are all-reduced</title>\n"
        f'<style>{STYLE}</style>\n<rect class="paper" width="{WIDTH}" height="{y}"/>\n'
        f"{''.join(parts)}</svg>\n"
    )


def main() -> None:
    """Run the lesson, keep its times, draw them."""
    from benchmarks.comparison import write_results

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "overlap.json")
        subprocess.run(
            [sys.executable, ROOT / "tutorial" / "overlap.py", file],
            check=True,
            cwd=ROOT,
        )
        write_results("overlap", {"steps": json.loads(file.read_text())})
    PICTURE.write_text(draw(json.loads(RESULTS.read_text())["steps"]))


if __name__ == "__main__":
    main()
