#!/usr/bin/env bash
# Creates or updates .venv with the pinned packages and the program itself:
#
#     scripts/venv.sh run    the packages that `make up` needs
#     scripts/venv.sh dev    those, and the packages that check and test the program
#
# PYTHON=/path/to/python3 chooses the interpreter; the default is the first suitable one in PATH.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.venv
LOG=$VENV/pip.log

is_fit() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# On Debian `import venv` succeeds but `python -m venv` fails, because ensurepip is missing.
can_make_venv() {
    "$1" -c 'import ensurepip, venv' 2>/dev/null
}

# Prints the first suitable interpreter.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if is_fit "$candidate" && can_make_venv "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

# Installs Python with venv, if this is Debian, where venv is a package of its own, and the user is root.
install_python() {
    [[ -z ${PYTHON:-} ]] && ((EUID == 0)) && [[ -e /etc/debian_version ]] && command -v apt-get >/dev/null || return 1
    echo "installing python3 and python3-venv by apt-get (once)…" >&2
    local get=(env DEBIAN_FRONTEND=noninteractive apt-get install --yes -qq --no-install-recommends)
    # If that fails: the package lists may be absent (a fresh container image) or stale.
    "${get[@]}" python3 python3-venv >/dev/null ||
        { apt-get update -qq >&2 && "${get[@]}" python3 python3-venv >/dev/null; }
}

print_requirements() {
    local found
    found=$(python3 --version 2>&1) || found="no python3 in PATH"
    echo "Mooring needs Python 3.11 or later with its venv module; here: ${PYTHON:-$found}."
    if is_fit "${PYTHON:-python3}"; then
        echo "That Python lacks venv. On Debian and Ubuntu: sudo apt-get install python3-venv"
    else
        echo "On Debian 12, Ubuntu 24.04 or later: sudo apt-get install python3 python3-venv"
    fi
    echo "Another interpreter: make PYTHON=/path/to/python3 …"
} >&2

make_venv() {
    # If this check fails, there is no .venv, or its Python was upgraded or removed.
    if is_fit "$VENV/bin/python" && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        echo "updating $VENV…"
        return
    fi
    local python
    python=$(find_python) || { install_python && python=$(find_python); } || { print_requirements && exit 1; }
    echo "creating $VENV (once, about a minute)…"
    "$python" -m venv --clear "$VENV"
}

# Runs `pip install`, and shows its output only if it fails.
install() {
    "$VENV/bin/python" -m pip --disable-pip-version-check --no-input install --progress-bar=off "$@" >"$LOG" 2>&1 && return
    tail -n 30 "$LOG" >&2
    echo "pip failed; its output is in $LOG" >&2
    exit 1
}

main() {
    local wanted=${1:?run or dev}
    local pins=(-r requirements.txt -r requirements-build.txt)
    [[ $wanted == run ]] || pins=(-r requirements-dev.txt)
    make_venv
    install --require-hashes "${pins[@]}"
    install --no-deps --no-build-isolation --editable ./client --editable .
    # `make` checks these files; `dev` includes `run`.
    touch "$VENV/.run"
    [[ $wanted == run ]] || touch "$VENV/.dev"
}

main "$@"
