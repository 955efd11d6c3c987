# Sourced by all other scripts, which set ROOT. Finds or creates the environment.

# --help prints the script's first comment and the flags of PROGRAM, if a script set it, and exits
case " $* " in *" --help "* | *" -h "*)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    [ -z "${PROGRAM:-}" ] || exec "${PROGRAM[@]}" --help
    exit 0
    ;;
esac

fail() {
    echo "$(basename "$0"): error: $*" >&2
    exit 2
}
[ "$(uname -s)" = Linux ] || fail "this needs Linux (on Windows: WSL2)"

# Makes PYTHON an absolute path
find_python() {
    local found
    found=$(command -v "$PYTHON") || fail "PYTHON=$PYTHON is not an interpreter"
    case $found in /*) PYTHON=$found ;; *) PYTHON=$PWD/$found ;; esac
}

# set_up REQUIREMENTS...: sets PYTHON to an interpreter that has all of these packages. If PYTHON is
# already set, it installs nothing. Otherwise it creates .venv, with uv if available, or else with pip.
set_up() {
    local file files=() marker modules=torch,torchvision,numpy,PIL,tqdm python
    for file in "$@"; do files+=(-r "$ROOT/$file"); done
    if [ -n "${PYTHON:-}" ]; then
        find_python
        echo "using $PYTHON without installing anything"
        case "$*" in *sample.txt*) modules+=,sklearn,matplotlib ;; esac
        case "$*" in *report.txt*) modules+=,scipy ;; esac
        case "$*" in *test.txt*) modules+=,pytest,xdist,torchcodec,matplotlib ;; esac
        "$PYTHON" -c "import $modules" 2>/dev/null ||
            fail "$PYTHON lacks some requirements; run $PYTHON -m pip install ${files[*]}"
        return
    fi

    export PYTHON=$ROOT/.venv/bin/python
    unset PYTHONDONTWRITEBYTECODE # containers often set it; without it, processes compile PyTorch's code only once
    marker=$ROOT/.venv/installed-$(cat "$ROOT"/requirements.txt "$ROOT"/requirements/* - <<<"$*" | cksum | cut -d' ' -f1)
    [ ! -e "$marker" ] || return 0

    for python in python3 python3.14 python3.13 python3.12 python3.11 python3.10 ""; do # versions with PyTorch wheels
        "${python:-true}" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null && break
    done
    [ -n "$python" ] || fail "no Python 3.10 to 3.14 found; install one, or set PYTHON"
    echo "setting up $ROOT/.venv with $("$python" --version)"
    files+=(-c "$ROOT/requirements/constraints.txt")
    if command -v uv >/dev/null; then
        [ -x "$PYTHON" ] || uv venv --quiet --seed --python "$python" "$ROOT/.venv"
        # Install the wheel for this GPU, driver or CPU from PyTorch's own index
        uv pip install --quiet --python "$PYTHON" --torch-backend=auto "${files[@]}" 2>/dev/null || {
            echo "uv cannot use PyTorch's own index: installing PyTorch's ordinary wheel"
            uv pip install --quiet --python "$PYTHON" "${files[@]}"
        }
    else
        # A failed attempt may have left a venv without pip
        "$PYTHON" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$ROOT/.venv" ||
            fail "$python cannot create environments (Debian and Ubuntu: apt-get install python3-venv)"
        "$PYTHON" -m pip install --quiet --disable-pip-version-check --progress-bar off "${files[@]}"
    fi
    : >"$marker"
}

# Builds and installs Horovod unless the environment has it. If that fails, HOROVOD_PROBLEM is the reason.
set_up_horovod() {
    export HOROVOD_PROBLEM=
    if "$PYTHON" -c 'import horovod.torch' 2>/dev/null; then return; fi
    if [ "$PYTHON" != "$ROOT/.venv/bin/python" ]; then
        HOROVOD_PROBLEM="not installed; run PYTHON=$PYTHON bash scripts/install_horovod.sh"
    elif ! bash "$ROOT/scripts/install_horovod.sh" 2>&1 | tee "$ROOT/.venv/horovod.log"; then
        HOROVOD_PROBLEM=$(tail -n 1 "$ROOT/.venv/horovod.log" | sed 's/^install_horovod: //')
    fi
}
