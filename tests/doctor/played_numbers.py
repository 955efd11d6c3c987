"""Compare what emulated GPUs compute with results by hand: torchrun --nproc-per-node 2 FILE."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
gpu = torch.device("cuda", rank)


def equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=0, atol=1e-5)


def check_sync_batch_norm() -> None:
    """Compare five images on one GPU and two on the other with seven in float64."""
    torch.manual_seed(0)
    images, factors = torch.randn(7, 3, 4, 4) * 3 + 5, torch.randn(7, 3, 4, 4).double()
    mine, norm = slice(5) if rank == 0 else slice(5, 7), nn.BatchNorm2d(3)
    nn.init.normal_(norm.weight)
    whole, all_images = copy.deepcopy(norm).double(), images.double().requires_grad_()
    outputs = whole(all_images)
    (outputs * factors).sum().backward()
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(norm).to(gpu)
    part = images[mine].to(gpu).requires_grad_()
    model = DDP(synced, device_ids=[rank])
    output = model(part)
    (output * factors[mine].to(gpu)).sum().backward()
    equal(output, outputs[mine])
    equal(part.grad, all_images.grad[mine])
    equal(2 * synced.weight.grad, whole.weight.grad)  # DDP averages over two ranks
    equal(2 * synced.bias.grad, whole.bias.grad)
    equal(synced.running_mean, whole.running_mean)
    equal(synced.running_var, whole.running_var)


def check_averages() -> None:
    numbers = torch.tensor([1.0, 4.0], device=gpu) * (rank + 1)
    dist.all_reduce(numbers, dist.ReduceOp.AVG)
    assert numbers.tolist() == [1.5, 6.0]
    dist.all_reduce(numbers, op=dist.ReduceOp.AVG, async_op=True).wait()
    assert numbers.tolist() == [1.5, 6.0]
    part = torch.zeros(1, device=gpu)
    both = torch.tensor([1.0, 2.0], device=gpu) * (rank + 1)
    dist.reduce_scatter_tensor(part, both, dist.ReduceOp.AVG)
    assert part.item() == 1.5 * (rank + 1)


def check_autocast() -> None:
    layer, x = nn.Linear(8, 8).to(gpu), torch.randn(4, 8, device=gpu)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cuda", dtype=dtype):
            y = layer(x)
            assert torch.get_autocast_dtype("cuda") == y.dtype == dtype
            assert nn.functional.mse_loss(y, y.detach()).dtype == torch.float32
        short, weight, bias = (t.to(dtype).double() for t in (x, *layer.parameters()))
        error = y.double() - (short @ weight.T + bias)
        assert error.abs().max() < 3 * torch.finfo(dtype).eps


def check_scaler() -> None:
    """Check that the scaler skips the second of four steps, whose gradients are infinite."""
    weight = nn.Parameter(torch.tensor([1.0, 2.0], device=gpu))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0, growth_interval=2)
    seen = []
    for factor in (3.0, float("inf"), 3.0, 3.0):
        optimizer.zero_grad()
        loss = (weight * torch.tensor([1.0, factor], device=gpu)).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append((*weight.tolist(), scaler.get_scale()))
    assert seen == [(0.5, 0.5, 8), (0.5, 0.5, 4), (0, -1, 4), (-0.5, -2.5, 8)], seen


def check_seeds() -> None:
    """Without manual_seed(), the ranks' GPUs draw different random numbers."""
    seeds = [None, None]
    dist.all_gather_object(seeds, torch.cuda.initial_seed())
    assert seeds[0] != seeds[1]


check_seeds()
check_sync_batch_norm()
check_averages()
check_autocast()
check_scaler()
assert torch.ones(1).cuda().is_cuda and dist.get_backend() == "nccl"
print("all numbers are right")
dist.destroy_process_group()
