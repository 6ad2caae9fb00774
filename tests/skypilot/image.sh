#!/usr/bin/env bash
# Builds the image of docs/skypilot as a root filesystem, for launch.py: tests/skypilot/image.sh IMAGE.tar
#
# On Debian as root, with mmdebstrap in place of `docker build`. It needs the network, 3 GB of disk and some minutes.
set -euo pipefail

image=$(realpath "$1")
here=$(cd "$(dirname "$0")" && pwd)
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
# The packages that the Dockerfile installs.
packages=$(sed -n '/apt-get install/{n;s/ *\\$//;s/^ *//;s/ /,/g;p}' "$here/../../docs/skypilot/Dockerfile")
certificates=${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt}

mmdebstrap --variant=minbase --mode=root --quiet --include="$packages" \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' bookworm "$root"
cp "$here/../../docs/skypilot/install.sh" "$certificates" "$root/tmp"
cp --dereference /etc/resolv.conf "$root/etc/resolv.conf"
# Variables of this machine, such as REQUESTS_CA_BUNDLE, name files that the image does not have.
env --ignore-environment HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PIP_CERT="/tmp/${certificates##*/}" ${https_proxy:+https_proxy="$https_proxy"} chroot "$root" sh /tmp/install.sh
rm "$root/tmp/install.sh" "$root/tmp/${certificates##*/}"
tar -C "$root" -cf "$image" .
