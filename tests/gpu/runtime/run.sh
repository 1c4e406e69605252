#!/usr/bin/env bash
# run.sh PYTHON FOLDER [TEXT]: compile the rules in FOLDER and print what the CUDA runtime does; with a GPU, that is
# golden.txt. Headers and runtime are those that came with that python's torch, or else CUDA_HOME's; where
# LD_PRELOAD names an emulated runtime, it is that one which runs. TEXT: only the cases that have it in their names.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
preloaded="${LD_PRELOAD:-}"
unset LD_PRELOAD
find='import importlib.util, pathlib
torch = importlib.util.find_spec("torch")
print(torch and pathlib.Path(torch.origin).parents[1])'
site="$("$1" -c "$find")"
toolkit="${CUDA_HOME:-/usr/local/cuda}"
for lib in "$site/nvidia/cu13/lib" "$toolkit/lib64" ""; do
	if [[ -f "$lib/libcudart.so.13" ]]; then break; fi
done
if [[ -z "$lib" ]]; then
	echo "there is no libcudart.so.13 beside the torch of $1, nor in $toolkit/lib64" >&2
	exit 1
fi
mkdir -p "$2"
# A directory that is not there is passed over. Some headers of CUDA come with triton.
g++ -std=c++17 -O1 -Wall -isystem "${lib%/*}/include" -isystem "$site/triton/backends/nvidia/include" \
	-isystem "$toolkit/include" "$here"/*.cpp "$lib/libcudart.so.13" -Wl,-rpath,"$lib" -pthread -o "$2/rules"
LD_PRELOAD="$preloaded" "$2/rules" "${@:3}"
