"""Log lines and output as messages: truncation, control characters, times, split packets."""

import pytest

from mooring.agent.docker.byte_streams import Demultiplexer
from mooring.agent.docker.streams.container_output import StreamHeaders
from mooring.agent.docker.streams.logs import LineCutter, engine_time
from mooring_client.schemas.text import MAX_LINE_BYTES
from mooring_client.stream_messages import MAX_DATA_BYTES, Channel
from mooring_client.terminal_text import clean_line

OUT, ERR = Channel.STDOUT, Channel.STDERR

AT = b"2026-11-21T08:00:00.123456789Z "


def line_of(cutter: LineCutter, channel: Channel, payload: bytes) -> bytes:
    """The line without its time."""
    line = cutter.line(channel, payload)
    assert line is not None
    assert line.startswith(AT)
    return line.removeprefix(AT)


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain\ttab", "plain\ttab"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bcreset", "reset"),
        ("a\x00b\x08c\rd\x7fe\x9bf", "abcdef"),
        ("forged\u2028line", "forgedline"),
        ("user\u202e\u2066nimda\u2069\u200f", "usernimda"),
        ("naïve 漢字 🚀", "naïve 漢字 🚀"),
    ],
)
def test_control_characters_are_stripped(raw: str, shown: str) -> None:
    assert clean_line(raw) == shown


def test_a_line_has_its_time_and_no_line_break() -> None:
    assert LineCutter().line(ERR, AT + b"hello\r\n") == AT + b"hello"


def test_a_long_line_is_cut_once_and_the_next_one_is_whole() -> None:
    cutter = LineCutter()
    assert len(line_of(cutter, OUT, AT + b"x" * MAX_LINE_BYTES)) == MAX_LINE_BYTES
    assert cutter.line(OUT, AT + b"x" * MAX_LINE_BYTES) is None
    assert line_of(cutter, ERR, AT + b"other channel\n") == b"other channel"
    assert cutter.line(OUT, AT + b"rest\n") is None
    assert line_of(cutter, OUT, AT + b"next\n") == b"next"


def test_the_last_line_needs_no_newline() -> None:
    assert line_of(LineCutter(), OUT, AT + b"no newline") == b"no newline"


def test_invalid_utf8_is_replaced_and_a_truncated_character_dropped() -> None:
    assert line_of(LineCutter(), OUT, AT + b"a\xffb\n").decode() == "a\ufffdb"
    cut = line_of(LineCutter(), OUT, AT + b"x" * (MAX_LINE_BYTES - 1) + "é".encode() + b"\n")
    assert cut == b"x" * (MAX_LINE_BYTES - 1)


@pytest.mark.parametrize(
    ("since", "converted"),
    [
        ("1970-01-01T00:00:10Z", "10.000000000"),
        ("1970-01-01T00:00:10.5Z", "10.500000000"),
        ("1970-01-01T00:00:10.123456789Z", "10.123456789"),
        ("1970-01-01T02:00:10.000000001+02:00", "10.000000001"),
        ("1970-01-01t00:00:10z", "10.000000000"),
        ("9999-12-31T23:59:59-01:00", "253402304399.000000000"),
    ],
)
def test_since_keeps_its_nanoseconds(since: str, converted: str) -> None:
    assert engine_time(since) == converted


@pytest.mark.parametrize("since", ["", "yesterday", "2026-13-01T00:00:00Z", "12", "2026-11-21"])
def test_an_invalid_since_is_rejected(since: str) -> None:
    with pytest.raises(ValueError):
        engine_time(since)


def packet(stream: int, payload: bytes) -> bytes:
    return bytes([stream, 0, 0, 0]) + len(payload).to_bytes(4, "big") + payload


SENT = packet(1, b"one") + packet(2, b"two") + packet(1, b"") + packet(1, b"three")


def test_frames_are_whole_wherever_the_bytes_are_split() -> None:
    wanted = [(OUT, b"one"), (ERR, b"two"), (OUT, b""), (OUT, b"three")]
    for size in range(1, len(SENT) + 1):
        demultiplexer = Demultiplexer()
        pieces = [SENT[at : at + size] for at in range(0, len(SENT), size)]
        assert [frame for piece in pieces for frame in demultiplexer.feed(piece)] == wanted


def test_output_passes_without_its_headers_wherever_the_bytes_are_split() -> None:
    for size in range(1, len(SENT) + 1):
        headers = StreamHeaders()
        pieces = [SENT[at : at + size] for at in range(0, len(SENT), size)]
        parts = [part for piece in pieces for part in headers.feed(piece)]
        assert b"".join(data for channel, data in parts if channel is OUT) == b"onethree"
        assert b"".join(data for channel, data in parts if channel is ERR) == b"two"


def test_output_is_passed_on_before_its_packet_is_complete() -> None:
    headers = StreamHeaders()
    begun = bytes([1, 0, 0, 0]) + (2**31).to_bytes(4, "big") + b"x" * (MAX_DATA_BYTES + 1)
    assert [len(data) for _channel, data in headers.feed(begun)] == [MAX_DATA_BYTES, 1]
