"""Exit codes, and the message of each failure.

| code | meaning |
|---|---|
| 0 | success |
| 1 | another error |
| 2 | wrong usage, or no configuration |
| 3 | not found |
| 4 | not allowed: no or a bad key, a missing permission |
| 5 | no capacity, or a quota is exceeded |
| 7 | the server cannot be reached |
| 124 | a time limit was exceeded |
| 130 | interrupted by Ctrl-C |

`run`, `exec`, `ssh` and `wait` end with the exit code of the program in the container.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from mooring_client.errors import (
    Forbidden,
    InsufficientCapacity,
    MooringError,
    NotFound,
    QuotaExceeded,
    Unauthorized,
)
from mooring_client.failures import (
    ClientFailure,
    ConnectionFailed,
    NoApiKey,
    NotConfigured,
    WaitTimeout,
)
from mooring_client.terminal_text import clean_line


class Exit(IntEnum):
    ERROR = 1
    USAGE = 2
    NOT_FOUND = 3
    NOT_ALLOWED = 4
    NO_CAPACITY = 5
    UNREACHABLE = 7
    TIMEOUT = 124
    INTERRUPTED = 130


# The first that matches.
_EXITS: tuple[tuple[type[Exception], Exit], ...] = (
    (NotFound, Exit.NOT_FOUND),
    (QuotaExceeded, Exit.NO_CAPACITY),
    (InsufficientCapacity, Exit.NO_CAPACITY),
    (Unauthorized, Exit.NOT_ALLOWED),
    (Forbidden, Exit.NOT_ALLOWED),
    (NoApiKey, Exit.NOT_ALLOWED),
    (NotConfigured, Exit.USAGE),
    (ConnectionFailed, Exit.UNREACHABLE),
    (WaitTimeout, Exit.TIMEOUT),
)


def exit_of(failure: Exception) -> Exit:
    return next((code for kind, code in _EXITS if isinstance(failure, kind)), Exit.ERROR)


def message_of(failure: MooringError | ClientFailure) -> str:
    """What the user reads: the server's sentence, each invalid field, and the ID for the server's log."""
    lines = [f"mooring: {failure}"]
    if isinstance(failure, MooringError):
        stated = failure.fields.get("errors")
        problems = [
            f"{item.get('pointer')}: {item.get('message')}"
            for item in (stated if isinstance(stated, list) else ())
            if isinstance(item, dict)
        ]
        lines += [f"  {problem}" for problem in problems if problem not in lines[0]]
        if failure.repeated:
            lines[0] += " (an earlier attempt, whose answer was lost, may have taken effect)"
        lines[0] += f" ({failure.code}{f', request {failure.request_id}' if failure.request_id else ''})"
    return "\n".join(map(clean_line, lines))


@contextmanager
def reported() -> Iterator[None]:
    """Turn failures within the block into a message on stderr and an exit code."""
    try:
        yield
    except (MooringError, ClientFailure) as failure:
        print(message_of(failure), file=sys.stderr)
        sys.exit(exit_of(failure))
    except KeyboardInterrupt:
        sys.exit(Exit.INTERRUPTED)
