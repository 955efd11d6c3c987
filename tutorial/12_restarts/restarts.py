"""Rank 1 is killed during training; torchrun starts both processes again.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
torchrun --standalone --nproc-per-node 2 --max-restarts 2 \
    tutorial/12_restarts/restarts.py
"""

import gc
import os
import signal
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, KILLED_IN = 8, 5


def save(content: dict, path: Path) -> None:
    """Write a checkpoint; `path` is always a complete file, either old or new."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())  # the bytes reach the disk before the new name does
    os.replace(temporary, path)


def train(run: int, path: Path | None) -> list[Tensor]:
    """Train from the checkpoint at `path`, if it exists; return the weights."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parts, first = {"model": model.module, "optimizer": optimizer}, 0
    if path and path.exists():
        content = torch.load(path, weights_only=True)
        for name in parts:
            parts[name].load_state_dict(content[name])
        first = content["step"] + 1
    if path and rank == 0:
        print(f"run {run}: {size} processes, first step {first}")
    for step in range(first, STEPS):
        if path and (run, rank, step) == (0, 1, KILLED_IN):
            print(f"  rank 1 is killed in step {step}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        torch.manual_seed(100 + step)
        x, y = torch.randn(8, 4), torch.randn(8, 2)
        optimizer.zero_grad()
        F.mse_loss(model(x[rank::size]), y[rank::size]).backward()
        optimizer.step()
        if path and rank == 0:
            content = {name: part.state_dict() for name, part in parts.items()}
            save({**content, "step": step}, path)
            print(f"  step {step} is saved", flush=True)
        dist.barrier()  # no process gets more than one step ahead of the checkpoint
    return [weight.detach() for weight in model.parameters()]


def main() -> None:
    """Train with checkpoints and then without any, and compare the weights."""
    run = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    path = Path(tempfile.gettempdir(), f"{os.environ['TORCHELASTIC_RUN_ID']}.pt")
    dist.init_process_group("gloo")
    resumed, whole = train(run, path), train(run, None)
    if dist.get_rank() == 0:
        equal = all(map(torch.equal, resumed, whole))
        print("weights of an uninterrupted run:", "equal" if equal else "different")
        path.unlink()
    gc.collect()  # frees the DDP models, so that the next line ends Gloo's threads
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
