"""Train in two processes in six ways; compare the bytes sent and the accuracy.

python tutorial/19_talk_less/talk_less.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import parameters_to_vector, vector_to_parameters

torch.cuda.is_available = lambda: False  # else, PowerSGD's hook waits for a GPU
STEPS, BATCH, SAMPLES, EVERY = 500, 32, 1000, 50
HOOKS = {  # each averages the gradients of a bucket
    "DDP": default_hooks.allreduce_hook,
    "DDP, fp16": default_hooks.fp16_compress_hook,
    "DDP, PowerSGD": powerSGD_hook.powerSGD_hook,
}
NESTEROV = {"lr": 0.7, "momentum": 0.5, "nesterov": True}
OUTER = {"local SGD": {"lr": 1}, "DiLoCo": NESTEROV}  # the outer step's optimizer


def train(way: str, rank: int, x: Tensor, y: Tensor) -> nn.Module:
    """Train a new network on this process's samples, in one of the six ways."""
    torch.manual_seed(0)  # the same initial weights in both processes
    layers = nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()
    model = net = nn.Sequential(*layers, nn.Linear(128, 8))
    if way in HOOKS:
        model, power = DDP(net), powerSGD_hook.PowerSGDState(None, 1, 10)
        model.register_comm_hook(power if "Power" in way else None, HOOKS[way])
    inner = torch.optim.AdamW(net.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(inner, STEPS)
    common = parameters_to_vector(net.parameters()).detach().clone()
    outer = torch.optim.SGD([common], **OUTER.get(way, {}))
    torch.manual_seed(rank)  # but different batches
    for step in range(1, STEPS + 1):
        batch = torch.randint(len(x), (BATCH,))
        inner.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        inner.step()
        schedule.step()
        if way in OUTER and step % EVERY == 0:
            common.grad = common - parameters_to_vector(net.parameters()).detach()
            dist.all_reduce(common.grad)  # the sum over the processes
            common.grad /= dist.get_world_size()
            outer.step()
            vector_to_parameters(common.clone(), net.parameters())
    return net


def main(rank: int, port: int) -> None:
    """Train in both processes, in all ways; rank 0 prints a row for each way."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    sent, all_reduce = [], dist.all_reduce

    def counted(tensor: Tensor, *args, **options) -> dist.Work | None:
        sent.append(tensor.nbytes)
        return all_reduce(tensor, *args, **options)

    dist.all_reduce = counted  # the hooks call it too
    torch.manual_seed(2)
    x = torch.randn(10000 + 2 * SAMPLES, 16)
    y = ((x @ torch.randn(16, 8)).tanh() @ torch.randn(8, 8)).argmax(1)
    mine, test = slice(rank, 2 * SAMPLES, 2), slice(2 * SAMPLES, None)
    for way in ("never", *HOOKS, *OUTER):
        sent.clear()
        net = train(way, rank, x[mine], y[mine])
        right = (net(x[test]).argmax(1) == y[test]).float().mean()
        if rank == 0:
            print(f"{way:14}{len(sent):5} all-reduces{sum(sent):12,} bytes{right:5.0%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(main, (store.port,), nprocs=2)
