"""The base of resources."""

from mooring_client.aio.transport import AsyncTransport


class AsyncResource:
    """Operations on one kind of resource.

    All methods raise what `AsyncTransport.send` raises: MooringError, ConnectionFailed and BadAnswer.
    """

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport
