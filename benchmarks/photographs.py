"""Generate JPEG files with dimensions and file sizes like ImageNet's.

ImageNet's training images have about 500 x 375 pixels and take 110 KB on average. The
generated images are noise with the spectrum of photographs: the amplitude falls as
1/frequency (Field 1987, https://doi.org/10.1364/JOSAA.4.002379), and brightness has
more contrast than color. The files use 4:2:0 subsampling, and take about 100 KB each.
"""

from pathlib import Path

import numpy
from PIL import Image

SIZES = ((375, 500), (375, 500), (500, 375), (333, 500), (500, 500), (280, 420))
QUALITY = 85
CONTRAST = (52, 14, 14)  # standard deviations of brightness and the two color channels


def photograph(
    generator: numpy.random.Generator, height: int, width: int
) -> Image.Image:
    """Generate an image in YCbCr, the color space of JPEG."""
    rows, columns = numpy.fft.fftfreq(height)[:, None], numpy.fft.rfftfreq(width)
    frequency = numpy.hypot(rows, columns)
    frequency[0, 0] = 1 / max(height, width)
    channels = []
    for contrast in CONTRAST:
        white = numpy.fft.rfft2(generator.standard_normal((height, width)))
        pink = numpy.fft.irfft2(white / frequency, s=(height, width))
        pink = 128 + contrast * (pink - pink.mean()) / pink.std()
        channels.append(Image.fromarray(pink.clip(0, 255).astype(numpy.uint8)))
    return Image.merge("YCbCr", channels)


def write_photographs(folder: Path, train: int, val: int, classes: int = 4) -> dict:
    """Write folder/train/CLASS/*.JPEG and folder/val/CLASS/*.JPEG.

    Returns:
        The image count, the mean pixel count and file size, and the JPEG quality.
    """
    generator = numpy.random.default_rng(0)
    sizes, pixels = [], 0
    for part, images in (("train", train), ("val", val)):
        for number in range(images):
            size = SIZES[number % len(SIZES)]
            file = folder / part / f"class_{number % classes}" / f"{number:05d}.JPEG"
            file.parent.mkdir(parents=True, exist_ok=True)
            picture = photograph(generator, *size)
            picture.save(file, "JPEG", quality=QUALITY, subsampling=2)
            sizes.append(file.stat().st_size)
            pixels += size[0] * size[1]
    return {
        "images": len(sizes),
        "mean_pixels": pixels // len(sizes),
        "mean_bytes": sum(sizes) // len(sizes),
        "jpeg_quality": QUALITY,
    }
