"""JSON pointers (RFC 6901)."""


def escaped(name: str) -> str:
    """The name of a field as a part of a pointer."""
    return name.replace("~", "~0").replace("/", "~1")
