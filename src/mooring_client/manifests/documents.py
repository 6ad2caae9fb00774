"""YAML as the values of JSON, with the line of each value. Whatever could be meant otherwise is refused.

Values are those of YAML 1.2's core schema: `yes`, `on`, `12:30` and dates are text; so are numbers that
JSON does not have, such as `010`. Anchors, aliases, tags and merge keys are refused: a small file cannot
become a large value, and no value is made by code.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from mooring_client.schemas.pointers import escaped

# The parser in C is 20 times faster; only a build of PyYAML without libyaml lacks it.
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MAX_BYTES: Final = 1024 * 1024
_MAX_DEPTH: Final = 32
_NULLS: Final = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLEANS: Final = {
    word: word.lower() == "true" for word in ("true", "True", "TRUE", "false", "False", "FALSE")
}
# A float of more digits would be infinite; an int of more is in no request.
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,29})")
_FLOAT = re.compile(r"[-+]?(\.[0-9]{1,30}|(0|[1-9][0-9]{0,29})(\.[0-9]{0,30})?)([eE][-+]?[0-9]{1,2})?")


class BadDocument(Exception):
    """A file that cannot be read. The message has the line, if there is one."""


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a file.

    Attributes:
        source: the name of the file, for messages.
        lines: the line of each value, by its JSON pointer; that of the whole document has the pointer "".
    """

    source: str
    value: Any
    lines: Mapping[str, int]

    def where(self, pointer: str = "") -> str:
        """File and line of a value, or of the part that it would be in."""
        while pointer not in self.lines:
            pointer = pointer.rpartition("/")[0]
        return f"{self.source}:{self.lines[pointer]}"


def read(content: bytes, source: str) -> list[Document]:
    """The documents of a file that are not empty.

    Raises:
        BadDocument: it is too large, not UTF-8, or not the YAML that is accepted here.
    """
    if len(content) > MAX_BYTES:
        raise BadDocument(f"{source} is larger than {MAX_BYTES // 1024} KiB")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise BadDocument(f"{source}:{line}: the file is not UTF-8") from None
    try:
        return [each for each in _Reader(text, source).documents() if each.value is not None]
    except yaml.YAMLError as error:
        raise BadDocument(f"{source}{_line_of(error)}: {_problem_of(error)}") from None


def _line_of(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f":{mark.line + 1}"


def _problem_of(error: yaml.YAMLError) -> str:
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "this is not valid YAML"
    context = getattr(error, "context", None)
    return f"{context}: {problem}" if context else str(problem)


@dataclass(slots=True)
class _Open:
    """A mapping or list whose end has not been read."""

    value: dict[str, Any] | list[Any]
    pointer: str
    key: str | None = None


@dataclass
class _Reader:
    """Builds values from events, so that nothing is built of what is refused."""

    text: str
    source: str
    lines: dict[str, int] = field(default_factory=dict)
    open: list[_Open] = field(default_factory=list)
    root: Any = None

    def documents(self) -> Iterator[Document]:
        event: Any
        for event in yaml.parse(self.text, Loader=_LOADER):
            if isinstance(event, yaml.DocumentStartEvent):
                self.lines, self.root = {"": _line(event)}, None
            elif isinstance(event, yaml.DocumentEndEvent):
                yield Document(self.source, self.root, self.lines)
            elif isinstance(event, yaml.NodeEvent):
                self._require_plain(event)
                self._node(event)
            elif isinstance(event, yaml.CollectionEndEvent):
                self.open.pop()

    def _node(self, event: Any) -> None:
        parent = self.open[-1] if self.open else None
        if parent is not None and isinstance(parent.value, dict) and parent.key is None:
            parent.key = self._key(parent, event)
            return
        pointer = self._place(parent, event)
        value = self._value(event)
        if parent is None:
            self.root = value
        elif isinstance(parent.value, list):
            parent.value.append(value)
        else:
            parent.value[str(parent.key)], parent.key = value, None
        if isinstance(value, dict | list):
            if len(self.open) == _MAX_DEPTH:
                raise self._refused(event, f"values are nested deeper than {_MAX_DEPTH} levels")
            self.open.append(_Open(value, pointer))

    def _key(self, parent: _Open, event: Any) -> str:
        if not isinstance(event, yaml.ScalarEvent):
            raise self._refused(event, "the name of a field must be text")
        if event.value == "<<" and not event.style:
            raise self._refused(event, "merge keys (<<) are not supported; write the fields out")
        key = str(event.value)
        pointer = f"{parent.pointer}/{escaped(key)}"
        if pointer in self.lines:
            raise self._refused(event, f"{key} is given twice, first in line {self.lines[pointer]}")
        self.lines[pointer] = _line(event)
        return key

    def _place(self, parent: _Open | None, event: Any) -> str:
        if parent is None:
            self.lines[""] = _line(event)
            return ""
        if isinstance(parent.value, dict):
            return f"{parent.pointer}/{escaped(str(parent.key))}"
        pointer = f"{parent.pointer}/{len(parent.value)}"
        self.lines[pointer] = _line(event)
        return pointer

    def _require_plain(self, event: Any) -> None:
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise self._refused(event, "anchors (&) and aliases (*) are not supported; write the value out")
        if getattr(event, "tag", None) is not None:
            raise self._refused(event, f"tags ({event.tag}) are not supported; quote the value if it is text")

    def _value(self, event: Any) -> Any:
        if isinstance(event, yaml.MappingStartEvent):
            return {}
        if isinstance(event, yaml.SequenceStartEvent):
            return []
        return event.value if event.style else _plain(event.value)

    def _refused(self, event: Any, problem: str) -> BadDocument:
        return BadDocument(f"{self.source}:{_line(event)}: {problem}")


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def _plain(text: str) -> Any:
    """The value of a scalar without quotes."""
    if text in _NULLS:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text
