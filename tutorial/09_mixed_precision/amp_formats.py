"""Show how precisely fp32, TF32, bf16 and fp16 store numbers and small updates.

python tutorial/09_mixed_precision/amp_formats.py
"""

import torch
from torch import Tensor


def tf32(x: Tensor) -> Tensor:
    """Round fp32 numbers from 23 fraction bits to TF32's ten."""
    bits = x.view(torch.int32) + (1 << 12)
    return (bits & -(1 << 13)).view(torch.float32)


FORMATS = {
    "fp32": lambda x: x,
    "TF32": tf32,
    "bf16": lambda x: x.bfloat16().float(),
    "fp16": lambda x: x.half().float(),
}


def numbers() -> None:
    """Print numbers of different sizes as each format stores them."""
    print("a number   ", *(f"{name:>11}" for name in FORMATS))
    for number in (1.001, 0.1, 70_000.0, 1e-8):
        kept = [keep(torch.tensor([number])).item() for keep in FORMATS.values()]
        print(f"  {number:<9g}", *(f"{x:11.6g}" for x in kept))


def updates() -> None:
    """Add a small number 1,000 times to a weight of 1, in three formats."""
    print("1 plus 1,000 updates of 0.0001")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = torch.ones(1, dtype=dtype)
        for _ in range(1000):
            weight += 0.0001
        following = 1 + torch.finfo(dtype).eps  # the next number after 1
        print(
            f"  {str(dtype):14} {weight.item():.4f}; "
            f"the next number after 1 is {following:.7f}"
        )


def defaults() -> None:
    """Print where PyTorch may use TF32; these flags exist even without a GPU."""
    print("may PyTorch use TF32?")
    print(f"  matrix products     {torch.backends.cuda.matmul.allow_tf32}")
    print(f"  cuDNN convolutions  {torch.backends.cudnn.allow_tf32}")


if __name__ == "__main__":
    numbers()
    updates()
    defaults()
