#!/usr/bin/env bash
# Installs the real parts that the tests drive: dockerd, PostgreSQL, a registry, busybox and the tools around them.
#
# On Debian as root it installs what is missing. Elsewhere it says what is missing and how to get it; that is an
# error only under CI=true, where a test that needs a missing part must fail rather than skip. No system service is
# started and no system database cluster is made: the tests run private daemons of their own.
set -euo pipefail

export DEBIAN_FRONTEND=noninteractive
# Debian keeps daemons in the sbin folders, which the caller's PATH may lack.
PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"
POLICY=/usr/sbin/policy-rc.d
NO_MAIN_CLUSTER=/etc/postgresql-common/createcluster.d/mooring-testbed.conf

# Prints the Debian packages of the programs that are not on this machine, one per line.
missing_packages() {
    command -v dockerd >/dev/null && command -v containerd >/dev/null && command -v runc >/dev/null || echo docker.io
    command -v initdb >/dev/null || compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || echo postgresql
    command -v busybox >/dev/null && ! ldd "$(command -v busybox)" >/dev/null 2>&1 || echo busybox-static
    command -v docker-registry >/dev/null || echo docker-registry
    command -v ip >/dev/null || echo iproute2
    command -v iptables >/dev/null || echo iptables
    command -v nsenter >/dev/null && command -v setpriv >/dev/null || echo util-linux
    command -v mkfs.btrfs >/dev/null || echo btrfs-progs
    command -v mkfs.ext4 >/dev/null || echo e2fsprogs
    command -v mkfs.xfs >/dev/null || echo xfsprogs
    command -v gcc >/dev/null || echo gcc
    [[ -e /usr/include/stdio.h ]] || echo libc6-dev
    command -v make >/dev/null || echo make
    command -v curl >/dev/null || echo curl
    command -v jq >/dev/null || echo jq
    command -v git >/dev/null || echo git
    command -v ssh >/dev/null && command -v sftp >/dev/null && command -v scp >/dev/null || echo openssh-client
    # The toolbox of instances (docs/access.md) is made of these, busybox-static and scp.
    [[ -x /usr/lib/openssh/sftp-server ]] || echo openssh-sftp-server
    command -v rsync >/dev/null || echo rsync
    compgen -G '/usr/lib/*/libnss_wrapper.so' >/dev/null || echo libnss-wrapper
    # Images of instances (tests/testbed/distributions.py) are made with these, once.
    command -v mmdebstrap >/dev/null || echo mmdebstrap
    command -v musl-gcc >/dev/null || echo musl-tools
    command -v node >/dev/null || echo nodejs
    command -v npm >/dev/null || echo npm
}

is_debian() {
    [[ -r /etc/os-release ]] && grep -qE '^(ID|ID_LIKE)=.*debian' /etc/os-release && command -v apt-get >/dev/null
}

remove_policies() {
    for policy in "${policies[@]}"; do rm -f "$policy"; done
}

# Keeps apt from starting services and from making the system's own PostgreSQL cluster, for this run only. A policy
# that the machine already has is its owner's decision and stays in force.
add_policies() {
    policies=()
    trap remove_policies EXIT
    if [[ ! -e $POLICY ]]; then
        policies+=("$POLICY")
        printf '#!/bin/sh\nexit 101\n' >"$POLICY"
        chmod 755 "$POLICY"
    fi
    if [[ ! -e $NO_MAIN_CLUSTER ]]; then
        policies+=("$NO_MAIN_CLUSTER")
        mkdir -p "$(dirname "$NO_MAIN_CLUSTER")"
        echo 'create_main_cluster = false' >"$NO_MAIN_CLUSTER"
    fi
}

apt_install() {
    apt-get install --yes --quiet --no-install-recommends -o Dpkg::Use-Pty=0 "$@"
}

install_packages() {
    echo "tests/testbed/install.sh: installing $*"
    add_policies
    # apt's package lists may be absent (a fresh container image) or stale (a version that the mirror has dropped).
    apt_install "$@" || { apt-get update --quiet && apt_install "$@"; }
}

print_missing() {
    {
        echo "tests/testbed/install.sh: these parts of the test bed are missing (Debian package names):"
        printf '    %s\n' "$@"
        echo "Get them on Debian, as root:"
        echo "    apt-get update && apt-get install --no-install-recommends $*"
        echo "Elsewhere install what provides the same programs. Without them the tests that need them are skipped"
        echo "here; under CI=true they fail."
    } >&2
}

main() {
    local packages
    mapfile -t packages < <(missing_packages)
    ((${#packages[@]})) || return 0
    if is_debian && ((EUID == 0)); then
        install_packages "${packages[@]}"
        return
    fi
    print_missing "${packages[@]}"
    [[ ${CI:-} != true ]]
}

main "$@"
"$(dirname "$0")/compose.sh"
"$(dirname "$0")/../contract/install.sh"
"$(dirname "$0")/../sso/install.sh"
"$(dirname "$0")/../jupyter/install.sh"
"$(dirname "$0")/../ansible/install.sh"
"$(dirname "$0")/../skypilot/install.sh"
