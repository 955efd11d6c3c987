"""Who this process is, by a launcher's variables."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

from common.errors import UserError


class Ranks(NamedTuple):
    """The four numbers that place a process in a job."""

    rank: int  # among all processes
    local_rank: int  # among the processes of this machine
    world_size: int  # number of processes
    local_world_size: int  # number of processes on this machine


def ranks_from_environment(environment: Mapping[str, str]) -> Ranks:
    """Read the ranks that torchrun, torch.distributed.launch or srun hand down.

    Args:
        environment: os.environ, or a mapping like it.

    Raises:
        UserError: a variable is missing, no number, out of range, or contradicts
            another.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    missing = [name for name in names if name not in environment]
    if missing and "SLURM_STEP_ID" in environment:
        return _ranks_from_slurm(environment, names)
    if missing:
        hint = "srun or " if "SLURM_JOB_ID" in environment else ""
        raise UserError(
            f"a launcher has to start this script, for example {hint}torchrun "
            f"--standalone --nproc-per-node=2 SCRIPT --data DIR (no "
            f"{', '.join(missing)} in the environment)"
        )
    ranks = Ranks(*_numbers(environment, names))
    if not (
        0 <= ranks.rank < ranks.world_size
        and 0 <= ranks.local_rank < ranks.local_world_size <= ranks.world_size
    ):
        values = ", ".join(f"{name}={environment[name]}" for name in names)
        raise UserError(f"ranks from the launcher contradict each other: {values}")
    return ranks


def _ranks_from_slurm(environment: Mapping[str, str], names: Sequence[str]) -> Ranks:
    """Read the ranks of a task that srun started.

    Source: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
    """
    sources = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NODEID")
    rank, local_rank, world_size, node = _numbers(environment, sources)
    name, text = next(
        (name, environment[name])
        for name in (
            *("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
            *("SLURM_NTASKS_PER_NODE", "SLURM_NTASKS"),  # the last is always there
        )
        if name in environment
    )
    tasks = _tasks_per_node(name, text)
    if name == "SLURM_NTASKS_PER_NODE":
        tasks *= max(1, world_size // tasks[0])

    def refuse(one: str, other: str) -> NoReturn:
        raise UserError(
            f"{one}={environment[one]} contradicts {other}={environment[other]}; "
            "has srun started this task, and nothing between them changed a variable?"
        )

    if sum(tasks) != world_size:
        refuse("SLURM_NTASKS", name)
    if rank >= world_size:
        refuse("SLURM_PROCID", "SLURM_NTASKS")
    if node >= len(tasks):
        refuse("SLURM_NODEID", name)
    if local_rank >= tasks[node]:
        refuse("SLURM_LOCALID", name)
    ranks = Ranks(rank, local_rank, world_size, tasks[node])
    slurm = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", name)
    for variable, value, source in zip(names, ranks, slurm, strict=True):
        if environment.get(variable, str(value)) != str(value):
            refuse(variable, source)
    missing = [v for v in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(v)]
    if missing:
        raise UserError(
            f"srun started this task, and {' and '.join(missing)} say not where rank 0 "
            "listens: scripts/slurm.sbatch sets them"
        )
    return ranks


def _numbers(environment: Mapping[str, str], names: Sequence[str]) -> list[int]:
    """The values of variables, as whole numbers from 0 on.

    Raises:
        UserError: one is none, or missing.
    """
    values = [environment.get(name, "") for name in names]
    if not all(value.isdecimal() for value in values):
        shown = ", ".join(f"{n}={v}" for n, v in zip(names, values, strict=True))
        raise UserError(f"ranks from the launcher have to be numbers: {shown}")
    return [int(value) for value in values]


def _tasks_per_node(name: str, text: str) -> list[int]:
    """Read Slurm's "2(x3),1": the number of tasks of each node.

    Raises:
        UserError: it is not of that form.
    """
    tasks = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match or not int(match[1]):
            raise UserError(f"{name}={text} is not of the form 2(x3),1")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks
