"""Images that were pulled with a project's credentials, and the registries that control access to them.

The engine has no access control: anyone who names an image gets it. So the agent records images pulled with
credentials. Another instance may use such an image only if a registry it was pulled from grants access.

Images are identified by id, since any registry can offer the same image under another name, and Docker then
downloads nothing. A registry that offers an image that was on the node before is not a source of it.
"""

import json
import threading
from collections.abc import Callable, Collection
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from mooring.agent.sync.identity import StateDirectory, StateError
from mooring.core.images import ImageName

FILE: Final = "private_images"


class _PrivateImagesFile(BaseModel):
    """Repositories that were pulled from with credentials, and the sources of each image ([]: public).

    A repository is saved before the pull: if the agent dies, or the engine completes an aborted pull, the
    image is still protected.
    """

    model_config = ConfigDict(extra="ignore")

    repositories: set[str] = set()
    sources: dict[str, list[str]] = {}


class PrivateImages:
    """The file, saved with `save`. Names are `registry/path@digest`, ids are the engine's. Thread-safe."""

    def __init__(self, saved: bytes | None = None, save: Callable[[bytes], None] = lambda _: None) -> None:
        self._lock = threading.Lock()
        self._save = save
        self._known = _PrivateImagesFile.model_validate_json(b"{}" if saved is None else saved)

    @classmethod
    def of_node(cls, state: StateDirectory) -> "PrivateImages":
        """Raises StateError: the file is damaged. An empty list would make private images public."""
        try:
            return cls(state.read(FILE), lambda content: state.write(FILE, content))
        except ValidationError as error:
            raise StateError(
                f"the agent's file {FILE} is damaged; remove the images that projects have pulled with "
                "credentials (`docker image prune --all`), then delete it"
            ) from error

    def sources(self, image_id: str, names: Collection[str]) -> tuple[str, ...]:
        """Return the sources of an image: any of them can grant access. Without any, the image is public.

        Args:
            names: all names of the image in the engine.
        """
        with self._lock:
            return tuple(self._sources(image_id, names))

    def add_repository(self, repository: str) -> None:
        """Save the repository before a pull with credentials."""
        with self._lock:
            if repository not in self._known.repositories:
                self._known.repositories.add(repository)
                self._write()

    def add(
        self, image_id: str, names: Collection[str], source: str, *, was_there: bool, credentials: bool
    ) -> None:
        """Record a completed pull of this image from `source`.

        Args:
            was_there: the node had the image before; if it was public, it stays public.
            credentials: whether a project's credentials were sent.
        """
        repository = ImageName.parse(source).repository
        with self._lock:
            after = before = self._known.sources.get(image_id)
            if before is None:
                # Sources other than this one are from pulls with credentials that were interrupted.
                sources = self._sources(image_id, names)
                others = [name for name in sources if not _has([name], repository)]
                if sources or credentials:
                    after = others or ([source] if credentials and not was_there else [])
            elif _has(before, repository):
                after = sorted({*before, source}) if credentials else []
            if after is not None and after != before:
                self._known.sources[image_id] = after
                self._write()

    def make_public(self, image_id: str) -> None:
        """Mark the image as public: a source grants access without credentials."""
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
