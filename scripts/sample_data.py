"""Create a real dataset without a download: scikit-learn's handwritten digits.

    python -m scripts.sample_data DIR

The script enlarges 1,797 scans from 8 x 8 to 64 x 64 pixels and saves them as JPEGs:
every fifth scan (359) in DIR/val/CLASS/*.JPEG, the others (1,438) in DIR/train/CLASS/.
"""

import shutil
import sys
from pathlib import Path

from PIL import Image

from common.errors import UserError, one_line_errors


def write_digits(folder: Path) -> int:
    """Write the images unless they exist; return the number of images in the folder.

    Raises UserError if scikit-learn is missing, or if the folder contains other files.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError("no scikit-learn: pip install scikit-learn") from None
    digits = load_digits()
    if folder.exists():
        if len([*folder.glob("*/*/digit_*.JPEG")]) == len(digits.images):
            return len(digits.images)
        raise UserError(f"{folder} is not this dataset; choose another folder")
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    scans = zip(digits.images, digits.target, strict=True)
    for number, (pixels, label) in enumerate(scans):
        part = "val" if number % 5 == 4 else "train"
        path = temporary / part / str(label) / f"digit_{number:04d}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray((pixels * 255 / 16).astype("uint8"))
        image = image.resize((64, 64), Image.Resampling.BICUBIC)
        image.save(path, "JPEG", quality=95)
    temporary.rename(folder)  # only now that it is complete
    return len(digits.images)


def main() -> None:
    """Write the dataset to the folder given on the command line."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise UserError("usage: python -m scripts.sample_data DIR")
    folder = Path(sys.argv[1])
    print(f"{write_digits(folder)} images in {folder}")


if __name__ == "__main__":
    with one_line_errors():
        main()
