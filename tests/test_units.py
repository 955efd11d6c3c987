"""Test small parts of common/ and of the scripts."""

import runpy
import sys
import warnings
from argparse import Namespace
from unittest.mock import Mock

import pytest
import torch
from conftest import ROOT
from ranks import parse
from torch import nn
from torchvision.models import WeightsEnum

import distributed
import multiprocessing_distributed
from common import meters
from common.errors import UserError, one_line_errors
from common.meters import Meter, Timer, averages, batch_sums, in_words
from common.model import build_model, build_scheduler


def test_metrics_are_averages_of_sums_over_all_processes():
    """The batches may differ in size, and a metric may have one number per class."""

    def batch(rows, labels):
        outputs = torch.tensor(rows, requires_grad=True)
        labels = torch.tensor(labels)
        sums = batch_sums(nn.functional.cross_entropy(outputs, labels), outputs, labels)
        assert not sums["loss"].requires_grad  # or the epoch's graphs would stay alive
        return {**sums, "by_class": torch.bincount(labels, minlength=7)}

    likely, unlikely = [0.0] * 6 + [9.0], [6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    parts = [batch([likely, unlikely], [6, 4]), batch([unlikely], [5])]
    ranks, sent = [Meter(), Meter()], []
    for meter in ranks:
        for part in parts:
            meter.add(part)
    ranks[0].reduce(lambda sums: sent.append(sums.clone()) or sums)
    sums = ranks[1].reduce(lambda own: own + sent[0])
    assert sent[0].dtype == torch.float64 and sent[0].shape == (11,)
    assert ranks[1].sums == {}
    found = averages(sums)
    rows = torch.tensor([likely, unlikely, unlikely])
    loss = nn.functional.cross_entropy(rows, torch.tensor([6, 4, 5])).item()
    assert found["loss"] == pytest.approx(loss)
    assert [found["top1"], found["top5"]] == pytest.approx([100 / 3, 200 / 3])
    assert found["images"] == 6 and type(found["images"]) is int
    assert found["by_class"] == pytest.approx([0, 0, 0, 0, 1 / 3, 1 / 3, 1 / 3])
    assert in_words(found) == f"loss {loss:.4f}, top1 33.3333, top5 66.6667"


def test_speeds_leave_out_the_first_interval(monkeypatch):
    """Processes start in the first interval. INTERVAL_HOOK is called after each interval."""
    called, found = [], []
    hook = Namespace(after_interval=lambda *figures: called.append(figures))
    monkeypatch.setitem(sys.modules, "a_hook", hook)
    monkeypatch.setattr(meters, "HOOK", "a_hook")
    intervals = [(10, 50, 90.0), (20, 64, 90.5), (30, 8, 92.0)]
    for part in (intervals[:1], intervals):
        clock = Mock(side_effect=(0, 100, 100, 102, 102, 106, 106))
        monkeypatch.setattr(meters, "time", Namespace(perf_counter=clock))
        timer = Timer()
        words = [timer.interval(*interval) for interval in part]
        found.append(timer.figures(torch.device("cpu")))
    assert (found[0]["images_per_second"], found[0]["data_wait"]) == (0.5, 0.9)
    assert words[1] == "32 images/s, waited for data 25%"
    assert (found[1]["images_per_second"], found[1]["seconds"]) == (12, 106)
    assert found[1]["data_wait"] == pytest.approx(2 / 6)
    assert 50 < found[1]["peak_memory_mib"] < 100_000
    assert called[1:] == [(10, 100, 50, 90.0), (20, 2, 64, 0.5), (30, 4, 8, 1.5)]


def test_a_user_error_is_one_line_and_others_are_not(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/a/b/script.py", "--data", "x"])
    text = "no\n  such folder"
    for error in (text, f"Caught UserError in worker\nTraceback\n  UserError: {text}"):
        with pytest.raises(SystemExit) as end, one_line_errors():
            raise UserError(error)
        assert end.value.code == 2
        assert capsys.readouterr() == ("", "script.py: error: no such folder\n")
    with pytest.raises(ZeroDivisionError), one_line_errors():
        _ = 1 / 0


X = ("--data", "x")


def test_defaults_are_those_of_the_recipe():
    """test_reference.py checks the other defaults."""
    args = parse(*X)
    assert (args.arch, args.epochs, args.global_batch_size) == ("resnet18", 90, 256)
    assert (args.save_minutes, args.print_interval) == (10, 10)
    assert args.resume is args.precision is None
    assert parse("--synthetic").synthetic == 1281167


def test_bad_flags_are_one_line(capsys):
    for flags, message in (
        ((*X, "--epoch", "3"), "unrecognized arguments: --epoch 3"),
        ((), "give either --data DIR or --synthetic"),
        ((*X, "--synthetic"), "give either --data DIR or --synthetic"),
        ((*X, "-b", "0"), "--global-batch-size must be from 1 to 1e+18"),
        ((*X, "-j", "-1"), "--workers must be from 0 to 1e+18"),
        ((*X, "--min-crop", "8"), "--min-crop must be from 0 to 1"),
        ((*X, "--epochs", "many"), "invalid int value: 'many'"),
        ((*X, "--lr", "inf"), "--lr must be from 0 to 1e+18, but is inf"),
        ((*X, "--lr", "nan"), "--lr must be from 0 to 1e+18, but is nan"),
        ((*X, "--decoder", "auto"), "invalid choice: 'auto'"),
        ((*X, "--evaluate"), "--evaluate needs --resume or --pretrained"),
    ):
        with pytest.raises(SystemExit, match="2"):
            parse(*flags)
        printed = capsys.readouterr().err
        assert message in printed and printed.count("\n") == 1


def test_processes_of_several_machines_need_an_address(monkeypatch, capsys):
    words = ["x.py", *X, "--nnodes", "2", "--node-rank", "1"]
    for wrong in ([], ["--dist-url", "tcp://h:9", "--node-rank", "2"]):
        monkeypatch.setattr(sys, "argv", [*words, *wrong])
        with pytest.raises(SystemExit, match="2"):
            multiprocessing_distributed.arguments()
        assert "--nnodes N needs --dist-url and a --node" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", words)
    words += ["--dist-url", "tcp://h:9", "--nprocs", "3"]
    init = Mock(side_effect=InterruptedError)
    monkeypatch.setattr(torch.distributed, "init_process_group", init)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    args = multiprocessing_distributed.arguments()
    args.local_rank = 2
    with pytest.raises(InterruptedError):
        multiprocessing_distributed.main(args)
    where = {"init_method": "tcp://h:9", "rank": 5, "world_size": 6}
    init.assert_called_once_with("gloo", **where)


def test_a_missing_launcher_library_or_gpu_is_one_line(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["x.py", *X])
    with pytest.raises(UserError, match="start it with torchrun"):
        distributed.main(distributed.arguments())
    for gpu, name, message in (
        (False, "horovod", r"no Horovod \(.*bash scripts/install_horovod.sh"),
        (False, "apex", "Apex needs a CUDA GPU, and PyTorch finds none"),
        (True, "apex", r"Apex's amp or DDP is missing \(.*NVIDIA/apex@25.05"),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        monkeypatch.setitem(sys.modules, name, None)
        script = runpy.run_path(str(ROOT / f"{name}_distributed.py"))
        with pytest.raises(UserError, match=message):
            script["arguments"]()


def test_apex_has_opt_levels_and_no_precision(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    modules = {"apex": Mock(), "apex.parallel": Mock()}
    monkeypatch.setattr(sys, "modules", sys.modules | modules)
    for flags, level in (([], "O1"), (["--opt-level", "O2"], "O2")):
        monkeypatch.setattr(sys, "argv", ["x.py", *X, *flags])
        script = runpy.run_path(str(ROOT / "apex_distributed.py"))
        args = script["arguments"]()
        assert (args.opt_level, args.precision) == (level, "fp32")  # no autocast
    monkeypatch.setattr(sys, "argv", ["x.py", *X, "--precision", "bf16"])
    with pytest.raises(SystemExit, match="2"):
        script["arguments"]()
    assert "use --opt-level, not --precision" in capsys.readouterr().err


def test_a_first_step_that_overflows_warns_of_nothing():
    """GradScaler skips it, because the loss scale is too high at first by design."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_scheduler(parse(*X), optimizer, 10).step()


def test_a_model_that_cannot_be_built_is_one_line(monkeypatch):
    offline = Mock(side_effect=OSError("no network"))
    monkeypatch.setattr(WeightsEnum, "get_state_dict", offline)
    for flags, problem in (
        ("--arch resnet19", "Unknown model resnet19"),
        ("--arch vit_b_16 --image-size 30", "Input shape indivisible by patch size!"),
        ("--pretrained", "'num_classes' expected value 1000 but got 10 "),
        ("--pretrained --arch vit_b_16 --image-size 192", "'image_size' expected"),
        ("--pretrained --arch inception_v3", "no network"),
    ):
        classes = range(10 if flags == "--pretrained" else 1000)
        with pytest.raises(UserError, match=f"--arch .*{problem}"):
            build_model(parse(*X, *flags.split()), classes)


@pytest.mark.parametrize("pretrained", ([], ["--pretrained"]))
@pytest.mark.parametrize("arch", ("googlenet", "inception_v3", "vit_b_32"))
def test_a_model_has_one_output(arch, pretrained, monkeypatch):
    """This also holds if the weights come from torchvision."""
    monkeypatch.setattr(WeightsEnum, "get_state_dict", lambda *_, **__: {})
    monkeypatch.setattr(nn.Module, "load_state_dict", lambda *_: None)
    with torch.device("meta"):
        args = parse(*X, "--arch", arch, *pretrained)
        model = build_model(args, range(1000)).train()
        images = torch.empty(2, 3, args.image_size, args.image_size)
        assert model(images).shape == (2, 1000)
