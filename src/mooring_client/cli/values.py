"""Values of options: sizes, durations, key=value pairs, mounts and variables."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import typer

_SIZES: Final[Mapping[str, float]] = {
    "": 1, "m": 1, "mb": 1, "mib": 1, "g": 1024, "gb": 1024, "gib": 1024, "t": 1024**2, "tb": 1024**2,
    "tib": 1024**2,
}  # fmt: skip
_DURATIONS: Final[Mapping[str, int]] = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def mib(text: str) -> int:
    """A size: `512m`, `16g`, `1.5t`; a plain number is MiB."""
    number, unit = _parts(text, _SIZES, "a size, such as 512m or 16g")
    return max(1, round(number * _SIZES[unit]))


def seconds(text: str) -> int:
    """A duration: `90s`, `30m`, `8h`, `2d`; a plain number is seconds."""
    number, unit = _parts(text, _DURATIONS, "a duration, such as 30m or 8h")
    return max(1, round(number * _DURATIONS[unit]))


def _parts(text: str, units: Mapping[str, float], expected: str) -> tuple[float, str]:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in units:
        raise typer.BadParameter(f"{text!r} is not {expected}")
    return float(match[1]), match[2]


def typed(text: str, kind: str, name: str) -> bool | int | float | str:
    """The value of a parameter of a template: as JSON writes it, a string without quotes.

    Raises:
        typer.BadParameter: it is none of this kind.
    """
    try:
        if kind == "integer":
            return int(text)
        if kind == "number":
            return float(text)
    except ValueError:
        raise typer.BadParameter(f"{name} must be a number, not {text!r}", param_hint="--param") from None
    if kind == "boolean":
        if text not in {"true", "false"}:
            raise typer.BadParameter(f"{name} must be true or false, not {text!r}", param_hint="--param")
        return text == "true"
    return text


def as_text(value: bool | int | float | str) -> str:
    """As `typed` reads it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def pairs(texts: Iterable[str], option: str) -> dict[str, str]:
    """The values of an option that is given as `key=value`, several times."""
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"{text!r} is not key=value", param_hint=option)
        found[key] = value
    return found


def mounts(texts: Iterable[str]) -> list[dict[str, Any]]:
    """The `volumes` of a spec from `-v NAME:/path[:ro]`, as with docker."""
    found = []
    for text in texts:
        name, _, rest = text.partition(":")
        path, _, mode = rest.partition(":")
        if not name or not path or mode not in {"", "ro", "rw"}:
            raise typer.BadParameter(f"{text!r} is not NAME:/path or NAME:/path:ro", param_hint="--volume")
        if name.startswith(("/", ".", "~")):
            message = f"{name!r} is a path; name a volume: `mooring volumes ls` lists them"
            raise typer.BadParameter(message, param_hint="--volume")
        found.append({"volume": name, "path": path, **({"read_only": True} if mode == "ro" else {})})
    return found


def environment(given: Iterable[str], files: Iterable[Path], secrets: Iterable[str]) -> dict[str, Any]:
    """The `env` of a spec from `-e`, `--env-file` and `--secret`; later ones replace earlier ones."""
    import os

    found: dict[str, Any] = {}
    for file in files:
        for line in _lines(file):
            found.update(pairs([line], "--env-file"))
    for text in given:
        name, equals, value = text.partition("=")
        if equals:
            found[name] = value
        elif name in os.environ:  # `-e NAME` passes the variable on, as with docker
            found[name] = os.environ[name]
        else:
            raise typer.BadParameter(f"{name} is not set here; write {name}=value", param_hint="--env")
    for text in secrets:
        name, _, secret = text.partition("=")
        found[name] = {"secret": secret or name}
    return found


def _lines(file: Path) -> list[str]:
    try:
        text = file.read_text()
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"cannot read {file}: {error}", param_hint="--env-file") from None
    return [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]
