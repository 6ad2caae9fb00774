"""String types of all requests and reports, which reject text that PostgreSQL or Docker cannot take.

PostgreSQL cannot store NUL, SQLite can; the two databases must accept the same text.
"""

from typing import Annotated, Final

from pydantic import StringConstraints

# Lone surrogates never reach these types: the JSON parser rejects them (api/http/body.py), and query strings
# are decoded with replacement.
NO_NUL = r"^[^\x00]*$"
DNS_LABEL = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"

LONGEST_TEXT = 4096
Text = Annotated[str, StringConstraints(pattern=NO_NUL, max_length=LONGEST_TEXT)]
LongText = Annotated[str, StringConstraints(pattern=NO_NUL, max_length=32_768)]
Name = Annotated[str, StringConstraints(pattern=DNS_LABEL, min_length=1, max_length=63)]
LabelKey = Annotated[
    str, StringConstraints(pattern=r"^[a-zA-Z0-9]([a-zA-Z0-9._/-]{0,61}[a-zA-Z0-9])?$", max_length=63)
]
LabelValue = Annotated[str, StringConstraints(pattern=NO_NUL, max_length=255)]
LabelFilter = Annotated[
    str,
    StringConstraints(
        pattern=r"^[a-zA-Z0-9]([a-zA-Z0-9._/-]{0,61}[a-zA-Z0-9])?:[^\x00]*$", max_length=63 + 1 + 255
    ),
]
EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=128)]
EnvValue = Annotated[str, StringConstraints(pattern=NO_NUL, max_length=32_768)]
EnvEntry = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}=[^\x00]*$", max_length=128 + 1 + 32_768)
]
SecretName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$", max_length=63)
]
GpuUuid = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", max_length=96)]
ImageReference = Annotated[
    str,
    StringConstraints(
        # The grammar of github.com/distribution/reference: host[:port]/path[:tag][@digest].
        pattern=(
            r"^([a-zA-Z0-9.-]+(:[0-9]{1,5})?/)?[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"
            r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[a-f0-9]{64})?$"
        ),
        min_length=1,
        max_length=512,
    ),
]


_LONGEST_MESSAGE = 2000
MAX_LINE_BYTES: Final = 16_384  # of a line of logs or output


def printable(message: str) -> str:
    """Make a message from Docker or a driver safe to store and show: no control characters, limited length.

    Otherwise a NUL in one container's error would make PostgreSQL reject the node's whole report.
    """
    cleaned = message
    if not message.isprintable():
        cleaned = "".join(character if character.isprintable() else " " for character in message)
    return cleaned if len(cleaned) <= _LONGEST_MESSAGE else f"{cleaned[:_LONGEST_MESSAGE]}…"
