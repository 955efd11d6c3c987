"""doctor finds the mistakes of tests/doctor/mistakes.txt and of the labs, without false alarms.

Each test runs a real job, so most tests run only with --full.
"""

import json
import re
import runpy
import shlex
import shutil
import signal
import subprocess
from importlib.util import find_spec

import jsonschema
import pytest
import torch
from conftest import ROOT, Started, run, run_torchrun, wait_until
from mutations import read_mutations
from torch.utils._pytree import tree_leaves

import doctor.laws  # noqa: F401  its checks

MODES = {path.stem: path for path in sorted(ROOT.glob("tests/doctor/modes/*.py"))}
MISTAKES = read_mutations((ROOT / "tests" / "doctor" / "mistakes.txt").read_text())
PLANTED = [(m.name, m, (ROOT / "tests/doctor" / m.file).read_text()) for m in MISTAKES]
FACTS = runpy.run_path(str(ROOT / "tutorial" / "labs" / "lab.py"))["labs"]()
LABS = [(n, x, "horovod" * (n == "30")) for n, x in FACTS.items() if x.doctor != "-"]
QUICK = {"a script"}  # the others only run with --full
LAUNCHER = "torchrun --standalone --nproc-per-node 2 FILE"


def cases(named):
    """Return parameters with their names and marks."""
    found = []
    for name, *values, text in named:
        marks = [] if name in QUICK else [pytest.mark.full]
        marks += [pytest.mark.horovod] * ("horovod" in text)
        found.append(pytest.param(*values, id=name, marks=marks))
    return found


def watch(folder, command, *flags):
    """Run a command under doctor in a folder; return the JSON report and the finished process."""
    words = ["python", "-m", "doctor", *flags, "--json", "found.json", "--", *command]
    line = f"cd {folder} && {shlex.join(map(str, words))}"
    ended = run("bash", "-c", line, PYTHONPATH=str(ROOT))
    assert (folder / "found.json").exists(), ended.stderr[-3000:]
    return json.loads((folder / "found.json").read_text()), ended


def examine(folder, path, text):
    """Return doctor's findings on a script, without its note on Gloo's rare abort at exit."""
    (folder / path.name).write_text(text)
    for name in ("accelerate", "lightning", "transformers"):
        if re.search(f"(import|from) {name}", text) and find_spec(name) is None:
            pytest.skip(f"no {name}")
    mode = MODES["hvd"] if "import horovod" in text else MODES.get(path.stem, path)
    first = re.search(r'"""(.*?FILE)', mode.read_text())
    command = first[1] if first else LAUNCHER
    flags = ["--machines"] * path.name.startswith("01_")
    found, _ = watch(folder, shlex.split(command.replace("FILE", path.name)), *flags)
    reasons = [why for one in found["verdicts"] for why in one["not_judged"].values()]
    assert not [why for why in reasons if "own error" in why]
    abort = ("note", "ends_with_an_error")
    return [x for x in found["findings"] if (x["level"], x["check"]) != abort]


def bad(findings):
    """Return the names of the findings that report a mistake."""
    return [one["check"] for one in findings if one["level"] in ("WRONG", "RISK")]


@pytest.mark.parametrize("path", cases((n, x, x.read_text()) for n, x in MODES.items()))
def test_nothing_is_wrong_with_a_right_script(path, tmp_path):
    found = examine(tmp_path, path, path.read_text())
    assert not bad(found), found
    assert path.stem != "steps" or not found, found


@pytest.mark.parametrize("mistake", cases(PLANTED))
def test_a_mistake_is_named(mistake, tmp_path):
    path = ROOT / "tests" / "doctor" / mistake.file
    text = path.read_text()
    assert text.count(mistake.old) == 1
    found = examine(tmp_path, path, text.replace(mistake.old, mistake.new))
    if path.stem == "steps":  # doctor names the main reason first
        first = f"{found[0]['check']} {found[0]['what']}"
        assert all(word in first for word in mistake.tests), found
    assert {*mistake.tests} & {one["check"] for one in found}, found


@pytest.mark.parametrize("mode", "plain amp spawn contrast".split())
def test_several_mistakes_in_one_script_are_all_named(mode, tmp_path):
    text, wanted = MODES[mode].read_text(), set()
    for one in MISTAKES:
        if "together" in one.tests and one.file == f"modes/{mode}.py":
            assert text.count(one.old) == 1, one.name
            text = text.replace(one.old, one.new)
            wanted |= {*one.tests} - {"together"}
    found = examine(tmp_path, MODES[mode], text)
    assert wanted <= {one["check"] for one in found}, found
    assert all(one["place"].startswith(f"{mode}.py:") for one in found if one["place"])


def test_what_was_found_in_public_scripts_is_named_in_ours():
    """Each entry of docs/found.md names a check, and a planted mistake that this check finds."""
    known = {(check, one.name) for one in MISTAKES for check in one.tests}
    group = r'\(((?:`\w+`,? ?)+); planted as ((?:"[^"]+",? ?)+)\)'
    sections = (ROOT / "docs" / "found.md").read_text().split("\n## ")[1:-1]
    for section in sections:
        groups = re.findall(group, " ".join(section.split()))
        assert len(groups) in (section.count("\n- **"), 1)  # or 1 per section
        for checks, names in groups:
            names = re.findall(r'"(.+?)"', names)
            rows = zip(re.findall(r"\w+", checks), names, strict=True)
            assert not {*rows} - known
    assert len(sections) == 4


