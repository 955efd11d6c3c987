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
    local_world_size: int  # number of processes on this machine (Slurm: the first)


def ranks_from_environment(environment: Mapping[str, str]) -> Ranks:
    """Read the ranks that torchrun, torch.distributed.launch or srun has set.

    Raises UserError if a variable is missing. Sources:
    https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
    """
    srun = "RANK" not in environment and "SLURM_STEP_ID" in environment
    names = (*SLURM, "MASTER_ADDR", "MASTER_PORT") if srun else TORCHRUN
    if missing := ", ".join(name for name in names if not environment.get(name)):
        how = "start this script with scripts/slurm.sbatch"
        if not srun:
            how = "start this script with a launcher, for example torchrun "
            how += "--standalone --nproc-per-node=2 SCRIPT --data DIR"
        raise UserError(f"{how} (not set: {missing})")
    # Slurm's "2(x3),1" begins with the number of tasks on the first machine
    return Ranks(*(int(re.match(r"\d+", environment[name])[0]) for name in names[:4]))


def add_launcher_flags(parser: ArgumentParser) -> None:
    """Add the flags for scripts under torchrun or torch.distributed.launch."""
    backends = "default: nccl on GPUs, gloo on CPUs"
    parser.add_argument("--backend", choices=("nccl", "gloo"), help=backends)
    parser.add_argument("--local-rank", "--local_rank", help="for older launchers")
