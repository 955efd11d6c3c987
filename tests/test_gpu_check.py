"""scripts/gpu_check.sh as far as it goes without a GPU: rows, limits, verdicts, summary."""

import json
import os
import shutil
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from conftest import MISSING, ROOT, run

sys.path.insert(0, str(ROOT / "scripts"))
import gpu_check
import gpu_rows
from gpu_check import Check
from gpu_rows import Failed, Machine, Row

from common.data import MEAN, STD

NO_GPU = pytest.mark.skipif(not MISSING["gpu"], reason="this machine has a GPU")
CURVE = "CPU's curve, distributed, 1 process, fp32"
ROW = "multiprocessing_distributed, 1 process, fp32"


def results(folder: Path) -> dict[str, dict]:
    """What came out of each row."""
    return {
        f"{group}: {row['row']}": row
        for group, content in gpu_check.read(folder).items()
        for row in content["rows"]
    }


# --- rows ---


def test_every_strategy_precision_and_number_of_processes_has_a_row():
    every = gpu_check.rows(Machine(rehearse=False))
    names = [f"{row.group}: {row.name}" for row in every]
    assert len(names) == len(set(names))
    for count, compiled in product((1, 2), (False, True)):
        for strategy in ("dataparallel", "distributed", "multiprocessing_distributed"):
            for precision in ("fp32", "bf16", "fp16"):
                setting = gpu_rows.Setting(strategy, count, precision, compiled)
                expected = (strategy, count, compiled) != ("dataparallel", 2, True)
                assert (f"training: {setting.name}" in names) == expected
        for precision in ("fp32", "bf16", "fp16"):
            setting = gpu_rows.Setting(
                "horovod_distributed", count, precision, compiled
            )
            assert f"training: {setting.name}" in names
        for level in ("O0", "O1", "O2"):
            setting = gpu_rows.Setting("apex_distributed", count, level, compiled)
            assert f"training: {setting.name}" in names
    timings = {name for name in names if name.startswith("timings: ")}
    assert len(timings) == 5 * 2 * 2
    assert {row.group for row in every} | {"agreement"} == set(gpu_check.TITLES)
    assert all(row.alone for row in every if row.group in ("speed", "model", "timings"))


@NO_GPU
def test_without_a_gpu_every_row_says_so(tmp_path):
    ended = run("bash", "scripts/gpu_check.sh", "--output", tmp_path)
    assert ended.returncode == 0, ended.stderr
    reason = Machine(rehearse=False).gpu()
    assert ended.stdout.splitlines()[-1] == f"Nothing was run: {reason}."
    found = results(tmp_path)
    assert len(found) > 100
    assert {row["status"] for row in found.values()} == {"not available"}
    assert {row["line"] for row in found.values()} == {reason}
    assert "0 passed, 0 failed, " in (tmp_path / "summary.md").read_text()


@NO_GPU
def test_a_rehearsal_writes_no_results():
    output = ROOT / "results" / "gpu"
    ended = run("bash", "scripts/gpu_check.sh", "--rehearse", "--output", output)
    assert ended.returncode == 2 and not output.exists()
    assert "--rehearse writes no results" in ended.stderr
    assert "Traceback" not in ended.stderr


# --- limits and verdicts ---


def bash(line: str):
    """The work of a row that runs a line of bash."""

    def work(launch) -> dict:
        return {"line": launch("bash", "-c", line).strip()}

    return work


@pytest.fixture
def check(tmp_path, monkeypatch):
    """A function that tries rows as a rehearsal, and what main() would make of it."""
    monkeypatch.setattr(gpu_check, "digest_of_sources", lambda: "abc")
    monkeypatch.setattr(
        gpu_check, "machine", lambda device: {"python": "3", "apex": None}
    )

    def make(*rows: Row, seconds: float = 60) -> dict[str, dict]:
        one = Check(tmp_path, Machine(rehearse=True), list(rows), seconds)
        one.run(list(rows))
        one.write()
        return results(tmp_path)

    make.folder = tmp_path
    return make


