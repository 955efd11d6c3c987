"""Define laws and checks, and judge a job by them.

Each file in laws/ contains events, a watcher and checks for one law. A check is a
function of a Job: it yields a Breach for each mistake that it finds, or evidence that
there is none (a sentence with numbers that a user can verify). If the job's events are
not sufficient, it raises NotJudged.

A check's docstring names the fault, the fix, and after "Not a mistake if:" when it is
none (.github/CONTRIBUTING.md has an example). A general check judges its law; the
others look for one known mistake each. A function marked with `@explains` looks for a
known mistake behind a general check's breach, and returns a better Breach or None.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from graphlib import TopologicalSorter

from .event import Event, Joins, Rank
from .job import Job

WRONG, RISK, SLOW, NOTE = LEVELS = "WRONG", "RISK", "SLOW", "note"
HELD, BROKEN, NOT_JUDGED = "held", "broken", "not judged"
COMPARES = "ranks", "randomness", "replicas"  # laws that need several processes


class NotJudged(Exception):
    """The reason why a check cannot judge this job."""


class Doubt(NotJudged):
    """Evidence that a law may be broken; doctor then does not report it as held."""


@dataclass(frozen=True)
class Law:
    """One of the ten laws of data-parallel training."""

    number: int
    name: str  # as in "law 4"
    text: str  # what is true of every correct job


@dataclass
class Breach:
    """A breach of a law, as a check has found it."""

    what: str  # a text with names, ranks, steps and numbers; "": see explained()
    place: str = ""  # file:line
    facts: object = None  # data for explanations
    level: str = ""  # if it differs from the check's level
    mend: str = ""


@dataclass
class Finding:
    """A breach as the report shows it."""

    law: Law
    check: str
    level: str
    what: str
    place: str
    mend: str
    right_if: str  # the case in which a RISK is not a mistake


@dataclass
class Verdict:
    """Whether a job obeys a law, with the reasons."""

    law: Law
    state: str = NOT_JUDGED
    evidence: list[str] = field(default_factory=list)  # sentences
    not_judged: dict[str, str] = field(default_factory=dict)  # check -> reason
    doubts: list[str] = field(default_factory=list)  # why the law is not held


@dataclass(eq=False)
class Check:
    """A check, or an explanation of breaches that another check (`explains`) finds."""

    law: Law
    name: str
    function: Callable
    level: str
    fault: str
    mend: str
    right_if: str
    read: str
    general: bool = False
    needs: tuple[type[Event], ...] = ()
    causes: set["Check"] = field(default_factory=set)
    explains: "Check | None" = None

    def finding(self, breach: Breach) -> Finding:
        """Return the finding for a breach that this check has found or explained."""
        level, mend = breach.level or self.level, breach.mend or self.mend
        texts = breach.what, breach.place, mend, self.right_if * (level == RISK)
        return Finding(self.law, self.name, level, *texts)


CHECKS: dict[str, Check] = {}


def check(
    law: Law,
    level: str,
    *,
    general: bool = False,
    needs: Iterable[type[Event]] = (),
    causes: Iterable[Check] = (),
    effects: Iterable[Check] = (),
    read: str = "",
    explains: Check | None = None,
) -> Callable[[Callable], Check]:
    """Return a decorator that turns a function into a check of a law.

    Args:
        needs: kinds of events; if the job lacks one kind, the check judges nothing.
        causes: checks whose findings hide this check's findings.
        effects: checks whose findings are hidden by this check's findings.
        read: a pitfall, lesson or page of the repository that explains the mistake.
        explains: the check whose breaches the function explains: see explains().
    """

    def add(function: Callable) -> Check:
        fault, _, rest = function.__doc__.partition(".\n\n")
        mend, _, right_if = " ".join(rest.split()).partition(" Not a mistake if: ")
        texts, name = (fault.strip(), mend, right_if, read), function.__name__
        if name in CHECKS:
            raise TypeError(f"two checks have the name {name}")
        fields = {"general": general, "needs": (*needs,), "causes": {*causes}}
        own = Check(law, name, function, level, *texts, **fields, explains=explains)
        CHECKS[name] = own
        for one in effects:
            one.causes.add(own)
        return own

    return add


def explains(
    general: Check, level: str = "", read: str = ""
) -> Callable[[Callable], Check]:
    """Return a decorator for an explanation: (job, breach) -> Breach | None."""
    level, read = level or general.level, read or general.read
    return check(general.law, level, read=read, explains=general)


def need(events, why: str):
    """Return the given events; raise NotJudged if there are none."""
    if not events:
        raise NotJudged(why)
    return events


def several(job: Job) -> None:
    """Raise NotJudged if the job has no group of several processes."""
    together = job.world_size > 1 and len(job.processes) > 1
    need(together, "this needs at least two processes")
    need(job.of(Joins) or job.of(Rank), "the processes train alone: see no_group")


def judge(job: Job, own: Check) -> Iterator[Breach | str]:
    """Yield a check's breaches and evidence."""
    if own.law.name in COMPARES:
        several(job)
        need(not job.apart, job.apart)
    for kind in own.needs:
        seen = kind.__doc__.split("\n")[0].split(". ")[0].rstrip(".")
        need(job.of(kind), f"not seen: {seen[0].lower()}{seen[1:]}")
    yield from own.function(job)


