"""Text that others choose, such as names and log lines, made safe to show in a terminal."""

import re

_ESCAPE_SEQUENCE = re.compile(
    "\x1b(?:\\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    "|\\][^\x07\x1b]*(?:\x07|\x1b\\\\)?"  # OSC: window title, links
    "|[ -/]*[0-~])"
)
# Besides control characters: line separators, and marks that change the order in which text is shown.
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def clean_line(text: str) -> str:
    """Remove control characters and terminal sequences, which could forge what a terminal shows."""
    return _CONTROL.sub("", _ESCAPE_SEQUENCE.sub("", text))
