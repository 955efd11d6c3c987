"""Every script trains real images through its real launchers, and all train the same model."""

import importlib.util
import json
import math
import re
import sys
import warnings
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SHORT, launcher, run
from played import run_python
from ranks import Ranks, free_port, run_ranks, train, train_compiled
from torchvision.models import resnet18

from common.schedule import build_scheduler

RECORD = {
    "epoch",
    "steps",
    "images",
    "train_loss",
    "train_top1",
    "val_loss",
    "val_top1",
    "val_top5",
    "val_images",
    "first_step",
    "seconds",
    "images_per_second",
    "step_milliseconds",
    "data_wait_share",
    "learning_rate",
    "peak_memory_mib",
}


def torchrun(*flags):
    script = ROOT / "distributed.py"
    return run("torchrun", "--standalone", "--nproc-per-node=2", script, *flags)


def launch(*flags):
    return launcher("distributed", *flags, NPROC="2", LAUNCHER="launch")


def launch_use_env(*flags):
    module = (
        "python",
        "-m",
        "torch.distributed.launch",
        "--use-env",
        "--nproc-per-node=2",
    )
    return run(
        *module,
        f"--master-port={free_port()}",
        ROOT / "distributed.py",
        *flags,
    )


def old_local_rank(*flags):
    """What launchers before torch 2.0 pass."""
    script = ROOT / "distributed.py"
    return run(
        "torchrun",
        "--standalone",
        "--nproc-per-node=2",
        script,
        "--local_rank=0",
        *flags,
    )


def horovodrun_mpi(*flags):
    command = ("horovodrun", "-np", "2", "-H", "localhost:2", "--mpi", sys.executable)
    return run(*command, ROOT / "horovod_distributed.py", *flags)


WAYS = {
    "dataparallel": lambda *flags: launcher("dataparallel", *flags),
    "torchrun": torchrun,
    "distributed.sh": lambda *flags: launcher("distributed", *flags),
    "launch": launch,
    "launch --use-env": launch_use_env,
    "--local_rank": old_local_rank,
    "mp.spawn": lambda *flags: launcher("multiprocessing_distributed", *flags),
    "horovodrun gloo": lambda *flags: launcher("horovod_distributed", *flags),
    "horovodrun mpi": horovodrun_mpi,
    "mpirun": lambda *flags: launcher("horovod_distributed", *flags, CONTROLLER="mpi"),
}
NEEDS = {
    "horovodrun gloo": [pytest.mark.horovod],
    "horovodrun mpi": [pytest.mark.mpi, pytest.mark.full],
    "mpirun": [pytest.mark.mpi],
    "launch --use-env": [pytest.mark.full],
    "--local_rank": [pytest.mark.full],
}


@pytest.fixture(scope="module")
def trained(digits, tmp_path_factory):
    """Run a way once and keep its output folder."""
    folder, done = tmp_path_factory.mktemp("runs"), {}

    def train(way) -> Path:
        if way not in done:
            output = folder / way.replace(" ", "_")
            done[way] = WAYS[way]("--data", digits, *SHORT, "--output", output), output
        ended, output = done[way]
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return output

    return train


def records(output):
    return [
        json.loads(line) for line in (output / "epochs.jsonl").read_text().splitlines()
    ]


