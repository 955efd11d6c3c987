"""Law 7: printed accuracies and losses agree with the networks' outputs."""

import re
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from math import inf

from .. import numbers
from ..law import RISK, WRONG, Breach, Law, NotJudged, check, explains, need
from ..loaders import Batch, Epoch, EpochEnd
from ..moments import Step
from ..neighbours import Input
from ..numbers import BEST, SIZES, Group, Number, gap_of
from ..reads import feeds
from ..results import OTHER, Measured, Printed, repeated
from .gradient import fits, near, not_averaged
from .passes import Update
from .replicas import weights_differ, weights_drift
from .samples import datasets_differ

LAW = Law(7, "printed", "Printed results are true")
CAUSES = datasets_differ, not_averaged, weights_differ, weights_drift
SORT = "Gather the labels, too: DistributedSampler changes the order of the samples."
MEANS = {("mean", 1), ("other mean", 1)}  # Term.kind and Term.inner
TRAINING = "which a network in training mode has computed"
WHAT = dict.fromkeys(("accuracy", "error"), ("hits", "top1"))
WHAT |= dict.fromkeys(("loss", "perplexity"), ("loss", "root"))


def groups(job) -> list[Group]:
    """Return groups of measurements, by time: one per pass and network (or loss)."""
    found, parts, again = {}, divided(job), repeated(job)
    entries = [entry for one in job.of(Update) for entry in one.passes]
    kinds = {(x[1], x[4]) for entry in entries for x in entry.get("terms", ())}
    trained = [{*one.rows} for one in job.of(Input)]
    stepped = {(one.loader, one.epoch) for one in job.of(Step)}
    stepped |= {(one.loader, one.epoch) for one in job.of(EpochEnd) if one.steps}
    lists = {one.loader: feeds(job, one.loader) for one in job.of(Epoch)}
    lists = {n: own for n, own in lists.items() if own and not own[0].divides}
    apart = {n for n, own in lists.items() if any(x.data != own[0].data for x in own)}
    for process in job.processes:
        keys = {(x.loader, x.epoch, x.number): x for x in process.of(Batch)}
        once = validated_once(process, trained)
        for one in process.of(Measured):
            if one.what in ("pairs", "seen") or (one.what == "root" and not parts):
                continue
            name = key = one.what, one.source, one.loader, one.epoch
            if one.loader is None:
                begun = again.get((process.rank, one.after), ())
                name += one.after, one.trains, sum(x <= one.at for x in begun)
            if name not in found:
                group = found[name] = Group(*key)
                group.parts = parts if one.what == "root" else 1
                group.means = one.what != "root" or bool(kinds) and kinds <= MEANS
                group.training = one.after in once
                group.trains = one.trains
                if one.loader is not None:
                    group.trains = (one.loader, one.epoch) in stepped
                    feed = process.loader(one.loader)
                    group.total = feed and feed.samples or 0
            group = found[name]
            batch = keys.get((one.loader, one.epoch, one.number))
            known = batch and (batch.indices or batch.rows)
            if known and one.loader in apart:  # each rank validates its own dataset
                known = [(process.rank, key) for key in known]
            group.training &= one.training
            values, weights = one.values, one.weights
            if known and one.what == "root":
                values, weights = [values[0] * len(known)], [len(known)]
            if not known or len(known) != len(values):
                done = len(group.ranks.get(process.rank, ()))
                own = one.loader, process.rank, done
                known = [(*own, n) for n in range(len(values))]
            group.guesses |= zip(known, one.guesses or (), strict=False)
            row = values, weights, [*known]
            group.ranks.setdefault(process.rank, []).append(row)
            group.times.setdefault(process.rank, []).append(one.at)
            group.step = max(group.step, one.after)
    kinds = {x.kind for line in job.of(Printed) for x in numbers.results(line.text)}
    for count in {1, *(int(x[3:]) for x in kinds if x[:3] == "top")}:
        for name, one in [*found.items()]:
            values = [x for rows in one.ranks.values() for row in rows for x in row[0]]
            if one.what == "top" and not -count < min(values) < 0:
                found[count, name] = one.top(count)
    return sorted(found.values(), key=lambda one: max(map(max, one.times.values())))


def validated_once(process, trained: list[set]) -> set[int]:
    """Return the steps after which a process validates without a loader."""
    seen = {}
    for one in process.of(Measured):
        if one.what == "seen":
            seen.setdefault(one.after, []).extend(one.guesses)
    most = max(map(len, trained), default=inf)
    known = set().union(*trained)
    # Monte Carlo dropout uses samples twice
    rows = {step: {*own} for step, own in seen.items() if len({*own}) == len(own)}
    return {step for step, own in rows.items() if len(own) > most and not own & known}


def divided(job) -> int:
    """Return the divisor of losses before backward(): 1 if none, 0 if it is unknown."""
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


def judged(job) -> dict[tuple, list]:
    """Return {(rank, line, words, position, kind): what judge() returns per print}.

    Lines that also print within a pass are left out.
    """
    sites, unnamed, everything = {}, {}, groups(job)
    for line in job.of(Printed):
        words = re.sub(r"\d[\d.]*", "#", line.text)  # helpers print many texts
        words = " ".join(words.split())
        for order, number in enumerate(numbers.results(line.text)):
            key = line.rank, line.place, words, order, number.kind
            sites.setdefault(key, []).append(judge(job, everything, line, number))
        for name, text in numbers.others(line.text):  # it may be a loss
            number = Number("loss", float(text), gap_of(text), 1, None, "any", text, "")
            fits = judge(job, everything, line, number)
            sized = isinstance(fits, dict) and any(x[2] == SIZES for x in fits.values())
            exact = sized and number.gap < 0.004 * number.value
            key = line.rank, line.place, words, name, "loss"
            unnamed.setdefault(key, {})[text] = fits if exact else None
    sites |= {key: [*known.values()] for key, known in unnamed.items()}
    return {key: known for key, known in sites.items() if None not in known}


