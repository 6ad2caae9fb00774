"""Opening WebSockets; `aio/connecting.py` is written by hand too."""

from websockets.sync.client import reconnect


class Connecting(reconnect):
    """Does not follow redirects: they could send the key to another server."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc
