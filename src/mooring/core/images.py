"""Normalized image names, and the patterns of images that a project may run (security rule R15).

`busybox` is `docker.io/library/busybox:latest`. Patterns match the normalized name, so that no spelling
evades a rule. A pattern is `registry/repository`; tags and digests are ignored:

- `*` matches any characters, or none. In a repository it also matches `/`.
- The part before the first `/` is a registry if it has a dot, a colon or a capital, or is `localhost`, as in
  image names. A pattern without a registry is for Docker Hub (`docker.io`, or `index.docker.io`).
- An official image has two names: `docker.io/library/busybox` and `docker.io/busybox`.
- `*` alone matches every image of every registry.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

DOCKER_HUB: Final = "docker.io"
_HUB_NAMES: Final = frozenset({DOCKER_HUB, "index.docker.io", "registry-1.docker.io"})
_OFFICIAL: Final = "library/"
_EVERY: Final = "*"


@dataclass(frozen=True, slots=True)
class ImageName:
    """A parsed reference; `repository` is normalized."""

    registry: str  # host[:port]
    repository: str  # with its registry
    tag: str | None
    digest: str | None

    @classmethod
    def parse(cls, reference: str) -> Self:
        name, _, digest = reference.partition("@")
        head, slash, last = name.rpartition("/")
        last, _, tag = last.partition(":")
        registry, path = _split(head + slash + last)
        if registry == DOCKER_HUB and "/" not in path:
            path = f"{_OFFICIAL}{path}"
        return cls(registry, f"{registry}/{path}", tag or None, digest or None)

    def pinned(self, digest: str | None) -> Self:
        """The image with this digest in the same repository, without the tag; None: unchanged."""
        return self if digest is None else type(self)(self.registry, self.repository, None, digest)

    @property
    def path(self) -> str:
        """The repository without its registry."""
        return self.repository.removeprefix(f"{self.registry}/")

    def __str__(self) -> str:
        """The reference for the engine: a digest replaces the tag."""
        return (
            f"{self.repository}@{self.digest}" if self.digest else f"{self.repository}:{self.tag or 'latest'}"
        )


def registry_host(server: str) -> str:
    """The canonical host of a registry, without scheme and path."""
    host = server.lower().removeprefix("https://").removeprefix("http://").partition("/")[0]
    return DOCKER_HUB if host in _HUB_NAMES else host


def is_allowed(image: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns matches the image."""
    name = ImageName.parse(image)
    return any(_matches(pattern, name) for pattern in patterns)


def _matches(pattern: str, image: ImageName) -> bool:
    if pattern == _EVERY:
        return True
    # Match host and path separately: `*.example.com/x` must not match `evil.net/a.example.com/x`.
    host, path = _split(pattern)
    return _glob_matches(host, image.registry) and any(_glob_matches(path, each) for each in _paths(image))


def _paths(image: ImageName) -> tuple[str, ...]:
    if image.registry != DOCKER_HUB:
        return (image.path,)
    return image.path, image.path.removeprefix(_OFFICIAL)


def _glob_matches(pattern: str, text: str) -> bool:
    """Glob with `*` only, in linear time; a regular expression with many stars may take exponential time."""
    first, *others = pattern.split("*")
    if not others:
        return text == first
    if not text.startswith(first):
        return False
    at = len(first)
    *middle, last = others
    for part in middle:
        found = text.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return text.endswith(last) and len(text) - len(last) >= at


def _split(name: str) -> tuple[str, str]:
    """Host and path. The host is the first part if it looks like one (Docker's rule), else Docker Hub."""
    first, slash, rest = name.partition("/")
    return (registry_host(first), rest) if slash and _is_host(first) else (DOCKER_HUB, name)


def _is_host(first: str) -> bool:
    return "." in first or ":" in first or first == "localhost" or first != first.lower()
