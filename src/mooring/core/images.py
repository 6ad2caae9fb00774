"""Normalized image names, and the patterns of images that a project may run (R15).

`busybox` is `docker.io/library/busybox:latest`. Patterns match the normalized name, so that no spelling
evades a rule. A pattern is `registry/repository`; tags and digests are ignored:

- `*` matches any characters, or none. In a repository it also matches `/`.
- The part before the first `/` is a registry if it contains a dot or a colon or is `localhost`, as in image
  names. A pattern without a registry is for Docker Hub (`docker.io`, also known as `index.docker.io`).
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
    return any(_names(pattern, name) for pattern in patterns)


def _names(pattern: str, image: ImageName) -> bool:
    if pattern == _EVERY:
        return True
    first, slash, rest = pattern.partition("/")
    host, path = (registry_host(first), rest) if slash and _is_host(first) else (DOCKER_HUB, pattern)
    # Match host and path separately: `*.example.com/x` must not match `evil.net/a.example.com/x`.
    return _matches(host, image.registry) and any(_matches(path, known) for known in _paths(image))


def _paths(image: ImageName) -> tuple[str, ...]:
    if image.registry != DOCKER_HUB:
        return (image.path,)
    return image.path, image.path.removeprefix(_OFFICIAL)


def _matches(pattern: str, text: str) -> bool:
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
    """The first part is a host if it looks like one (Docker's rule), else all is a path on Docker Hub."""
    first, slash, rest = name.partition("/")
    host, path = (registry_host(first), rest) if slash and _is_host(first) else (DOCKER_HUB, name)
    return host, f"{_OFFICIAL}{path}" if host == DOCKER_HUB and "/" not in path else path


def _is_host(first: str) -> bool:
    return "." in first or ":" in first or first == "localhost" or first != first.lower()
