#!/usr/bin/env bash
# Installs the OpenID provider of the tests of single sign-on. tests/testbed/install.sh has seen to node and npm before.
# To pin anew what package.json asks for, without the address of any registry (npm 11 or later):
#     npm install --package-lock-only --ignore-scripts --no-audit --no-fund --omit-lockfile-registry-resolved
#
# Where it cannot be installed it says so; that is an error only under CI=true, where a test that needs a missing part
# must fail rather than skip.
set -euo pipefail
cd "$(dirname "$0")"

[[ -e node_modules/.installed ]] && cmp -s package-lock.json node_modules/.installed && exit
echo "tests/sso/install.sh: installing an OpenID provider by npm"
# None of its packages needs to run anything while it is installed.
if npm ci --ignore-scripts --no-audit --no-fund --loglevel=error; then
    cp package-lock.json node_modules/.installed
else
    echo "tests/sso/install.sh: the tests of single sign-on are skipped; under CI=true they fail" >&2
    [[ ${CI:-} != true ]]
fi