def judge(job, everything: list[Group], line: Printed, number: Number):
    """Return True for a right number, {mistake: details} for a wrong one, or None.

    {} means that no known mistake fits; None, that no whole pass gives this number.
    """
    process = next(one for one in job.processes if one.rank == line.rank)
    kinds = WHAT.get(number.kind, (number.kind,))
    found = [one for one in everything if one.what in kinds]
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
    done = [
        one
        for one in trained
        if len(one.ranks.get(line.rank, ())) >= ends.get((one.loader, one.epoch), inf)
    ]
    latest = max((one.epoch or 0 for one in trained), default=0)
    passes = [one for one in done if one.epoch == latest] + evals
    if not passes:
        if not evals and number.split == "train":
            return None
        return {}
    if any(x in number.words for x in BEST):
        passes = [one for one in found if one in done or not one.trains]
    for one in passes + together(passes):
        if any(number.equals(x) for x in one.right(line.text, line.rank)):
            mode = {TRAINING: (line, number, "", None)}
            return mode if one.training and number.split != "train" else True
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
    if number.kind in ("loss", "perplexity"):
        gaps = [abs(number.turned(one[3]) / number.value - 1) for one in fits.values()]
        return {} if min(gaps, default=0) < 0.01 else fits
    return fits


def together(passes: list[Group]) -> list[Group]:
    """Return one merged group for each network that several passes validate."""
    found = {}
    for one in passes:
        if not one.trains:
            key = one.source, one.step, one.loader is None
            found.setdefault(key, []).append(one)
    merged = []
    for same in found.values():
        if len(same) > 1:
            ranks = {rank for one in same for rank in one.ranks}
            rows = {n: [x for one in same for x in one.ranks.get(n, ())] for n in ranks}
            merged.append(replace(same[0], ranks=rows))
    return merged


def other_order(group: Group, pairs: Measured) -> bool:
    """Return whether a comparison uses a group's predictions in another order."""
    guesses = Counter(group.guesses.values())
    rows = pairs.values, pairs.weights
    apart = [(guesses - Counter(map(int, row))).total() for row in rows]
    return len(pairs.values) == len(group.guesses) > 0 and min(apart) < 8


def in_a_pass(process, moment: float) -> bool:
    """Return whether a process was reading training batches at a given moment."""
    passes = process.of(Epoch) + process.of(EpochEnd)
    own = [x for x in passes if x.loader == process.training and x.time < moment]
    return sum(1 if isinstance(one, Epoch) else -1 for one in own) > 0


def unchecked(job) -> str:
    """Return the name and place of a result that doctor cannot recompute, or ""."""
    seen = {}
    for line in job.of(Printed):
        if known := OTHER.search(line.text):
            return f"{known[1]} at {line.place}"
        for name, value in numbers.others(line.text):
            if seen.setdefault((name, line.rank, line.place), value) != value:
                return f"{name} at {line.place}"
    return ""


@check(LAW, WRONG, general=True, causes=CAUSES, read="pitfall 16")
def wrong_number(job):
    """A printed result does not match the network's outputs.

    Sum the numerator and the number of samples over all ranks, without the samples
    that DistributedSampler repeats, and divide once.
    Not a mistake if: the line is meant to cover one rank or one batch only.
    """
    need(job.of(Printed), "no accuracy or loss was printed")
    sites = need(judged(job), "no accuracy or loss was printed after a pass")
    unknown, right, counts, found = [], Counter(), Counter(), False
    for (rank, place, _, _, kind), known in sites.items():
        result = "losses" if kind in ("loss", "perplexity") else "accuracies"
        wrong = [one for one in known if one is not True]
        counts[result] += len(known)
        right[result] += len(known) - len(wrong)
        names = Counter(name for one in wrong for name in one)
        name, count = names.most_common(1)[0] if names else ("", 0)
        least = 2 if result == "losses" else 1
        if count >= least and count > 0.6 * len(wrong):
            found = True
            line, number, mend, ratio = [one[name] for one in wrong if name in one][-1]
            what = f"rank {rank} prints {number.text}, {name}"
            if ratio:
                true = number.turned(ratio)
                share = number.scale == 100 and true > 20 * number.value > 0
                true /= 100 if share else 1  # it was printed as a share
                what += f"; counting each sample once gives {true:.4f}"
            what += f" ({count} of {len(known)} prints)" * (len(known) > 1)
            unsure = result == "losses" or (" only" in name and "divided" not in name)
            yield Breach(what, place, level=RISK * unsure, mend=mend)
        elif wrong:
            unknown.append(place)
    text = ", ".join(f"{right[x]} of {counts[x]} {x}" for x in sorted(counts))
    other = unchecked(job) or "".join(f"all at {place}" for place in unknown[:1])
    need(not other, f"{text} could be checked, but not {other}")
    if not found:
        yield f"{text} equal the recomputed ones"


@explains(wrong_number, RISK, read="docs/found.md")
def printed_in_training_mode(job, breach):
    """A printed result comes from a network in training mode.

    Call model.eval() before validation, and model.train() after it.
    Not a mistake if: dropout and batch norm are meant to behave this way.
    """
    return replace(breach, level="") if TRAINING in breach.what else None
