"""Format the report as an HTML page with a timeline of the last steps (--html)."""

from html import escape

from .job import Job
from .law import BROKEN, HELD, Finding, Report, Verdict
from .laws.time import Spans
from .page import conclusion, summary, times, why_not_judged

SHOWN = 6  # number of steps in the timeline
PARTS = {  # part of a step: its colours on light and dark pages
    "data": "#b35900, #ffa657",
    "forward": "#2f6fce, #79b8ff",
    "backward": "#1b4f9c, #388bfd",
    "communication": "#b3261e, #ff7b72",
    "optimizer": "#2e7d32, #56d364",
    "validation": "#6f42c1, #b392f0",
    "saving": "#00696e, #39c5cf",
}
STYLE = """
:root { color-scheme: light dark; --line: light-dark(#d0d7de, #30363d);
  --soft: light-dark(#f0f2f4, #161b22); --bad: light-dark(#b3261e, #ff7b72);
  --risk: light-dark(#8a5a00, #e3b341); --good: light-dark(#1a7f37, #56d364); }
body { font: 16px/1.5 system-ui, sans-serif; margin: auto; max-width: 60rem;
  padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.finding { border-left: 4px solid var(--risk); background: var(--soft);
  padding: .5rem 1rem; margin: 1rem 0; }
.WRONG { border-color: var(--bad); } .SLOW, .note { border-color: var(--line); }
.law { display: grid; grid-template-columns: 2rem 1fr; padding: .4rem 0;
  border-top: 1px solid var(--line); }
.held b { color: var(--good); } .broken b { color: var(--bad); }
.row { display: grid; grid-template-columns: 3.5rem 1fr; align-items: center; }
.bar { position: relative; height: 1.6rem; background: var(--soft); margin: 2px 0; }
.bar i, .bar u { position: absolute; height: 100%; } .bar u { border-left: 1px dashed; }
.key { display: flex; flex-wrap: wrap; gap: .3rem 1rem; padding-left: 3.5rem; }
.key i { width: .9rem; height: .9rem; margin-right: .3rem; }
.key span { display: flex; align-items: center; }
"""
STYLE += "".join(f".{x} {{ background: light-dark({y}); }}" for x, y in PARTS.items())


def html(job: Job, report: Report) -> str:
    """Return the page as HTML."""
    found = "".join(map(finding, report.findings))
    found = f"<p>{conclusion(report)}</p>" * bool(job.watched) + found
    laws = "".join(map(law, report.verdicts))
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>doctor</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>{STYLE}</style>
<h1>doctor</h1><p>{escape(summary(job))}</p>
<h2>Findings</h2>{found}
<h2>The ten laws</h2>{laws}
{timeline(job)}<p>{"<br>".join(times(job, 999, len(job.processes))[1:])}</p>
</html>
"""


def finding(one: Finding) -> str:
    """Return a finding as HTML."""
    right = one.right_if and f"<p>It is not a mistake if: {escape(one.right_if)}</p>"
    where = f" [{escape(one.place)}]" * bool(one.place)
    what = f"<b>{one.level} {one.check}</b>: {escape(one.what)}{where}"
    mend = f"<p>To fix it: {escape(one.mend)}</p>"
    return f'<div class="finding {one.level}">{what}{mend}{right}</div>'


def law(verdict: Verdict) -> str:
    """Return a law's row as HTML."""
    text = {BROKEN: "see the findings", HELD: "; ".join(verdict.evidence)}
    why = text.get(verdict.state) or why_not_judged(verdict)
    state = verdict.state.replace(" ", "-")
    text = f"{verdict.law.text}: <b>{verdict.state}</b>. {escape(why)}"
    head = f'<div class="law {state}"><span>{verdict.law.number}</span>'
    return f"{head}<div>{text}</div></div>"


def timeline(job: Job) -> str:
    """Return a timeline of the last recorded steps, with one row per rank."""
    rows = {process.rank: process.of(Spans) for process in job.processes}
    rows = {k: [(x.step, *y) for x in own for y in x.spans] for k, own in rows.items()}
    common = set.intersection(*({x[0] for x in row} for row in rows.values()))
    if not common:
        return ""
    steps = sorted(common)[-SHOWN:]
    rows = {k: [x for x in row if x[0] in steps] for k, row in rows.items()}
    every = [one for row in rows.values() for one in row]
    start, end = min(x[2] for x in every), max(x[3] for x in every)

    def percent(seconds: float) -> str:
        return f"{100 * seconds / max(end - start, 1e-9):.2f}%"

    text = ""
    for rank, row in rows.items():
        begun = [min(x[2] for x in row if x[0] == number) for number in steps]
        bars = "".join(f'<u style="left:{percent(x - start)}"></u>' for x in begun)
        for number, part, begin, stop in row:
            label = f"step {number + 1}, {part}: {1000 * (stop - begin):.1f} ms"
            style = f"left:{percent(begin - start)};width:{percent(stop - begin)}"
            bars += f'<i class="{part}" title="{label}" style="{style}"></i>'
        text += f'<div class="row"><span>rank {rank}</span><div class="bar">'
        text += f"{bars}</div></div>"
    key = "".join(f'<span><i class="{x}"></i>{x}</span>' for x in PARTS)
    return f"""<h2>Steps {steps[0] + 1} to {steps[-1] + 1}</h2>{text}
<div class="key">{key}</div><p>{1000 * (end - start):.0f} ms in total; a dashed line
marks the start of each step. Communication includes the time in which a rank waits for
others. Gaps are other work of the script.</p>"""
