"""scripts/slurm.sbatch: what it does after an end, with stand-ins for Slurm's programs.

cluster/test_multihost.py runs it under Slurm itself.
"""

import pytest
from conftest import ROOT, run

# One task after another, here; then, as srun does, the highest status of all
SRUN = """
[ -z "${SIGNAL:-}" ] || kill -"$SIGNAL" "$PPID" # Slurm's, to the batch script
while [[ $1 = --* ]]; do echo "$1" >>"$(dirname "$0")/options"; shift; done
highest=0
for SLURM_PROCID in 0 1; do
    export SLURM_PROCID
    "$@" || { status=$?; highest=$((status > highest ? status : highest)); }
done
exit $highest
"""
SCONTROL = """
case $1 in show) echo hosta ;; *) echo "scontrol $*" ;; esac
"""
# It passes for an interpreter with PyTorch, whose scripts end as STATUSES has it
PYTHON = """
case $1 in -*) exit 0 ;; esac
echo "flags: ${*:2}"
statuses=($STATUSES)
exit "${statuses[SLURM_PROCID]}"
"""


@pytest.fixture
def sbatch(tmp_path):
    """Run the batch script: (status, what it printed)."""
    stand_ins = {"srun": SRUN, "scontrol": SCONTROL, "python": PYTHON}
    for name, text in {**stand_ins, "scancel": '\necho "scancel $*"'}.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash{text}")
        (tmp_path / name).chmod(0o755)

    def start(statuses, *flags, restarts=0, **variables):
        ended = run(
            *("env", f"PATH={tmp_path}:/usr/bin:/bin", "bash"),
            *(ROOT / "scripts" / "slurm.sbatch", *flags),
            PYTHON=str(tmp_path / "python"),
            STATUSES=statuses,
            MAX_RESTARTS="1",
            SLURM_RESTART_COUNT=str(restarts),
            **dict.fromkeys(("SLURM_JOB_ID", "SLURM_NNODES"), "7"),
            SLURM_JOB_NODELIST="hosta",
            SLURM_NTASKS_PER_NODE="2",
            **variables,
        )
        assert not ended.stderr
        return ended.returncode, ended.stdout

    return start


def test_a_job_that_met_bad_input_is_not_queued_again(sbatch):
    for statuses, status, again in (
        ("0 0", 0, False),
        ("2 143", 2, False),  # the others are ended, by SIGTERM or, later, by SIGKILL
        ("137 2", 2, False),
        ("1 137", 0, True),
    ):
        ended, printed = sbatch(statuses)
        assert ended == status, printed
        assert ("scontrol requeue 7" in printed) is again
        ended, printed = sbatch(statuses, restarts=1)
        assert "scontrol requeue" not in printed and (ended == 0) == (statuses == "0 0")


@pytest.mark.parametrize("flags", [("--output", "{}"), ("--output={}", "--no-flip")])
def test_the_next_run_resumes_what_the_job_has_saved(sbatch, flags, tmp_path):
    """Before the first save it begins as the first one did."""
    output = tmp_path / "an output"
    output.mkdir()
    flags = ["--resume", "other.pt", *(flag.format(output) for flag in flags)]
    given = "flags: " + " ".join(flags)
    assert sbatch("0 0", *flags, restarts=1)[1].splitlines()[1:] == [given] * 2
    (output / "checkpoint.pt").touch()
    resumed = f"{given} --resume auto"
    assert sbatch("0 0", *flags, restarts=1)[1].splitlines()[1:] == [resumed] * 2
    assert sbatch("0 0", *flags)[1].splitlines()[1:] == [given] * 2
    printed = sbatch("0 0", *flags, "--evaluate", restarts=1)[1]
    assert printed.splitlines()[1:] == [f"{given} --evaluate"] * 2


@pytest.mark.parametrize("restarts", [0, 1])
def test_only_a_job_that_slurm_stops_for_the_time_limit_is_queued_again(
    sbatch, restarts
):
    """However often that was; not one that somebody cancels."""
    status, printed = sbatch("143 143", restarts=restarts, SIGNAL="USR1")
    assert status == 0 and "scancel --signal=USR1 7.0\n" in printed
    assert "stopped for the time limit, requeued\nscontrol requeue 7\n" in printed
    status, printed = sbatch("143 143", restarts=restarts, SIGNAL="TERM")
    assert status == 143 and "requeue" not in printed


def test_tasks_have_their_cores_and_gpus_and_end_together(sbatch, tmp_path):
    variables = {"SLURM_CPUS_PER_TASK": "3", "SLURM_GPUS_ON_NODE": "2"}
    printed = sbatch("0 0", "--lr", "1", **variables)[1]
    assert printed.splitlines()[1:] == ["flags: --device cuda --lr 1"] * 2
    options = (tmp_path / "options").read_text().split()
    assert options == ["--cpus-per-task=3", "--kill-on-bad-exit=1"]
