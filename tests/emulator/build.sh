#!/usr/bin/env bash
# build.sh PYTHON FOLDER: compile the emulated CUDA runtime with the headers that came with that python's torch.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
site="$("$1" -c 'import importlib.util, pathlib; print(pathlib.Path(importlib.util.find_spec("torch").origin).parents[1])')"
if [[ ! -d "$site/nvidia/cu13/include" ]]; then
	echo "the torch of $1 is not built for CUDA 13: there is no $site/nvidia/cu13/include" >&2
	exit 1
fi
mkdir -p "$2"
echo 'libcudart.so.13 { global: *; };' >"$2/versions"
g++ -std=c++17 -O1 -w -fPIC -shared -I"$site/nvidia/cu13/include" -I"$site/triton/backends/nvidia/include" \
	-Wl,-soname,libcudart.so.13 -Wl,--version-script="$2/versions" "$here/cudart.cpp" "$here/kernels.cpp" -lpthread -o "$2/libcudart.so.13"
ln -sf libcudart.so.13 "$2/libcuda.so.1"
