"""Find impossible or missing figures in a summary from scripts/gpu_check.sh."""

import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from common.errors import UserError

from .gpu_summary import FORMAT


class Card(NamedTuple):
    """The highest rates and the largest memory of all variants of a GPU."""

    half: float  # TFLOPS in fp16 or bf16 with Tensor Cores, without sparsity
    single: float  # TFLOPS in fp32, or in TF32 with Tensor Cores without sparsity
    memory: float  # GB


# From NVIDIA's data sheets, which docs/gpus.md links to. If a sheet gives only the rate
# with sparsity, the rate here is half of that.
CARDS = {
    "T4": Card(65, 8.1, 16),
    "V100": Card(125, 15.7, 32),
    "V100S": Card(130, 16.4, 32),
    "A10": Card(125, 62.5, 24),
    "A100": Card(312, 156, 80),
    "L4": Card(121, 60, 24),
    "H100": Card(989.5, 494.5, 94),
    "H200": Card(989.5, 494.5, 141),
}
# One image's forward and backward pass at 224 px; a multiply-add is two operations.
# PyTorch's torch.utils.flop_counter counts 24.30 and 10.65 GFLOP.
GFLOP = {"resnet50": 24.29, "resnet18": 10.64}
SPEEDUP_ERROR = 1.05  # two runs on one GPU may differ by a few percent
INTERVAL = 10  # steps at the start of a run that images_per_second leaves out
REQUIRED = ("dataparallel", "distributed", "multiprocessing_distributed")
LEVELS = {name: ("fp32", "bf16", "fp16") for name in (*REQUIRED, "horovod_distributed")}
LEVELS["apex_distributed"] = ("O0", "O1", "O2", "O3")
FIELDS = {
    "format": int,
    "commit": str,
    "date": str,
    "machine.gpus": list,
    "machine.cpu": str,
    "machine.cpu_cores": int,
    "versions.python": str,
    "versions.torch": str,
    "versions.torchvision": str,
    "versions.CUDA": str,
    "versions.cuDNN": int,
    "versions.NCCL": str,
    "tests": list,
    "timings": list,
}
GPU_FIELDS = {"name": str, "driver_version": str, "capability": float}
GPU_FIELDS |= {"memory.total": float, "clocks.max.sm": float}
ROW = {"name": str, "status": str, "seconds": float, "commit": str}
SETTINGS = {"kind": str, "strategy": str, "arch": str, "precision": str}
SETTINGS |= {"image_size": int, "processes": int, "batch": int, "found": dict}
POSITIVE = ("steps", "images", "training_seconds", "images_per_second")
POSITIVE += ("peak_memory_mib",)
OPTIONAL = ("clocks.sm", "power.draw", "temperature.gpu")  # null where it is "[N/A]"
MORE_TESTS = ("test_distributed_with", "test_a_resumed_run_ends_as_a_whole_one")
AGAIN = "run scripts/gpu_check.sh again, and do not edit what it writes"
ALL = "run scripts/gpu_check.sh without -k"
MORE = "run scripts/gpu_check.sh --last-failed until nothing is left"


def problem(field: str, value: object, possible: str, action: str = AGAIN) -> str:
    """Return one line: what is wrong, what would be possible, and what to do."""
    return f"{field} is {json.dumps(value)}; possible: {possible}; to do: {action}"


def wrong(where: str, part: object, fields: dict) -> Iterator[str]:
    """Find fields that are missing, empty or of the wrong type; "a.b" means b in a."""
    for name, kind in fields.items():
        value = part
        for key in name.split(".") if fields is FIELDS else [name]:
            value = value.get(key) if isinstance(value, dict) else None
        kinds = (int, float) if kind is float else kind
        number = isinstance(value, (int, float))
        if (
            not isinstance(value, kinds)
            or value in ("", [])
            or (number and not 0 <= value < math.inf)
        ):
            words = {str: "a text", list: "a list", dict: "an object"}
            possible = words.get(kind, "a number")
            yield problem(f"{where}{name}", value, possible)


def is_positive(value: object) -> bool:
    """Return whether the value is a finite number above 0."""
    return isinstance(value, int | float) and 0 < value < math.inf


