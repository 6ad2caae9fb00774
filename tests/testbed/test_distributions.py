"""The images of distributions contain what the tests of SSH assume."""

import tarfile
from pathlib import Path

from tests.testbed.distributions import debian_layer, musl_layer

# What the toolbox brings; the tests of SSH must not use the image's.
TOOLBOX = {"rsync", "scp", "sftp-server", "sshd", "libnss_wrapper.so"}


def names_in(layer: Path) -> set[str]:
    with tarfile.open(layer) as archive:
        return {Path(name).name for name in archive.getnames()}


def test_the_image_of_debian_has_bash_git_and_glibc() -> None:
    names = names_in(debian_layer())
    assert {"apt-get", "bash", "git", "git-receive-pack", "libc.so.6"} <= names
    assert not names & TOOLBOX


def test_the_image_of_musl_has_neither_glibc_nor_bash() -> None:
    names = names_in(musl_layer())
    assert {"ash", "busybox"} <= names
    assert not names & {"bash", "lib64", "libc.so.6", "nsswitch.conf", *TOOLBOX}
    with tarfile.open(musl_layer()) as archive:
        busybox = archive.extractfile("bin/busybox")
        assert busybox is not None
        assert b"\0/lib/ld-musl-" in busybox.read(), "not linked with musl"
