"""Look at a command line before any training process starts.

    python -m common.check SCRIPT [PROCESSES] -- [flags of the script]

Prints how many processes to start on this machine: PROCESSES, or one per GPU, or 2 on a
CPU. A mistake in the flags, the data or the checkpoint ends with status 2 and one line,
where a launcher would wrap it into a page for each process.
"""

import contextlib
import importlib.util
import sys
from argparse import Namespace
from pathlib import Path

from common.checkpoint import RECIPE, check_recipe, find_checkpoint, read_checkpoint
from common.data import build_datasets, share_out
from common.device import best_precision, processes_per_machine, select_device
from common.errors import UserError, exit_status
from common.model import check_image_size


def script_arguments(script: Path, flags: list[str]) -> Namespace:
    """Parse flags as the script itself does, without running it."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.argv[0] = str(script)  # whose name mistakes are reported under
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the number
            return module.arguments(flags)
    except SystemExit as end:
        if end.code == 0:  # --help
            print("help")
        raise


def check(args: Namespace, processes: int) -> None:
    """Raise what training with these arguments would stumble over.

    Raises:
        UserError: bad data, a batch that cannot be divided, an unusable checkpoint.
    """
    device = select_device(args.device)
    args.precision = args.precision or best_precision(device)
    share_out(args, 0, processes * getattr(args, "nnodes", 1), processes)
    train_set, _ = build_datasets(args)
    if len(train_set) < args.global_batch_size and not args.evaluate:
        raise UserError(
            f"{len(train_set)} training images are less than one global batch of "
            f"{args.global_batch_size}; lower --global-batch-size"
        )
    check_image_size(args, len(train_set.classes))
    path = find_checkpoint(args)
    if path is not None:
        recipe = {name: getattr(args, name) for name in RECIPE}
        content = read_checkpoint(path)
        if args.evaluate:
            content["recipe"] = {**recipe, "arch": content["arch"]}
        check_recipe(path, content, recipe)


def main() -> None:
    """Check the command line in sys.argv; print the number of processes."""
    end = sys.argv.index("--")
    script, *count = sys.argv[1:end]
    flags = sys.argv[end + 1 :]
    args = script_arguments(Path(script), flags)
    processes = getattr(args, "nprocs", None) or processes_per_machine(args.device)
    if count and count[0]:
        if not count[0].isdigit() or not int(count[0]):
            raise UserError(f"NPROC={count[0]} is no number of processes")
        processes = int(count[0])
    check(args, processes)
    print(processes)


if __name__ == "__main__":
    with exit_status():
        main()