def problems(summary: dict) -> list[str]:
    """Return one line for each impossible or missing figure."""
    found = list(wrong("", summary, FIELDS))
    if not found and summary["format"] != FORMAT:
        found.append(problem("format", summary["format"], str(FORMAT)))
    if not found:
        for index, gpu in enumerate(summary["machine"]["gpus"]):
            found += wrong(f"machine.gpus[{index}].", gpu, GPU_FIELDS)
        for part in ("tests", "timings"):
            fields = ROW if part == "tests" else {**ROW, **SETTINGS}
            for index, row in enumerate(summary[part]):
                found += wrong(f"{part}[{index}].", row, fields)
    if found:  # the other checks need these fields
        return found
    found += about_origin(summary)
    found += about_tests(summary)
    found += about_completeness(summary)
    for row in summary["timings"]:
        if row["status"] == "passed":
            found += about_timing(summary, row)
    found += about_speedups(summary)
    return found


def about_origin(summary: dict) -> Iterator[str]:
    """Check the commit and the GPUs."""
    here = summary["commit"]
    if not re.fullmatch("[0-9a-f]{40}", here):
        action = "commit or undo your changes (git status), then start again"
        yield problem("commit", here, "40 hexadecimal digits without -dirty", action)
    for part in ("tests", "timings"):
        for other in sorted({row["commit"] for row in summary[part]} - {here}):
            action = "delete the folder of the summary, and start again"
            yield problem(f"{part}: a commit", other, f"{here}, as above", action)
    for index, gpu in enumerate(summary["machine"]["gpus"]):
        card = card_of(gpu)
        if card and gpu["memory.total"] * 2**20 > card.memory * 2**30:
            field = f"machine.gpus[{index}].memory.total"
            limit = f"at most {card.memory * 1024:.0f} MiB ({gpu['name']})"
            yield problem(field, gpu["memory.total"], limit)


def card_of(gpu: dict) -> Card | None:
    """Return the known rates of a GPU, found by a word in its name."""
    words = re.split(r"\W+", gpu["name"])
    return next((CARDS[word] for word in words if word in CARDS), None)


def about_tests(summary: dict) -> Iterator[str]:
    """Check that each strategy's tests passed, or had a reason not to run."""
    rows = {row["name"]: row for row in summary["tests"]}
    names = [
        f"test_gpus_do_what_the_cpu_does[{strategy}-{level}-{count}]"
        for strategy, levels in LEVELS.items()
        for level in levels
        for count in (1, 2)
    ]
    if missing := [name for name in names if name not in rows]:
        action = ALL
        field = f"tests: {missing[0]} (and {len(missing) - 1} other rows)"
        yield problem(field, None, "a row", action)
    for prefix in MORE_TESTS:
        if not any(name.startswith(prefix) for name in rows):
            yield problem(f"tests: {prefix}", None, "a row", ALL)
    gpus = summary["machine"]["gpus"]
    for name, row in rows.items():
        optional = "horovod" in name or "apex" in name
        optional |= "bf16" in name and min(gpu["capability"] for gpu in gpus) < 8
        optional |= "-2]" in name and (len(gpus) == 1 or "dataparallel" in name)
        yield from about_status("tests", row, optional)


def about_status(part: str, row: dict, optional: bool) -> Iterator[str]:
    """Check that a row passed; an optional row may be skipped for a reason."""
    line = row.get("line", "")
    if row["status"] == "skipped" and optional and line:
        return
    if row["status"] != "passed":
        value = f"{row['status']}: {line}"
        possible = "passed, or skipped for a reason" if optional else "passed"
        yield problem(f"{part}: {row['name']}: status", value, possible, MORE)


def about_completeness(summary: dict) -> Iterator[str]:
    """Check that each strategy was timed on one GPU and on all GPUs."""
    gpus = len(summary["machine"]["gpus"])
    trained = {}
    for row in summary["timings"]:
        optional = row["strategy"] not in REQUIRED
        yield from about_status("timings", row, optional)
        if row["kind"] == "train":
            trained[row["strategy"], row["processes"]] = row
    if not any(row["kind"] == "compare" for row in summary["timings"]):
        yield problem("timings", None, "a row of kind compare", MORE)
    for strategy in REQUIRED:
        for count in sorted({1, gpus}):
            if (strategy, count) not in trained:
                field = f"timings: {strategy} on {count} GPUs"
                yield problem(field, None, "a row of kind train", MORE)


def median(row: object) -> object:
    """Return the median in a row of a comparison, or None if there is none."""
    value = row.get("value") if isinstance(row, dict) else None
    return value.get("median") if isinstance(value, dict) else None


