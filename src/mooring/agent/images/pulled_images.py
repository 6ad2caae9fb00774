"""The images that the agent has pulled, by reference with a digest.

The engine has no access control: anyone who names an image on the node gets it, including images that the
operator built or pulled, and outdated tags. A project without `local_images` may use only the images recorded
here; for all other images the agent contacts the registry.
"""

import json
import threading
from collections.abc import Callable
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from mooring.agent.sync.identity import StateDirectory, StateError

FILE: Final = "pulled_images"
_MAX_REFERENCES: Final = 10_000  # the registry is contacted again for a reference that was dropped


class PulledImage(BaseModel):
    """An image on the node; `private`: pulled with a project's credentials, so others must be authorized."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    image_id: str
    private: bool


class _PulledImagesFile(BaseModel):
    model_config = ConfigDict(extra="ignore")

    references: dict[str, PulledImage] = {}


class PulledImages:
    """The file, saved with `save`. References are `registry/path@digest`. Thread-safe."""

    def __init__(self, saved: bytes | None = None, save: Callable[[bytes], None] = lambda _: None) -> None:
        self._lock = threading.Lock()
        self._save = save
        self._known = _PulledImagesFile.model_validate_json(b"{}" if saved is None else saved).references

    @classmethod
    def of_node(cls, state: StateDirectory) -> "PulledImages":
        """Raises StateError: the file is damaged."""
        try:
            return cls(state.read(FILE), lambda content: state.write(FILE, content))
        except ValidationError as error:
            raise StateError(
                f"the agent's file {FILE} is damaged; delete it: the agent then contacts the registries again"
            ) from error

    def find(self, reference: str, image_id: str) -> PulledImage | None:
        """Return the image if the agent pulled it under this reference."""
        with self._lock:
            pulled = self._known.get(reference)
        return pulled if pulled is not None and pulled.image_id == image_id else None

    def add(self, reference: str, image_id: str, *, private: bool) -> None:
        """Record a pull. An image that was pulled without credentials stays public."""
        with self._lock:
            before = self._known.get(reference)
            if before is not None and before.image_id == image_id and not before.private:
                return
            pulled = PulledImage(image_id=image_id, private=private)
            if pulled == before:
                return
            self._known.pop(reference, None)
            self._known[reference] = pulled
            while len(self._known) > _MAX_REFERENCES:
                del self._known[next(iter(self._known))]
            references = {name: each.model_dump() for name, each in self._known.items()}
            self._save(json.dumps({"references": references}).encode())
