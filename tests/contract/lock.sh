#!/usr/bin/env bash
# Pins anew what package.json and requirements.in here, in ../jupyter, ../ansible and ../skypilot ask for:
# package-lock.json and requirements.txt, with hashes and without the address of any registry. npm 11 or later, Python
# 3.11.
set -euo pipefail
cd "$(dirname "$0")"

npm install --package-lock-only --ignore-scripts --no-audit --no-fund --omit-lockfile-registry-resolved

# As in scripts/lock.sh: a private index must neither stand in the file nor decide what is in it.
cert=${PIP_CERT:-$(python3.11 -m pip config get global.cert 2>/dev/null || true)}
while IFS='=' read -r name _; do unset "$name"; done < <(env | grep '^PIP_' || true)
export PIP_CONFIG_FILE=/dev/null ${cert:+PIP_CERT="$cert"}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3.11 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet --disable-pip-version-check pip-tools==7.6.2
for folder in . ../jupyter ../ansible ../skypilot; do
    CUSTOM_COMPILE_COMMAND=tests/contract/lock.sh "$scratch/venv/bin/pip-compile" --quiet --generate-hashes \
        --allow-unsafe \
        --strip-extras --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --resolver=backtracking \
        --output-file="$folder/requirements.txt" "$@" "$folder/requirements.in"
done

if grep -nE '"resolved"' package-lock.json ||
    grep -nE '://|^-|/(opt|home|root|work)/' requirements.txt ../{jupyter,ansible,skypilot}/requirements.txt; then
    echo "tests/contract/lock.sh: the lines above name a place that only this machine may know" >&2
    exit 1
fi
