"""Placeholders in JSON documents: `${name}` in a text stands for a value."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

_PLACEHOLDER: Final = re.compile(r"\$\$\{|\$\{([a-z][a-z0-9_]*)\}")


def names_in(document: Any) -> Iterator[str]:
    """Yield the name of each placeholder in the texts of a document. Keys of objects have none."""
    if isinstance(document, str):
        yield from (found[1] for found in _PLACEHOLDER.finditer(document) if found[1])
    elif isinstance(document, Mapping):
        for value in document.values():
            yield from names_in(value)
    elif isinstance(document, list):
        for value in document:
            yield from names_in(value)


def filled(document: Any, values: Mapping[str, Any]) -> Any:
    """Replace the placeholders. A text that is one placeholder alone becomes the value, with its type.

    Values are not searched for placeholders.

    Raises:
        KeyError: a placeholder has no value.
    """
    if isinstance(document, str):
        alone = _PLACEHOLDER.fullmatch(document)
        if alone and alone[1]:
            return values[alone[1]]
        return _PLACEHOLDER.sub(lambda found: _text(values[found[1]]) if found[1] else "${", document)
    if isinstance(document, Mapping):
        return {name: filled(value, values) for name, value in document.items()}
    if isinstance(document, list):
        return [filled(value, values) for value in document]
    return document


def _text(value: Any) -> str:
    """A value within a text, as JSON writes it: `true`, not `True`."""
    return str(value).lower() if isinstance(value, bool) else str(value)
