"""Opening WebSockets; `sync/connecting.py` is written by hand too."""

from websockets.asyncio.client import connect


class AsyncConnecting(connect):
    """Does not follow redirects: they could send the key to another server."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc
