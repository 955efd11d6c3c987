"""Law 7: printed accuracies and losses agree with the networks' outputs."""

import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ..law import RISK, WRONG, Breach, Law, NotJudged, check, explains, need
from ..loaders import Batch, Epoch, EpochEnd
from ..moments import Step
from ..numbers import BEST, REPEATED, Group, Number, others, results
from ..results import OTHER, Measured, Printed, repeated
from .gradient import fits, near, not_averaged
from .passes import Update
from .ranks import contents_differ
from .replicas import weights_differ, weights_drift
from .samples import datasets_differ

LAW = Law(7, "printed", "Printed results are true")
CAUSES = datasets_differ, contents_differ, not_averaged
CAUSES += weights_differ, weights_drift
SORT = (
    "Put the gathered predictions into the order of the labels, or gather the labels "
    "too: DistributedSampler gives rank r the samples r, r + world_size, ..."
)


@dataclass
class Site:
    """All output that one line of the script prints on one rank."""

    kind: str
    place: str
    words: str  # the printed line without its numbers
    right: int = 0
    unknown: int = 0
    fits: list[dict] = field(default_factory=list)  # mistakes that fit


def groups(job) -> list[Group]:
    """Return groups of measurements, by time: one per pass and network (or loss)."""
    found, stepped, parts, again = {}, set(), divided(job), repeated(job)
    for process in job.processes:
        steps = {(one.loader, one.epoch) for one in process.of(Step)}
        steps |= {(x.loader, x.epoch) for x in process.of(EpochEnd) if x.steps}
        stepped |= steps
        keys = {(x.loader, x.epoch, x.number): x for x in process.of(Batch)}
        for one in process.of(Measured):
            if one.what in ("pairs", "seen") or (one.what == "root" and not parts):
                continue
            loaderless = one.loader is None
            name = one.what, one.source, one.loader, one.epoch
            if loaderless:
                begun = again.get((process.rank, one.after), ())
                name += one.after, one.trains, sum(x <= one.at for x in begun)
            if name not in found:
                feed = process.loader(one.loader) if not loaderless else None
                found[name] = Group(one.what, one.source, one.loader, one.epoch)
                found[name].total = feed.samples or 0 if feed else 0
                found[name].parts = parts if one.what == "root" else 1
            group = found[name]
            batch = keys.get((one.loader, one.epoch, one.number))
            known = batch and (batch.indices or batch.rows)
            if not known or len(known) != len(one.values):
                done = len(group.ranks.get(process.rank, ()))
                own = one.loader, process.rank, done
                known = [(*own, n) for n in range(len(one.values))]
            group.skipped += one.skipped
            group.guesses |= zip(known, one.guesses or (), strict=False)
            row = one.values, one.weights, [*known]
            group.ranks.setdefault(process.rank, []).append(row)
            group.times.setdefault(process.rank, []).append(one.at)
            group.step = max(group.step, one.after)
            fed = (one.loader, one.epoch) in stepped
            group.trains = one.trains if loaderless else fed
    return sorted(found.values(), key=lambda one: max(map(max, one.times.values())))


def divided(job) -> int:
    """Return the number by which the script divides its losses before backward().

    This is the number of passes per step (or of ranks, if the script sums gradients),
    1 if the script does not divide, or 0 if the number is unknown.
    """
    found, size, summed = Counter(), len(job.processes), False
    with suppress(NotJudged):
        summed = any([near(one.factor, size) for one in fits(job)])
    for one in job.of(Update):
        count, entries = len(one.passes), one.passes
        rows = [[one.part(x, n) for n in range(len(one.names))] for x in one.local]
        networks = {tuple(map(any, row)) for row in rows}
        terms = [x for entry in entries for x in entry.get("terms", ())]
        factors = [max((abs(x[0]) for x in terms), default=1)]
        factors += [abs(x) for entry in entries for x in entry.get("outer", ())]
        times = size if summed and any(near(x * size, 1) for x in factors) else 1
        if count == 1 or len(networks) > 1:
            found[times] += 1
        elif any(near(x * count, 1) for x in factors):
            found[count] += 1
        else:
            found[times * (bool(terms) and all(x[1] for x in terms))] += 1
    return found.most_common(1)[0][0] if found else 1


