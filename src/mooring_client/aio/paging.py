"""Lists: iterators that fetch page after page."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, Generic

from mooring_client.aio.transport import AsyncTransport
from mooring_client.calls import Call
from mooring_client.failures import BadAnswer
from mooring_client.pages import Item, Page


class AsyncPages(Generic[Item]):
    """All items of a list, in the server's order: iterate over the items, or over `pages()`."""

    def __init__(self, transport: AsyncTransport, first: Call[Any]) -> None:
        self._transport, self._first = transport, first

    async def __aiter__(self) -> AsyncIterator[Item]:
        async for page in self.pages():
            for item in page:
                yield item

    async def pages(self) -> AsyncIterator[Sequence[Item]]:
        """Yield the items of each page.

        Raises:
            BadAnswer: a page names itself as the next one.
        """
        call = self._first
        while True:
            page: Page[Item] = await self._transport.send(call)
            yield page.items
            if page.next_cursor is None:
                return
            if page.next_cursor == call.params.get("cursor"):
                raise BadAnswer("the server answers the same page again; check the URL")
            call = replace(call, params={**call.params, "cursor": page.next_cursor})

    async def all(self) -> list[Item]:
        """Fetch all pages."""
        return [item async for item in self]
