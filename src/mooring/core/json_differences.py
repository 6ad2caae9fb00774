"""What differs between two JSON documents, as JSON pointers (RFC 6901)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from mooring_client.schemas.base import Json
from mooring_client.schemas.pointers import escaped

# The value of a member that one of the documents does not have.
ABSENT: Final = object()


@dataclass(frozen=True, slots=True)
class JsonDifference:
    """A value that differs; ABSENT if one of the documents has no such member."""

    pointer: str
    before: Any
    after: Any

    @property
    def field(self) -> str:
        """The member of the whole document that the value is part of."""
        return self.pointer.split("/")[1]


def differences(before: Json, after: Json) -> tuple[JsonDifference, ...]:
    """The smallest parts that differ: members of objects, at any depth. A list is one value."""
    return tuple(_differences("", before, after))


def _differences(pointer: str, before: Any, after: Any) -> Iterator[JsonDifference]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in dict.fromkeys((*before, *after)):
            part = f"{pointer}/{escaped(name)}"
            yield from _differences(part, before.get(name, ABSENT), after.get(name, ABSENT))
    elif before != after:
        yield JsonDifference(pointer, before, after)