@pytest.mark.parametrize("lab", cases(LABS))
def test_a_lab_is_named_and_its_solution_is_right(lab, tmp_path):
    path = ROOT / "tutorial" / "labs" / lab.script
    broken, solved = tmp_path / "broken", tmp_path / "tutorial" / "labs"
    for folder in (broken, solved):
        shutil.copytree(path.parent, folder)
    found = examine(broken, path, path.read_text())
    assert (bad(found) or [one["check"] for one in found])[0] == lab.doctor, found
    for patch in path.parent.glob(f"solutions/{lab.number}.patch"):
        subprocess.run(["git", "apply", patch], cwd=tmp_path, check=True)
    found = examine(solved, path, (solved / path.name).read_text())
    assert not bad(found), found


OURS = "--image-size 32 --max-steps 6 --epochs 1 -b 48 -j 2 --print-interval 3"
OURS = f"{OURS} --output run".split()
STRATEGIES = "dataparallel distributed multiprocessing_distributed horovod_distributed"
STRATEGIES = [(x, x, x) for x in ("a script", *STRATEGIES.split())]


@pytest.mark.parametrize("name", cases(STRATEGIES))
def test_a_watched_run_has_the_same_weights(name, tmp_path, digits):
    """A network has dropout; our scripts have loader processes, and save optimizers and generators."""
    command, written = LAUNCHER.replace("FILE", str(MODES["plain"])), "checkpoint.pt"
    if name != "a script":
        script, written = ROOT / "scripts" / f"{name}.sh", "run/checkpoint.pt"
        command = shlex.join(["bash", str(script), "--data", str(digits), *OURS])
    schema = json.loads((ROOT / "doctor/report.schema.json").read_text())
    contents, valid = [], jsonschema.validators.validator_for(schema)(schema).is_valid
    for kind in ("alone", "watched", "--cpu")[: 2 + (name == "a script")]:
        (folder := tmp_path / kind).mkdir()
        if kind == "alone":
            ended = run_torchrun(folder, command)
            assert ended.returncode == 0, ended.stderr
        else:
            flags = ["--cpu"] * (kind == "--cpu")
            found, ended = watch(folder, shlex.split(command), *flags)
            assert not bad(found["findings"]) and len(found["verdicts"]) == 10
            assert valid(found) and "own error" not in json.dumps(found)
            assert ("Emulated on the CPU" in ended.stderr) == (kind == "--cpu")
            assert found["steps"] and not valid(found | {"verdicts": [{}]})
        content = torch.load(folder / written)
        if isinstance(content, dict):
            del content["records"]  # these contain times
        contents.append(tree_leaves(content))
        for one, other in zip(contents[0], contents[-1], strict=True):
            assert torch.equal(one, other) if torch.is_tensor(one) else one == other
    assert len(contents[0]) > 10


def test_without_a_training_process_it_says_so():
    """The exit status is 2 then, unless the command or its signal has given another one."""
    for code, status in (("exit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)):
        ended = run("python", "-m", "doctor", "--", "python", "-c", code)
        assert ended.returncode == status
    ended = run("python", "-m", "doctor", "--", "python", "-c", "print('hello')")
    assert ended.returncode == 2 and ended.stdout == "hello\n"
    assert ended.stderr.startswith("doctor: error: NOTHING CHECKED: no process")
    for words, last in (
        ("-- no-such-command", "cannot start no-such-command: No such file or"),
        ("", "give a command after --"),
        ("--cpu 0 -- python", "--cpu"),
        ("--html none/a.html -- python", "cannot write none/a.html: give a file in"),
        ("--steps 0 -- python", "--steps must be at least 1"),
        ("--explain hang", "no check is named hang; try hangs"),
    ):
        ended = run("python", "-m", "doctor", *words.split())
        lines = ended.stderr.splitlines()
        assert ended.returncode == 2 and last in lines[-1] and len(lines) < 3, lines


def test_ctrl_c_ends_the_job_and_prints_the_page(tmp_path):
    text = MODES["plain"].read_text()
    path, log = tmp_path / "long.py", tmp_path / "log"
    end = "dist.destroy_process_group()"
    path.write_text(text.replace(end, f"__import__('time').sleep(99)\n{end}"))
    command = f"exec python -m doctor -- {LAUNCHER.replace('FILE', path.name)}"
    command = ["bash", "-c", f"cd {tmp_path} && {command}"]
    own = {"PYTHONPATH": ROOT, "PYTHONUNBUFFERED": "1"}
    with log.open("w") as output, Started(tmp_path, command, output, **own) as job:
        wait_until(lambda: "epoch 2" in log.read_text(), 90, log.read_text)
        job.process.send_signal(signal.SIGINT)
        job.process.wait(60)
        job.wait_until_gone(20)
    words = " ".join(log.read_text().split())
    assert "2 processes trained" in words and "the job was interrupted" in words
    held = r"1 held Every sample is read once per epoch: epoch 0: \d+ samples read"
    assert re.search(held, words) and "WRONG" not in words
