#!/usr/bin/env bash
# Installs the peers that PyPI has into a virtual environment of their own, about 3 GB, for `python -m bench.core.compare`.
#
#     bench/install_peers.sh DIR [more arguments for pip]
#     DIR/bin/python -m bench.core.compare                                  # the checkout's kvblocks, plain
#     KVBLOCKS_COMPILE=1 DIR/bin/pip install --no-deps . && DIR/bin/python -m bench.core.compare      # the compiled build
#
# vLLM and SGLang ask for different versions of the same packages, and for packages that need a GPU. Their block managers
# need none of these. So everything is installed from a list, without dependencies. On Linux, PyPI's torch brings CUDA
# (several GB more); for the CPU build add: --extra-index-url https://download.pytorch.org/whl/cpu
set -euo pipefail

if [[ $# -lt 1 || $1 == -* ]]; then
  echo "usage: bench/install_peers.sh DIR [more arguments for pip]" >&2
  exit 2
fi
peers=$1
shift
here=$(cd "$(dirname "$0")" && pwd)

"${PYTHON:-python3}" -m venv "$peers"
pip=("$peers/bin/python" -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" "$@" torch==2.13.0 numpy
"${pip[@]}" "$@" --no-deps -r "$here/peers/requirements.txt"
echo "peers installed; now: $peers/bin/python -m bench.core.compare"
