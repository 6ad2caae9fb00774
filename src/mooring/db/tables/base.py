"""What all tables share: constraint names, column types for both databases, and partial indexes."""

from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    CheckConstraint,
    Index,
    MetaData,
    text,
)
from sqlalchemy.orm import DeclarativeBase

from mooring.db.types import EnumText, Json, JsonObject, UtcDateTime
from mooring_client.schemas.gpus import Health
from mooring_client.schemas.projects import Role
from mooring_client.schemas.states import DesiredState, State

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map = {
        datetime: UtcDateTime,
        JsonObject: Json,
        list[Any]: Json,
        State: EnumText(State),
        DesiredState: EnumText(DesiredState),
        Health: EnumText(Health),
        Role: EnumText(Role),
    }


def one_of(column: str, values: type[StrEnum]) -> CheckConstraint:
    """A check constraint that allows only the values of an enum."""
    return CheckConstraint(f"{column} IN ({', '.join(repr(str(value)) for value in values)})", name=column)


LIVE = "deleted_at IS NULL"
DELETED = "deleted_at IS NOT NULL"


def partial_index(name: str, *columns: str, where: str, unique: bool = False) -> Index:
    """An index of the rows for which `where` holds: SQL that both databases support."""
    return Index(name, *columns, unique=unique, sqlite_where=text(where), postgresql_where=text(where))
