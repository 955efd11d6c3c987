#!/usr/bin/env bash
# Build Horovod from its PyPI source for an environment's PyTorch, and install it in that environment.
#
#   bash scripts/install_horovod.sh                  # into .venv
#   PYTHON=/path/to/python bash scripts/install_horovod.sh
#
# The build always includes Gloo. It includes MPI if mpicxx is found, and NCCL if a CUDA toolkit matches PyTorch.
# The wheel is kept in ~/.cache/horovod-wheels, so another installation takes only seconds.
# Exit status: 0 if installed, 3 if it cannot be built here (one line gives the reason), 1 if the build failed.
set -euo pipefail
ROOT=$(dirname "$(dirname "$(realpath "$0")")")
source "$ROOT/scripts/setup.sh"

PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
PYTHON=$(command -v "$PYTHON" || printf %s "$PYTHON")
case $PYTHON in /*) ;; *) PYTHON=$PWD/$PYTHON ;; esac
VERSION=0.28.1
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/horovod-wheels
# An nvcc on PATH may be a link or a wrapper script, but prints its folder.
nvcc=$(realpath "$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)" 2>/dev/null || true)
CUDA_HOME=${CUDA_HOME:-$("${nvcc:-false}" --dryrun -x cu /dev/null 2>&1 | sed -n 's|^#\$ _HERE_=\(.*\)/bin$|\1|p' || true)}

say() { printf 'install_horovod: %s\n' "$*"; }

pip_install() {
    if "$PYTHON" -m pip --version >/dev/null 2>&1; then
        "$PYTHON" -m pip install --quiet --disable-pip-version-check "$@"
    else
        uv pip install --quiet --python "$PYTHON" "$@"
    fi
}

if ! facts=$("$PYTHON" -c 'import platform, sys, torch
print(torch.__version__, torch.version.cuda or "none", "cp%d%d" % sys.version_info[:2], platform.machine())' 2>/dev/null); then
    say "$PYTHON has no working PyTorch; install it first (bash scripts/quickstart.sh does this)" >&2
    exit 3
fi
read -r torch_version torch_cuda python_tag machine <<<"$facts"

if ! command -v "${CXX:-c++}" g++ clang++ >/dev/null; then
    say "not built: no C++ compiler found (Debian and Ubuntu: apt-get install g++)"
    exit 3
fi

operations=gloo
mpi="HOROVOD_WITHOUT_MPI=1"
if command -v mpicxx >/dev/null; then
    operations=$operations-mpi$(mpirun --version 2>/dev/null | sed -n '1s/.* //p')
    mpi="HOROVOD_WITH_MPI=1"
fi
cuda=()
nccl=$("$PYTHON" -c 'import nvidia.nccl as n; print(list(n.__path__)[0])' 2>/dev/null || true)
toolkit=$("${CUDA_HOME:-/none}/bin/nvcc" --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\),.*/\1/p' || true)
if [ -n "$toolkit" ] && [ -n "$nccl" ] && [ "${toolkit%%.*}" = "${torch_cuda%%.*}" ]; then
    operations=$operations-nccl-cuda$toolkit
    cuda=(HOROVOD_GPU_OPERATIONS=NCCL)
fi

wheels=$CACHE/2-torch$torch_version-$python_tag-$machine-$operations
if compgen -G "$wheels/horovod-$VERSION-*.whl" >/dev/null; then
    say "installing the wheel from $wheels"
    pip_install "$wheels"/horovod-"$VERSION"-*.whl
    exit 0
fi

say "building Horovod $VERSION for PyTorch $torch_version with $operations on $(nproc) cores: about 4 minutes of CPU time"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

