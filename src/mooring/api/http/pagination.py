"""Pages of lists, newest first. A signed cursor is valid for one list with the same filters."""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Row, Select
from sqlalchemy.orm import InstrumentedAttribute, Session

from mooring.core.access import Access
from mooring_client.errors import BadCursor
from mooring_client.schemas.text import Text

Item = TypeVar("Item")


class PageQuery(BaseModel):
    """The parameters of every list. Unknown ones are rejected: a misspelt filter would match everything."""

    model_config = ConfigDict(extra="forbid")

    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: Annotated[
        Text | None, Field(max_length=512, description="`next_cursor` of the previous page")
    ] = None

    def filters(self) -> dict[str, Any]:
        return self.model_dump(exclude={"limit", "cursor"}, exclude_none=True, mode="json")


def visible(query: Select[Any], project_id: InstrumentedAttribute[Any], access: Access) -> Select[Any]:
    """Keep only rows of projects that the caller may see; every list of project resources uses this."""
    return query if access.projects is None else query.where(project_id.in_(access.projects))


def matching(query: Select[Any], params: PageQuery, *columns: InstrumentedAttribute[Any]) -> Select[Any]:
    """Keep only rows that match the filters named like these columns."""
    for column in columns:
        if (value := getattr(params, column.key)) is not None:
            query = query.where(column == value)
    return query


def labelled(query: Select[Any], labels: InstrumentedAttribute[Any], wanted: Sequence[str]) -> Select[Any]:
    """Keep only rows that have all of these labels, each given as `key:value`."""
    for label in wanted:
        key, _, value = label.partition(":")
        query = query.where(labels[key].as_string() == value)
    return query


def page(
    session: Session,
    query: Select[Any],
    key: InstrumentedAttribute[str] | InstrumentedAttribute[int],
    params: PageQuery,
    secret: bytes,
) -> tuple[Sequence[Row[Any]], str | None]:
    """One page, and the cursor of the next page (None after the last).

    Raises:
        BadCursor: the cursor is invalid, or of another list or other filters.
    """
    scope = _scope(key, params)
    if params.cursor is not None:
        query = query.where(key < key.type.python_type(_verified(params.cursor, scope, secret)))
    query = query.add_columns(key.label("page_key")).order_by(key.desc()).limit(params.limit + 1)
    rows = session.execute(query).all()
    if len(rows) <= params.limit:
        return rows, None
    return rows[: params.limit], _signed(str(rows[params.limit - 1].page_key), scope, secret)


def page_of_items(
    items: Sequence[Item], params: PageQuery, name: str, secret: bytes
) -> tuple[Sequence[Item], str | None]:
    """As `page`, for items that are not in a table: the cursor contains the offset of the next page.

    Raises:
        BadCursor.
    """
    scope = f"{name}{sorted(params.filters().items())}"
    start = int(_verified(params.cursor, scope, secret)) if params.cursor is not None else 0
    end = start + params.limit
    return items[start:end], _signed(str(end), scope, secret) if end < len(items) else None


def cursor_after(
    row: Row[Any],
    key: InstrumentedAttribute[str] | InstrumentedAttribute[int],
    params: PageQuery,
    secret: bytes,
) -> str:
    """The cursor that continues after this row of `page`."""
    return _signed(str(row.page_key), _scope(key, params), secret)


def _scope(key: InstrumentedAttribute[str] | InstrumentedAttribute[int], params: PageQuery) -> str:
    return f"{key.class_.__name__}{sorted(params.filters().items())}"


def _signed(last: str, scope: str, secret: bytes) -> str:
    return base64.urlsafe_b64encode(_mac(last, scope, secret) + last.encode()).decode().rstrip("=")


def _verified(cursor: str, scope: str, secret: bytes) -> str:
    try:
        raw = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        last = raw[16:].decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        raise _bad_cursor() from None
    if not hmac.compare_digest(raw[:16], _mac(last, scope, secret)):
        raise _bad_cursor()
    return last


def _bad_cursor() -> BadCursor:
    return BadCursor("the cursor is not valid for this list and these filters; start again without it")


def _mac(last: str, scope: str, secret: bytes) -> bytes:
    return hmac.new(secret, f"{scope}\n{last}".encode(), hashlib.sha256).digest()[:16]
