"""docs/pitfalls.md quotes what PyTorch really says, and its cures run."""

import re

import pytest
import torch
from conftest import ROOT, environment
from played import Played, python, run_python
from ranks import free_port

PAGE = (ROOT / "docs" / "pitfalls.md").read_text()
# Messages that two CPU processes cannot provoke; their sections name where they were reported
CITED = (
    "RuntimeError: Timed out initializing process group",
    "#error You need C++17 to compile PyTorch",
    "ImportError: cannot import name 'amp'",
    "ModuleNotFoundError: No module named 'amp_C'",
    "[Rank 7] Watchdog caught",
    "RuntimeError: ProcessGroupNCCL is only",
    "RuntimeError: Distributed package doesn't",
)
# What one process can do wrong
ALONE = """
import argparse, os, socket, sys, tempfile, traceback
from datetime import timedelta
import torch
import torch.distributed as dist
from torchvision.datasets import ImageFolder

os.chdir(os.path.dirname(sys.argv[0]))

def wrong(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception:
        traceback.print_exc()
    else:
        raise SystemExit("nothing is wrong")

def load(content, size=None):
    torch.save(content, "checkpoint.pt")
    if size is not None:
        os.truncate("checkpoint.pt", size)
    wrong(torch.load, "checkpoint.pt")

def port(listener):
    return listener.getsockname()[1]

wrong(dist.init_process_group, "gloo")
with socket.socket() as listener:
    listener.bind(("", 0))
    one = f"tcp://127.0.0.1:{port(listener)}"
    wrong(dist.init_process_group, "gloo", one, None, 1, 0)
two = {"init_method": one, "rank": 0, "timeout": timedelta(seconds=3)}
wrong(dist.init_process_group, "gloo", world_size=2, **two)
wrong(dist.init_process_group, "nccl", world_size=1, **two)

net = torch.nn.Linear(2, 2)
wrong(net.load_state_dict, {f"module.{name}": w for name, w in net.state_dict().items()})
load({"args": argparse.Namespace(lr=0.1)})
load({"weights": torch.zeros(10**5)}, 10**5)
load({"weights": torch.zeros(10**5)}, 0)
torch.serialization.location_tag = lambda storage: "cuda:0"
load({"weights": torch.zeros(1)})

wrong(ImageFolder, ".")
os.mkdir("cat")
wrong(ImageFolder, ".")
"""
# What two can; rank 0 has one batch less in "uneven", and rank 1 sleeps in "silent"
TWO = """
import sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
dist.barrier()  # both are there, so the time of the next group begins together
group = dist.new_group(timeout=timedelta(seconds=3))
model = DDP(torch.nn.Linear(2, 2), process_group=group)
steps = 3 + dist.get_rank() * (sys.argv[1] == "uneven")
for step in range(steps):
    model(torch.ones(4, 2)).sum().backward()
if sys.argv[1] == "silent" and dist.get_rank() == 1:
    time.sleep(6)
dist.barrier(group)
"""
OLD_FLAG = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank")
parser.parse_args()
"""

# Runs each cure, and what is said of it here, in one process
CURES = """
import os, re, sys
import torch
import torch.distributed as dist

