"""Cookies: our own, which no program gets, and those of programs, which no other origin gets."""

import re
from typing import Final

_SECURE_NAME: Final = "__Host-mooring-port"  # with this prefix, browsers accept it from this host only
_NAME: Final = "mooring-port"
OUR_NAMES: Final = frozenset({_SECURE_NAME.encode(), _NAME.encode()})
_ATTRIBUTE_END: Final = re.compile(rb";[ \t]*")


def made(value: str, *, secure: bool, path: str, max_age_s: int) -> bytes:
    """Our cookie, as in Set-Cookie."""
    is_host_cookie = secure and path == "/"
    name = _SECURE_NAME if is_host_cookie else _NAME
    attributes = f"Path={path}; Max-Age={max_age_s}; HttpOnly; SameSite=Lax"
    return f"{name}={value}; {attributes}{'; Secure' if secure else ''}".encode()


def ours(cookies: list[bytes]) -> list[str]:
    """The values of our cookies. A program of another host may have added some."""
    return [value.strip().decode("latin-1") for name, value in _pairs(cookies) if name.strip() in OUR_NAMES]


def without_ours(cookies: list[bytes]) -> bytes | None:
    """The Cookie header for the program; None: no cookie is left."""
    left = [name + (b"=" + value if value is not None else b"") for name, value in _raw_pairs(cookies)]
    return b"; ".join(left) or None


def _pairs(cookies: list[bytes]) -> list[tuple[bytes, bytes]]:
    found = []
    for line in cookies:
        for part in line.split(b";"):
            name, _, value = part.partition(b"=")
            found.append((name, value))
    return found


def _raw_pairs(cookies: list[bytes]) -> list[tuple[bytes, bytes | None]]:
    found: list[tuple[bytes, bytes | None]] = []
    for line in cookies:
        for part in line.split(b";"):
            name, equals, value = part.strip().partition(b"=")
            if name.strip() in OUR_NAMES or not part.strip():
                continue
            found.append((name, value if equals else None))
    return found


def of_program(value: bytes, path: str | None) -> bytes | None:
    """A program's Set-Cookie for its own host only; None: it must not be set.

    Args:
        path: of all its cookies, because other programs share the host; None: as the program likes.
    """
    pair, *attributes = _ATTRIBUTE_END.split(value)
    name = pair.partition(b"=")[0].strip()
    if name in OUR_NAMES or (not name and any(pair.strip().startswith(b"=" + each) for each in OUR_NAMES)):
        return None
    dropped = {b"domain", b"path"} if path is not None else {b"domain"}
    kept = [each for each in attributes if each.partition(b"=")[0].strip().lower() not in dropped]
    if path is not None:
        if name.lower().startswith(b"__host-"):
            return None  # a browser would refuse it with this path
        kept.append(b"Path=" + path.encode())
    return b"; ".join([pair, *filter(None, kept)])
