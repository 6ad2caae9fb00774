"""Pages of lists: newest first, with a signed cursor that is good for the same filters only."""

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
from mooring.core.errors import BadRequest
from mooring.core.text import Text

Item = TypeVar("Item")


class PageQuery(BaseModel):
    """The parameters of every list; unknown ones are refused, since a misspelt filter would match all."""

    model_config = ConfigDict(extra="forbid")

    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: Annotated[Text | None, Field(max_length=512, description="`next_cursor` of the page before")] = (
        None
    )

    def filters(self) -> dict[str, Any]:
        return self.model_dump(exclude={"limit", "cursor"}, exclude_none=True, mode="json")


def visible(query: Select[Any], project_id: InstrumentedAttribute[Any], access: Access) -> Select[Any]:
    """Only what lies in the projects that the operation may touch: each list of tenants' things begins so."""
    return query if access.projects is None else query.where(project_id.in_(access.projects))


def matching(query: Select[Any], asked: PageQuery, *columns: InstrumentedAttribute[Any]) -> Select[Any]:
    """Only what has the values asked for, by the columns' names."""
    for column in columns:
        if (value := getattr(asked, column.key)) is not None:
            query = query.where(column == value)
    return query


def labelled(query: Select[Any], labels: InstrumentedAttribute[Any], wanted: Sequence[str]) -> Select[Any]:
    """Only what has all of these labels, each given as `key:value`."""
    for label in wanted:
        key, _, value = label.partition(":")
        query = query.where(labels[key].as_string() == value)
    return query


def page(
    session: Session,
    query: Select[Any],
    key: InstrumentedAttribute[str] | InstrumentedAttribute[int],
    asked: PageQuery,
    secret: bytes,
) -> tuple[Sequence[Row[Any]], str | None]:
    """One page and the cursor of the next, null on the last.

    Raises:
        BadRequest: code `bad_cursor`: made up, or from another list or other filters.
    """
    scope = _scope(key, asked)
    if asked.cursor is not None:
        query = query.where(key < key.type.python_type(_opened(asked.cursor, scope, secret)))
    query = query.add_columns(key.label("page_key")).order_by(key.desc()).limit(asked.limit + 1)
    rows = session.execute(query).all()
    if len(rows) <= asked.limit:
        return rows, None
    return rows[: asked.limit], _sealed(str(rows[asked.limit - 1].page_key), scope, secret)


def slice_of(
    items: Sequence[Item], asked: PageQuery, name: str, secret: bytes
) -> tuple[Sequence[Item], str | None]:
    """As `page`, of what is in no table: the cursor tells how many came before.

    Raises:
        BadRequest: code `bad_cursor`.
    """
    scope = f"{name}{sorted(asked.filters().items())}"
    start = int(_opened(asked.cursor, scope, secret)) if asked.cursor is not None else 0
    end = start + asked.limit
    return items[start:end], _sealed(str(end), scope, secret) if end < len(items) else None


def cursor_after(
    row: Row[Any],
    key: InstrumentedAttribute[str] | InstrumentedAttribute[int],
    asked: PageQuery,
    secret: bytes,
) -> str:
    """The cursor of a page that ends early, with this row of `page`."""
    return _sealed(str(row.page_key), _scope(key, asked), secret)


def _scope(key: InstrumentedAttribute[str] | InstrumentedAttribute[int], asked: PageQuery) -> str:
    return f"{key.class_.__name__}{sorted(asked.filters().items())}"


def _sealed(last: str, scope: str, secret: bytes) -> str:
    return base64.urlsafe_b64encode(_mac(last, scope, secret) + last.encode()).decode().rstrip("=")


def _opened(cursor: str, scope: str, secret: bytes) -> str:
    try:
        raw = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        last = raw[16:].decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        raise _bad_cursor() from None
    if not hmac.compare_digest(raw[:16], _mac(last, scope, secret)):
        raise _bad_cursor()
    return last


def _bad_cursor() -> BadRequest:
    return BadRequest(
        "the cursor is not one of this list with these filters; start again without it", code="bad_cursor"
    )


def _mac(last: str, scope: str, secret: bytes) -> bytes:
    return hmac.new(secret, f"{scope}\n{last}".encode(), hashlib.sha256).digest()[:16]
