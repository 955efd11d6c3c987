"""Run scripts/slurm.sbatch and deploy/ with substitutes for the programs that they start.

cluster/test_multihost.py runs slurm.sbatch under Slurm itself.
"""

import pytest
import yaml
from conftest import ROOT, run

# Slurm sends the signal to the batch script, which runs srun
SRUN = """
printf '%s\\n' "$@"
[ -z "${SIGNAL:-}" ] || { kill -"$SIGNAL" "$PPID"; sleep 1; }
exit "${STATUS:-0}"
"""
SCONTROL = """
case $1 in show) echo hosta ;; *) echo "scontrol $*" ;; esac
"""


JOB = "--cpus-per-task=3 --kill-on-bad-exit=1 torchrun --nnodes 2 --nproc-per-node gpu "
JOB += "--rdzv-backend c10d --rdzv-id 7 --rdzv-endpoint hosta:20007 distributed.py"


@pytest.fixture
def sbatch(tmp_path):
    """Run the batch script; return its status and the lines that it printed."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash{text}")
        (tmp_path / name).chmod(0o755)

    def start(*flags, restarts=0, **variables):
        words = ("env", "-C", tmp_path, f"PATH={tmp_path}:/usr/bin:/bin", "bash")
        slurm = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_CPUS_PER_TASK": "3"}
        slurm |= {"SLURM_JOB_NODELIST": "hosta", "SLURM_RESTART_COUNT": str(restarts)}
        script = ROOT / "scripts" / "slurm.sbatch"
        ended = run(*words, script, *flags, **slurm, **variables)
        return ended.returncode, ended.stdout.splitlines()

    return start


def test_a_requeued_job_resumes(sbatch):
    """A requeued job resumes from its own checkpoint, unless it only evaluates."""
    for restarts, flags, more in (
        (0, ["--lr", "1"], []),
        (0, ["--resume", "other.pt"], []),
        (1, ["--resume", "other.pt"], ["--resume"]),
        (2, ["--resume", "other.pt", "--evaluate"], []),
    ):
        status, printed = sbatch(*flags, restarts=restarts)
        assert status == 0 and printed == [*JOB.split(), *flags, *more]


def test_only_a_job_at_its_time_limit_is_queued_again(sbatch):
    assert sbatch(SIGNAL="USR1")[1][-1] == "scontrol requeue 7"
    for how in ({"STATUS": "1"}, {"SIGNAL": "TERM"}):
        status, printed = sbatch(**how)
        assert status != 0 and "scontrol requeue 7" not in printed


def test_skypilot_starts_torchrun_on_each_node(tmp_path):
    task = yaml.safe_load((ROOT / "deploy" / "skypilot.yaml").read_text())
    assert task["file_mounts"]["/runs"]["mode"] == "MOUNT_CACHED"
    (tmp_path / "torchrun").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    set_ = f"NUM_NODES={task['num_nodes']} NODE_RANK=1".split()
    set_ = [f"SKYPILOT_{one}" for one in (*set_, "NODE_IPS=10.0.0.1\n10.0.0.2")]
    path = f"PATH={tmp_path}:/usr/bin:/bin"
    ended = run("env", "-C", tmp_path, path, *set_, "bash", "-euc", task["run"])
    where = "--nnodes=2 --nproc-per-node=gpu --node-rank=1 --master-addr=10.0.0.1"
    assert ended.stdout.startswith(f"{where} --master-port=29500 distributed.py ")
