#!/usr/bin/env bash
# Set up .venv, including Horovod, and run the tests.
#
#   bash scripts/test.sh [--system] [arguments of pytest]
#   bash scripts/test.sh --mutations     # inject known bugs and check that the tests catch them
#   bash scripts/test.sh -n 0 --pdb      # two processes share the tests; -n 0: only one
#
# --system (or CI=true) also installs, as root with apt-get, system packages that some tests need:
# Open MPI, and sshd, Slurm, munge and ip for tests on two hosts. Use it in containers: under
# systemd, some of these packages start daemons. Without the packages, pytest skips these tests.
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
        say "not installing ${packages[*]}: this needs root and apt-get"
    fi
fi

set_up requirements.txt requirements/nvimgcodec.txt requirements/report.txt requirements/sample.txt \
    requirements/test.txt
set_up_horovod
if [ -n "$HOROVOD_PROBLEM" ]; then
    say "Horovod: $HOROVOD_PROBLEM"
    # --system installs everything that Horovod needs, so do not skip its tests
    if [ "$SYSTEM" = true ] && command -v c++ >/dev/null; then exit 1; fi
fi
cd "$ROOT"
if [ "${1:-}" = --mutations ]; then exec "$PYTHON" tests/mutations.py "${@:2}"; fi
exec "$PYTHON" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
