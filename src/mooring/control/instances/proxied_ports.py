"""Which port of which instance an address of the port proxy means, and who may use it."""

from dataclasses import dataclass

from sqlalchemy import select, tuple_
from sqlalchemy.orm import Session

from mooring.control.instances import instances
from mooring.core.port_urls import PortAddress
from mooring.db.tables import Instance, Project
from mooring_client.schemas.spec import InstanceSpec, PortAuth


@dataclass(frozen=True, slots=True)
class ProxiedPort:
    """A port of a live instance.

    Attributes:
        auth: `public` only while its project may have public ports.
    """

    instance_id: str
    project_id: str
    port: int
    auth: PortAuth


def matching(session: Session, address: PortAddress) -> list[ProxiedPort]:
    """The ports that the address can mean."""
    query = (
        select(Instance, Project.public_ports)
        .join(Project, Project.id == Instance.project_id)
        .where(Instance.deleted_at.is_(None))
        .order_by(Instance.id)
    )
    if address.instance_id is not None:
        query = query.where(Instance.id == address.instance_id)
    else:
        query = query.where(tuple_(Instance.name, Project.name).in_(address.names))
    found = []
    for row, public_ports in session.execute(query):
        auth = auth_of(instances.spec_of(row), address.port)
        if auth == "public" and not public_ports:
            auth = "private"
        if auth is not None:
            found.append(ProxiedPort(row.id, row.project_id, address.port, auth))
    return found


def auth_of(spec: InstanceSpec, port: int) -> PortAuth | None:
    """Who may use a port: `private` if the spec does not list it; None: it is listed as udp only."""
    listed = {each.protocol: each for each in spec.ports if each.container == port}
    if "tcp" in listed:
        return listed["tcp"].auth
    return None if listed else "private"