def judged(job) -> list[Site]:
    """Return the lines that print results after a pass, and count the right results."""
    sites, everything, running = {}, groups(job), set()
    for line in job.of(Printed):
        for order, number in enumerate(results(line.text)):
            known = judge(job, everything, line, number)
            words = re.sub(r"\d[\d.]*", "#", line.text)  # helpers print many texts
            words = re.sub(" +", " ", words)
            key = line.rank, line.place, words, order, number.kind
            if known is None:
                running.add(key)  # this line also prints within a pass
                continue
            site = sites.setdefault(key, Site(number.kind, line.place, words))
            if known is True:
                site.right += 1
            elif known:
                site.fits.append(known)
            else:
                site.unknown += 1
    return [site for key, site in sites.items() if key not in running]


WHAT = {"accuracy": ("hits",), "error": ("hits",), "top5": ("top5",)}
WHAT |= dict.fromkeys(("loss", "perplexity"), ("loss", "root"))


def judge(job, everything: list[Group], line: Printed, number: Number):
    """Return True for a right number, {mistake: details} for a wrong one, or None.

    {} means that no known mistake fits; None, that no whole pass gives this number.
    """
    process = next(one for one in job.processes if one.rank == line.rank)
    found = [one for one in everything if one.what in WHAT[number.kind]]
    found = [one for one in found if one.began(line.rank) < line.time]
    if any(one.running(line.rank, line.time) for one in found if not one.trains):
        return None
    evals = [one for one in found if not one.trains and one.step == line.step]
    trained = [one for one in found if one.trains]
    if number.split == "train":
        evals = [one for one in evals if one.loader == process.training]
    if number.split == "val" or (evals and not number.split):
        trained = []
    if trained and in_a_pass(process, line.time):
        return None
    ends = {(x.loader, x.epoch): x.batches for x in process.of(EpochEnd)}
    batches = [ends.get((one.loader, one.epoch), 10**9) for one in trained]
    rows = [len(one.ranks.get(line.rank, ())) for one in trained]
    latest = max((one.epoch or 0 for one in trained), default=0)
    done = [one for one, n, m in zip(trained, rows, batches, strict=True) if n >= m]
    passes = [one for one in done if one.epoch == latest] + evals
    if not passes:
        if not evals and number.split == "train":
            return None
        return a_share(job, line, number) if number.kind == "accuracy" else {}
    if any(x in number.words for x in BEST):
        passes = [one for one in found if one in done or not one.trains]
    for one in passes + together(passes):
        if any(number.equals(x) for x in one.right(line.text, line.rank)):
            return True
    fits = {}
    if number.gap > 0.01 * number.value and number.count is None:
        return {}
    for one in passes:
        same = one.what, one.source, one.trains
        own = [x for x in everything if (x.what, x.source, x.trains) == same]
        earlier = own[: own.index(one)]
        right = one.right(line.text, line.rank)[0]
        for name, mend, top, bottom in one.wrong(earlier):
            if number.equals((top, bottom)):
                fits.setdefault(name, (line, number, mend, right))
    for one in process.of(Measured) if number.kind == "accuracy" else ():
        same = [x for x in passes if other_order(x, one)]
        hits = sum(a == b for a, b in zip(one.values, one.weights, strict=True))
        if one.what == "pairs" and same and number.equals((hits, len(one.values))):
            name = "which compares predictions with the labels of other samples"
            fits = {name: (line, number, SORT, same[0].right(line.text, line.rank)[0])}
    if fits and number.kind in ("loss", "perplexity"):
        gaps = [abs(number.turned(one[3]) / number.value - 1) for one in fits.values()]
        return {} if min(gaps) < 0.01 else fits
    return fits


def a_share(job, line: Printed, number: Number) -> dict:
    """Return {mistake: details} if a number counts repeated samples, else {}."""
    sources = {}
    for one in job.of(Measured):
        if one.what == "seen" and one.after == line.step:
            sources.setdefault(one.source, []).extend(one.guesses)
    for rows in sources.values():
        value, gap = number.value / number.scale, number.gap / number.scale
        counts = len(rows), len({*rows})
        fits = [abs(value * n - round(value * n)) <= gap * n for n in counts]
        if fits == [True, False] and gap * len(rows) < 0.1 and number.count is None:
            name = f"a share of {len(rows)} samples, {len({*rows})} of them distinct"
            return {name: (line, number, REPEATED, None)}
    return {}


