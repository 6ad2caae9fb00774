"""Which images the agent has pulled, by the reference with a digest that their registry gave them under.

The engine gives whatever is on the node to whoever names it: the operator's own builds, what somebody pulled
by hand, and tags that moved long ago. A project without `local_images` gets only what is written down here;
for anything else its registry is asked.
"""

import json
import threading
from collections.abc import Callable
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from mooring.agent.sync.identity import StateDirectory, StateError

FILE: Final = "pulled_images"
# What is forgotten is asked of its registry again.
_MOST: Final = 10_000


class Pulled(BaseModel):
    """Attributes: private: it came with a project's credentials, so others must ask for themselves."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    image_id: str
    private: bool


class _Remembered(BaseModel):
    model_config = ConfigDict(extra="ignore")

    references: dict[str, Pulled] = {}


class PulledImages:
    """Kept on disk by `save`; references are `registry/path@digest`. Any thread may call."""

    def __init__(self, saved: bytes | None = None, save: Callable[[bytes], None] = lambda _: None) -> None:
        self._lock = threading.Lock()
        self._save = save
        known = _Remembered() if saved is None else _Remembered.model_validate_json(saved)
        self._known = known.references

    @classmethod
    def of_node(cls, state: StateDirectory) -> "PulledImages":
        """Raises StateError when the node's file makes no sense."""
        try:
            return cls(state.read(FILE), lambda content: state.write(FILE, content))
        except ValidationError as error:
            raise StateError(
                f"the agent's file {FILE} is damaged; delete it: registries are asked again for what it held"
            ) from error

    def find(self, reference: str, image_id: str) -> Pulled | None:
        """The pull by which the node has this image under this reference; None: the agent made none."""
        with self._lock:
            pulled = self._known.get(reference)
        return pulled if pulled is not None and pulled.image_id == image_id else None

    def add(self, reference: str, image_id: str, *, private: bool) -> None:
        """A registry has just given this image. Without credentials it gives it to everybody."""
        with self._lock:
            before = self._known.get(reference)
            if before is not None and before.image_id == image_id and not before.private:
                return
            pulled = Pulled(image_id=image_id, private=private)
            if pulled == before:
                return
            self._known.pop(reference, None)
            self._known[reference] = pulled
            while len(self._known) > _MOST:
                del self._known[next(iter(self._known))]
            references = {name: each.model_dump() for name, each in self._known.items()}
            self._save(json.dumps({"references": references}).encode())