page = open(sys.argv.pop()).read()
os.chdir(os.path.dirname(sys.argv[0]))
torch.cuda.synchronize = lambda: None
os.makedirs("root/train/cat"), os.makedirs("root/val/cat")
calls = {
    1: "assert len(build_loader(data, 4, range(10), 0)) == 3",
    2: "assert 0 <= accuracy(net, [batch], 'cpu') <= 1",
    6: "train_step(net, sgd, torch.amp.GradScaler('cuda'), *batch)",
    7: "save('all.pt', net, sgd, schedule, torch.amp.GradScaler('cpu'), 3, 0.5);"
       "assert torch.load('all.pt')['epoch'] == 3;"
       "assert without_prefix({'module.w': 1, 'b': 2}) == {'w': 1, 'b': 2}",
    8: "assert load('all.pt', net, sgd, schedule, torch.amp.GradScaler('cpu')) == (3, 0.5)",
    9: "end_with_parent()",
    10: "free_port()",
    11: "assert paths[0] == 'train/cat/1.JPEG' and paths[1] == 'train/dog/2.JPEG'",
    12: "train_epoch(DDP(net), sgd, [batch] * 3, torch.nn.functional.cross_entropy)",
    14: "assert images_per_second(lambda batch: None, range(30), 8) > 0",
    15: "rate = build_optimizer(net, 0.1, 512, 10)[0].param_groups[0]['lr'];"
        "assert round(rate, 6) == 0.02",
    16: "seed_process(0, 1)",
    17: "assert not stop_together('cpu'); import os, signal, time;"
        "os.kill(os.getpid(), signal.SIGTERM); assert stop_together('cpu')",
    18: "save({'a': 1}, 'a.pt'); assert torch.load('a.pt') == {'a': 1}",
    19: "check_classes('root')",
}
count = 0
for section in page.split("\\n## ")[1:]:
    number = int(section.split(".")[0])
    for block in re.findall(r"```python\\n(.*?)```", section, re.DOTALL):
        count += 1
        if "init_process_group(" not in block:
            dist.init_process_group("gloo")
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 3)
        sgd = torch.optim.SGD(net.parameters(), 0.1)
        names = {
            "DDP": torch.nn.parallel.DistributedDataParallel,
            "data": torch.utils.data.TensorDataset(torch.zeros(10, 4)),
            "batch": (torch.randn(8, 4), torch.randint(3, (8,))),
            "net": net, "sgd": sgd,
            "schedule": torch.optim.lr_scheduler.StepLR(sgd, 1),
        }
        exec(block, names)
        exec(f"import torch; {calls.pop(number, '')}", names)
        assert dist.is_initialized()
        dist.destroy_process_group()
print(count, "cures", sorted(calls))
"""


def in_a_group(size):
    """Variables of processes that meet, without a GPU."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return environment(**group, WORLD_SIZE=str(size), CUDA_VISIBLE_DEVICES="")


def alike(text):
    """Without what differs from one machine and moment to another."""
    text = re.sub(r"\x1b\[\d+m|\[[\d.:a-f]+\](:\d+)?", "", text)
    return re.sub(r"\d+", "N", re.sub(r"(folder in) \S+", r"\1 FOLDER", text))


@pytest.mark.skipif(
    not torch.__version__.startswith("2.15."), reason="the page quotes PyTorch 2.15"
)
def test_the_messages_are_what_is_said(tmp_path):
    files = [tmp_path / name for name in ("alone.py", "two.py", "flag.py")]
    for file, program in zip(files, (ALONE, TWO, OLD_FLAG), strict=True):
        file.write_text(program)
    alone, two, flag = files
    with Played(tmp_path) as played:
        played.start(python, (alone,), in_a_group(1))
        played.start(python, (flag, "--local-rank=0"), in_a_group(1))
        for mistake in ("uneven", "silent"):
            group = in_a_group(2)
            for rank in "01":
                played.start(python, (two, mistake), {**group, "RANK": rank})
        played.end()
        said = alike(played.text())
    assert "nothing is wrong" not in said
    lines = "".join(re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)).splitlines()
    quoted = [line for line in lines if not line.startswith(CITED)]
    assert len(quoted) >= 14
    for line in quoted:
        assert alike(line) in said, line + "\n\n" + said


def test_the_cures_run_as_they_stand(tmp_path):
    (tmp_path / "cures.py").write_text(CURES)
    page = ROOT / "docs" / "pitfalls.md"
    variables = {**in_a_group(1), "RANK": "0", "LOCAL_RANK": "0"}
    status, printed = run_python(tmp_path, tmp_path / "cures.py", page, **variables)
    assert status == 0 and printed.endswith("19 cures []\n"), printed
