"""Links to ports of instances, for browsers, which cannot send an API key."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from mooring.control.audit import audit_log
from mooring.control.instances import instances, port_tokens, proxied_ports
from mooring.control.instances.port_tokens import PortToken, TokenKind
from mooring.control.tenants import ssh_holders
from mooring.control.tenants.encryption import Encryptor
from mooring.control.tenants.ssh_holders import Holder
from mooring.core import ids
from mooring.core.access import Access
from mooring.core.port_urls import PortUrls
from mooring.db.tables import PortLink, Project
from mooring.db.types import new_id, now
from mooring_client.errors import NotProxied, TooManyRows

# The parameter of a URL with a link's token.
PARAMETER: Final = "mooring_token"
MAX_UNUSED: Final = 1000  # links of an instance that work once


@dataclass(frozen=True, slots=True)
class SignedLink:
    url: str
    expires_at: datetime


def create(
    session: Session,
    access: Access,
    encryptor: Encryptor,
    urls: PortUrls,
    instance_id: str,
    port: int,
    ttl: timedelta,
) -> SignedLink:
    """Make a link to a port. It ends with the caller's credential.

    Raises:
        NotFound, Forbidden: as `instances.get`.
        NotProxied: the port is public or udp, so it needs no link, or cannot have one.
        NoMembership, Unauthorized: as `ssh_holders.locked`.
        TooManyRows.
    """
    row = instances.get(session, access, instance_id)
    auth = proxied_ports.auth_of(instances.spec_of(row), port)
    if auth is None or auth == "public":
        raise NotProxied(f"port {port} is {'udp' if auth is None else 'public'}: it has no links")
    holder = Holder.of_access(access, row.project_id)
    ssh_holders.locked(session, holder)
    expires_at = (now() + ttl).replace(microsecond=0)
    link_id = ""
    if auth == "private":
        _require_room(session, row.id)
        link_id = new_id(ids.PORT_LINK)
        session.add(PortLink(id=link_id, instance_id=row.id, expires_at=expires_at))
    token = PortToken(row.id, port, holder.text, auth, int(expires_at.timestamp()), link_id)
    signed = port_tokens.signer(session, encryptor).sign(TokenKind.LINK, token)
    after = {"port": port, "auth": auth, "expires_at": expires_at.isoformat()}
    audit_log.record(session, access, row.id, row.project_id, after=after)
    project = session.get_one(Project, row.project_id)
    return SignedLink(f"{urls.url(port, row.id, row.name, project.name)}?{PARAMETER}={signed}", expires_at)


def _require_room(session: Session, instance_id: str) -> None:
    unused = select(func.count()).where(PortLink.instance_id == instance_id, PortLink.expires_at > now())
    if (session.scalar(unused) or 0) >= MAX_UNUSED:
        raise TooManyRows(f"the instance has {MAX_UNUSED} unused links; use one, or let them expire")


def use(session: Session, link_id: str) -> bool:
    """Use up a link that works once. Returns False if it was used before."""
    statement = delete(PortLink).where(PortLink.id == link_id, PortLink.expires_at > now())
    return session.scalar(statement.returning(PortLink.id)) is not None
