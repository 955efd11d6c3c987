#!/usr/bin/env bash
# Set up .venv, including Horovod, and run the tests.
#
#   bash scripts/test.sh [--system] [pytest arguments]
#   bash scripts/test.sh --mutations     # inject known bugs and check that the tests catch them
#   bash scripts/test.sh -n 0 --pdb      # run the tests in one process instead of four
#
# --system (or CI=true) also installs, as root with apt-get, system packages that some tests need:
# Open MPI, and sshd, Slurm, munge and ip for tests on two hosts. Use --system in containers, because
# under systemd, some of these packages start daemons. pytest skips tests whose packages are missing.
set -euo pipefail
ROOT=$(dirname "$(dirname "$(realpath "$0")")")
source "$ROOT/scripts/setup.sh"

SYSTEM=${CI:-false}
if [ "${1:-}" = --system ]; then
    SYSTEM=true
    shift
fi
if [ "$SYSTEM" = true ] && ! PATH=$PATH:/usr/sbin type -P mpicxx ip sshd slurmctld bwrap >/dev/null; then
    echo "installing Open MPI, sshd, Slurm, munge, ip and bubblewrap"
    { apt-get update && apt-get install -y --no-install-recommends libopenmpi-dev openmpi-bin iproute2 \
        openssh-server openssh-client slurmctld slurmd slurm-client munge bubblewrap; } >/dev/null ||
        echo "not all installed: this needs root and apt-get"
fi

set_up requirements.txt requirements/nvimgcodec.txt requirements/test.txt
set_up_horovod
if [ -n "$HOROVOD_PROBLEM" ]; then
    echo "Horovod: $HOROVOD_PROBLEM"
    # --system installs everything that Horovod needs, so do not skip its tests
    if [ "$SYSTEM" = true ] && command -v c++ >/dev/null; then exit 1; fi
fi
cd "$ROOT"
if [ "${1:-}" = --mutations ]; then exec "$PYTHON" tests/mutations.py "${@:2}"; fi
exec "$PYTHON" -m pytest -n 4 "$@"
