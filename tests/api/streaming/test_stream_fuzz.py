"""Malformed WebSocket frames on open streams, from users and from nodes: only their own stream ends."""

import random
import socket
import struct
from contextlib import suppress

import pytest
from websockets.exceptions import ConnectionClosed

from mooring_client.stream_messages import Channel, message
from tests.api.streaming.conftest import Streams
from tests.nodes import output, status
from tests.testbed.waiting import wait_until

CASES = 60


def frame(chance: random.Random) -> bytes:
    """A frame whose every part may be wrong: reserved bits, opcode, mask, length, content."""
    first = chance.choice([0x82, 0x82, 0x82, 0x81, 0x02, 0x00, 0x80, 0x88, 0x89, 0x8A, chance.randrange(256)])
    payload = chance.randbytes(chance.choice([0, 1, 2, 5, 125, 126, 300, 70_000]))
    if chance.random() < 0.5:
        payload = bytes([chance.choice([*Channel, 9, 77])]) + payload
    length = chance.choice([len(payload)] * 4 + [0, 1, 2**16, 2**31, 2**63 - 1, 2**64 - 1])
    is_masked = 0x80 if chance.random() < 0.9 else 0
    head = bytes([first])
    if length < 126:
        head += bytes([is_masked | length])
    elif length < 2**16:
        head += bytes([is_masked | 126]) + struct.pack("!H", length)
    else:
        head += bytes([is_masked | 127]) + struct.pack("!Q", length)
    return head + (chance.randbytes(4) if is_masked else b"") + payload


@pytest.mark.parametrize("side", ["user", "node"])
def test_malformed_frames_end_their_own_stream_only(streams: Streams, side: str) -> None:
    chance = random.Random(side)
    context = streams.sandbox.service.service._server._context
    bystander, bystander_node = streams.open()
    for _ in range(CASES):
        user, node = streams.open()
        attacker = user if side == "user" else node
        with suppress(OSError):
            attacker.socket.sendall(b"".join(frame(chance) for _ in range(chance.randrange(1, 8))))
            attacker.socket.shutdown(socket.SHUT_WR)
        other = node if side == "user" else user
        with suppress(ConnectionClosed):
            while True:
                other.recv(timeout=30)
    wait_until(lambda: len(context.streams.channels) == 1, 30)
    wait_until(lambda: len(context.open_streams) == 1, 30)
    bystander.send(message(Channel.STDIN, b"still here"))
    assert bystander_node.recv(timeout=20) == message(Channel.STDIN, b"still here")
    bystander_node.send(output("yes"))
    assert bystander.recv(timeout=20) == output("yes")
    bystander_node.send(status(0))
    assert bystander.recv(timeout=20, decode=False)[:1] == bytes([Channel.STATUS])
