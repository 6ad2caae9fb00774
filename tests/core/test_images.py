"""Which images a pattern matches. For names see test_image_names.py."""

import time

import pytest

from mooring.core.images import ImageName, is_allowed, registry_host

DIGEST = f"sha256:{'a' * 64}"


@pytest.mark.parametrize(
    ("written", "full"),
    [
        ("Docker.IO/pytorch/pytorch", "docker.io/pytorch/pytorch:latest"),
        ("R.Example:5000/a/b:1", "r.example:5000/a/b:1"),
        ("Registry/a", "registry/a:latest"),  # a path has no capitals, so this is a host
    ],
)
def test_hosts_are_case_insensitive(written: str, full: str) -> None:
    assert str(ImageName.parse(written)) == full


@pytest.mark.parametrize(
    ("server", "host"),
    [
        ("docker.io", "docker.io"),
        ("index.docker.io", "docker.io"),
        ("registry-1.docker.io", "docker.io"),
        ("https://index.docker.io/v1/", "docker.io"),
        ("GHCR.io", "ghcr.io"),
        ("http://10.0.0.7:5000/v2/", "10.0.0.7:5000"),
    ],
)
def test_a_registry_has_one_name(server: str, host: str) -> None:
    assert registry_host(server) == host


@pytest.mark.parametrize(
    ("pattern", "image"),
    [
        ("docker.io/pytorch/*", "pytorch/pytorch:2.8.0-cuda12.9-cudnn9-runtime"),
        ("docker.io/pytorch/*", "docker.io/pytorch/pytorch"),
        ("docker.io/pytorch/*", f"index.docker.io/pytorch/pytorch@{DIGEST}"),
        ("docker.io/pytorch/*", "pytorch/a/b"),
        ("index.docker.io/pytorch/*", "pytorch/pytorch"),
        ("pytorch/*", "pytorch/pytorch"),
        ("pytorch/pytorch", "pytorch/pytorch:any"),
        # Official images have a short and a full name.
        ("busybox", "busybox:1"),
        ("busybox", "docker.io/library/busybox"),
        ("library/busybox", "busybox"),
        ("docker.io/busybox", "library/busybox"),
        ("docker.io/library/*", "busybox"),
        ("busy*", "busybox"),
        ("docker.io/*", "busybox"),
        ("docker.io/*", "pytorch/pytorch"),
        ("*/pytorch", "pytorch/pytorch"),
        # Other registries.
        ("ghcr.io/org/*", "ghcr.io/org/team/image:1"),
        ("ghcr.io/*/image", "ghcr.io/a/b/image"),
        ("*.example.com/*", "a.example.com/x"),
        ("localhost:5000/*", "localhost:5000/x"),
        ("localhost/x", "localhost/x"),
        ("ghcr.io/a*b*c", "ghcr.io/a-x-b-y-c"),
        ("ghcr.io/a*", "ghcr.io/a"),
        # Everything.
        ("*", "busybox"),
        ("*", "evil.example/x/y"),
    ],
)
def test_a_pattern_matches_an_image(pattern: str, image: str) -> None:
    assert is_allowed(image, [pattern])
    assert is_allowed(image, ["nothing/of-it", pattern])


@pytest.mark.parametrize(
    ("pattern", "image"),
    [
        ("docker.io/pytorch/*", "pytorch-evil/pytorch"),
        ("docker.io/pytorch/*", "pytorch"),
        ("docker.io/pytorch/*", "evil.example/pytorch/pytorch"),
        ("docker.io/pytorch/*", "evil.example/docker.io/pytorch/x"),
        ("docker.io/pytorch/*", "docker.io:443/pytorch/x"),
        ("docker.io/pytorch/*", "docker.io.evil.example/pytorch/x"),
        ("pytorch/pytorch", "ghcr.io/pytorch/pytorch"),
        ("pytorch/pytorch", "pytorch/pytorch2"),
        ("pytorch/pytorch", "x/pytorch/pytorch"),
        ("busybox", "someone/busybox"),
        ("busybox", "localhost/busybox"),
        ("docker.io/library/*", "someone/busybox"),
        ("docker.io/*", "ghcr.io/x/y"),
        ("*/*", "ghcr.io/x/y"),  # no registry means Docker Hub
        ("*/x", "evil.example/x"),
        # A wildcard in the registry does not match the path.
        ("*.example.com/x", "evil.net/a.example.com/x"),
        ("*.example.com/x", "example.com/x"),
        ("ghcr.io/*", "ghcr.io:5000/x"),
        ("localhost:5000/*", "localhost:5001/x"),
        ("ghcr.io/a*b*b", "ghcr.io/ab"),  # parts of a pattern do not overlap
        ("ghcr.io/a*a", "ghcr.io/a"),
        ("ghcr.io/*-safe", "ghcr.io/un-safe/x"),
    ],
)
def test_a_pattern_matches_no_other_image(pattern: str, image: str) -> None:
    assert not is_allowed(image, [pattern])


def test_an_empty_list_matches_no_image() -> None:
    assert not is_allowed("busybox", [])


def test_many_wildcards_match_in_linear_time() -> None:
    began = time.thread_time()
    assert not is_allowed("a" * 500, ["*a" * 200 + "b"] * 256)
    assert time.thread_time() - began < 1
