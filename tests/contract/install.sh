#!/usr/bin/env bash
# Installs what reads the API from outside: two linters and a Python environment with Schemathesis and a generator of
# clients, each pinned by hash (lock.sh). tests/testbed/install.sh has seen to node and npm before.
#
# Where something cannot be installed it says so; that is an error only under CI=true, where a test that needs a
# missing part must fail rather than skip.
set -euo pipefail
cd "$(dirname "$0")"

VENV=.venv

is_new() {
    [[ -e $2 ]] && cmp -s "$1" "$2"
}

install_linters() {
    is_new package-lock.json node_modules/.installed && return
    echo "tests/contract/install.sh: installing the linters by npm"
    # None of them needs what its packages would run while they are installed.
    npm ci --ignore-scripts --no-audit --no-fund --loglevel=error
    cp package-lock.json node_modules/.installed
}

install_python_tools() {
    is_new requirements.txt "$VENV/.installed" && return
    echo "tests/contract/install.sh: installing Schemathesis and the generator of clients by pip"
    ../../.venv/bin/python -m venv --clear "$VENV"
    # pip's own words matter only when it fails.
    "$VENV/bin/python" -m pip --disable-pip-version-check --no-input --quiet install --require-hashes \
        -r requirements.txt >"$VENV/pip.log" 2>&1 || { tail -n 30 "$VENV/pip.log" >&2 && return 1; }
    cp requirements.txt "$VENV/.installed"
}

# `set -e` does not hold in the condition of an `if`, so each is a process of its own.
for part in install_linters install_python_tools; do
    if [[ ${1:-} == "$part" ]]; then
        "$part"
        exit
    fi
done
failed=0
for part in install_linters install_python_tools; do
    ./install.sh "$part" || failed=1
done
if ((failed)); then
    echo "tests/contract/install.sh: the tests of the API's contract are skipped; under CI=true they fail" >&2
    [[ ${CI:-} != true ]]
fi
