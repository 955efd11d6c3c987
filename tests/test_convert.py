"""The code blocks in README.md, docs/convert.md and docs/pitfalls.md do what the pages promise."""

import re
import sys

from conftest import ROOT, run

BLOCK = re.compile(r"^ *```python\n(.*?)^ *```", re.M | re.S)
# For each block, which two processes run: the code before it, and what must be true after it
PROGRAM = '''
import os, sys, textwrap
import numpy
from unittest.mock import MagicMock
import torch, torchvision
import torch.distributed as dist
import torch.nn.functional as F
from itertools import islice
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info
from torchvision.transforms.v2 import MixUp

os.chdir(os.path.dirname(sys.argv[0]))
SummaryWriter = MagicMock()  # TensorBoard is not among the tests' requirements
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
BEFORE = {
    "reduction=\\"sum\\")\\n(loss * world_size)": "x, y = images[rank::2], labels[rank::2]",
    "shares": "start = raw_model.weight.detach().clone()",
    "all_gather_object": "predictions = {rank + 2 * i: [i] for i in range(rank + 3)}",
    "torch.bincount": "classes = 3; matrix = torch.zeros(3, 3, dtype=torch.long);"
        "target = torch.tensor([0, 1, 2, 2]); predicted = torch.tensor([0, 1, 2, rank])",
    "resnet18": "classes = 7; torch.save(torchvision.models.resnet18().state_dict(),"
        " 'weights.pt') if rank == 0 else None; dist.barrier()",
    "prepare()": "prepare = lambda: {'a': 1}",
    "SummaryWriter": "loss = torch.tensor(2.0); step = 50",
    "MixUp": "x, y = images[rank::2].view(-1, 1, 2, 2), labels[rank::2];"
        "model(images[rank::2]).pow(2).sum().mul(100).backward()",
    "requires_grad_": "raw_model = torch.nn.Sequential(torch.nn.Linear(4, 4),"
        " torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)); backbone = raw_model[:2]",
    "IterableDataset": "files = [*range(11)]; read = lambda file: [torch.tensor(file)];"
        "steps_per_epoch = 2",
    "path.encode()": "paths = ['train/cat/1.JPEG', 'b']",
    "\\"scheduler\\": scheduler": "scheduler = OneCycleLR(optimizer, 0.1, 7);"
        "scaler, best = torch.amp.GradScaler('cpu'), 0.5",
    "initial_lr": "OneCycleLR(optimizer, 0.1, 7); loader, epochs = [1, 2], 5",
    "os.fsync": "content, path = {'a': 1}, f'{rank}.pt'",
    "isfinite(losses)": "losses, step, indices = torch.ones(4), 7, torch.arange(5, 9)",
    "net_d": "net_g, net_d = torch.nn.Linear(2, 4), torch.nn.Linear(4, 1);"
        "real, noise = images[rank::2], images[rank::2, :2] * rank",
}
AFTER = {
    "(loss * world_size).backward()": """
total = F.cross_entropy(raw_model(images), labels, reduction="sum")
torch.testing.assert_close(raw_model.weight.grad, torch.autograd.grad(total, raw_model.weight)[0])
""",
    "shares": """
weight = start.requires_grad_()
for rows in (order[:32], order[32:]):
    mean = F.cross_entropy(images[rows] @ weight.T, labels[rows])
    weight = (weight - 0.1 * torch.autograd.grad(mean, weight)[0]).detach().requires_grad_()
torch.testing.assert_close(raw_model.weight.data, weight.data)
assert len(batches) == 2 and {*map(len, batches)} == {shares[rank]}
every = [None] * 2
dist.all_gather_object(every, sum(batches, []))
assert sorted(every[0] + every[1]) == sorted(order)
""",
    "mine.split": """
every = [None] * 2
dist.all_gather_object(every, mine.tolist())
assert sorted(every[0] + every[1]) == [*range(64)]
""",
    "all_gather_object": "assert sorted(everything) == [0, 1, 2, 3, 4, 5, 7]",
    "torch.bincount": "assert matrix.sum() == 8 and [round(float(x), 2) for x in iou] == [0.67, 0.67, 0.5]",
    "resnet18": "assert len(optimizer.param_groups[0]['params']) == 2 and raw_model.fc.out_features == 7",
    "prepare()": "assert content == [{'a': 1}]",
    "MixUp": """
assert y.shape == (32, 1000) and torch.allclose(y.sum(1), torch.ones(32))
assert abs(raw_model.weight.grad.norm() - 1) < 1e-4
every = [None] * 2
dist.all_gather_object(every, raw_model.weight.grad)
assert torch.equal(*every)
""",
    "SummaryWriter": """
assert (writer is None) == (rank == 1)
if rank == 0:
    writer.add_scalar.assert_called_once_with("train/loss", 2.0, 50)
""",
    "requires_grad_": """
assert not backbone.training and raw_model.training
before = [w.clone() for w in backbone.state_dict().values()]
F.cross_entropy(model(images[rank::2]), labels[rank::2]).backward()
optimizer.step()
assert all(map(torch.equal, before, backbone.state_dict().values()))
""",
    "IterableDataset": """
seen = list(batches)
assert len(seen) == 2
every = [None] * 2
dist.all_gather_object(every, [x for b in seen for x in b.tolist()])
assert len({*every[0], *every[1]}) == 8, every
""",
    "path.encode()": "assert paths[0].decode() == 'train/cat/1.JPEG';"
        "assert DataLoader([], **options).multiprocessing_context.get_start_method() == 'fork'",
    "\\"scheduler\\": scheduler": "assert content['epoch'] == 1 and {*parts} < {*content}",
    "initial_lr": "assert (scheduler.last_epoch, scheduler.total_steps) == (2, 10)",
    "os.fsync": "assert torch.load(path) == content",
    "net_d": """
d_loss.backward()
found = [net_d.weight.grad.clone()]
g_loss.backward()
every = [None] * 2
dist.all_gather_object(every, found + [net_g.weight.grad])
assert all(map(torch.equal, *every))
""",
    "isfinite(losses)": """
losses[1] = float("nan")
try:
    exec(block)
except SystemExit as problem:
    assert str(problem) == f"rank {rank}, step 7: samples [6]"
else:
    raise ValueError("a NaN was not seen")
""",
}
count, blocks = 0, open("blocks.txt").read().split("\\0")
assert all(any(mark in block for block in blocks) for mark in (*BEFORE, *AFTER))
for block in blocks:
    if "init_process_group" in block:
        continue  # the whole example, which has a test of its own
    torch.manual_seed(0)
    images, labels = torch.randn(64, 4), torch.randint(3, (64,))
    raw_model = torch.nn.Linear(4, 3, bias=False)
    names = {**globals(), "device": torch.device("cpu"), "epoch": 1, "model": DDP(raw_model)}
    names |= {"optimizer": torch.optim.SGD(raw_model.parameters(), 0.1)}
    names |= {"train_set": TensorDataset(images, labels), "loader": [(images, labels)]}
    for part in (BEFORE, block, AFTER):
        if isinstance(part, dict):
            part = "\\n".join(code for mark, code in part.items() if mark in block)
        exec(textwrap.dedent(part), names)
    count += 1
    dist.barrier()
sys.stdout.write(f"{count} blocks\\n")  # at once: two processes write
dist.barrier()
dist.destroy_process_group()
'''


def test_the_lines_to_add_run_and_do_what_is_said(tmp_path):
    names = ("README.md", "docs/convert.md", "docs/pitfalls.md")
    pages = [(ROOT / name).read_text() for name in names]
    section = pages[0].partition("### What else is in your script")[2]
    pages[0] = section.partition("\n### Start from")[0]
    blocks = [block for page in pages for block in BLOCK.findall(page)]
    (tmp_path / "blocks.txt").write_text("\0".join(blocks))
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    ended = run(sys.executable, *words, tmp_path / "program.py")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"{len(blocks)} blocks\n" * 2
