#!/usr/bin/env bash
# What the tests run against besides Python packages: Debian's redis-server, prometheus, chromium and openssl.
# Installs what is missing where it may; says what to install where it may not.
set -euo pipefail
missing=()
for tool in redis-server prometheus chromium openssl; do
  command -v "$tool" >/dev/null || missing+=("$tool")
done
[ ${#missing[@]} -eq 0 ] && exit 0
install=(apt-get install -y -qq --no-install-recommends "${missing[@]}")
if [ "$(id -u)" -ne 0 ]; then
  sudo -n true 2>/dev/null || { echo "error: the tests need ${missing[*]}; run: sudo ${install[*]}" >&2; exit 2; }
fi
echo "installing for the tests: ${missing[*]}"
as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo -n)
"${as_root[@]}" apt-get update -qq || true
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive "${install[@]}" >/dev/null ||
  { echo "error: apt-get must install ${missing[*]}; see above" >&2; exit 2; }