def explained(job: Job, own: Check, breach: Breach) -> list[Finding]:
    """Return the finding of the first explanation that fits, else the check's own."""
    for other in CHECKS.values():
        if other.explains is own and (better := other.function(job, breach)):
            better = replace(better, place=better.place or breach.place)
            return [other.finding(better)]
    return [own.finding(breach)] if breach.what else []


@dataclass
class Report:
    """A job's verdicts and findings, and findings that may be effects of others."""

    verdicts: list[Verdict] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    effects: list[tuple[Finding, str]] = field(default_factory=list)


def examine(job: Job) -> Report:
    """Judge a job by all laws."""
    verdicts = {one.law.number: Verdict(one.law) for one in CHECKS.values()}
    report, named, hidden, evidence = Report(), {}, set(), {}
    report.verdicts = [verdicts[number] for number in sorted(verdicts)]
    order = {one: one.causes | ({one.explains} - {None}) for one in CHECKS.values()}
    for own in TopologicalSorter(order).static_order():
        if own.explains:
            continue
        verdict, found, seen = verdicts[own.law.number], [], []
        try:
            for one in judge(job, own):
                if isinstance(one, Breach):
                    found += explained(job, own, one)
                elif own.general:
                    seen.append(one)
        except NotJudged as reason:
            verdict.not_judged[own.name] = str(reason)
            verdict.doubts += [str(reason)] * isinstance(reason, Doubt)
        except Exception as error:  # the other checks' findings still count
            verdict.not_judged[own.name] = f"doctor's own error: {error!r}"
            verdict.doubts.append(verdict.not_judged[own.name])
        broken = any(one.level in (WRONG, RISK) for one in found)
        if cause := sorted(named[one] for one in named.keys() & own.causes):
            report.effects += [(one, cause[0]) for one in found]
            text = f"{cause[0]} may have affected the result"
            verdict.not_judged.setdefault(own.name, text)
            if found:
                verdict.not_judged[own.name] = f"it could be an effect of {cause[0]}"
                hidden.add(own.law)
                named |= {own: cause[0]} if broken else {}  # hides its effects, too
                if own.general and broken:
                    verdict.state = BROKEN
            continue
        evidence[own] = seen
        report.findings += [x for n, x in enumerate(found) if x not in found[:n]]
        if broken:
            checks = [own, *(CHECKS[one.check] for one in found)]
            named |= {one: one.name for one in checks}
        if any(one.level != NOTE for one in found):
            verdict.state = BROKEN
    for verdict in report.verdicts:
        general = [x for x in CHECKS.values() if x.law is verdict.law and x.general]
        verdict.evidence = [text for x in general for text in evidence.get(x, ())]
        doubts = verdict.doubts or verdict.law in hidden
        doubts = doubts or general[0].name in verdict.not_judged
        if verdict.state != BROKEN and verdict.evidence and not doubts:
            verdict.state = HELD
    report.findings.sort(key=lambda one: (LEVELS.index(one.level), one.law.number))
    return report
