"""Every operation with every kind of credential, and the audit rows of each request.

On SQLite: `test_database_roles.py` runs every operation on PostgreSQL.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import select

from mooring.api.auth.rules import RULES
from mooring.db.tables import AuditEntry
from tests.problems import problem
from tests.tenancy import facade
from tests.tenancy.calls import CALLS, Callers
from tests.tenancy.matrix import MATRIX
from tests.tenancy.tenants import Setup

# Pages of the documentation, which the OpenAPI document does not list.
UNDOCUMENTED = {"docs", "asset"}
FIRST_ERROR = 400
# Actions in the audit log that `RULES` does not name.
AUDITED_READS_OF_ADMINS = {"get_instance_logs": "instance.read_logs"}  # in projects without the admin
ACTIONS_OF_NODES = {"join_node": "node.join", "renew_node_credential": "node.renew_credential"}


@pytest.fixture(scope="module")
def callers(setup: Setup) -> Iterator[Callers]:
    made = Callers(setup)
    yield made
    made.close()


@pytest.fixture(scope="module")
def operations(setup: Setup) -> dict[str, tuple[str, str]]:
    """Method and path by operationId."""
    document: dict[str, Any] = setup.admin.get("/openapi.json").json()
    return {
        operation["operationId"]: (method, path)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


def test_the_matrix_has_exactly_the_operations_of_the_document(
    operations: dict[str, tuple[str, str]],
) -> None:
    assert MATRIX.keys() == operations.keys()
    assert CALLS.keys() == operations.keys()
    assert RULES.keys() - UNDOCUMENTED - facade.MATRIX.keys() == operations.keys()
    assert facade.MATRIX.keys() == facade.CALLS.keys() == facade.OPERATIONS.keys()


@pytest.mark.parametrize("operation", MATRIX)
def test_every_caller_gets_the_status_of_the_matrix(
    setup: Setup, callers: Callers, operations: dict[str, tuple[str, str]], operation: str
) -> None:
    method, path = operations[operation]
    statuses, expected_rows = {}, {}
    action = RULES[operation].action or ACTIONS_OF_NODES.get(operation)
    for caller, expected in MATRIX[operation].items():
        call = CALLS[operation](setup, caller)
        answer = call.send(callers.clients[caller], method, path, X_Request_Id=_request_id(operation, caller))
        statuses[caller] = answer.status_code
        if action and answer.status_code < FIRST_ERROR:
            expected_rows[_request_id(operation, caller)] = action
        if caller == "admin" and operation in AUDITED_READS_OF_ADMINS:
            expected_rows[_request_id(operation, caller)] = AUDITED_READS_OF_ADMINS[operation]
        if expected == answer.status_code >= FIRST_ERROR:
            problem(answer, expected)
    assert statuses == MATRIX[operation]
    # One row for each action; none for reads and for rejected requests.
    assert _audited(setup, operation) == sorted(expected_rows.items())
    _restore(setup, operation)


def _request_id(operation: str, caller: str) -> str:
    return f"{operation}:{caller.replace(' ', '-')}"


def _audited(setup: Setup, operation: str) -> list[tuple[str | None, str]]:
    """Request ID and action of each audit row of the requests for an operation."""
    with setup.service.plane.database.read() as session:
        query = select(AuditEntry.request_id, AuditEntry.action)
        rows = session.execute(query.where(AuditEntry.request_id.startswith(f"{operation}:"))).all()
    return sorted((request_id, action) for request_id, action in rows)


def _restore(setup: Setup, operation: str) -> None:
    """Restore the wire node for the next operations: schedulable, not reserved, with the newest session."""
    if operation in {"cordon_node", "drain_node"}:
        setup.admin.post(f"/v1/nodes/{setup.wire.id}/uncordon")
    if operation == "update_node":
        setup.admin.patch(f"/v1/nodes/{setup.wire.id}", json={"reserved_for": None})
    if operation == "open_node_session":
        setup.wire.open_session()
