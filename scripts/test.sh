#!/usr/bin/env bash
# Set up .venv, including Horovod, and run the tests.
#
#   bash scripts/test.sh [--system] [arguments of pytest]
#   bash scripts/test.sh --mutations     # try known mistakes: does a test see each of them?
#
# --system (or CI=true) also installs system packages that some tests need, as root with apt-get:
# Open MPI, and sshd, Slurm, munge and ip for tests on two hosts. It is meant for containers: where
# systemd runs, some of these packages start daemons. Without them, pytest skips and counts these tests.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source-path=SCRIPTDIR
source "$ROOT/scripts/setup.sh"

SYSTEM=${CI:-false}
if [ "${1:-}" = --system ]; then
    SYSTEM=true
    shift
fi
packages=()
command -v mpicxx >/dev/null || packages+=(libopenmpi-dev openmpi-bin)
command -v ip >/dev/null || packages+=(iproute2)
[ -x /usr/sbin/sshd ] || packages+=(openssh-server openssh-client)
[ -x /usr/sbin/slurmctld ] || packages+=(slurmctld slurmd slurm-client munge)
if [ "$SYSTEM" = true ] && [ ${#packages[@]} -gt 0 ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing ${packages[*]}"
        { apt-get update && apt-get install -y --no-install-recommends "${packages[@]}"; } >/dev/null
    else
        say "${packages[*]} not installed: that needs root and apt-get"
    fi
fi

set_up requirements.txt requirements-nvimgcodec.txt requirements-report.txt requirements-sample.txt \
    requirements-test.txt
set_up_horovod
if [ -n "$HOROVOD_PROBLEM" ]; then
    say "Horovod: $HOROVOD_PROBLEM"
    # With --system everything for Horovod should be there, so its tests must not be skipped
    if [ "$SYSTEM" = true ] && command -v c++ >/dev/null; then exit 1; fi
fi
cd "$ROOT"
if [ "${1:-}" = --mutations ]; then exec "$PYTHON" tests/mutations.py "${@:2}"; fi
exec "$PYTHON" -m pytest "$@"
