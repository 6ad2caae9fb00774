# Generated from aio/resources/base.py: change that file, and run `make client`.
"""The base of resources."""

from mooring_client.sync.transport import Transport


class Resource:
    """Operations on one kind of resource.

    All methods raise what `Transport.send` raises: MooringError, ConnectionFailed and BadAnswer.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
