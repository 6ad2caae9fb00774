#!/usr/bin/env bash
# Gets Docker's compose plugin, which Debian has since version 13, from the mirror of this machine's apt. It goes to
# .testbed, and nothing is installed. tests/testbed/install.sh calls this.
#
# Where it cannot be had it says so; that is an error only under CI=true, where a test that needs a missing part must
# fail rather than skip.
set -euo pipefail

SUITE=trixie
KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg
PLUGIN=usr/libexec/docker/cli-plugins/docker-compose
CACHE=$(cd "$(dirname "$0")/../.." && pwd)/.testbed/compose

is_present() {
    local path
    # tests/testbed/parts.py: COMPOSE_PLUGINS
    for path in "$CACHE/docker-compose" "/$PLUGIN" /usr/{,local/}lib/docker/cli-plugins/docker-compose; do
        [[ ! -x $path ]] || return 0
    done
    return 1
}

# Prints the address of the archive that this machine's own Debian comes from.
mirror() {
    local codename
    codename=$(. /etc/os-release && [[ $ID == debian ]] && echo "$VERSION_CODENAME")
    apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Identifier: Packages' |
        awk -v release="$codename" '$2 == release { print $1; exit }'
}

# apt with this one source, and without the machine's lists and caches.
fetch() {
    local folder=$1 uri
    uri=$(mirror)
    [[ -n $uri && -r $KEYRING ]] || { echo "no Debian archive in apt's sources, or no $KEYRING" >&2 && return 1; }
    mkdir -p "$folder"/{lists,cache,package}
    printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\nSigned-By: %s\n' "$uri" "$SUITE" "$KEYRING" \
        >"$folder/debian.sources"
    local options=(-qq -o "Dir::Etc::sourcelist=$folder/debian.sources" -o Dir::Etc::sourceparts=-
        -o "Dir::State::lists=$folder/lists" -o "Dir::Cache=$folder/cache" -o Acquire::Languages=none
        -o APT::Sandbox::User=root -o Acquire::Retries=3)
    apt-get "${options[@]}" update
    (cd "$folder/package" && apt-get "${options[@]}" download docker-compose)
    dpkg-deb --extract "$folder"/package/docker-compose_*.deb "$folder/files"
    mkdir -p "$CACHE"
    mv "$folder/files/$PLUGIN" "$CACHE/docker-compose"
}

if [[ ${1:-} == fetch ]]; then
    fetch "$2"
    exit
fi
is_present && exit
echo "tests/testbed/compose.sh: getting docker-compose of Debian $SUITE"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# `set -e` does not hold in the condition of an `if`, so it is a process of its own.
if ! "$0" fetch "$folder"; then
    echo "tests/testbed/compose.sh: no docker-compose: its tests are skipped; under CI=true they fail" >&2
    [[ ${CI:-} != true ]]
fi
