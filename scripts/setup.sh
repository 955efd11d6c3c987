# shellcheck shell=bash
# Sourced by quickstart.sh, test.sh and timings.sh, which set ROOT. Finds or creates the environment.

# --help prints the script's first comment and exits
case " $* " in *" --help "* | *" -h "*)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac

say() { printf '%s\n' "$*"; }
fail() {
    printf '%s: error: %s\n' "$(basename "$0")" "$*" >&2
    exit 2
}

# set_up REQUIREMENTS...: sets PYTHON to an interpreter that has all of these packages.
#
# If PYTHON is already set, the function uses that environment and installs nothing. Otherwise it
# creates .venv, with uv if available (in seconds), or else with pip.
set_up() {
    local file files=() key marker modules=torch,torchvision,tqdm python
    for file in "$@"; do files+=(-r "$ROOT/$file"); done
    if [ -n "${PYTHON:-}" ]; then
        PYTHON=$(command -v "$PYTHON") || fail "PYTHON is set, but is not an interpreter"
        case $PYTHON in /*) ;; *) PYTHON=$PWD/$PYTHON ;; esac
        say "using $PYTHON without installing anything"
        case "$*" in *requirements/sample.txt*) modules+=,sklearn ;; esac
        case "$*" in *requirements/report.txt*) modules+=,scipy ;; esac
        case "$*" in *requirements/test.txt*) modules+=,pytest,xdist ;; esac
        "$PYTHON" -c "import $modules" 2>/dev/null ||
            fail "$PYTHON lacks some requirements; run $PYTHON -m pip install ${files[*]}"
        return
    fi

    PYTHON=$ROOT/.venv/bin/python
    key=$(cat "$ROOT/requirements/constraints.txt" "${@/#/$ROOT/}" | cksum | cut -d' ' -f1)
    marker=$ROOT/.venv/installed-$key
    [ ! -e "$marker" ] || return 0

    python=$(find_python) || fail "no Python 3.10 to 3.13 found; install one, or set PYTHON"
    say "setting up $ROOT/.venv with $("$python" --version)"
    if command -v uv >/dev/null; then
        [ -x "$PYTHON" ] || uv venv --quiet --seed --python "$python" "$ROOT/.venv"
        uv pip install --quiet --python "$PYTHON" -c "$ROOT/requirements/constraints.txt" "${files[@]}"
    else
        # A failed attempt may have left a venv without pip
        "$PYTHON" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$ROOT/.venv" ||
            fail "$python cannot create environments (Debian and Ubuntu: apt-get install python3-venv)"
        "$PYTHON" -m pip install --quiet --disable-pip-version-check --progress-bar off \
            -c "$ROOT/requirements/constraints.txt" "${files[@]}"
    fi
    : >"$marker"
}

# Prints the first Python on PATH whose version has PyTorch wheels
find_python() {
    local name
    for name in python3 python3.13 python3.12 python3.11 python3.10 python; do
        if "$name" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    return 1
}

# set_up_horovod: builds and installs Horovod unless the environment has it. If that fails,
# HOROVOD_PROBLEM contains the reason.
set_up_horovod() {
    local log
    export HOROVOD_PROBLEM=
    if "$PYTHON" -c 'import horovod.torch' 2>/dev/null; then return; fi
    if [ "$PYTHON" != "$ROOT/.venv/bin/python" ]; then
        HOROVOD_PROBLEM="not installed; run PYTHON=$PYTHON bash scripts/install_horovod.sh"
        return
    fi
    log=$(mktemp)
    if ! PYTHON=$PYTHON bash "$ROOT/scripts/install_horovod.sh" 2>&1 | tee "$log"; then
        HOROVOD_PROBLEM=$(tail -n 1 "$log" | sed 's/^install_horovod: //')
    fi
    rm -f "$log"
}