def about_timing(summary: dict, row: dict) -> Iterator[str]:
    """Check the figures of one measurement."""
    where, found = f"timings: {row['name']}: ", row["found"]
    gpus = summary["machine"]["gpus"]
    if not 1 <= row["processes"] <= len(gpus):
        possible = f"1 to {len(gpus)}, the number of GPUs"
        yield problem(f"{where}processes", row["processes"], possible)
    speeds = {"images_per_second": found.get("images_per_second")}
    if row["kind"] == "compare":
        rows = found.get("rows")
        speeds = {"rows": None}
        if isinstance(rows, dict) and rows:
            speeds = {name: median(one) for name, one in rows.items()}
    card, flop = card_of(gpus[0]), GFLOP.get(row["arch"])
    for name, speed in speeds.items():
        if not is_positive(speed):
            yield problem(f"{where}{name}", speed, "a number above 0")
        elif card and flop and row["image_size"] == 224:
            rate = card.single if row["precision"] in ("fp32", "O0") else card.half
            limit = row["processes"] * rate * 1000 / flop
            if speed > limit:
                possible = (
                    f"below {limit:.0f} images/s, at {rate:g} TFLOPS per GPU "
                    f"({gpus[0]['name']}) and {flop:g} GFLOP per image"
                )
                yield problem(f"{where}{name}", speed, possible)
    if row["kind"] == "train":
        size = row["arch"], row["image_size"], row["batch"]
        if size != ("resnet50", 224, 64 * row["processes"]):
            possible = f"resnet50, 224 px and {64 * row['processes']} images"
            action = "run scripts/gpu_check.sh without --rehearse-gpu"
            yield problem(f"{where}arch, image_size and batch", size, possible, action)
        yield from about_training(where, gpus, row, found)


def about_training(where: str, gpus: list, row: dict, found: dict) -> Iterator[str]:
    """Check that the figures of a training run agree with each other."""
    bad = [name for name in POSITIVE if not is_positive(found.get(name))]
    for name in bad:
        if name != "images_per_second":
            yield problem(f"{where}{name}", found.get(name), "a number above 0")
    for name in OPTIONAL:
        if found.get(name) is not None and not is_positive(found[name]):
            yield problem(f"{where}{name}", found[name], "a number above 0, or null")
    wait = found.get("data_wait")
    if not isinstance(wait, int | float) or not 0 <= wait <= 1:
        yield problem(f"{where}data_wait", wait, "a share from 0 to 1")
    if bad:
        return
    limits = {
        "peak_memory_mib": min(gpu["memory.total"] for gpu in gpus),
        "clocks.sm": max(gpu["clocks.max.sm"] for gpu in gpus),
        "training_seconds": row["seconds"],
    }
    for name, limit in limits.items():
        if is_positive(found.get(name)) and found[name] > limit:
            yield problem(f"{where}{name}", found[name], f"at most {limit:g}")
    images = found["steps"] * row["batch"]
    if found["images"] != images:
        possible = f"{images}: {found['steps']} steps of {row['batch']} images"
        yield problem(f"{where}images", found["images"], possible)
    # images_per_second excludes the first interval; training_seconds includes it
    speed, seconds = found["images_per_second"], found["training_seconds"]
    least = (found["steps"] - INTERVAL) * row["batch"] / speed
    if seconds < 0.99 * least:
        possible = (
            f"at least {least:.2f}: {found['steps']} steps of {row['batch']} images, "
            f"without the first {INTERVAL} steps, at {speed:g} images/s"
        )
        yield problem(f"{where}training_seconds", seconds, possible)
    intervals = found.get("intervals")
    later = intervals[1:] if isinstance(intervals, list) else []
    if (
        not later
        or not all(map(is_positive, later))
        or not min(later) - 1 <= speed <= max(later) + 1
    ):
        possible = f"within the later intervals, {later}"
        yield problem(f"{where}images_per_second", speed, possible)


def about_speedups(summary: dict) -> Iterator[str]:
    """Check that n GPUs are at most n times as fast as one."""
    speeds = {}
    for row in summary["timings"]:
        speed = row["found"].get("images_per_second")
        if row["kind"] == "train" and is_positive(speed):
            speeds[row["strategy"], row["processes"]] = speed
    for (strategy, count), speed in speeds.items():
        alone = speeds.get((strategy, 1))
        if alone and speed > SPEEDUP_ERROR * count * alone:
            field = f"timings: {strategy}: speedup on {count} GPUs"
            possible = (
                f"at most {count}, and {SPEEDUP_ERROR - 1:.0%} of measuring error"
            )
            yield problem(field, round(speed / alone, 2), possible)


def check(file: Path) -> None:
    """Print what is impossible or missing in a summary; then exit with status 2."""
    try:
        summary = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: {error}") from None
    found = problems(summary)
    for line in found:
        print(f"{file.name}: {line}", file=sys.stderr)
    if found:
        sys.exit(2)
    print(f"{file.name}: nothing is missing, and all figures are possible")