def test_a_row_that_breaks_has_failed(check, monkeypatch):
    broken = "echo noise; echo 'x.py: error: it broke' >&2; echo more; exit 3"
    rows = [
        Row("training", "breaks", 9, bash(broken)),
        Row("training", "a bug of ours", 9, lambda launch: {}["line"]),
        Row("training", "works", 9, bash("echo fine")),
        Row("training", "lacks", 9, bash("exit 1"), lambda: "no such library"),
    ]
    found = check(*rows)
    verdicts = {name: (one["status"], one["line"]) for name, one in found.items()}
    assert verdicts["training: breaks"] == ("failed", "exit status 3: it broke")
    assert verdicts["training: a bug of ours"] == ("failed", "KeyError: 'line'")
    assert verdicts["training: works"] == ("passed", "fine")
    assert verdicts["training: lacks"] == ("not available", "no such library")
    # and the command ends with 1
    monkeypatch.setattr(gpu_check, "rows", lambda here: rows)
    monkeypatch.setattr(gpu_check, "write_data", lambda: None)
    words = ["gpu_check.py", "--rehearse", "--output", str(check.folder)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        gpu_check.main()
    assert ended.value.code == 1
    monkeypatch.setattr(gpu_check, "rows", lambda here: rows[2:])
    shutil.rmtree(check.folder)
    with pytest.raises(SystemExit) as ended:
        gpu_check.main()
    assert ended.value.code == 0


def test_a_row_that_failed_is_tried_again(check):
    row = Row("training", "first", 9, bash("exit 1"), alone=True)
    assert check(row)["training: first"]["status"] == "failed"
    found = check(row, seconds=1)  # no time for it
    assert found["training: first"]["status"] == "failed"
    found = check(row._replace(work=bash("echo done")))
    assert found["training: first"]["status"] == "passed"


def test_the_sources_have_a_digest(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "a.py").write_text("1")
    (tmp_path / "b.sh").write_text("1")
    before = gpu_check.digest_of_sources()
    assert before == gpu_check.digest_of_sources()
    (tmp_path / "b.sh").write_text("2")
    assert before != gpu_check.digest_of_sources()


def test_a_row_over_its_limit_is_ended_with_its_children(check):
    children = "setsid sleep 311 & (sleep 312 &) ; exec sleep 313"
    found = check(Row("training", "hangs", 1, bash(children)))
    assert found["training: hangs"]["seconds"] < 300
    assert found["training: hangs"]["status"] == "failed"
    assert found["training: hangs"]["line"] == "not done within its limit of 1 s, ended"
    mark = f"{gpu_rows.MARK}={os.getpid()}-".encode()
    left = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes():
                left.append((folder / "cmdline").read_bytes())
        except OSError:
            continue
    assert not left


def test_what_does_not_fit_into_the_time_is_not_run_and_done_by_the_next_command(check):
    counted = check.folder / "counted"
    rows = [
        Row("training", "first", 60, bash(f"echo >>{counted}; echo done")),
        Row("speed", "second", 60, bash("sleep 30"), alone=True),
        Row("speed", "third", 60, bash("echo done"), alone=True),
        Row("model", "lacks", 60, bash("exit 1"), lambda: "no such library"),
    ]
    found = check(*rows, seconds=6)
    assert found["training: first"]["status"] == "passed"
    second, third = found["speed: second"], found["speed: third"]
    assert second["status"] == third["status"] == "not run"
    assert "time is up" in second["line"] and third["line"] == "time is up"
    rows[1] = rows[1]._replace(work=bash("echo done"))
    found = check(*rows)
    tried = ("training: first", "speed: second", "speed: third")
    assert [found[name]["status"] for name in tried] == ["passed"] * 3
    assert counted.read_text() == "\n"  # once
    assert len(found) == 4 + len(gpu_check.agreements([]))
    gpu_check.digest_of_sources = lambda: "def"
    with pytest.raises(gpu_check.UserError, match="sources abc, now it is def"):
        check(*rows)


def test_the_summary_is_made_of_the_json_files(check):
    check(
        Row("training", "works", 9, bash("echo fine | tr f F")),
        Row("resume", "breaks", 9, bash("exit 1")),
    )
    text = (check.folder / "summary.md").read_text()
    assert text == gpu_check.summary(check.folder)
    assert "1 passed, 1 failed, 0 not available, 6 not run" in text
    assert "passed, rehearsed on a CPU" in text and "# rehearsed on a CPU" in text
    for file in check.folder.glob("*.json"):
        content = json.loads(file.read_text())
        assert content["device"] == gpu_check.REHEARSED
        for row in content["rows"]:
            assert row.get("device", content["device"]) == gpu_check.REHEARSED
    content = json.loads((check.folder / "resume.json").read_text())
    content["rows"][0]["line"] = "changed"
    (check.folder / "resume.json").write_text(json.dumps(content))
    assert "changed" in gpu_check.summary(check.folder)


# --- what is compared ---


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """The results of two rows that a rehearsal really ran."""
    folder = tmp_path_factory.mktemp("rehearsal")
    words = ("--rehearse", "--output", folder, "--rows", CURVE, f"training: {ROW}")
    ended = run("bash", "scripts/gpu_check.sh", *words)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "This was rehearsed on a CPU: nothing ran on a GPU." in ended.stdout
    return results(folder)


@pytest.mark.full
def test_a_rehearsal_runs_rows_and_compares_them(rehearsed):
    assert rehearsed[f"training: {ROW}"]["status"] == "passed"
    agreement = rehearsed["agreement: 1 process, fp32"]
    assert agreement["status"] == "passed" and agreement["found"]["pairs"]
    others = {name for name, row in rehearsed.items() if row["status"] == "passed"} - {
        f"training: {ROW}",
        "agreement: 1 process, fp32",
        f"training: the {CURVE}",
    }
    assert not others
    assert rehearsed["agreement: 2 processes, bf16"]["status"] == "not run"


def copy_of_the_project(folder: Path, file: str, old: str, new: str) -> Path:
    """With one thing changed."""
    away = shutil.ignore_patterns(".*", "results", "runs", "sample_data", "docs")
    shutil.copytree(ROOT, folder, ignore=away)
    (folder / "sample_data").symlink_to(ROOT / "sample_data")
    text = (folder / file).read_text()
    assert text.count(old) == 1
    (folder / file).write_text(text.replace(old, new))
    return folder


WRONG_TRAINING = {
    "a learning rate twice as high": (
        "multiprocessing_distributed.py",
        "lr=scaled_learning_rate(args.lr, args.global_batch_size)",
        "lr=2 * scaled_learning_rate(args.lr, args.global_batch_size)",
    ),
    "images normalised twice": (
        "multiprocessing_distributed.py",
        "        seed_step(args.seed, state.epoch, step, rank)\n",
        "        images = loader.normalise(images.clone())\n",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize(
    "mistake, seen_in",
    [
        ("a learning rate twice as high", ("fp32", "fp16")),
        ("images normalised twice", ("fp32",)),
    ],
)
def test_a_wrong_training_is_outside_the_tolerance(
    rehearsed, tmp_path, mistake, seen_in
):
    copy = copy_of_the_project(tmp_path / "copy", *WRONG_TRAINING[mistake])
    words = ("--rehearse", "--output", tmp_path / "out", "--rows", f"training: {ROW}")
    ended = run("bash", copy / "scripts" / "gpu_check.sh", *words)
    assert ended.returncode == 0, ended.stdout + ended.stderr  # it trains
    reference = rehearsed[f"training: the {CURVE}"]["found"]
    runs = {"wrong": results(tmp_path / "out")[f"training: {ROW}"]["found"]}
    for precision in seen_in:
        with pytest.raises(Failed, match="losses differ by"):
            gpu_rows.judge_agreement(
                runs, reference, gpu_rows.LOSS_TOLERANCE[precision]
            )


@pytest.mark.full
def test_curves_that_are_no_numbers_never_agree(rehearsed):
    right = rehearsed[f"training: {ROW}"]["found"]
    wrong = {**right, "curve": [[float("nan"), 1.0]] * gpu_rows.EPOCHS}
    with pytest.raises(Failed, match="losses differ by inf"):
        gpu_rows.judge_agreement({"one": wrong}, right, 100)


@pytest.mark.full
def test_a_resume_that_loses_something_is_none(rehearsed):
    one = rehearsed[f"training: {ROW}"]["found"]
    whole = {**one, "scale": {"loss_scale": 65536.0, "unskipped": 16}}
    same = dict.fromkeys(("weights", "masters", "momenta", "statistics"), 0.0)
    gpu_rows.judge_resume(whole, whole, same, "fp16")
    parts = {**one, "scale": {"loss_scale": 65536.0, "unskipped": 8}}
    with pytest.raises(Failed, match="loss scale .*'unskipped': 8.*in one piece"):
        gpu_rows.judge_resume(whole, parts, same, "fp16")
    for name, value in (("masters", 2**-13), ("momenta", 0.43), ("weights", 1e-9)):
        with pytest.raises(Failed, match=f"{name} differ by"):
            gpu_rows.judge_resume(whole, whole, {**same, name: value}, "bf16")


def test_runs_that_cannot_be_compared_are_no_agreement():
    """Each skipped another number of steps, for another loss scale."""
    setting = gpu_rows.Setting("distributed", 1, "fp16")
    one = {"setting": setting._asdict(), "curve": [[1.0, 1.0]], "compared": True}
    reference = {**one, "scale": {}, "reference": True}
    skipped = {**one, "scale": {"scale": 2.0**14}}
    found = {row["row"]: row for row in gpu_check.agreements([reference, skipped])}
    assert found["1 process, fp16"]["status"] == "not run"
    assert "nothing to compare" in found["1 process, fp16"]["line"]
    whole = {**one, "scale": {"scale": 2.0**16}}
    found = {row["row"]: row for row in gpu_check.agreements([reference, whole])}
    assert found["1 process, fp16"]["status"] == "passed"


def test_the_tolerance_of_fp16_pixels():
    """No value of no channel is further off, and some nearly are."""
    values = torch.arange(256.0, dtype=torch.float64)
    exact = torch.cat([(values - m) / s for m, s in zip(MEAN, STD, strict=True)])
    most = (exact.half().double() - exact).abs().max().item()
    assert 0.9 * gpu_rows.INPUT_TOLERANCE["O2"] < most < gpu_rows.INPUT_TOLERANCE["O2"]


def test_differences_of_checkpoints():
    def content(weight, mean, momentum, master):
        return {
            "state_dict": {
                "w": torch.tensor([weight]),
                "b.running_mean": torch.tensor([mean, 0]),
            },
            "optimizer": {
                "state": {0: {"momentum_buffer": torch.tensor([momentum, 0.0])}}
            },
            "masters": {"tensors": [torch.tensor([master])]},
        }

    whole, parts = content(1.0, 2.0, 4.0, 8.0), content(1.5, 2.5, 3.0, 8.25)
    expected = {"weights": 0.5, "masters": 0.25, "momenta": 0.25, "statistics": 0.25}
    assert gpu_rows.state_differences(whole, parts) == expected


def test_what_reaches_the_network_is_normalised_once(tmp_path):
    gpu_check.write_data()

    def judged(root: Path) -> dict:
        file = tmp_path / "found.json"
        words = [sys.executable, "-m", "benchmarks.gpu", "input", "distributed", file]
        flags = [*gpu_rows.RECIPE.split(), "--epochs", 1, "--precision", "fp32"]
        flags += ["--data", gpu_rows.DATA, "--device", "cpu", "--image-size", 32]
        flags += ["--output", tmp_path / f"run-{root.name}"]
        line = " ".join(map(str, [*words, *flags]))
        ended = run("bash", "-c", f"cd {root} && {line}")
        assert ended.returncode == 0, ended.stderr
        found = json.loads(file.read_text())
        return gpu_rows.judge_input(found, gpu_rows.INPUT_TOLERANCE["O2"])

    assert judged(ROOT)["batches"] == gpu_rows.STEPS
    _, old, new = WRONG_TRAINING["images normalised twice"]
    copy = copy_of_the_project(tmp_path / "copy", "distributed.py", old, new)
    with pytest.raises(Failed, match="pixels differ by"):
        judged(copy)


@pytest.mark.full
def test_a_momentum_that_is_not_restored_is_seen(tmp_path):
    lost = (
        "            for name, part in self.parts.items():\n"
        "                part.load_state_dict(content[name])\n"
    )
    copy = copy_of_the_project(
        tmp_path / "copy",
        "common/checkpoint.py",
        lost,
        lost.replace("self.parts.items():", "list(self.parts.items())[1:]:"),
    )
    row = "resume: distributed, 1 process, fp16"
    for root, status in ((ROOT, "passed"), (copy, "failed")):
        output = tmp_path / f"out-{status}"
        words = ("--rehearse", "--output", output, "--rows", row)
        ended = run("bash", root / "scripts" / "gpu_check.sh", *words, timeout=300)
        assert ended.returncode == (status == "failed")
        assert results(output)[row]["status"] == status