build() {
    # The build tools get their own folder. Horovod's CMake files import pkg_resources, which setuptools 81 dropped.
    pip_install --target "$work/tools" pip 'setuptools<81' wheel packaging cloudpickle psutil pyyaml cffi cmake ninja
    export PYTHONPATH=$work/tools PATH=$work/tools/bin:${PYTHON%/*}:$PATH
    "$PYTHON" -m pip download --quiet --no-deps --no-binary :all: --no-build-isolation -d "$work" "horovod==$VERSION"
    tar -xzf "$work/horovod-$VERSION.tar.gz" -C "$work"
    cd "$work/horovod-$VERSION"

    # PyTorch's headers now need C++20, but Horovod requests C++14. CUDA 13's nvcc needs C++17, not C++11.
    sed -i 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 20/' CMakeLists.txt horovod/torch/CMakeLists.txt
    sed -i 's/CMAKE_CUDA_STANDARD 11/CMAKE_CUDA_STANDARD 17/' horovod/common/ops/cuda/CMakeLists.txt
    # GCC 13's headers include fewer other headers, hence CXXFLAGS below. GCC 14 rejects assignments to a const member.
    sed -i 's/const size_type count_;/size_type count_;/' third_party/flatbuffers/include/flatbuffers/stl_emulation.h
    # The driver may provide only libcuda.so.1, for example in a container.
    sed -i 's/dlopen("libcuda.so"/dlopen("libcuda.so.1"/' horovod/torch/cuda_util.cc
    # Python 3.12 no longer has distutils.
    sed -i "s/from distutils.sysconfig import get_python_inc; print(get_python_inc())/import sysconfig; \
print(sysconfig.get_path('include'))/" horovod/torch/CMakeLists.txt
    sed -i 's/from distutils.spawn import find_executable/from shutil import which as find_executable/' \
        horovod/runner/js_run.py
    # pip would download setup_requires, which are already installed or unnecessary. Ninja comes from
    # PyPI (make may be missing) and does not accept VERBOSE=1. Debug symbols would make up most of a wheel.
    sed -i -e 's/setup_requires=.*/setup_requires=[],/' -e "s/'VERBOSE=1'/'-j$(nproc)'/" \
        -e "s/'RelWithDebInfo'/'Release'/" setup.py

    if [ ${#cuda[@]} -gt 0 ]; then
        # The NCCL wheel has only libnccl.so.2; the linker also needs libnccl.so.
        mkdir -p "$work/nccl/lib"
        ln -s "$nccl/include" "$work/nccl/include"
        ln -s "$nccl/lib/libnccl.so.2" "$work/nccl/lib/libnccl.so"
        ln -s "$nccl/lib/libnccl.so.2" "$work/nccl/lib/libnccl.so.2"
        # Compute capabilities that this toolkit still supports
        capabilities=$("$CUDA_HOME/bin/nvcc" --list-gpu-code |
            grep -oE 'sm_(70|75|80|86|89|90|100|120)$' | sed 's/sm_//' | paste -sd, -)
        cuda+=(CUDA_HOME="$CUDA_HOME" CUDAToolkit_ROOT="$CUDA_HOME" HOROVOD_CUDA_HOME="$CUDA_HOME"
            HOROVOD_NCCL_HOME="$work/nccl" HOROVOD_NCCL_LINK=SHARED
            HOROVOD_BUILD_CUDA_CC_LIST="$capabilities" PATH="$CUDA_HOME/bin:$PATH")
    else
        # If PyTorch finds a CUDA toolkit, even an unsuitable one, Horovod requires all CUDA components.
        sed -i 's/(CUDA_HOME is not None)/False/' cmake/Modules/FindPytorch.cmake
        [ "$mpi" = HOROVOD_WITH_MPI=1 ] || cuda=(HOROVOD_CPU_OPERATIONS=GLOO)
    fi
    env HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1 \
        "$mpi" ${cuda[@]+"${cuda[@]}"} CMAKE_POLICY_VERSION_MINIMUM=3.5 CMAKE_GENERATOR=Ninja MAKEFLAGS=unused \
        CXXFLAGS="-include string -include cstdint ${CXXFLAGS:-}" \
        "$PYTHON" -m pip wheel --no-deps --no-build-isolation -w "$work/wheel" .
}

set +e # not `if (...)`: in a condition, the subshell would ignore set -e
(set -e && build) >"$work/build.log" 2>&1
status=$?
set -e
if [ $status != 0 ]; then
    mkdir -p "$CACHE"
    cp "$work/build.log" "$CACHE/failed-build.log"
    say "the build failed: $(sed -nE '/subprocess-exited/d; /fatal error|(^|[^A-Za-z-])[A-Za-z]*[Ee](rror|RROR):|CMake Error/{s/^ *//p;q}' "$work/build.log" | cut -c1-200); the log is $CACHE/failed-build.log" >&2
    exit 1
fi
mkdir -p "$wheels"
mv "$work"/wheel/horovod-*.whl "$wheels/"
pip_install "$wheels"/horovod-"$VERSION"-*.whl
say "installed; the wheel is in $wheels"
