"""One store of compiled SQL statements for all engines of a kind.

SQLAlchemy compiles a statement once per engine. Most tests open a database, and so an engine, of their own:
without sharing, a quarter of the CPU time of the API tests is spent on compiling the same statements again.
"""

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.util import LRUCache

_STATEMENTS_OF_A_KIND = 5000
_stores: dict[type, LRUCache[object, object]] = {}


def share() -> None:
    """Let every engine of this process use the store of its kind of dialect."""
    # A statement's key contains the dialect, and dialects are equal only to themselves. The dialects of the
    # tests' engines differ in nothing that the compiler reads: they have one server of each kind.
    setattr(DefaultDialect, "__eq__", lambda self, other: type(self) is type(other))  # noqa: B010
    setattr(DefaultDialect, "__hash__", lambda self: hash(type(self)))  # noqa: B010
    event.listen(Engine, "engine_connect", _use_store)


def _use_store(connection: Connection) -> None:
    store = _stores.setdefault(type(connection.dialect), LRUCache(_STATEMENTS_OF_A_KIND))
    setattr(connection.engine, "_compiled_cache", store)  # noqa: B010  the engine's own store
