"""Launched training, what it leaves and prints, and what one script has alone."""

import json
import sys
from argparse import Namespace

import pytest
import torch
from conftest import ROOT, SHORT, launcher, run
from ranks import Ranks, graphs_in_ddp, run_ranks, train, train_watched
from torchvision.models import resnet18

import apex_distributed
import distributed
from common.errors import UserError
from launch.check import load_script

SAME = "images train_loss train_top1 train_top5 val_loss val_top1 val_top5".split()
SAME += ["val_images", "learning_rate"]
TIMED = "first_step seconds warmup_steps images_per_second step_milliseconds".split()
TIMED += ["data_wait_share", "peak_memory_mib"]
FLAGS = (*SHORT, "--max-steps", "2", "-j", "0")

# The second without our launch scripts, with the flag that launchers gave before torch 2.0.
# Others are started in test_interruption.py, where a run ends with the same bits
WAYS = {
    "distributed.sh": ("bash", ROOT / "scripts" / "distributed.sh"),
    "torchrun": (
        *("torchrun", "--standalone", "--nproc-per-node=2"),
        *(ROOT / "distributed.py", "--local_rank=0"),
    ),
}


@pytest.fixture(scope="module")
def trained(digits, tmp_path_factory):
    """The output folder of two processes that no launcher started."""
    folder = tmp_path_factory.mktemp("trained")
    flags = ["--data", digits, *FLAGS, "--output", folder / "out"]
    run_ranks(folder, 2, train, name="distributed", flags=flags)
    return folder / "out"


def records(output):
    return [*map(json.loads, (output / "epochs.jsonl").read_text().splitlines())]


def checkpoint(output):
    return torch.load(output / "checkpoint.pt", weights_only=True)


@pytest.mark.parametrize(
    "way", ["distributed.sh", pytest.param("torchrun", marks=pytest.mark.full)]
)
def test_every_way_trains_the_same_model(trained, digits, tmp_path, way):
    """To the bit."""
    ended = run(*WAYS[way], "--data", digits, *FLAGS, "--output", tmp_path / "out")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    epochs = records(tmp_path / "out")
    assert [record["epoch"] for record in epochs] == [0, 1]
    for record in epochs:
        printed = "epoch {}/2: train loss {train_loss:.4f}, top-1 {train_top1:.2f} %, "
        printed += "top-5 {train_top5:.2f} %; val loss {val_loss:.4f}, "
        printed += "top-1 {val_top1:.2f} %, top-5 {val_top5:.2f} %, 359 images"
        assert printed.format(record["epoch"] + 1, **record) in ended.stdout
        assert set(record) == {"epoch", "steps", *SAME, *TIMED}
        counts = record["steps"], record["images"], record["val_images"]
        assert counts == (2, 128, 359)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["world_size"] == 2
    contents = map(checkpoint, (tmp_path / "out", trained))
    ends = ([one["state_dict"], one["optimizer"]["state"]] for one in contents)
    torch.testing.assert_close(*ends, rtol=0, atol=0)
    for one, other in zip(records(trained), epochs, strict=True):
        assert {n: one[n] for n in SAME} == {n: other[n] for n in SAME}


def test_evaluate_finds_what_was_recorded(trained, digits, tmp_path):
    """One process counts the images of the two that trained, and has the same loss."""
    record = records(trained)[-1]
    before = (trained / "checkpoint.pt").read_bytes()
    flags = ["--data", digits, *SHORT, "--evaluate", "--output", tmp_path / "none"]
    flags += ["--resume", trained / "checkpoint.pt", "-b", 2048, "-j", 0]
    with Ranks(tmp_path, 1, train, name="dataparallel", flags=flags) as ranks:
        assert ranks.end() == [0], ranks.text()
        assert ranks.text().splitlines()[-1] == (
            f"val loss {record['val_loss']:.4f}, top-1 {record['val_top1']:.2f} %, "
            f"top-5 {record['val_top5']:.2f} %, 359 images"
        )
    assert (trained / "checkpoint.pt").read_bytes() == before
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
    content, model = checkpoint(trained), resnet18(num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
    assert (content["arch"], content["epoch"]) == ("resnet18", 2)
    assert 0 <= content["best_acc1"].to("cpu").item() <= 100
    model.load_state_dict(content["state_dict"])
    optimizer.load_state_dict(content["optimizer"])
    schedule.load_state_dict(content["scheduler"])


def test_a_compiled_network_and_synthetic_images(tmp_path):
    flags = ["--synthetic", 64, "-b", 8, "--image-size", 32, "--epochs", 1]
    flags += ["--max-steps", 3, "--compile", "--output", tmp_path / "out"]
    name = "multiprocessing_distributed"
    # A compiler's first start may take minutes on a busy machine
    how = {"name": name, "flags": flags, "net": "flat", "skipped": 0, "gpus": ""}
    (graphs,) = run_ranks(tmp_path, 1, train_watched, 300, **how)
    assert graphs >= 1
    assert records(tmp_path / "out")[0]["images"] == 24


def test_a_model_is_compiled_before_ddp_wraps_it(tmp_path):
    """docs/six_places.md says why."""
    (found,) = run_ranks(tmp_path, 1, graphs_in_ddp)
    for kind in ("Sequential", "Net"):
        assert found[f"compile, then wrap: {kind}"] == [6, 0]  # a graph for each bucket
        assert found[f"no DDP: {kind}"] == [1, 0]
    # DDP's own lines break; of nn.Sequential, whose forward is PyTorch's, nothing is left
    assert found["wrap, then compile: Net"] == [6, 3]
    assert found["wrap, then compile: Sequential"] == [0, 3]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_apex_and_synchronized_batch_norm_need_a_gpu(digits):
    ended = launcher("apex_distributed", "--data", digits)
    line = "apex_distributed.py: error: Apex needs a CUDA GPU: this machine has none\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", line)
    with pytest.raises(UserError, match="--sync-bn needs a CUDA GPU: this machine has"):
        distributed.arguments(["--data", "x", "--sync-bn"])


def test_a_library_is_missing(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["test"])
    for name, message in (
        ("apex", r"Apex's amp or DDP is missing \(.*NVIDIA/apex@25.05"),
        ("horovod", r"Horovod is missing \(.*bash scripts/install_horovod.sh"),
    ):
        monkeypatch.setitem(sys.modules, name, None)
        script = load_script(ROOT / f"{name}_distributed.py")
        script.require_gpu = lambda *_: None
        with pytest.raises(UserError, match=message):
            script.arguments(["--data", "x"])


def test_apex_has_opt_levels_and_no_bf16(monkeypatch, capsys):
    monkeypatch.setattr(apex_distributed, "require_gpu", lambda *args: None)
    monkeypatch.setattr(apex_distributed, "amp", "is there")

    def opt_level(*flags):
        return apex_distributed.arguments(["--data", "x", *flags]).opt_level

    assert (opt_level(), opt_level("--precision", "fp32")) == ("O1", "O0")
    for flags in (["bf16"], ["fp16", "--opt-level", "O1"]):
        with pytest.raises(SystemExit):
            opt_level("--precision", *flags)
        assert "bf16 is not supported" in capsys.readouterr().err
