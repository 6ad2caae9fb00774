"""Column types and values that behave the same on SQLite and PostgreSQL."""

from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import BigInteger, DateTime, Dialect, Integer, String
from sqlalchemy.types import JSON, TypeDecorator
from ulid import ULID

from mooring.db.clock import CLOCK


def now() -> datetime:
    """The service clock's UTC time, truncated to milliseconds as in the API."""
    current = datetime.fromtimestamp(CLOCK.time(), UTC)
    return current.replace(microsecond=current.microsecond // 1000 * 1000)


def new_id(prefix: str) -> str:
    """A new id such as `ins_01k…` (see core/ids.py)."""
    return f"{prefix}_{str(ULID.from_timestamp(CLOCK.time())).lower()}"


class UtcDateTime(TypeDecorator[datetime]):
    """An aware UTC datetime. SQLite stores no zone, so it is removed on write and added on read."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None or dialect.name != "sqlite":
            return value
        return value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class EnumText(TypeDecorator[StrEnum]):
    """An enum stored as text: readable in SQL, and a new value needs no change of a database type."""

    impl = String
    cache_ok = True

    def __init__(self, values: type[StrEnum]) -> None:
        super().__init__()
        self.values = values

    def process_result_value(self, value: str | None, dialect: Dialect) -> StrEnum | None:
        return None if value is None else self.values(value)


# On SQLite, only an INTEGER can autoincrement; on PostgreSQL, the event log needs more than 32 bits.
BigId = BigInteger().with_variant(Integer, "sqlite")
# none_as_null: None is stored as SQL NULL and not as JSON's null, so that `IS NULL` finds it.
Json: JSON = JSON(none_as_null=True)
JsonObject = dict[str, Any]
