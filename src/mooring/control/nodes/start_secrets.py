"""Secrets and registry credentials, which a node requests when it starts an instance (R16, R17).

Answers to reports never contain them. A node gets those of an attempt only while the attempt is placed on it
and has not run. The audit log has the first request of each attempt, and all requests are counted.
"""

from collections.abc import Mapping

from sqlalchemy.orm import Session

from mooring.control import locks
from mooring.control.audit import audit_log
from mooring.control.instances import instances
from mooring.control.nodes import nodes
from mooring.control.nodes.assignments import is_startable
from mooring.control.tenants import registries, secrets
from mooring.control.tenants.encryption import Encryptor
from mooring.core.access import Access, Caller, Permission
from mooring.core.images import ImageName
from mooring.db.tables import Instance, Node
from mooring.schemas.agent import RegistryAuth, StartSecrets, StartSecretsRequest
from mooring_client.errors import NotFound, TooManyHandouts, Unauthorized
from mooring_client.schemas.spec import InstanceSpec

# An agent requests them again after its restart, and every ten minutes while a start keeps failing.
MAX_REQUESTS_PER_ATTEMPT = 200


def hand_out(
    session: Session,
    encryptor: Encryptor,
    node_id: str,
    credential_hash: str,
    instance_id: str,
    request: StartSecretsRequest,
    access_from: tuple[str | None, str | None] = (None, None),
) -> StartSecrets:
    """The secrets and registry credentials of one attempt.

    Args:
        access_from: the address and the request id of the node's request, for the audit log.

    Raises:
        Unauthorized: the node was deleted, or its credential was replaced.
        StaleSession: the node has a newer agent.
        NotFound: the attempt is not placed on the node, is no longer wanted, or has run.
        TooManyHandouts.
    """
    node = locks.node(session, node_id)
    if node is None or node.deleted_at is not None:
        raise Unauthorized("this node was deleted; join it again with a new token")
    nodes.authenticate(node, credential_hash)
    nodes.require_current_session(node, request.session)
    row = locks.instances(session, [instance_id]).get(instance_id)
    if row is None or not _is_to_start(row, node, request.attempt):
        raise NotFound(f"this node has no attempt {request.attempt} of {instance_id} to start")
    spec = instances.spec_of(row)
    given = StartSecrets(
        secrets=_secrets(session, encryptor, row, spec),
        registry=_registry(session, encryptor, row, spec),
        node_id=node.id,
    )
    if given.secrets or given.registry:
        _count(row)
        if row.handout_count == 1:
            _record(session, node, row, spec, given, access_from)
    return given


def _is_to_start(row: Instance, node: Node, attempt: int) -> bool:
    placed = row.node_id == node.id and row.attempt == attempt and row.deleted_at is None
    return placed and is_startable(row)


def _count(row: Instance) -> None:
    if row.handout_attempt != row.attempt:
        row.handout_attempt, row.handout_count = row.attempt, 0
    if row.handout_count >= MAX_REQUESTS_PER_ATTEMPT:
        raise TooManyHandouts(
            f"secrets for attempt {row.attempt} of {row.id} were handed out {row.handout_count} times; "
            "restart the instance for a new attempt",
        )
    row.handout_count += 1


def _record(
    session: Session,
    node: Node,
    row: Instance,
    spec: InstanceSpec,
    given: StartSecrets,
    access_from: tuple[str | None, str | None],
) -> None:
    names = secrets.references(spec)
    after = {
        "attempt": row.attempt,
        "secrets": sorted({names[variable] for variable in given.secrets}),
        "registry": given.registry.server if given.registry else None,
    }
    caller = Caller(node.id, "node", node.name)
    access = Access(caller, Permission.ADMIN, "instance.hand_out_secrets", *access_from)
    audit_log.record(session, access, row.id, row.project_id, after=after)


def _secrets(session: Session, encryptor: Encryptor, row: Instance, spec: InstanceSpec) -> dict[str, str]:
    """Variable -> value. Deleted secrets are missing, and the node rejects the start."""
    named = secrets.references(spec)
    values = secrets.values(session, encryptor, {(row.project_id, name) for name in named.values()})
    return _that_fit(row.project_id, named, values)


def _that_fit(
    project_id: str, named: Mapping[str, str], values: Mapping[secrets.SecretKey, str]
) -> dict[str, str]:
    """The values that fit the size limit together: they may have grown since `secrets.require`."""
    fit: dict[str, str] = {}
    left = secrets.MAX_BYTES
    for variable, name in named.items():
        value = values.get((project_id, name))
        if value is not None and (left := left - len(value.encode())) >= 0:
            fit[variable] = value
    return fit


def _registry(
    session: Session, encryptor: Encryptor, row: Instance, spec: InstanceSpec
) -> RegistryAuth | None:
    host = (row.project_id, ImageName.parse(spec.image).registry)
    return registries.credentials(session, encryptor, [host]).get(host)
