"""python FILE: mp.spawn, and a learning rate that falls on a plateau of the loss."""

import socket

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def work(rank: int, ranks: int, port: int) -> None:
    url = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=ranks)
    torch.manual_seed(0)
    train = [(one, one[:3].argmax()) for one in torch.randn(96, 8)]
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 8, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = optim.SGD(model.parameters(), 0.9, momentum=0.9)
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    whole = torch.compile([*model.modules()][-1], fullgraph=True, backend="eager")
    for epoch in range(3):
        sampler.set_epoch(epoch)
        mean = torch.zeros(())
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            mean += loss.detach() / len(loader) / ranks
            whole(torch.ones(1, 16))  # an error if doctor's hooks cause recompilations
        dist.all_reduce(mean)
        scheduler.step(mean)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        free = listener.getsockname()[1]
    torch.multiprocessing.spawn(work, (2, free), nprocs=2)
