"""The collective operations that Horovod has, on four processes started by MPI.

mpirun -np 4 --bind-to none python tutorial/collectives_horovod.py
"""

import sys

import torch

try:
    import horovod.torch as hvd
except ImportError as error:
    print(f"collectives_horovod.py needs Horovod: {error}", file=sys.stderr)
    sys.exit(2)


def main() -> None:
    """Each of the four processes runs this function; only `rank` differs."""
    rank = hvd.rank()
    mine = torch.tensor([10 * rank + i for i in range(4)])
    one = torch.tensor([rank + 1])

    x = hvd.broadcast(mine, root_rank=0)
    show("broadcast: rank 0 gives everybody what it has", mine, x)

    for op in (hvd.Sum, hvd.Max, hvd.Min, hvd.Product):
        names = {hvd.Sum: "Sum", hvd.Max: "Max", hvd.Min: "Min", hvd.Product: "Product"}
        x = hvd.allreduce(one, op=op)
        show(f"allreduce, {names[op]}: everybody gets it", one, x)
    x = hvd.allreduce(one.float())
    show("allreduce, Average: what is done when no op is named", one, x)

    x = hvd.allgather(one)
    show("allgather: everybody collects", one, x)
    x = hvd.allgather(torch.arange(rank))
    show("allgather: the parts may differ in length", torch.arange(rank), x)
    x = hvd.reducescatter(mine, op=hvd.Sum)
    show("reducescatter: everybody gets one part of the sum", mine, x)
    what = {"lr": 0.1} if rank == 0 else None
    x = hvd.broadcast_object(
        what, name="what"
    )  # by itself named after its type: a hang
    show("broadcast_object: the same for any object", "?" if rank else "a dict", x)
    hvd.barrier()


def show(title: str, before: object, after: object) -> None:
    """Bring what every process holds to rank 0, which prints it."""
    texts = [x.tolist() if isinstance(x, torch.Tensor) else x for x in (before, after)]
    row = f"  rank {hvd.rank()}: {str(texts[0]):16} -> {texts[1]}"
    rows = hvd.allgather_object(row)
    if hvd.rank() == 0:
        print(title, *rows, sep="\n")


if __name__ == "__main__":
    hvd.init()
    if hvd.size() != 4:
        print("start it with: mpirun -np 4 (Horovod built with MPI)", file=sys.stderr)
        sys.exit(2)
    main()
    hvd.shutdown()
