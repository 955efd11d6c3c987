#!/usr/bin/env bash
# Set everything up in .venv, Horovod included, and run the tests.
#
#   bash scripts/test.sh [--system] [arguments of pytest]
#
# --system (or CI=true) also installs system packages that some tests need, as root with apt-get:
# Open MPI, and for tests on two hosts sshd, Slurm, munge and ip. (Where systemd runs, their
# packages start daemons: it is meant for containers.) Elsewhere what needs them is skipped, and counted.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source-path=SCRIPTDIR
source "$ROOT/scripts/setup.sh"

SYSTEM=${CI:-false}
if [ "${1:-}" = --system ]; then
    SYSTEM=true
    shift
fi
# provide PROGRAM PACKAGE...: install packages where the program is not there yet
provide() {
    if command -v "$1" >/dev/null || [ -x "/usr/sbin/$1" ]; then return; fi
    shift
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing $*"
        apt-get update >/dev/null
        DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@" >/dev/null
    else
        say "not installed: $*: that takes root and apt-get"
    fi
}
if [ "$SYSTEM" = true ]; then
    provide mpicxx libopenmpi-dev openmpi-bin
    provide ip iproute2
    provide sshd openssh-server openssh-client
    provide slurmctld slurmctld slurmd slurm-client munge
fi

set_up requirements.txt requirements-nvimgcodec.txt requirements-sample.txt requirements-test.txt
set_up_horovod
if [ -n "$HOROVOD_PROBLEM" ]; then
    say "Horovod: $HOROVOD_PROBLEM"
    # Where everything for it was to be there, its tests are not to be skipped
    if [ "$SYSTEM" = true ] && command -v c++ >/dev/null; then exit 1; fi
fi
cd "$ROOT"
exec "$PYTHON" -m pytest "$@"
