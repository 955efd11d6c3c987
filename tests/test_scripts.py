"""Every script trains through its real launchers, and all train the same model."""

import json
import math
import sys
from argparse import Namespace

import pytest
import torch
from conftest import ROOT, SHORT, launcher, run
from ranks import Ranks, free_port, run_ranks, train, train_compiled
from torchvision.models import resnet18

import apex_distributed
import distributed
from common.errors import UserError
from launch.check import load_script

RECORD = {"epoch", "steps", "images", "train_loss", "train_top1", "train_top5"}
RECORD |= {"val_loss", "val_top1", "val_top5", "val_images", "learning_rate"}
SAME = RECORD - {"epoch", "steps"}
RECORD |= {"first_step", "seconds", "warmup_steps", "images_per_second"}
RECORD |= {"step_milliseconds", "step_milliseconds_p90", "data_wait_share"}
RECORD |= {"peak_memory_mib"}

SCRIPT = ROOT / "distributed.py"
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node=2", SCRIPT)
USE_ENV = (sys.executable, "-m", "torch.distributed.launch", "--use-env")
USE_ENV += ("--nproc-per-node=2", f"--master-port={free_port()}", SCRIPT)
HOROVODRUN = ("horovodrun", "-np", "2", "-H", "localhost:2", "--mpi", sys.executable)
HOROVODRUN += (ROOT / "horovod_distributed.py",)
LONG = pytest.mark.full
# The command or the launch script, variables for it, and what it needs
WAYS = {
    "torchrun": (TORCHRUN, {}),
    "dataparallel": ("dataparallel", {}),
    "distributed.sh": ("distributed", {}),
    "launch": ("distributed", {"NPROC": "2", "LAUNCHER": "launch"}),
    "launch --use-env": (USE_ENV, {}, LONG),
    "before torch 2.0": ((*TORCHRUN, "--local_rank=0"), {}, LONG),
    "mp.spawn": ("multiprocessing_distributed", {}),
    "horovodrun gloo": ("horovod_distributed", {}, pytest.mark.horovod),
    "horovodrun mpi": (HOROVODRUN, {}, pytest.mark.mpi, LONG),
    "mpirun": ("horovod_distributed", {"CONTROLLER": "mpi"}, pytest.mark.mpi),
}


@pytest.fixture(scope="module")
def trained(digits, tmp_path_factory):
    """Run a way once and keep its output folder."""
    folder, done = tmp_path_factory.mktemp("runs"), {}

    def train(way):
        output = folder / way.replace(" ", "_")
        if way not in done:
            command, variables, *_ = WAYS[way]
            flags = ("--data", digits, *SHORT, "--output", output)
            start = launcher if isinstance(command, str) else run
            words = (command,) if isinstance(command, str) else command
            done[way] = start(*words, *flags, **variables)
        assert done[way].returncode == 0, done[way].stdout + done[way].stderr
        return output

    return train


def records(output):
    return [*map(json.loads, (output / "epochs.jsonl").read_text().splitlines())]


def checkpoint(output):
    return torch.load(output / "checkpoint.pt", weights_only=True)


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=WAYS[way][2:]) for way in WAYS]
)
def test_every_way_trains_the_same_model(trained, way):
    """To the bit, where two processes train; DataParallel is one."""
    output = trained(way)
    epochs = records(output)
    assert [record["epoch"] for record in epochs] == [0, 1]
    for record in epochs:
        assert set(record) == RECORD
        counts = record["steps"], record["images"], record["val_images"]
        assert counts == (10, 640, 359)
        assert 0 <= record["val_top1"] <= record["val_top5"] <= 100
        assert record["train_loss"] < math.log(10)  # guessing
    report = json.loads((output / "report.json").read_text())
    assert report["world_size"] == (1 if way == "dataparallel" else 2)
    content, expected = checkpoint(output), checkpoint(trained("torchrun"))
    resnet18(num_classes=10).load_state_dict(content["state_dict"])
    if way == "dataparallel":
        return
    for name, tensor in expected["state_dict"].items():
        assert torch.equal(tensor, content["state_dict"][name]), name
    for number, state in expected["optimizer"]["state"].items():
        momentum = content["optimizer"]["state"][number]["momentum_buffer"]
        assert torch.equal(state["momentum_buffer"], momentum)
    for one, other in zip(records(trained("torchrun")), epochs, strict=True):
        assert {n: one[n] for n in SAME} == {n: other[n] for n in SAME}


