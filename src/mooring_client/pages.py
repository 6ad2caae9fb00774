"""Pages of lists, as the server answers them."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

Item = TypeVar("Item")
Item_co = TypeVar("Item_co", covariant=True)


class Page(Protocol[Item_co]):
    """A page of a list; `next_cursor` is null on the last one."""

    @property
    def items(self) -> Sequence[Item_co]: ...

    @property
    def next_cursor(self) -> str | None: ...