def together(passes: list[Group]) -> list[Group]:
    """Return one merged group for each network that several passes validate."""
    found = {}
    for one in passes:
        if not one.trains:
            key = one.source, one.step, one.loader is None
            found.setdefault(key, []).append(one)
    merged = []
    for same in found.values():
        ranks = {}
        for one in same if len(same) > 1 else ():
            for rank, rows in one.ranks.items():
                ranks.setdefault(rank, []).extend(rows)
        merged += [replace(same[0], ranks=ranks)] if ranks else []
    return merged


def other_order(group: Group, pairs: Measured) -> bool:
    """Return whether a comparison uses a group's predictions in another order."""
    guesses = Counter(group.guesses.values())
    rows = pairs.values, pairs.weights
    apart = [(guesses - Counter(map(int, row))).total() for row in rows]
    return len(pairs.values) == len(group.guesses) > 0 and min(apart) < 8


def in_a_pass(process, moment: float) -> bool:
    """Return whether a process was reading training batches at a given moment."""
    begun = [x for x in process.of(Epoch) if x.loader == process.training]
    ended = [x for x in process.of(EpochEnd) if x.loader == process.training]
    count = sum(x.time < moment for x in begun) - sum(x.time < moment for x in ended)
    return count > 0


def unchecked(job) -> str:
    """Return the name and place of a result that doctor cannot recompute, or ""."""
    seen = {}
    for line in job.of(Printed):
        if known := OTHER.search(line.text):
            return f"{known[1]} at {line.place}"
        for name, value in others(line.text):
            values = seen.setdefault((name, line.rank, line.place), set())
            values.add(value)
            if len(values) > 1:
                return f"{name} at {line.place}"
    return ""


@check(LAW, RISK, general=True, causes=CAUSES, read="pitfall 16")
def wrong_number(job):
    """A printed result does not match the network's outputs.

    Sum the numerator and the number of samples over all ranks, and divide once.
    Not a mistake if: the line is meant to cover one rank's samples only.
    """
    need(job.of(Printed), "no accuracy or loss was printed")
    sites = need(judged(job), "no accuracy or loss was printed after a pass")
    unknown, counts, found = [], Counter(), False
    for site in sites:
        result = "accuracies" if "hits" in WHAT[site.kind] else "losses"
        result = "accuracies" if site.kind == "top5" else result
        counts[result] += site.right + site.unknown + len(site.fits)
        counts["right", result] += site.right
        names = Counter(name for one in site.fits for name in one)
        least = 1 if result == "accuracies" else 2
        name, count = names.most_common(1)[0] if names else ("", 0)
        others = site.unknown + len(site.fits)
        least = 2 if "a share of" in name else least
        if count >= least and count > 0.6 * others:
            found = True
            yield Breach("", site.place, facts=(site, name, others))
        elif others:
            unknown.append(site)
    kinds = [one for one in ("accuracies", "losses") if counts[one]]
    text = ", ".join(f"{counts['right', x]} of {counts[x]} {x}" for x in kinds)
    if other := unchecked(job):
        raise NotJudged(f"{text} could be checked, but not {other}")
    if unknown:
        where = unknown[0].place
        raise NotJudged(f"{text} could be checked, but not all of those at {where}")
    if not found:
        yield f"{text} equal the recomputed ones"


def told(breach: Breach, level: str) -> Breach:
    """Return the breach for a wrong result."""
    site, name, others = breach.facts
    rows = [one[name] for one in site.fits if name in one]
    line, number, mend, right = rows[-1]
    what = f"rank {line.rank} prints {number.text}, {name}"
    if right:
        true = number.turned(right)
        true /= 100 if true > 20 * number.value > 0 else 1  # a share, not in %
        what += f"; counting each sample once gives {true:.4f}"
    if others + site.right > 1:
        what += f" ({len(rows)} of {others + site.right} prints)"
    only = " only" in name and "divided" not in name
    return Breach(what, line.place, level=RISK if only else level, mend=mend)


@explains(wrong_number, WRONG)
def wrong_accuracy(job, breach):
    """A printed accuracy does not count each validation sample once.

    Sum the correct predictions and the samples over all ranks, without the samples
    that DistributedSampler repeats, and divide once.
    Not a mistake if: the line is meant to cover one rank's samples only.
    """
    site = breach.facts[0]
    return told(breach, WRONG) if WHAT[site.kind] != WHAT["loss"] else None


@explains(wrong_number, RISK)
def wrong_loss(job, breach):
    """A printed loss is not the mean over all ranks' samples (or tokens).

    Sum the losses and the samples over all ranks, and divide once.
    Not a mistake if: the line is meant to cover one rank or one batch only.
    """
    return told(breach, RISK)