def test_evaluate_finds_what_was_recorded(trained, digits, tmp_path):
    """One process counts the images of the two that trained, and has the same loss."""
    output = trained("torchrun")
    record = records(output)[-1]
    before = (output / "checkpoint.pt").read_bytes()
    flags = ["--data", digits, *SHORT, "--evaluate", "--output", tmp_path / "none"]
    flags += ["--resume", output / "checkpoint.pt", "-b", 2048]
    with Ranks(tmp_path, 1, train, name="dataparallel", flags=flags) as ranks:
        assert ranks.end() == [0], ranks.text()
        assert ranks.text().splitlines()[-1] == (
            f"val loss {record['val_loss']:.4f}, top-1 {record['val_top1']:.2f} %, "
            f"top-5 {record['val_top5']:.2f} %, 359 images"
        )
    assert (output / "checkpoint.pt").read_bytes() == before
    assert not (tmp_path / "none").exists()


def test_validation_records_no_gradients(monkeypatch):
    """A graph of every batch would take memory, and the wrapped model would average."""
    seen, fed = [], []

    class Probe(torch.nn.Linear):
        def forward(self, images):
            seen.append((torch.is_grad_enabled(), self.training))
            return super().forward(images)

    monkeypatch.setattr(distributed, "all_reduce", lambda sums: sums)
    batches = [(torch.rand(2, 4), torch.tensor([0, 1]))] * 2
    watchdog = Namespace(stop_requested=True, feed=lambda: fed.append(1))
    args = Namespace(precision="fp32")
    found = distributed.validate(args, batches, Probe(4, 6), watchdog)
    assert found["images"] == 4 and found["stop"] is True
    assert seen == [(False, False)] * 2 and len(fed) == 2


def test_another_script_reads_the_checkpoint(trained):
    """One that expects the keys of the ImageNet example of pytorch/examples."""
    content = checkpoint(trained("torchrun"))
    model = resnet18(num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    assert content["arch"] == "resnet18" and content["epoch"] == 2
    best = max(record["val_top1"] for record in content["records"])
    assert float(content["best_acc1"].to("cpu")) == pytest.approx(best)
    model.load_state_dict(content["state_dict"])
    optimizer.load_state_dict(content["optimizer"])
    schedule.load_state_dict(content["scheduler"])


def test_a_compiled_network_and_synthetic_images(tmp_path):
    flags = ["--synthetic", 64, "-b", 8, "--image-size", 32, "--epochs", 1]
    flags += ["--max-steps", 3, "--compile", "--output", tmp_path / "out"]
    name = "multiprocessing_distributed"
    # A compiler's first start may take minutes on a busy machine
    (graphs,) = run_ranks(tmp_path, 1, train_compiled, 300, name=name, flags=flags)
    assert graphs >= 1
    assert records(tmp_path / "out")[0]["images"] == 24


@pytest.mark.horovod
def test_horovod_sends_fp16_gradients(tmp_path, digits):
    """Few steps, so that what fp16 rounds is not amplified; else the bits are DDP's."""
    flags = ["--data", digits, *SHORT, "--epochs", 1, "--max-steps", 3, "-j", 0]
    rounded, exact = tmp_path / "rounded", tmp_path / "exact"
    more = ("--output", rounded, "--fp16-allreduce")
    ended = launcher("horovod_distributed", *flags, *more)
    assert ended.returncode == 0, ended.stderr
    flags += ["--output", exact]
    run_ranks(tmp_path, 2, train, name="distributed", flags=flags)
    one, other = (checkpoint(f)["state_dict"]["fc.weight"] for f in (rounded, exact))
    assert not torch.equal(one, other)
    torch.testing.assert_close(one, other, rtol=0, atol=0.02)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_apex_needs_a_gpu(digits):
    ended = launcher("apex_distributed", "--data", digits)
    line = "apex_distributed.py: error: Apex needs a CUDA GPU: this machine has none\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", line)


@pytest.mark.parametrize(
    "name, message",
    [
        ("apex", r"Apex's amp or DDP is missing \(.*NVIDIA/apex@25.05"),
        ("horovod", r"Horovod is missing \(.*bash scripts/install_horovod.sh"),
    ],
)
def test_a_library_is_missing(name, message, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(sys, "argv", ["test"])
    script = load_script(ROOT / f"{name}_distributed.py")
    script.require_gpu = lambda *_: None
    with pytest.raises(UserError, match=message):
        script.arguments(["--data", "x"])


@pytest.mark.parametrize(
    "flags", [("--precision", "bf16"), ("--precision", "fp16", "--opt-level", "O1")]
)
def test_apex_has_no_bf16(flags, monkeypatch, capsys):
    monkeypatch.setattr(apex_distributed, "require_gpu", lambda *args: None)
    with pytest.raises(SystemExit) as ended:
        apex_distributed.arguments(["--data", "x", *flags])
    assert ended.value.code == 2
    assert "no bf16" in capsys.readouterr().err
