"""PyTorch prints the messages that docs/pitfalls.md quotes, and the fixes there run."""

import re

import pytest
import torch
from conftest import ROOT, environment
from played import Played, python
from ranks import free_port

PAGE = (ROOT / "docs" / "pitfalls.md").read_text()
# Messages that two CPU processes cannot cause; the page's last section lists the users' reports
CITED = (
    "#error ",
    "ImportError: cannot import name 'amp'",
    "ModuleNotFoundError: No module named 'amp_C'",
    "Watchdog caught",
    "[Rank 1] Watchdog caught",
    "RuntimeError: ProcessGroupNCCL is only",
    "RuntimeError: Distributed package doesn't",
    "  exitcode  : -9",
    "RuntimeError: DataLoader worker (pid 22040) is killed",
    "RuntimeError: received 0 items of ancdata",
    "RuntimeError: CUDA error: invalid device ordinal",
    "torch.distributed.DistBackendError: NCCL error",
    "ncclSystemError",
    "AssertionError: Gradients were computed more than",
)
# Mistakes that need only one process
ALONE = """
import argparse, os, resource, socket, sys, tempfile, traceback
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.utils.data import DataLoader
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
    free = port(listener)
    one = f"tcp://127.0.0.1:{port(listener)}"
    wrong(dist.init_process_group, "gloo", one, None, 1, 0)
two = {"init_method": one, "rank": 0, "timeout": timedelta(seconds=3)}
wrong(dist.init_process_group, "gloo", world_size=2, **two)
wrong(dist.init_process_group, "nccl", world_size=1, **two)
late = timedelta(seconds=1)
wrong(dist.TCPStore, "127.0.0.1", free, is_master=False, timeout=late)
endpoint = {"backend": "c10d", "endpoint": f"127.0.0.1:{free}", "run_id": "1"}
hosts = {"min_nodes": 2, "max_nodes": 2, "is_host": False, "read_timeout": 1}
wrong(create_backend, RendezvousParameters(**endpoint, **hosts))
os.environ["GLOO_SOCKET_IFNAME"] = "eth9"
wrong(dist.init_process_group, "gloo", one, None, 1, 0)

net = torch.nn.Linear(2, 2)
wrong(net.load_state_dict, {f"module.{name}": w for name, w in net.state_dict().items()})
one = torch.optim.lr_scheduler.OneCycleLR(torch.optim.SGD(net.parameters(), 0.1), 0.1, 99)
one.load_state_dict({"last_epoch": 84, "total_steps": 84})
wrong(one.step)
load({"args": argparse.Namespace(lr=0.1)})
load({"weights": torch.zeros(10**5)}, 10**5)
load({"weights": torch.zeros(10**5)}, 0)
torch.serialization.location_tag = lambda storage: "cuda:0"
load({"weights": torch.zeros(1)})

wrong(ImageFolder, ".")
os.mkdir("cat")
wrong(ImageFolder, ".")

def killed(sample):
    os.kill(os.getpid(), 9)

def keep(*sets, **options):
    return [*DataLoader(*sets, num_workers=1, multiprocessing_context="fork", **options)]

wrong(keep, [torch.zeros(1)], collate_fn=killed)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
wrong(keep, [torch.zeros(1)] * 200)
"""
# Mistakes that need two processes: in "uneven", rank 0 has one batch fewer; in "silent", rank 1
# sleeps; in "branch", rank 1 skips a parameter
TWO = """
import sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
dist.barrier()  # both have arrived, so the timeout of the next group starts at the same time
group = dist.new_group(timeout=timedelta(seconds=3))
class Net(torch.nn.Linear):
    def forward(self, inputs, whole):
        return torch.nn.functional.linear(inputs, self.weight, self.bias if whole else None)

model = DDP(Net(2, 2), process_group=group)
steps = 3 + dist.get_rank() * (sys.argv[1] == "uneven")
for step in range(steps):
    whole = (sys.argv[1], dist.get_rank(), step) != ("branch", 1, 1)
    model(torch.ones(4, 2), whole).sum().backward()
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

# Runs each fix in one process, and checks what the page claims about it
CURES = '''
import os, re, sys
import numpy
import torch
from torch.optim.lr_scheduler import OneCycleLR

page = open(sys.argv.pop()).read()
os.chdir(os.path.dirname(sys.argv[0]))
calls = {
    1: "assert paths[0].decode() == 'train/cat/1.JPEG';"
        "loader = torch.utils.data.DataLoader([], **options);"
        "assert loader.multiprocessing_context.get_start_method() == 'fork'",
    2: "assert content['epoch'] == 3 and {*parts} < {*content}",
    3: "assert (scheduler.last_epoch, scheduler.total_steps) == (6, 10)",
    4: "assert torch.load(path) == content",
    5: """
losses[1] = float("nan")
try:
    exec(block)
except SystemExit as problem:
    assert str(problem) == "rank 1, step 7: samples [6]"
else:
    raise ValueError("a NaN was not seen")
""",
}
for count, block in enumerate(re.findall(r"```python\\n(.*?)```", page, re.DOTALL), 1):
    net = torch.nn.Linear(4, 3)
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    names = {
        **globals(), "raw_model": net, "optimizer": sgd,
        "scheduler": OneCycleLR(sgd, 0.1, total_steps=7), "scaler": torch.amp.GradScaler("cpu"),
        "epoch": 3, "best": 0.5, "path": "a.pt", "content": {"a": 1},
        "paths": ["train/cat/1.JPEG", "b"], "rank": 1, "loader": [1, 2], "epochs": 5,
        "losses": torch.ones(4), "step": 7, "indices": torch.arange(5, 9),
        "block": block,
    }
    exec(block, names)
    exec(calls.pop(count), names)
print(count, "cures", sorted(calls))
'''


def in_a_group(size):
    """Return the environment variables of processes that form a group without GPUs."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return environment(**group, WORLD_SIZE=str(size), CUDA_VISIBLE_DEVICES="")


def alike(text):
    """Remove the parts of a text that differ between machines or runs."""
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
        for mistake in ("uneven", "silent", "branch"):
            group = in_a_group(2)
            for rank in "01":
                played.start(python, (two, mistake), {**group, "RANK": rank})
        played.end()
        said = alike(played.text())
    assert "nothing is wrong" not in said
    lines = "".join(re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)).splitlines()
    quoted = [line for line in lines if not line.startswith(CITED)]
    assert len(quoted) >= 16
    for line in quoted:
        assert alike(line) in said, line + "\n\n" + said


def test_the_cures_run_as_they_stand(tmp_path):
    (tmp_path / "cures.py").write_text(CURES)
    page = ROOT / "docs" / "pitfalls.md"
    with Played(tmp_path / "logs") as played:
        played.start(python, (tmp_path / "cures.py", page), environment())
        assert played.end() == [0], played.text()
        assert played.log(0).endswith("5 cures []\n"), played.text()
