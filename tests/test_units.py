"""Test small parts of common/ and of the scripts."""

import hashlib
import io
import json
import os
import runpy
import sys
import warnings
from argparse import Namespace
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from conftest import ROOT
from ranks import parse
from torch import nn
from torchvision.models import WeightsEnum, get_model, get_model_weights

import distributed
import multiprocessing_distributed
from common import errors, meters
from common.arguments import build_parser, choose_defaults
from common.errors import UserError, one_line_errors
from common.meters import Meter, Progress, averages, batch_sums, format_metrics
from common.model import build_model, build_scheduler, set_up_cuda


def test_metrics_are_averages_of_sums_over_all_processes():
    """Metrics are right for batches of different sizes, and for one number per class."""

    def batch(rows, labels):
        outputs = torch.tensor(rows, requires_grad=True)
        labels = torch.tensor(labels)
        sums = batch_sums(nn.functional.cross_entropy(outputs, labels), outputs, labels)
        assert not sums["loss"].requires_grad  # would keep all graphs alive
        return {**sums, "by_class": torch.bincount(labels, minlength=7)}

    likely, unlikely = [0.0] * 6 + [9.0], [6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    parts = [batch([likely, unlikely], [6, 4]), batch([unlikely], [5])]
    ranks, sent = [Meter(), Meter()], []
    for meter in ranks:
        for part in parts:
            meter.add(part)
    ranks[0].reduce(lambda sums: sent.append(sums.clone()) or sums)
    sums = ranks[1].reduce(lambda own: own + sent[0])
    assert (sent[0].dtype, *sent[0].shape, ranks[1].sums) == (torch.float64, 11, {})
    found = averages(sums)
    rows = torch.tensor([likely, unlikely, unlikely])
    loss = nn.functional.cross_entropy(rows, torch.tensor([6, 4, 5])).item()
    assert found["loss"] == pytest.approx(loss)
    assert [found["top1"], found["top5"]] == pytest.approx([100 / 3, 200 / 3])
    assert found["images"] == 6 and type(found["images"]) is int
    assert found["by_class"] == pytest.approx([0, 0, 0, 0, 1 / 3, 1 / 3, 1 / 3])
    text = f"loss {loss:.4g}, top-1 33.33 %, top-5 66.67 %"
    assert format_metrics(found, found) == f"{text}, 6 images"


class Batches(list):
    """A loader that yields these batches, on the CPU."""

    device, rank, waited = torch.device("cpu"), 0, 0.0


# For each interval: the second at which it ends, its images, the seconds waited until then
INTERVALS = [(100, 50, 90.0), (102, 64, 90.5), (106, 8, 92.0), (137, 31, 92.0)]


def progress(monkeypatch, intervals, length=40, done=0, **place) -> Progress:
    """Return the Progress of an epoch that starts at second 0 and has ten-step intervals."""
    clock = Mock(side_effect=[0, *(end for end, *_ in intervals)])
    monkeypatch.setattr(meters, "time", Namespace(perf_counter=clock))
    loader = Batches(range(length))
    vars(loader).update(place)
    shown = Progress("epoch 3/90", loader, done)
    for number, (_, images, loader.waited) in enumerate(intervals, start=1):
        means = {"loss": 2.34567, "top1": 45.2, "images": images}
        shown.show_interval(done + 10 * number, means, 0.1)
    return shown


def test_speeds_leave_out_the_first_interval(monkeypatch):
    """Loader processes start in the first interval, which is therefore slower."""
    alone = progress(monkeypatch, INTERVALS[:1]).epoch_stats()
    assert (alone["images_per_second"], alone["data_wait"]) == (0.5, 0.9)
    several = progress(monkeypatch, INTERVALS[:3]).epoch_stats()
    assert (several["images_per_second"], several["seconds"]) == (12, 106)
    assert several["data_wait"] == pytest.approx(2 / 6)
    assert 50 < several["peak_memory_mib"] < 100_000


def test_a_log_gets_a_line_every_half_minute(monkeypatch, capsys):
    """Rank 0 also prints the first and the last interval; the other ranks print nothing."""
    progress(monkeypatch, INTERVALS[:3], length=50, rank=1)
    assert capsys.readouterr() == ("", "")
    progress(monkeypatch, INTERVALS, length=70, done=20)  # a resumed epoch
    lines = capsys.readouterr().out.splitlines()
    wanted = [f"epoch 3/90, step {step}/70" for step in (30, 60)]
    assert [line.split(":")[0] for line in lines] == wanted
    first = "loss 2.346, top-1 45.20 %, 0 images/s, data wait 90%, lr 0.1, "
    assert lines[0].partition(": ")[2].startswith(first)
    assert lines[0].endswith(" MiB, ETA 06:40") and lines[1].endswith(" MiB, ETA 00:34")
    progress(monkeypatch, INTERVALS[:3], length=30)
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_terminal_gets_a_bar_of_rank_0(monkeypatch):
    for rank in (1, 0):
        terminal = io.StringIO()
        terminal.isatty = lambda: True
        monkeypatch.setattr(sys, "stderr", terminal)
        progress(monkeypatch, INTERVALS[:3], rank=rank).refresh()
        assert bool(drawn := terminal.getvalue()) == (rank == 0)
    assert "epoch 3/90 |" in drawn and "| ETA " in drawn
    assert "loss 2.346, top-1 45.20 %, 2 images/s, wait 38%" in drawn


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


def test_under_torchrun_one_process_reports_the_error(monkeypatch, tmp_path, capsys):
    """torchrun prints the error file, and ends processes that would report the error later."""
    monkeypatch.setattr(sys, "argv", ["script.py"])
    slept = []
    monkeypatch.setattr(errors.time, "sleep", slept.append)
    for rank in (0, 1, 3):
        file = tmp_path / f"{rank}.json"
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        with pytest.raises(SystemExit, match="2"), one_line_errors():
            raise UserError("no such folder")
        message = json.loads(file.read_text())["message"]
        assert message["message"] == "script.py: error: no such folder"
        assert int(message["extraInfo"]["timestamp"]) > 1e9
    assert slept == [0, 2, 6] and capsys.readouterr() == ("", "")


X = ("--data", "x")
OTHERS = ("--max-steps", 9, "--workers", 9)  # flags without a default


def test_defaults_are_those_of_the_recipe():
    """This test checks the defaults that test_reference.py does not check."""
    args = parse(*X)
    assert (args.arch, args.epochs, args.global_batch_size) == ("resnet18", 90, 256)
    assert (args.save_minutes, args.print_interval) == (10, 10)
    assert args.resume is args.precision is None
    assert parse("--synthetic").synthetic == 1281167


def test_the_processes_of_a_machine_share_its_cores(monkeypatch):
    """Processes share cores with and without a launcher; more than 16 loaders rarely help."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    for processes, workers in ((1, 16), (4, 16), (8, 8), (24, 2), (100, 1)):
        args = parse(*X)
        choose_defaults(args, torch.device("cpu"), processes)
        assert args.workers == workers
    args = parse(*X, "-j", "0", "--precision", "fp16")
    choose_defaults(args, torch.device("cpu"), 2)
    assert (args.workers, args.precision) == (0, "fp16")


def test_bad_flags_are_one_line(capsys):
    for flags, message in (
        ((*X, "--epoch", "3"), "unrecognized arguments: --epoch 3 (--help lists"),
        ((*X, "--synthetic"), "give either --data DIR or --synthetic"),
        ((*X, "--epochs", "many"), "invalid int value: 'many'"),
        ((*X, "--lr", "nan"), "--lr must be from 0 to 1e+18, but is nan"),
        ((*X, "--evaluate"), "--evaluate needs --resume or --pretrained"),
    ):
        with pytest.raises(SystemExit, match="2"), one_line_errors():
            parse(*flags)
        printed = capsys.readouterr().err
        assert message in printed and printed.count("\n") == 1


def test_each_number_has_a_range():
    """Counts must be at least 1, shares from 0 to 1, and other numbers not negative."""
    numbers = [a for a in build_parser("A test.")._actions if a.type in (int, float)]
    assert len(numbers) == 16
    for name in (action.dest for action in numbers if action.dest != "synthetic"):
        share = name in ("momentum", "label_smoothing", "min_crop")
        count = type(parse(*X, *OTHERS).__dict__[name]) is int
        least = 1 if count and name not in ("workers", "seed") else 0
        flag = "--" + name.replace("_", "-")
        for value in (least - 1, *([1.1] if share else [])):
            with pytest.raises(UserError, match=f"{flag} must be from {least} to "):
                parse(*X, flag, value)
        assert vars(parse(*X, flag, least))[name] == least


def test_processes_of_several_machines_need_an_address(monkeypatch, capsys):
    words = ["x.py", *X, "--nnodes", "2", "--node-rank", "1"]
    monkeypatch.setattr(torch.multiprocessing, "spawn", Mock())
    for wrong in ([], ["--dist-url", "tcp://h:9", "--node-rank", "2"]):
        monkeypatch.setattr(sys, "argv", [*words, *wrong])
        with pytest.raises(SystemExit, match="2"):
            runpy.run_path(multiprocessing_distributed.__file__, run_name="__main__")
        assert "--nnodes N needs --dist-url and a --node" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", words)
    words += ["--dist-url", "tcp://h:9", "--nprocs", "3"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    init = Mock(side_effect=InterruptedError)
    monkeypatch.setattr(torch.distributed, "init_process_group", init)
    args = multiprocessing_distributed.arguments()
    args.local_rank = 2
    with pytest.raises(InterruptedError):
        multiprocessing_distributed.main(args)
    init.assert_called_once_with("gloo", init_method="tcp://h:9", rank=5, world_size=6)


def test_a_missing_launcher_or_library_is_one_line(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["x.py", *X])
    with pytest.raises(UserError, match="RANK is not set: use torchrun"):
        distributed.main(distributed.arguments())
    monkeypatch.setitem(sys.modules, "horovod", None)
    script = runpy.run_path(str(ROOT / "horovod_distributed.py"))
    with pytest.raises(UserError, match=r"no Horovod \(.*scripts/install_horovod.sh"):
        script["arguments"]()


def test_a_horovod_without_nccl_is_one_line_on_gpus(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x.py", *X])
    hvd = Mock()
    monkeypatch.setitem(sys.modules, "horovod", Mock(torch=hvd))
    monkeypatch.setitem(sys.modules, "horovod.torch", hvd)
    script = runpy.run_path(str(ROOT / "horovod_distributed.py"))
    for gpu, nccl, wrong in ((0, 0, False), (1, 1, False), (1, 0, True)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu == 1)
        hvd.nccl_built.return_value = nccl
        line = "this Horovod lacks NCCL: see docs/running.md"
        with pytest.raises(UserError, match=line) if wrong else nullcontext():
            script["arguments"]()


def test_apex_has_opt_levels_and_no_precision(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    modules = {"apex": Mock(), "apex.parallel": Mock()}
    monkeypatch.setattr(sys, "modules", sys.modules | modules)
    for flags, level in (([], "O1"), (["--opt-level", "O2"], "O2")):
        monkeypatch.setattr(sys, "argv", ["x.py", *X, *flags])
        script = runpy.run_path(str(ROOT / "apex_distributed.py"))
        args = script["arguments"]()
        assert (args.opt_level, args.precision) == (level, "fp32")  # no autocast
    for flags in (["--precision", "bf16"], ["--compile"]):
        monkeypatch.setattr(sys, "argv", ["x.py", *X, *flags])
        with pytest.raises(UserError, match="amp has --opt-level, but no --precision"):
            script["arguments"]()


def test_a_first_step_that_overflows_warns_of_nothing():
    """GradScaler's first loss scale is too high on purpose, so it skips the first step."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_scheduler(parse(*X, "--precision", "fp16"), optimizer, 10).step()


def test_a_model_that_cannot_be_built_is_one_line(monkeypatch):
    offline = Mock(side_effect=OSError("no network"))
    monkeypatch.setattr(WeightsEnum, "get_state_dict", offline)
    for flags, problem in (
        ("--arch resnet19", "Unknown model resnet19"),
        ("--arch vit_b_16 --image-size 30", "Input shape indivisible by patch size!"),
        ("--pretrained --arch squeezenet1_1", "no network"),
    ):
        with pytest.raises(UserError, match=f"--arch .*{problem}"):
            build_model(parse(*X, *flags.split()), range(10), 0)


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """Let torchvision download MobileNet's best weights from a file; others are missing."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    torch.manual_seed(1)
    state = get_model("mobilenet_v2").state_dict()
    torch.save(state, tmp_path / "weights.pt")
    digest = hashlib.sha256((tmp_path / "weights.pt").read_bytes()).hexdigest()
    file = (tmp_path / "weights.pt").rename(tmp_path / f"net-{digest[:8]}.pth")
    best = get_model_weights("mobilenet_v2").DEFAULT

    def url(weights):
        return file.as_uri() if weights is best else "file:///none"

    monkeypatch.setattr(WeightsEnum, "url", property(url))
    return state


def test_pretrained_weights_that_fit_are_kept(weights, capsys):
    """With other classes, rank 0 prints which weights are not the pretrained ones."""
    args = parse(*X, "--pretrained", "--compile", "--arch", "mobilenet_v2")
    layer = ["classifier.1.weight", "classifier.1.bias"]
    for classes, new in ((1000, []), (10, layer)):
        model = build_model(args, range(classes), 0)
        assert model._compiled_call_impl
        torch.manual_seed(args.seed)
        fresh = get_model("mobilenet_v2", num_classes=classes).state_dict()
        for name, value in model.state_dict().items():
            assert torch.equal(value, fresh[name] if name in new else weights[name])
        lines = capsys.readouterr().out.splitlines()
        lines = [line for line in lines if not line.startswith("Downloading: ")]
        start = f"--pretrained: {', '.join(new)} do not fit these classes"
        assert [line.startswith(start) for line in lines] == [True] * bool(new)
        build_model(args, range(classes), 1)
        assert capsys.readouterr().out == ""
    args = parse(*X, "--pretrained", "--arch", "mobilenet_v2", "--evaluate")
    build_model(args, range(1000), 0)
    with pytest.raises(UserError, match="classifier.1.bias do not fit these classes"):
        build_model(args, range(10), 1)


@pytest.mark.parametrize("arch", ("googlenet", "inception_v3", "vit_b_32"))
def test_a_model_has_one_output_and_else_torchvisions_settings(arch, monkeypatch):
    """Some of torchvision's pretrained models change the normalization themselves."""
    with torch.device("meta"):
        state = get_model(arch).state_dict()
        monkeypatch.setattr(WeightsEnum, "get_state_dict", lambda *_, **__: state)
        for flags, weights in (([], None), (["--pretrained", "--evaluate"], "DEFAULT")):
            args = parse(*X, "--arch", arch, *flags)
            nets = build_model(args, range(1000), 0), get_model(arch, weights=weights)
            images = torch.empty(2, 3, args.image_size, args.image_size)
            assert nets[0].train()(images).shape == (2, 1000)
            a, b = ({x for x in vars(m).items() if type(x[1]) is bool} for m in nets)
            assert {name for name, _ in a ^ b} <= {"aux_logits"}


def test_labels_that_are_not_class_numbers_are_refused():
    """Otherwise, such labels would be compared in wrong shapes, without an error."""
    loss, outputs = torch.tensor(1.0), torch.rand(4, 4, 4, 4)
    for scores, labels in (
        (outputs, torch.zeros(4, 4, 4, dtype=torch.int64)),  # dense
        (outputs[0, 0], torch.rand(4, 4)),  # soft
        (outputs[0, 0], torch.rand(4)),
    ):
        with pytest.raises(UserError, match="batch_sums.* one class number each"):
            batch_sums(loss, scores, labels)


def test_more_processes_than_gpus_are_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    set_up_cuda(1)
    with pytest.raises(UserError, match=r"4 processes .* 1 visible .*--gpus-per-node"):
        set_up_cuda(4)
