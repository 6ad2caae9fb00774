"""The messages of streams: the framing of Kubernetes' `v5.channel.k8s.io` over WebSockets.

Each message is binary. Its first byte is the channel, the rest is data of that channel. A message without
data is a keepalive, except on CLOSE. Channel 5 is Mooring's own; Kubernetes has no channel for signals.
"""

from collections.abc import Iterable, Iterator
from enum import IntEnum
from itertools import groupby
from typing import Final

SUBPROTOCOL: Final = "v5.channel.k8s.io"
TCP_SUBPROTOCOL: Final = "tcp"  # without channels: each message is data, an empty one the end of the data
MAX_DATA_BYTES: Final = 64 * 1024  # of a message that Mooring sends
MAX_MESSAGE_BYTES: Final = 1024 * 1024  # of a message that Mooring accepts


class Channel(IntEnum):
    STDIN = 0  # data to the program, or to the port
    STDOUT = 1  # data from the program, or from the port
    STDERR = 2
    STATUS = 3  # a StreamStatus as JSON, once, as the last message
    RESIZE = 4  # {"Width": columns, "Height": rows}
    SIGNAL = 5  # {"Signal": "TERM"}
    CLOSE = 255  # the data is one byte: the channel that its sender closes


KEEPALIVE: Final = bytes([Channel.STDOUT])
STDIN_CLOSED: Final = bytes([Channel.CLOSE, Channel.STDIN])
STDOUT_CLOSED: Final = bytes([Channel.CLOSE, Channel.STDOUT])


class BadMessage(ValueError):
    """A message that does not follow the framing; the text says what is wrong."""


def message(channel: Channel, data: bytes) -> bytes:
    return bytes([channel]) + data


def split(received: bytes) -> tuple[Channel, bytes]:
    """Return a message's channel and data.

    Raises:
        BadMessage: it is empty, or its channel is unknown.
    """
    if not received:
        raise BadMessage("a message needs a first byte that names its channel")
    try:
        return Channel(received[0]), received[1:]
    except ValueError:
        raise BadMessage(f"there is no channel {received[0]}") from None


def joined(parts: Iterable[tuple[Channel, bytes]]) -> Iterator[tuple[Channel, bytes]]:
    """Join successive parts on the same channel, because each message has a cost of its own."""
    for channel, group in groupby(parts, key=lambda part: part[0]):
        yield channel, b"".join(data for _channel, data in group)
