"""Names of images in full, and the patterns that say which images a project may run (R15).

`busybox` is `docker.io/library/busybox:latest`: what may run is decided on the full name, so that no way of
writing it gets around a rule. A pattern is `registry/repository`; tags and digests play no part:

- `*` stands for any characters, none included. In a repository it stands for `/` too; in a registry it
  cannot, since that ends at the first `/`.
- What comes before the first `/` is a registry if it holds a dot or a colon or is `localhost`, as in images'
  names. A pattern without a registry is of Docker Hub (`docker.io`, also known as `index.docker.io`).
- An official image goes by two names: `docker.io/library/busybox` and `docker.io/busybox`.
- `*` alone is every image of every registry.
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
    """A reference taken apart; `repository` is the same for all ways of writing it."""

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
        """The same repository's image of this digest, whatever its tag says now; None: as it is."""
        return self if digest is None else type(self)(self.registry, self.repository, None, digest)

    @property
    def path(self) -> str:
        """The repository without its registry."""
        return self.repository.removeprefix(f"{self.registry}/")

    def __str__(self) -> str:
        """What the engine finds it by: a digest makes a tag superfluous."""
        return (
            f"{self.repository}@{self.digest}" if self.digest else f"{self.repository}:{self.tag or 'latest'}"
        )


def registry_host(server: str) -> str:
    """A registry's one name, of those it is known by; a scheme and a path are left out."""
    host = server.lower().removeprefix("https://").removeprefix("http://").partition("/")[0]
    return DOCKER_HUB if host in _HUB_NAMES else host


def is_allowed(image: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns names the image."""
    name = ImageName.parse(image)
    return any(_names(pattern, name) for pattern in patterns)


def _names(pattern: str, image: ImageName) -> bool:
    if pattern == _EVERY:
        return True
    first, slash, rest = pattern.partition("/")
    host, path = (registry_host(first), rest) if slash and _is_host(first) else (DOCKER_HUB, pattern)
    # Host and path each on its own: `*.example.com/x` must not name `evil.net/a.example.com/x`.
    return _matches(host, image.registry) and any(_matches(path, known) for known in _paths(image))


def _paths(image: ImageName) -> tuple[str, ...]:
    if image.registry != DOCKER_HUB:
        return (image.path,)
    return image.path, image.path.removeprefix(_OFFICIAL)


def _matches(pattern: str, text: str) -> bool:
    """Glob with `*` only, in time linear in both; a regular expression may take forever over many stars."""
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
    """The first part is a host if it looks like one (as Docker has it), else all is a path on Docker Hub."""
    first, slash, rest = name.partition("/")
    host, path = (registry_host(first), rest) if slash and _is_host(first) else (DOCKER_HUB, name)
    return host, f"{_OFFICIAL}{path}" if host == DOCKER_HUB and "/" not in path else path


def _is_host(first: str) -> bool:
    return "." in first or ":" in first or first == "localhost" or first != first.lower()
