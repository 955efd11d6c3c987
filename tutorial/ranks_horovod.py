"""Who am I? The numbers that Horovod gives to each of its processes.

horovodrun --gloo -np 8 -H localhost:4,127.0.0.1:4 python tutorial/ranks_horovod.py
"""

import sys

try:
    import horovod.torch as hvd
except ImportError as error:
    print(f"ranks_horovod.py needs Horovod: {error}", file=sys.stderr)
    sys.exit(2)


def main() -> None:
    """Each process says what it knows; rank 0 prints it in the order of the ranks."""
    hvd.init()
    line = (
        f"host {hvd.cross_rank()} of {hvd.cross_size()}: "
        f"rank {hvd.rank()} of {hvd.size()}, "
        f"local rank {hvd.local_rank()} of {hvd.local_size()}"
    )
    lines = hvd.allgather_object(line)
    if hvd.rank() == 0:
        print(*lines, sep="\n")
    hvd.shutdown()


if __name__ == "__main__":
    main()
