"""Names of images, in full: `busybox` is `docker.io/library/busybox:latest`."""

from dataclasses import dataclass
from typing import Final, Self

DOCKER_HUB: Final = "docker.io"
_HUB_NAMES: Final = frozenset({DOCKER_HUB, "index.docker.io", "registry-1.docker.io"})


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

    def __str__(self) -> str:
        """What the engine finds it by: a digest makes a tag superfluous."""
        return (
            f"{self.repository}@{self.digest}" if self.digest else f"{self.repository}:{self.tag or 'latest'}"
        )


def registry_host(server: str) -> str:
    """A registry's one name, of those it is known by."""
    host = server.removeprefix("https://").removeprefix("http://").partition("/")[0]
    return DOCKER_HUB if host in _HUB_NAMES else host


def _split(name: str) -> tuple[str, str]:
    """The first part is a host if it looks like one (as Docker has it), else all is a path on Docker Hub."""
    first, slash, rest = name.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost" or first != first.lower()):
        host, path = registry_host(first), rest
    else:
        host, path = DOCKER_HUB, name
    return host, f"library/{path}" if host == DOCKER_HUB and "/" not in path else path
