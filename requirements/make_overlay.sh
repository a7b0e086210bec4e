#!/usr/bin/env bash
# Makes a folder of packages that stands first on the path of one child process: make_overlay.sh FOLDER LIST PYTHON.
# The rest (torch, transformers) is PYTHON's own. Does nothing where it is up to date.
set -euo pipefail
[ $# -eq 3 ] && [ -f "$2" ] || { echo "error: make_overlay.sh must be given a folder, a list and a Python, got: $*" >&2; exit 2; }
folder=$1 list=$2 python=$3
stamp="$folder/.made-from-$(sha256sum "$list" | cut -c1-16)"
[ -e "$stamp" ] && exit 0
"$python" -c 'import torch, transformers' || { echo "error: $python must have torch and transformers; run make setup" >&2; exit 2; }

echo "making $folder from $list (under a minute)"
rm -rf "$folder"
"$python" -m pip --disable-pip-version-check install --quiet --no-deps --progress-bar off --target "$folder" -r "$list"
touch "$stamp"
