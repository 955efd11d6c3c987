"""Show what fully_shard keeps and sends: in fp32, in bf16, and with two replicas.

python tutorial/16_sharded/sharded.py [FILE.json]    # {form: {kept, calls}}
"""

import json
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

LAYERS, WIDTH = 2, 256  # a layer is one matrix: 256 KiB in fp32
FP32 = MixedPrecisionPolicy()
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FORMS = {"fp32": ((4,), FP32), "bf16": ((4,), BF16), "bf16, 2 x 2": ((2, 2), BF16)}


def build(shape: tuple[int, ...], policy: MixedPrecisionPolicy) -> nn.Sequential:
    """Build a model sharded over a mesh of this shape: shards, or replicas x shards."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for part in (*model, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return model


def count(name: str, calls: Counter, older: str = "") -> None:
    """Count all later calls of a collective, by ranks, data type and size in KiB."""
    used = name if hasattr(dist, name) else older
    original = getattr(dist, used)

    def call(*args, group, **kwargs):
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        whole = max(tensors, key=torch.Tensor.numel)
        ranks = tuple(dist.get_process_group_ranks(group))
        calls[name, ranks, str(whole.dtype), whole.nbytes // 1024] += 1
        return original(*args, group=group, **kwargs)

    setattr(dist, used, call)


def main(rank: int, port: int, file: str | None = None) -> None:
    """Train in each of four processes; rank 0 prints what it keeps and sends."""
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    calls, found = Counter(), {}
    count("all_reduce", calls)
    count("all_gather_single", calls, "all_gather_into_tensor")  # in older versions
    count("reduce_scatter_single", calls, "reduce_scatter_tensor")
    for form, options in FORMS.items():
        model = build(*options)
        optimizer = torch.optim.Adam(model.parameters())
        calls.clear()
        output = model(torch.randn(8, WIDTH))
        output.float().square().mean().backward()
        optimizer.step()
        weights, states = list(model.parameters()), optimizer.state.values()
        kept = [*weights, *(w.grad for w in weights), *(s["exp_avg"] for s in states)]
        kept += [state["exp_avg_sq"] for state in states]
        kib = sum(tensor.to_local().nbytes for tensor in kept) // 1024
        found[form] = {"kept": kib, "calls": [(*what, n) for what, n in calls.items()]}
        if rank == 0:
            print(f"{form}: a rank keeps {kib} KiB, {weights[0].placements}")
            print(f"  {weights[0].dtype} weights, {output.dtype} outputs")
            for (name, ranks, dtype, kib), n in calls.items():
                print(f"  {n} x {name:21} {kib:3} KiB {dtype[6:]:8} ranks {ranks}")
    if rank == 0 and file:
        Path(file).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(main, (store.port, *sys.argv[1:]), nprocs=4)
