#!/usr/bin/env bash
# Installs SkyPilot, pinned by hash (tests/contract/lock.sh), in an environment of its own.
#
# Where it cannot be installed it says so; that is an error only under CI=true, where a test that needs a missing part
# must fail rather than skip.
set -euo pipefail
cd "$(dirname "$0")"

VENV=.venv

[[ -e $VENV/.installed ]] && cmp -s requirements.txt "$VENV/.installed" && exit
echo "tests/skypilot/install.sh: installing SkyPilot by pip"
../../.venv/bin/python -m venv --clear "$VENV"
if "$VENV/bin/python" -m pip --disable-pip-version-check --no-input --quiet install --require-hashes --compile \
    -r requirements.txt >"$VENV/pip.log" 2>&1; then
    cp requirements.txt "$VENV/.installed"
else
    tail -n 30 "$VENV/pip.log" >&2
    echo "tests/skypilot/install.sh: the tests with SkyPilot are skipped; under CI=true they fail" >&2
    [[ ${CI:-} != true ]]
fi
