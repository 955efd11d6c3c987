"""Compute the batch size per GPU at which communication takes as long as computation.

python tutorial/15_network/network_batch.py
"""

GPUS = {  # dense bf16 peak (FLOP/s), images/s of ResNet-50, NVLink (bytes/s, one way)
    "A100": (312e12, 2470, 300e9),
    "H100": (989e12, 2791, 450e9),
    "B200": (2250e12, 3076, 900e9),
}
LINKS = {"8 x 400 Gbit/s": 400e9, "100 Gbit/s": 12.5e9, "10 Gbit/s": 1.25e9}
MFU = 0.4  # of the transformer
RESNET50 = 102.2e6  # bytes of gradients (fp32)


def crossing(samples_per_second: float, sent: float, bandwidth: float) -> float:
    """Return the batch size per GPU at which sending takes as long as computing.

    One GPU trains on `samples_per_second`, and sends `sent` bytes per step.
    """
    return samples_per_second * sent / bandwidth


if __name__ == "__main__":
    print(f"{'GPU':5} {'link':15} {'FLOP per byte':>13} {'images':>9} {'tokens':>9}")
    for gpu, (peak, images_per_second, nvlink) in GPUS.items():
        for link, bandwidth in {"NVLink": nvlink, **LINKS}.items():
            flops = MFU * peak
            images = crossing(images_per_second, 2 * RESNET50, bandwidth)
            # Each parameter: 6 FLOP per token, and 4 bytes of gradients (fp32)
            tokens = crossing(flops / 6, 2 * 4, bandwidth)
            row = f"{flops / bandwidth:13,.0f} {images:9,.1f} {tokens:9,.0f}"
            print(f"{gpu:5} {link:15} {row}")
