"""`ssh -L`, `-W` and `-D`: connections to ports in the instance."""

from typing import Final

import asyncssh

from mooring.gateway.ssh.copying import ChannelOwner, Copying
from mooring.schemas.agent_streams import StreamStatus
from mooring.streams.node_streams import NodeStream
from mooring_client.stream_messages import Channel

_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0", ""})  # noqa: S104 - as a destination


def is_in_instance(host: str, instance_name: str) -> bool:
    """Whether a destination means the instance itself. All others would leave it."""
    return host.lower() in _LOOPBACK or host == instance_name


class Forward(Copying, asyncssh.SSHTCPSession[bytes]):
    """One forwarded connection. Its stream is open before the client's channel is."""

    delivered_within_s = 10.0  # Go's SSH clients close the channel right after the last write

    def __init__(self, owner: ChannelOwner, stream: NodeStream) -> None:
        super().__init__(owner)
        self._stream = stream

    async def open(self) -> NodeStream:
        return self._stream

    def write(self, channel: Channel, data: bytes) -> None:
        self._channel.write(data)

    def end(self, status: StreamStatus) -> None:
        self._channel.close()
