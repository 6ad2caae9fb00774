#!/usr/bin/env bash
# Pins what pyproject.toml asks for, with the hashes of every wheel of each version:
#
#     requirements.txt          what the program runs on
#     requirements-build.txt    what makes a wheel or an editable install of it
#     requirements-dev.txt      both, and what checks and tests it
#
#     scripts/lock.sh              after a change of pyproject.toml; keeps the pins that still fit
#     scripts/lock.sh --upgrade    takes the newest of everything
#
# It runs on the oldest Python that Mooring supports: what only that one needs is then in the files, and is
# harmless elsewhere. The environment and pip's configuration are put aside, so that a private index or folder of
# wheels can neither stand in the files nor decide what is in them.
set -euo pipefail
cd "$(dirname "$0")/.."

PIP_TOOLS="pip-tools==7.6.2"
PYTHON=${PYTHON:-python3.11}

"$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
    { echo "scripts/lock.sh needs Python 3.11 (PYTHON=${PYTHON} is not)" >&2 && exit 1; }

# Where pip finds the certificates of this network is no choice of packages, so that setting stays.
cert=${PIP_CERT:-$("$PYTHON" -m pip config get global.cert 2>/dev/null || true)}
while IFS='=' read -r name _; do unset "$name"; done < <(env | grep '^PIP_' || true)
export PIP_CONFIG_FILE=/dev/null ${cert:+PIP_CERT="$cert"}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$PYTHON" -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet --disable-pip-version-check "$PIP_TOOLS"

export CUSTOM_COMPILE_COMMAND=scripts/lock.sh

compile() {
    "$scratch/venv/bin/pip-compile" --quiet --generate-hashes --strip-extras --no-emit-index-url \
        --no-emit-find-links --no-emit-trusted-host --resolver=backtracking "$@" pyproject.toml
}

# Later files take the versions of earlier ones: all three can stand in one environment.
compile --output-file=requirements.txt "$@"
compile --output-file=requirements-build.txt --constraint=requirements.txt --only-build-deps \
    --build-deps-for=wheel "$@"
compile --output-file=requirements-dev.txt --constraint=requirements.txt --constraint=requirements-build.txt \
    --extra=dev --build-deps-for=wheel "$@"

if grep -nE '://|^-|/(opt|home|root|work)/' requirements*.txt; then
    echo "scripts/lock.sh: the lines above name a place that only this machine may know" >&2
    exit 1
fi
