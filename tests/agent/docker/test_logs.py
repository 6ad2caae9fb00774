"""Log lines and exec output as frames: truncation, control characters, times, split packets."""

import pytest

from mooring.agent.docker.exec import Output
from mooring.agent.docker.logs import LineCutter, engine_time
from mooring.agent.docker.streams import Demultiplexer, StreamName
from mooring.core.text import MAX_LINE_BYTES, clean_line
from mooring.schemas.agent_streams import StreamFrame

AT = b"2026-11-21T08:00:00.123456789Z "


def frame_of(cutter: LineCutter, stream: StreamName, payload: bytes) -> StreamFrame:
    frame = cutter.frame(stream, payload)
    assert frame is not None
    return frame


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


def test_a_line_is_one_frame_with_its_time() -> None:
    frame = frame_of(LineCutter(), "stderr", AT + b"hello\r\n")
    assert frame.stream == "stderr"
    assert frame.at == "2026-11-21T08:00:00.123456789Z"
    assert (frame.text, frame.truncated) == ("hello", False)


def test_a_long_line_is_cut_once_and_the_next_one_is_whole() -> None:
    cutter = LineCutter()
    first = frame_of(cutter, "stdout", AT + b"x" * MAX_LINE_BYTES)
    assert (len(first.text or ""), first.truncated) == (MAX_LINE_BYTES, True)
    assert cutter.frame("stdout", AT + b"x" * MAX_LINE_BYTES) is None
    assert frame_of(cutter, "stderr", AT + b"other stream\n").text == "other stream"
    assert cutter.frame("stdout", AT + b"rest\n") is None
    assert frame_of(cutter, "stdout", AT + b"next\n").text == "next"


def test_the_last_line_needs_no_newline() -> None:
    frame = frame_of(LineCutter(), "stdout", AT + b"no newline")
    assert (frame.text, frame.truncated) == ("no newline", False)


def test_invalid_utf8_is_replaced_and_a_truncated_character_dropped() -> None:
    assert frame_of(LineCutter(), "stdout", AT + b"a\xffb\n").text == "a\ufffdb"
    cut = frame_of(LineCutter(), "stdout", AT + b"x" * (MAX_LINE_BYTES - 1) + "é".encode() + b"\n")
    assert (cut.text, cut.truncated) == ("x" * (MAX_LINE_BYTES - 1), True)


@pytest.mark.parametrize(
    ("since", "converted"),
    [
        ("1970-01-01T00:00:10Z", "10.000000000"),
        ("1970-01-01T00:00:10.5Z", "10.500000000"),
        ("1970-01-01T00:00:10.123456789Z", "10.123456789"),
        ("1970-01-01T02:00:10.000000001+02:00", "10.000000001"),
        ("1970-01-01t00:00:10z", "10.000000000"),
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


def test_frames_are_whole_wherever_the_bytes_are_split() -> None:
    sent = packet(1, b"one") + packet(2, b"two") + packet(1, b"") + packet(1, b"three")
    wanted = [("stdout", b"one"), ("stderr", b"two"), ("stdout", b""), ("stdout", b"three")]
    for size in range(1, len(sent) + 1):
        demultiplexer = Demultiplexer()
        pieces = [sent[at : at + size] for at in range(0, len(sent), size)]
        assert [frame for piece in pieces for frame in demultiplexer.feed(piece)] == wanted


def test_output_is_truncated_at_its_limit_with_one_notice() -> None:
    output = Output(5)
    frames = [frame for part in (b"abc", b"defg", b"hij") for frame in output.frames(packet(1, part))]
    assert [(frame.text, frame.truncated) for frame in frames] == [("abc", False), ("de", True)]


def test_output_of_exactly_the_limit_is_not_truncated() -> None:
    assert [frame.truncated for frame in Output(3).frames(packet(1, b"abc"))] == [False]


def test_characters_split_between_packets_are_joined() -> None:
    output, character = Output(100), "é".encode()
    frames = [
        *output.frames(packet(1, character[:1])),
        *output.frames(packet(2, b"x")),
        *output.frames(packet(1, character[1:])),
    ]
    assert [frame.text for frame in frames] == ["x", "é"]
    assert [frame.text for frame in [*output.frames(packet(1, character[:1])), *output.rest()]] == ["\ufffd"]
