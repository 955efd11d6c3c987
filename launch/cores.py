"""How many of the machine's cores a training process may use."""

import math
import os
import re
from pathlib import Path


def cpu_quota(root: Path = Path("/")) -> int | None:
    """CPUs that the quota of this process's container allows; None without a quota.

    Args:
        root: holds proc/self/cgroup and sys/fs/cgroup.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu-interface-files
    """
    cgroups, quotas = root / "sys/fs/cgroup", []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if not line.startswith("0::/"):  # of cgroup version 1
            continue
        own = cgroups / line[4:]
        for folder in (own, *own.parents):  # a quota also limits the groups below it
            if folder.is_relative_to(cgroups) and (folder / "cpu.max").is_file():
                quota, period = (folder / "cpu.max").read_text().split()
                if quota != "max":
                    quotas.append(math.ceil(int(quota) / int(period)))
    return min(quotas, default=None)


def own_cores(processes: int, root: Path = Path("/")) -> int:
    """Cores for each of the training processes of this machine, at least 1.

    Processes of torchrun, horovodrun and the like share the cores that they may run on.
    Under srun, which starts several tasks, each task may have been given its own.

    Args:
        processes: number of training processes on this machine.
        root: see cpu_quota().

    Source: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
    """
    # Slurm's "2(x3),1": two tasks on each of three machines, one on the last
    text = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    tasks = max(map(int, re.findall(r"(?<![x\d])\d+", text)), default=1)
    together = max(1, processes // max(1, tasks))
    cores = [len(os.sched_getaffinity(0)) // together]
    # These two are of all processes, whoever started them
    slurm, quota = os.environ.get("SLURM_CPUS_ON_NODE", ""), cpu_quota(root)
    cores += [int(slurm) // processes] if slurm.isdecimal() else []
    cores += [quota // processes] if quota else []
    return max(1, min(cores))