def checkpoint(output):
    return torch.load(output / "checkpoint.pt", weights_only=True)


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=NEEDS.get(way, ())) for way in WAYS]
)
def test_trains_and_validates(trained, way):
    output = trained(way)
    epochs = records(output)
    assert [record["epoch"] for record in epochs] == [0, 1]
    for record in epochs:
        assert RECORD <= set(record)
        counts = record["steps"], record["images"], record["val_images"]
        assert counts == (10, 640, 359)
        assert 0 <= record["val_top1"] <= record["val_top5"] <= 100
    guessing = math.log(10)
    assert all(record["train_loss"] < guessing for record in epochs)
    report = json.loads((output / "report.json").read_text())
    assert report["world_size"] == (1 if way == "dataparallel" else 2)
    assert report["precision"] == "fp32" and report["torch"] == torch.__version__
    model = resnet18(num_classes=10)
    model.load_state_dict(checkpoint(output)["state_dict"])


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=NEEDS.get(way, ()))
        for way in WAYS
        if way not in ("dataparallel", "torchrun")
    ],
)
def test_two_processes_end_with_the_same_bits_whatever_the_strategy(trained, way):
    expected, found = checkpoint(trained("torchrun")), checkpoint(trained(way))
    for name, tensor in expected["state_dict"].items():
        assert torch.equal(tensor, found["state_dict"][name]), name
    for number, state in expected["optimizer"]["state"].items():
        momentum = found["optimizer"]["state"][number]["momentum_buffer"]
        assert torch.equal(state["momentum_buffer"], momentum)
    figures = (
        "train_loss",
        "train_top1",
        "val_loss",
        "val_top1",
        "val_top5",
        "learning_rate",
    )
    for one, other in zip(
        records(trained("torchrun")), records(trained(way)), strict=True
    ):
        assert [one[name] for name in figures] == [other[name] for name in figures]


def test_evaluate_finds_what_was_recorded(trained, digits, tmp_path):
    """One process counts the same images as the two that trained, and has the same loss."""
    output = trained("torchrun")
    record = records(output)[-1]
    before = (output / "checkpoint.pt").read_bytes()
    flags = ("--evaluate", "--resume", output / "checkpoint.pt")
    script = ROOT / "dataparallel.py"
    status, printed = run_python(tmp_path, script, "--data", digits, *SHORT, *flags)
    assert status == 0, printed
    assert printed.splitlines()[-1] == (
        f"val loss {record['val_loss']:.4f}, top-1 {record['val_top1']:.2f} %, "
        f"top-5 {record['val_top5']:.2f} %, 359 images"
    )
    assert (output / "checkpoint.pt").read_bytes() == before


def test_evaluate_needs_no_training_batch(pictures):
    """A folder with fewer training images than one batch can still be validated on."""
    from common.data import build_datasets
    from common.schedule import build_scheduler

    args = Namespace(
        data=pictures, synthetic=None, image_size=32, min_crop=0.08, no_flip=False
    )
    args.pretrained = False
    args.decoder, args.global_batch_size, args.evaluate = "auto", 256, True
    train_set, val_set = build_datasets(args)
    assert (len(train_set), len(val_set)) == (16, 8)
    args.epochs, args.warmup_epochs, args.schedule = 90, 5, "step"
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    scheduler = build_scheduler(args, optimizer, 0)  # whose epochs have no step
    assert scheduler.get_last_lr() == pytest.approx([0.02])


def test_a_finished_run_is_not_overwritten(trained, digits, tmp_path):
    output = trained("torchrun")
    before = (output / "checkpoint.pt").read_bytes()
    flags = ["--data", digits, *SHORT, "--output", output]
    for more, status, said in (
        ([], 2, "go on with --resume auto"),
        (["--resume", "auto"], 0, "complete already: 2 of 2 epochs"),
    ):
        arguments = {"name": "distributed", "flags": flags + more}
        with Ranks(tmp_path, 2, train, **arguments) as ranks:
            assert ranks.end() == [status] * 2
            assert said in ranks.text()
    assert (output / "checkpoint.pt").read_bytes() == before


@pytest.mark.parametrize("precision", ("bf16", "fp16"))
def test_precisions(tmp_path, pictures, precision):
    flags = "--image-size 32 -b 8 --epochs 1 -j 0 --precision".split()
    flags = ["--data", pictures, *flags, precision, "--output", tmp_path / "out"]
    run_ranks(tmp_path, 2, train, name="distributed", flags=flags)
    content = checkpoint(tmp_path / "out")
    assert content["recipe"]["precision"] == precision
    assert bool(content["scaler"]) == (precision == "fp16")
    weights = content["state_dict"].values()
    assert {tensor.dtype for tensor in weights} == {torch.float32, torch.int64}


def test_validation_records_no_gradients(monkeypatch):
    """A graph of every batch would take memory, and the wrapped model would average."""
    import distributed

    seen = []

    class Probe(torch.nn.Linear):
        def forward(self, images):
            seen.append((torch.is_grad_enabled(), self.training))
            return super().forward(images)

    monkeypatch.setattr(distributed, "combine", lambda sums: sums)
    batches = [(torch.rand(2, 4), torch.tensor([0, 1]))] * 2
    args = Namespace(precision="fp32", label_smoothing=0.0)
    meter = distributed.Meter(torch.device("cpu"))
    assert distributed.validate(args, batches, Probe(4, 6), meter).images == 4
    assert seen == [(False, False)] * 2


def test_an_overflow_in_the_first_fp16_step_leaves_no_trace():
    """Loss scaling begins too high by design, and skips such steps: none warns of it."""
    import distributed

    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), **sgd_options())
    scaler = torch.amp.GradScaler("cpu")
    state = Namespace(optimizer=optimizer, scaler=scaler)
    args = Namespace(precision="fp16", label_smoothing=0.0)
    vars(args).update(epochs=1, warmup_epochs=0.0, schedule="step")
    labels = torch.tensor([0, 1])
    bad = torch.full((2, 3, 2, 2), float("inf"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = build_scheduler(args, optimizer, 10)
        distributed.train_step(args, model, state, bad, labels)
        scheduler.step()
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
    distributed.train_step(args, model, state, torch.rand(2, 3, 2, 2), labels)
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert 0 < (parameter - old).abs().max() < 1


def sgd_options():
    """How distributed.py makes its optimizer, apart from the numbers."""
    source = (ROOT / "distributed.py").read_text()
    (call,) = re.findall(r"torch\.optim\.SGD\(\n(.*?)\n    \)", source, re.DOTALL)
    names = re.findall(r"^ +(\w+)=(.*),$", call, re.MULTILINE)
    numbers = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}
    return {name: numbers.get(name, text == "True") for name, text in names}


def test_another_script_reads_the_checkpoint(trained):
    """One that expects the keys of the ImageNet example of pytorch/examples."""
    content = checkpoint(trained("torchrun"))
    model = resnet18(num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    assert content["arch"] == "resnet18"
    first_epoch, best = content["epoch"], content["best_acc1"].to("cpu")
    model.load_state_dict(content["state_dict"])
    optimizer.load_state_dict(content["optimizer"])
    schedule.load_state_dict(content["scheduler"])
    assert first_epoch == 2
    assert float(best) == pytest.approx(max(r["val_top1"] for r in content["records"]))
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    optimizer.step()
    schedule.step()


def test_a_compiled_network_and_synthetic_images(tmp_path):
    flags = ["--synthetic", 64, "-b", 8, "--image-size", 32, "--epochs", 1]
    flags += ["--max-steps", 3, "--compile", "--output", tmp_path / "out"]
    name = "multiprocessing_distributed"
    # A compiler's first start may take minutes on a busy machine
    (graphs,) = run_ranks(tmp_path, 1, train_compiled, 300, name=name, flags=flags)
    assert graphs >= 1
    assert records(tmp_path / "out")[0]["images"] == 24


@pytest.mark.full
def test_compile_and_synthetic(tmp_path):
    ended = launcher(
        "multiprocessing_distributed",
        *(
            "--synthetic",
            "64",
            "-b",
            "8",
            "--image-size",
            "32",
            "--arch",
            "squeezenet1_1",
        ),
        *(
            "--epochs",
            "1",
            "--max-steps",
            "3",
            "--compile",
            "--output",
            tmp_path / "out",
        ),
        timeout=400,
    )
    assert ended.returncode == 0, ended.stderr
    assert records(tmp_path / "out")[0]["images"] == 24


@pytest.mark.horovod
def test_horovod_sends_fp16_gradients(tmp_path, digits):
    """Few steps, so that what fp16 rounds is not amplified; without it the bits are DDP's."""
    flags = ["--data", digits, *SHORT, "--epochs", 1, "--max-steps", 3, "-j", 0]
    output = tmp_path / "out"
    ended = launcher(
        "horovod_distributed", *flags, "--output", output, "--fp16-allreduce"
    )
    assert ended.returncode == 0, ended.stderr
    flags += ["--output", tmp_path / "exact"]
    run_ranks(tmp_path, 2, train, name="distributed", flags=flags)
    rounded, exact = (
        checkpoint(folder)["state_dict"]["fc.weight"]
        for folder in (output, tmp_path / "exact")
    )
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, rtol=0, atol=0.02)


HOROVOD_PROBE = """
import horovod.torch as hvd, torch
from argparse import Namespace
import horovod_distributed as script

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
state = Namespace(optimizer=optimizer, scaler=scaler)
args = Namespace(precision="fp32", label_smoothing=0.0)
for step in range(3):
    before = model.weight.detach().clone()
    images = torch.ones(3, 4) * (hvd.rank() + 1)
    if step == 1 and hvd.rank() == 1:
        images[0, 0] = float("inf")
    script.train_step(args, model, state, images, torch.tensor([0, 1, 0]))
    moved = not torch.equal(before, model.weight)
    same = torch.equal(model.weight, hvd.broadcast(model.weight.detach(), root_rank=0))
    print(f"RANK {hvd.rank()} STEP {step} MOVED {moved} SAME {same} SCALE {scaler.get_scale()}", flush=True)
sums = torch.tensor([hvd.rank() + 1.0, 10.0], dtype=torch.float64)
print("SUM", script.combine(sums).tolist(), flush=True)
"""


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    """What two processes under horovodrun print of functions of the script."""
    probe = tmp_path_factory.mktemp("probe") / "probe.py"
    probe.write_text(HOROVOD_PROBE)
    command = ("horovodrun", "-np", "2", "--gloo", "python", probe)
    ended = run(*command, PYTHONPATH=str(ROOT))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.horovod
def test_an_infinity_on_one_rank_skips_the_step_on_all(probed):
    """GradScaler under Horovod: the region of the script, run on a gradient with an inf."""
    for rank in (0, 1):
        for step, (moved, scale) in enumerate(
            ((True, 1024.0), (False, 512.0), (True, 512.0))
        ):
            line = f"RANK {rank} STEP {step} MOVED {moved} SAME True SCALE {scale}"
            assert line in probed, probed


@pytest.mark.horovod
def test_horovod_metrics_are_summed_over_the_processes(probed):
    assert probed.count("SUM [3.0, 20.0]") == 2, probed


def test_apex_says_why_it_cannot_run(tmp_path, digits):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    ended = launcher("apex_distributed", "--data", digits)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "apex_distributed.py: error: Apex needs a CUDA GPU: this machine has none\n"
    )


