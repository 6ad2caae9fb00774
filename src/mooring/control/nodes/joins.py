"""Join tokens, and the machines that become nodes with them."""

from datetime import timedelta
from secrets import token_urlsafe

from sqlalchemy import select
from sqlalchemy.orm import Session

from mooring.control.audit import audit_log
from mooring.control.nodes import nodes
from mooring.core import credentials, ids
from mooring.core.access import Access, Caller, Permission
from mooring.db.tables import JoinToken, Node
from mooring.db.types import new_id, now
from mooring_client.errors import NodeNameMissing, NodeNameTaken, Unauthorized


def create_join_token(
    session: Session, access: Access, ttl_s: int, node_name: str | None, *, local: bool = False
) -> tuple[JoinToken, str]:
    """Create a single-use token and its secret, which is stored as a hash only (R20).

    Args:
        local: for a node of `mooring up`, which may join again as the same node.
    """
    secret = f"mj_{token_urlsafe(32)}"
    token = JoinToken(
        id=new_id(ids.JOIN_TOKEN),
        secret_hash=credentials.hashed(secret),
        node_name=node_name,
        created_at=now(),
        expires_at=now() + timedelta(seconds=ttl_s),
        local=local,
    )
    session.add(token)
    after = {"node_name": node_name, "expires_at": token.expires_at.isoformat()}
    audit_log.record(session, access, token.id, None, after=after)
    return token, secret


def join(
    session: Session,
    secret: str,
    asked_name: str | None,
    credential_hash: str | None = None,
    address: str | None = None,
    request_id: str | None = None,
) -> tuple[Node, str | None]:
    """Create a node for a join token.

    The name of an existing node is rejected: a token must not take over another machine's identity. But a
    machine whose credential the node has is that node: it repeats a join whose answer was lost. And the agent
    of `mooring up` gets its node back if it has lost its files.

    Args:
        credential_hash: of the credential that the machine has made; null: make one.

    Returns:
        The node, and the credential if it was made here.

    Raises:
        Unauthorized: the token is unknown, used or expired; the error does not say which.
        Conflict: codes `node_name_missing`, `node_name_taken`.
    """
    token = session.scalar(
        select(JoinToken).where(JoinToken.secret_hash == credentials.hashed(secret)).with_for_update()
    )
    known = _joined_with(session, credential_hash)
    if token is not None and known is not None and token.node_id in {None, known.id}:
        return known, None
    if token is None or token.used_at is not None or token.expires_at <= now():
        raise Unauthorized("the join token is unknown, used or expired; ask an admin for a new one")
    name = token.node_name or asked_name
    if name is None:
        raise NodeNameMissing("give the node a name: MOORING_NODE_NAME, or node_name in the token")
    credential = None if credential_hash else nodes.new_credential()
    hashed = credential_hash or credentials.hashed(credential or "")
    node = session.scalar(select(Node).where(Node.name == name, Node.deleted_at.is_(None)).with_for_update())
    if node is None:
        node = _new_node(name, hashed)
        session.add(node)
    elif token.local and node.local:
        node.credential_hash, node.next_credential_hash = hashed, None
    else:
        raise NodeNameTaken(f"a node named {name} exists; delete it first, or set another MOORING_NODE_NAME")
    node.local = token.local
    token.used_at, token.node_id = now(), node.id
    joined = Access(Caller(token.id, "join_token", name), Permission.ADMIN, "node.join", address, request_id)
    audit_log.record(session, joined, node.id, None, after={"name": name})
    return node, credential


def _joined_with(session: Session, credential_hash: str | None) -> Node | None:
    """The node that has joined with this credential and still uses it."""
    if credential_hash is None:
        return None
    query = select(Node).where(Node.credential_hash == credential_hash, Node.deleted_at.is_(None))
    return session.scalar(query)


def _new_node(name: str, credential_hash: str) -> Node:
    return Node(
        id=new_id(ids.NODE), name=name, credential_hash=credential_hash, cordoned=False, draining=False,
        version=1, silent=True, samples=[], orphans=[], session=0, seq=0, generation=1, heartbeats=0,
        created_at=now(),
    )  # fmt: skip
