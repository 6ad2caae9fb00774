#!/usr/bin/env bash
# Pins the dependencies of pyproject.toml and client/pyproject.toml, each with the hashes of all its files:
#
#     requirements.txt          packages of the program
#     requirements-build.txt    packages to build a wheel or an editable install
#     requirements-dev.txt      both, and packages to check and test the program
#
#     scripts/lock.sh              after a change of pyproject.toml; keeps the pins that still fit
#     scripts/lock.sh --upgrade    upgrades all packages
#
# It runs on the oldest Python that Mooring supports, so that packages which only that version needs are included.
# It ignores pip's environment and configuration, so that a private index or folder of wheels does not affect the
# files.
set -euo pipefail
cd "$(dirname "$0")/.."

PIP_TOOLS="pip-tools==7.6.2"
PYTHON=${PYTHON:-python3.11}

"$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
    { echo "scripts/lock.sh needs Python 3.11, and ${PYTHON} is not: set PYTHON" >&2 && exit 1; }

# Keep the setting for CA certificates, which does not affect the choice of packages.
cert=${PIP_CERT:-$("$PYTHON" -m pip config get global.cert 2>/dev/null || true)}
while IFS='=' read -r name _; do unset "$name"; done < <(env | grep '^PIP_' || true)
export PIP_CONFIG_FILE=/dev/null ${cert:+PIP_CERT="$cert"}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$PYTHON" -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet --disable-pip-version-check "$PIP_TOOLS"

export CUSTOM_COMPILE_COMMAND=scripts/lock.sh

# The client is a part of this repository: its dependencies are pinned, but not itself.
"$scratch/venv/bin/pip" wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$scratch/wheels" ./client

compile() {
    "$scratch/venv/bin/pip-compile" --quiet --generate-hashes --strip-extras --no-emit-index-url \
        --no-emit-find-links --no-emit-trusted-host --resolver=backtracking \
        --find-links="$scratch/wheels" --unsafe-package=mooring-client "$@" pyproject.toml
}

# Later files use the versions of earlier files, so that all three fit in one environment.
compile --output-file=requirements.txt "$@"
compile --output-file=requirements-build.txt --constraint=requirements.txt --only-build-deps \
    --build-deps-for=wheel "$@"
compile --output-file=requirements-dev.txt --constraint=requirements.txt --constraint=requirements-build.txt \
    --extra=dev --build-deps-for=wheel "$@"

# pip-compile warns of the package that it was told to leave out.
for file in requirements.txt requirements-dev.txt; do
    sed -i '/^# WARNING: /,$d' "$file"
    sed -i '${/^$/d}' "$file"
done

if grep -nE '://|^-|/(opt|home|root|work)/' requirements*.txt; then
    echo "scripts/lock.sh: the lines above contain a path or address of this machine" >&2
    exit 1
fi
