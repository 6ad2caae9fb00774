# Generated from aio/paging.py: change that file, and run `make client`.
"""Lists: iterators that fetch page after page."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Generic

from mooring_client.calls import Call
from mooring_client.failures import BadAnswer
from mooring_client.pages import Item, Page
from mooring_client.sync.transport import Transport


class Pages(Generic[Item]):
    """All items of a list, in the server's order: iterate over the items, or over `pages()`."""

    def __init__(self, transport: Transport, first: Call[Any]) -> None:
        self._transport, self._first = transport, first

    def __iter__(self) -> Iterator[Item]:
        for page in self.pages():
            for item in page:
                yield item

    def pages(self) -> Iterator[Sequence[Item]]:
        """Yield the items of each page.

        Raises:
            BadAnswer: a page names itself as the next one.
        """
        call = self._first
        while True:
            page: Page[Item] = self._transport.send(call)
            yield page.items
            if page.next_cursor is None:
                return
            if page.next_cursor == call.params.get("cursor"):
                raise BadAnswer("the server answers the same page again; check the URL")
            call = replace(call, params={**call.params, "cursor": page.next_cursor})

    def all(self) -> list[Item]:
        """Fetch all pages."""
        return [item for item in self]
