"""Which of the engine's images only their registry may hand out: those that a project's credentials pulled.

The engine gives whatever it has to whoever names it. So an image that came with credentials is remembered,
and an instance gets it once the registry that it came from has said that this instance may have it.

An image is known by its id, since any registry can offer the same one under a name of its own: Docker does
not even fetch what it has. Who has merely named it after it was there is no source of it, and is not asked.
"""

import json
import threading
from collections.abc import Callable, Collection
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from mooring.agent.sync.identity import StateDirectory, StateError
from mooring.core.images import ImageName

FILE: Final = "private_images"


class _Remembered(BaseModel):
    """Repositories from which was pulled with credentials; and, by image, the sources to be asked.

    A repository is written down before the pull, so that an agent that dies in the middle of it, or a pull
    that is given up and comes to its end all the same, leaves no image that nobody guards. No sources: it has
    turned out to be free.
    """

    model_config = ConfigDict(extra="ignore")

    repositories: set[str] = set()
    sources: dict[str, list[str]] = {}


class PrivateImages:
    """Kept on disk by `save`; names are `registry/path@digest`, ids the engine's. Any thread may call."""

    def __init__(self, saved: bytes | None = None, save: Callable[[bytes], None] = lambda _: None) -> None:
        self._lock = threading.Lock()
        self._save = save
        self._known = _Remembered() if saved is None else _Remembered.model_validate_json(saved)

    @classmethod
    def of_node(cls, state: StateDirectory) -> "PrivateImages":
        """Raises StateError when the node's file makes no sense: it must not be taken for an empty one."""
        try:
            return cls(state.read(FILE), lambda content: state.write(FILE, content))
        except ValidationError as error:
            raise StateError(
                f"the agent's file {FILE} is damaged; remove the images that projects have pulled with "
                "credentials (`docker image prune --all`), then delete it"
            ) from error

    def sources(self, image_id: str, names: Collection[str]) -> tuple[str, ...]:
        """Who is to be asked for this image, any of them; none: it is free.

        Args:
            names: all that the engine knows the image by.
        """
        with self._lock:
            return tuple(self._sources(image_id, names))

    def expect(self, repository: str) -> None:
        """A pull with credentials is about to begin; on disk when this returns."""
        with self._lock:
            if repository not in self._known.repositories:
                self._known.repositories.add(repository)
                self._write()

    def pulled(
        self, image_id: str, names: Collection[str], source: str, *, was_there: bool, credentials: bool
    ) -> None:
        """A pull from `source` has ended with this image.

        Args:
            was_there: the node had it before, perhaps with nobody to ask: then it stays free.
            credentials: whether a project's were needed, as far as anybody knows.
        """
        repository = ImageName.parse(source).repository
        with self._lock:
            before = self._known.sources.get(image_id)
            after = before
            if before is None:
                asked = self._sources(image_id, names)
                others = [name for name in asked if not _has([name], repository)]
                if asked or credentials:
                    after = others or ([source] if credentials and not was_there else [])
            elif _has(before, repository):
                after = sorted({*before, source}) if credentials else []
            if after is not None and after != before:
                self._known.sources[image_id] = after
                self._write()

    def free(self, image_id: str) -> None:
        """A source gives it to anybody."""
        with self._lock:
            if self._known.sources.get(image_id) != []:
                self._known.sources[image_id] = []
                self._write()

    def _sources(self, image_id: str, names: Collection[str]) -> list[str]:
        if (known := self._known.sources.get(image_id)) is not None:
            return known
        return [name for name in names if ImageName.parse(name).repository in self._known.repositories]

    def _write(self) -> None:
        content = {
            "repositories": sorted(self._known.repositories),
            "sources": dict(sorted(self._known.sources.items())),
        }
        self._save(json.dumps(content).encode())


def _has(names: Collection[str], repository: str) -> bool:
    return any(ImageName.parse(name).repository == repository for name in names)
