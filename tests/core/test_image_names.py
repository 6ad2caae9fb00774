"""Normalization of image names."""

import pytest

from mooring.core.images import ImageName, registry_host

DIGEST = f"sha256:{'a' * 64}"


@pytest.mark.parametrize(
    ("written", "full"),
    [
        ("busybox", "docker.io/library/busybox:latest"),
        ("library/busybox:1", "docker.io/library/busybox:1"),
        ("docker.io/busybox:1", "docker.io/library/busybox:1"),
        ("index.docker.io/library/busybox", "docker.io/library/busybox:latest"),
        ("pytorch/pytorch:2.8", "docker.io/pytorch/pytorch:2.8"),
        ("localhost/x", "localhost/x:latest"),
        ("10.0.0.7:5000/a/b:1", "10.0.0.7:5000/a/b:1"),
        ("r.example/a/b", "r.example/a/b:latest"),
        (f"r.example:5000/a@{DIGEST}", f"r.example:5000/a@{DIGEST}"),
        (f"r.example:5000/a:1@{DIGEST}", f"r.example:5000/a@{DIGEST}"),
        # Docker would treat this name as a prefix of an image ID.
        ("4f3cdeadbeef", "docker.io/library/4f3cdeadbeef:latest"),
    ],
)
def test_a_short_name_is_expanded(written: str, full: str) -> None:
    assert str(ImageName.parse(written)) == full


def test_a_pinned_digest_replaces_tag_and_digest() -> None:
    other = f"sha256:{'b' * 64}"
    for written in ("r.example/a:1", f"r.example/a@{other}", f"r.example/a:1@{other}"):
        assert str(ImageName.parse(written).pinned(DIGEST)) == f"r.example/a@{DIGEST}"
    assert str(ImageName.parse("r.example/a:1").pinned(None)) == "r.example/a:1"


@pytest.mark.parametrize(
    "server", ["docker.io", "index.docker.io", "registry-1.docker.io", "https://index.docker.io/v1/"]
)
def test_all_names_of_docker_hub_are_recognized(server: str) -> None:
    assert registry_host(server) == ImageName.parse("busybox").registry
