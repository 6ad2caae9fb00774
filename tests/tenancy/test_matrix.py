"""Every operation with every kind of credential, and the audit entries of each request.

On SQLite: `test_database_roles.py` runs every operation on PostgreSQL.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from sqlalchemy import select

from mooring.api.auth.rules import RULES
from mooring.db.tables import AuditEntry
from tests.problems import problem
from tests.tenancy.calls import CALLS, Callers, awaited_stream
from tests.tenancy.matrix import MATRIX
from tests.tenancy.tenants import World

# The pages of the documentation, which are in no document.
UNDOCUMENTED = {"docs", "asset"}
REFUSED = 400
# Audited, though no caller's rule says so: what machines do for themselves.
READS_OF_ADMINS = {"get_instance_logs": "instance.read_logs"}  # in projects that they are not in
DEEDS_OF_NODES = {"join_node": "node.join", "renew_node_credential": "node.renew_credential"}


@pytest.fixture(scope="module")
def callers(world: World) -> Iterator[Callers]:
    made = Callers(world)
    yield made
    made.close()


@pytest.fixture(scope="module")
def operations(world: World) -> dict[str, tuple[str, str]]:
    """operationId -> method and path, as the document has them."""
    document: dict[str, Any] = world.admin.get("/openapi.json").json()
    return {
        operation["operationId"]: (method, path)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


def test_every_operation_has_its_row_and_every_row_its_operation(
    operations: dict[str, tuple[str, str]],
) -> None:
    assert MATRIX.keys() == operations.keys()
    assert CALLS.keys() == operations.keys()
    assert RULES.keys() - UNDOCUMENTED == operations.keys()


@pytest.mark.parametrize("operation", MATRIX)
def test_every_caller_gets_the_status_of_the_table(
    world: World, callers: Callers, operations: dict[str, tuple[str, str]], operation: str
) -> None:
    method, path = operations[operation]
    got, done = {}, {}
    action = RULES[operation].action or DEEDS_OF_NODES.get(operation)
    for caller, expected in MATRIX[operation].items():
        call = CALLS[operation](world, caller)
        streams = operation == "bring_stream" and caller == "node"
        with awaited_stream(world) if streams else nullcontext(call) as call:
            answer = call.send(
                callers.clients[caller], method, path, X_Request_Id=_request_id(operation, caller)
            )
        got[caller] = answer.status_code
        if action and answer.status_code < REFUSED:
            done[_request_id(operation, caller)] = action
        if caller == "admin" and operation in READS_OF_ADMINS:
            done[_request_id(operation, caller)] = READS_OF_ADMINS[operation]
        if expected == answer.status_code >= REFUSED:
            problem(answer, expected)
    assert got == MATRIX[operation]
    # One row for each deed; none for what was read, and none for what was refused.
    assert _audited(world, operation) == sorted(done.items())
    _restore(world, operation)


def _request_id(operation: str, caller: str) -> str:
    return f"{operation}:{caller.replace(' ', '-')}"


def _audited(world: World, operation: str) -> list[tuple[str | None, str]]:
    """Request id and action of each row that the requests for an operation have left."""
    with world.service.plane.database.read() as session:
        mine = AuditEntry.request_id.startswith(f"{operation}:")
        rows = session.execute(select(AuditEntry.request_id, AuditEntry.action).where(mine)).all()
    return sorted((request_id, action) for request_id, action in rows)


def _restore(world: World, operation: str) -> None:
    """What the next operations rely on: a node that takes instances and whose session is the newest."""
    if operation in {"cordon_node", "drain_node"}:
        world.admin.post(f"/v1/nodes/{world.wire.id}/uncordon")
    if operation == "update_node":
        world.admin.patch(f"/v1/nodes/{world.wire.id}", json={"reserved_for": None})
    if operation == "open_node_session":
        world.wire.open_session()
