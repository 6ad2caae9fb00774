"""Output of lists and single resources: tables, JSON, YAML and names. Data is on stdout, messages on stderr.

`-o json` prints the objects of the API as they are, so that scripts can rely on docs/openapi.json. Others
choose names and labels, and could forge what a terminal shows: JSON and YAML are ASCII, and elsewhere control
characters are removed.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

from mooring_client.terminal_text import clean_line

Row = Mapping[str, Any]


class Format(StrEnum):
    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


FormatOption = Annotated[
    Format,
    typer.Option("--output", "-o", help="json and yaml: the objects of the API; name: one name a line"),
]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        of: the text of the column in a row.
        wide: shown only with `-o wide`.
    """

    title: str
    of: Callable[[Row], str]
    wide: bool = False


def show_list(items: Iterable[Row], columns: Sequence[Column], chosen: Format, *, empty: str) -> None:
    """Print a list.

    Args:
        empty: the message if a table would have no rows.
    """
    rows = list(items)
    if chosen is Format.JSON:
        _print_json(rows)
    elif chosen is Format.YAML:
        _print_yaml(rows)
    elif chosen is Format.NAME:
        for row in rows:
            print(_name_of(row))
    elif rows:
        shown = [column for column in columns if chosen is Format.WIDE or not column.wide]
        texts = [[clean_line(column.of(row)) for column in shown] for row in rows]
        print("\n".join(table([column.title for column in shown], texts)))
    else:
        print(empty, file=sys.stderr)


def show_one(item: Row, chosen: Format, fields: Sequence[tuple[str, str]]) -> None:
    """Print one resource; as a table, its fields one below the other."""
    if chosen is Format.JSON:
        _print_json(item)
    elif chosen is Format.YAML:
        _print_yaml(item)
    elif chosen is Format.NAME:
        print(_name_of(item))
    else:
        width = max(len(title) for title, _value in fields)
        for title, value in fields:
            print(f"{title:<{width}}  {clean_line(value)}")


def _name_of(item: Row) -> str:
    return clean_line(str(item.get("name") or item.get("uuid") or item.get("id")))


def _print_json(value: object) -> None:
    import json

    print(json.dumps(value, indent=2))


def _print_yaml(value: object) -> None:
    import yaml

    print(yaml.safe_dump(value, sort_keys=False), end="")


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table without lines: each column as wide as its longest text, but the last."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    widths[-1] = 0
    return [
        "   ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
        for row in (titles, *rows)
    ]


_UNITS: Final = ((86_400, "d"), (3600, "h"), (60, "m"))


def age(timestamp: str | None, now: datetime | None = None) -> str:
    """How long ago a time was: `5s`, `12m`, `3h`, `9d`; `-` for None."""
    if timestamp is None:
        return "-"
    passed = ((now or datetime.now(UTC)) - datetime.fromisoformat(timestamp)).total_seconds()
    return duration(max(0.0, passed))


def duration(seconds: float) -> str:
    """A duration in its largest unit, rounded down."""
    for unit_s, name in _UNITS:
        if seconds >= unit_s:
            return f"{int(seconds // unit_s)}{name}"
    return f"{int(seconds)}s"


def size(mib: float | None) -> str:
    """A size in MiB as a short text: `512 MiB`, `80 GiB`, `1.5 TiB`."""
    if mib is None:
        return "-"
    for unit, name in ((1024 * 1024, "TiB"), (1024, "GiB")):
        if mib >= unit:
            return f"{mib / unit:.1f} {name}".replace(".0 ", " ")
    return f"{mib:g} MiB"


def gpus_of(spec: Row) -> str:
    """The GPUs of a request: `2 x H100`, `1 x 1g.10gb`, `0.25 x A100`, or `-`."""
    gpus = spec.get("gpus") or {}
    count, model = gpus.get("count") or 0, gpus.get("model")
    if not count:
        return "-"
    name = gpus.get("mig_profile") or (" or ".join(model) if isinstance(model, list) else model)
    number = f"{gpus['share']:g}" if gpus.get("share") else str(count)
    return f"{number} x {name}" if name else number
