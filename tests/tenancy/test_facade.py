"""`/compat/prime` with every kind of credential, and what one tenant sees of another's pods and keys."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select

from mooring.api.auth.rules import RULES
from mooring.db.tables import AuditEntry
from tests.problems import problem
from tests.service import Client
from tests.tenancy.calls import Callers, public_key
from tests.tenancy.facade import CALLS, MATRIX, OPERATIONS, PREFIX, pod_body
from tests.tenancy.tenants import Setup, post
from tests.testbed.waiting import wait_until

pytestmark = pytest.mark.both_databases


@pytest.fixture(scope="module")
def callers(setup: Setup) -> Iterator[Callers]:
    made = Callers(setup)
    yield made
    made.close()


@pytest.mark.parametrize("operation", MATRIX)
def test_every_caller_gets_the_status_of_the_matrix(setup: Setup, callers: Callers, operation: str) -> None:
    method, path = OPERATIONS[operation]
    statuses, audited = {}, set()
    for caller, expected in MATRIX[operation].items():
        call, request_id = CALLS[operation](setup, caller), f"{operation}:{caller.replace(' ', '-')}"
        answer = call.send(callers.clients[caller], method, path, X_Request_Id=request_id)
        statuses[caller] = answer.status_code
        if RULES[operation].action and answer.status_code < 400:
            audited.add((request_id, RULES[operation].action))
        if expected == answer.status_code >= 400:
            assert isinstance(problem(answer, expected)["detail"], str)
    assert statuses == MATRIX[operation]
    with setup.service.plane.database.read() as session:
        query = select(AuditEntry.request_id, AuditEntry.action)
        rows = session.execute(query.where(AuditEntry.request_id.startswith(f"{operation}:"))).all()
    assert {(request_id, action) for request_id, action in rows} == audited


def _ids(client: Client) -> set[str]:
    return {pod["id"] for pod in client.get(f"{PREFIX}/pods").json()["data"]}


def test_a_tenant_sees_only_its_own_pods(setup: Setup) -> None:
    of_a = setup.a.member.post(f"{PREFIX}/pods", json=pod_body("mine")).json()["id"]
    of_b = setup.b.member.post(f"{PREFIX}/pods", json=pod_body("mine")).json()["id"]
    assert of_a in _ids(setup.a.viewer)
    assert of_b not in _ids(setup.a.viewer)
    assert of_a not in _ids(setup.b.owner)
    assert {of_a, of_b} <= _ids(setup.admin)


def test_an_instance_of_another_kind_is_no_pod(setup: Setup) -> None:
    """So SkyPilot can never delete what it has not created."""
    assert setup.running not in _ids(setup.a.member)
    problem(setup.a.member.get(f"{PREFIX}/pods/{setup.running}"), 404, "not_found")
    problem(setup.a.member.delete(f"{PREFIX}/pods/{setup.running}"), 404, "not_found")
    assert setup.admin.instance(setup.running)["desired_state"] == "running"


def test_the_keys_are_those_of_the_credential_alone(setup: Setup) -> None:
    """Any other key would make SkyPilot believe that it can log in."""
    key = public_key()
    made = setup.a.member.post(f"{PREFIX}/ssh_keys", json={"name": "sky", "publicKey": key})
    assert made.json()["publicKey"].split() == key.split()[:2]

    def listed(client: Client) -> list[str]:
        keys = client.get(f"{PREFIX}/ssh_keys").json()["data"]
        return [each["name"] for each in keys if each["publicKey"] == made.json()["publicKey"]]

    assert listed(setup.a.member) == ["sky"]
    assert listed(setup.a.owner) == []
    assert listed(setup.admin) == []
    again = setup.a.member.post(f"{PREFIX}/ssh_keys", json={"name": "sky", "publicKey": key})
    problem(again, 409, "ssh_key_exists")


def test_a_key_that_cannot_log_in_is_not_listed(setup: Setup) -> None:
    """One that expires, and later has, and one for a single project, which need not be that of the pods."""
    soon = (datetime.now(UTC) + timedelta(seconds=1)).isoformat()
    expiring = post(setup.a.member, "/v1/ssh-keys", name="a", public_key=public_key(), expires_at=soon)
    restricted = post(setup.admin, "/v1/ssh-keys", name="b", public_key=public_key(), project_id=setup.a.id)

    def listed(client: Client) -> set[str]:
        return {key["id"] for key in client.get(f"{PREFIX}/ssh_keys").json()["data"]}

    wait_until(lambda: expiring["id"] not in listed(setup.a.member))
    assert restricted["id"] not in listed(setup.admin)
