"""This process's ranks, from the launcher's environment variables."""

import re
from argparse import ArgumentParser
from collections.abc import Mapping
from typing import NamedTuple

from common.errors import UserError

# The variables that torchrun (or torch.distributed.launch) and srun set, as in Ranks
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_TASKS_PER_NODE")


class Ranks(NamedTuple):
    """A process's ranks and the process counts."""

    rank: int  # among all processes
    local_rank: int  # among the processes of this machine
    world_size: int  # number of processes
    local_world_size: int  # number of processes on this machine


def ranks_from_environment(environment: Mapping[str, str]) -> Ranks:
    """Read the ranks that torchrun, torch.distributed.launch or srun has set.

    Raises UserError if a variable is missing or the ranks are inconsistent.
    Sources: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    and https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
    """
    names = TORCHRUN
    if "RANK" not in environment and "SLURM_STEP_ID" in environment:
        names = SLURM
        missing = {"MASTER_ADDR", "MASTER_PORT"} - environment.keys()
        if missing:
            raise UserError(
                f"srun started this task without {' and '.join(sorted(missing))} "
                "(rank 0's address): scripts/slurm.sbatch sets them"
            )
    values = {name: environment.get(name, "") for name in names}
    if not all(values.values()):
        raise UserError(
            "start this script with a launcher, for example torchrun --standalone "
            "--nproc-per-node=2 SCRIPT --data DIR (not set: "
            f"{', '.join(name for name in names if not values[name])})"
        )
    try:
        *first, tasks = values.values()
        ranks = Ranks(*map(int, first), _tasks(tasks, environment))
    except (ValueError, LookupError):
        ranks = Ranks(-1, -1, 0, 0)
    if not (
        0 <= ranks.rank < ranks.world_size
        and 0 <= ranks.local_rank < ranks.local_world_size <= ranks.world_size
    ):
        shown = ", ".join(f"{name}={value}" for name, value in values.items())
        raise UserError(f"the launcher's ranks are inconsistent: {shown}")
    return ranks


def _tasks(text: str, environment: Mapping[str, str]) -> int:
    """Parse this machine's number of tasks, from a number or Slurm's "2(x3),1"."""
    if text.isdecimal():
        return int(text)
    tasks = []
    for count, repeated in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        tasks += [int(count)] * int(repeated or 1)
    return tasks[int(environment["SLURM_NODEID"])]


def add_launcher_flags(parser: ArgumentParser) -> None:
    """Add the flags for scripts under torchrun or torch.distributed.launch."""
    backends = "default: nccl on GPUs, gloo on CPUs"
    parser.add_argument("--backend", choices=("nccl", "gloo"), help=backends)
    parser.add_argument("--local-rank", "--local_rank", help="for older launchers")
