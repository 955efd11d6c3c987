"""Simulate two hosts on this machine; host b loses power and comes back.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
python tutorial/12_restarts/restarts_hosts.py
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, LOST_IN = 6, 3
TORCHRUN = "-m torch.distributed.run --nnodes 2 --nproc-per-node 1 --max-restarts 3"
TORCHRUN += " --rdzv-backend c10d --rdzv-id 1 --redirects 3"


def start(host: str, port: int, folder: Path) -> subprocess.Popen:
    """Start torchrun for one simulated host, with the same command as on a real one."""
    where = ["--rdzv-endpoint", f"localhost:{port}", "--log-dir", folder / host]
    where += ["--rdzv-conf", f"is_host={int(host == 'a')}"]  # only a hosts the store
    command = [sys.executable, *TORCHRUN.split(), *where, __file__, folder]
    return subprocess.Popen(command, env={**os.environ, "HOST": host})


def train(folder: Path) -> None:
    """Train from the checkpoint, if there is one; each process runs this function."""
    dist.init_process_group("gloo")
    host, path, first = os.environ["HOST"], folder / "checkpoint.pt", 0
    model = DDP(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if path.exists():
        content = torch.load(path, weights_only=True)
        model.module.load_state_dict(content["model"])
        first = content["step"] + 1
    print(f"{dist.get_world_size()} processes", flush=True)
    for step in range(first, STEPS):
        if (host, first, step) == ("b", 0, LOST_IN):
            print(f"step {step}: power failure", flush=True)
            os.kill(os.getppid(), signal.SIGKILL)  # torchrun
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        print(f"step {step}", flush=True)
        if dist.get_rank() == 0:
            content = {"model": model.module.state_dict(), "step": step}
            torch.save(content, path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)
        dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start both hosts, start host b again when it is lost, and print all logs."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        a, b = start("a", port, folder), start("b", port, folder)
        print("host b: torchrun ends with status", b.wait(), flush=True)
        b = start("b", port, folder)
        print("then, a and b end with status", a.wait(), b.wait(), flush=True)
        for host in ("a", "b"):  # folders are RUN/ATTEMPT/LOCAL_RANK
            files = folder.glob(f"{host}/*/*/*/stdout.log")
            for file in sorted(files, key=lambda file: file.stat().st_mtime):
                print(f"host {host}, {file.parts[-3]}:", end=" ")
                print(", ".join(file.read_text().splitlines()))


if __name__ == "__main__":
    train(Path(sys.argv[1])) if "RANK" in os.environ else main()