@pytest.mark.parametrize(
    "package, message",
    [
        (
            None,
            "no amp or DDP of Apex (No module named 'apex'); tag 25.05 has: pip install",
        ),
        (
            {"__init__": ""},
            "no amp or DDP of Apex (cannot import name 'amp' from 'apex'",
        ),
        (
            {"__init__": "", "amp": ""},
            "no amp or DDP of Apex (No module named 'apex.parallel')",
        ),
    ],
)
def test_apex_missing_or_too_new(tmp_path, package, message):
    """On a machine with a GPU; a package of the same name shows what a newer Apex lacks."""
    for module, text in (package or {}).items():
        (tmp_path / "apex").mkdir(exist_ok=True)
        (tmp_path / "apex" / f"{module}.py").write_text(text)
    code = (
        "import torch; torch.cuda.is_available = lambda: True\n"
        "from common.errors import exit_status\n"
        "with exit_status():\n"
        "    import apex_distributed\n"
        "    apex_distributed.arguments(['--data', 'x'])\n"
    )
    if package is None and importlib.util.find_spec("apex"):
        pytest.skip("Apex is installed")
    (tmp_path / "probe.py").write_text(code)
    status, printed = run_python(tmp_path, tmp_path / "probe.py")
    assert status == 2 and message in printed
    assert "NVIDIA/apex@25.05" in printed and printed.count("\n") == 1


@pytest.mark.parametrize(
    "flags", [("--precision", "bf16"), ("--precision", "fp16", "--opt-level", "O1")]
)
def test_apex_has_no_bf16(flags, monkeypatch, capsys):
    import apex_distributed

    monkeypatch.setattr(apex_distributed, "require_gpu", lambda *args: None)
    with pytest.raises(SystemExit) as ended:
        apex_distributed.arguments(["--data", "x", *flags])
    assert ended.value.code == 2
    assert "no bf16" in capsys.readouterr().err
