"""Which registries projects may use, by the service's settings (`core/registry_hosts.py`)."""

from typing import Final

from sqlalchemy.orm import Session

from mooring.core.images import ImageName
from mooring.core.registry_hosts import RegistryRules
from mooring.db.session import Database
from mooring_client.errors import RegistryNotAllowed

_KEY: Final = "mooring.registry_rules"
_STRICTEST: Final = RegistryRules()


def install(database: Database, rules: RegistryRules) -> None:
    """Make the rules available to every session of this database."""
    database.session_info[_KEY] = rules


def of(session: Session) -> RegistryRules:
    rules = session.info.get(_KEY, _STRICTEST)
    assert isinstance(rules, RegistryRules)
    return rules


def require(session: Session, project_id: str, registry: str, pointer: str) -> None:
    """Raises RegistryNotAllowed if the rules do not allow the registry to the project.

    Args:
        registry: `host[:port]`.
        pointer: JSON pointer of the field in the request body.
    """
    if of(session).allows(registry, project_id):
        return
    message = (
        f"{registry} is not a registry on the public internet; use one that is, or ask an admin to add it to "
        "MOORING_ALLOWED_REGISTRIES"
    )
    raise RegistryNotAllowed(
        message,
        errors=[{"pointer": pointer, "code": "registry_not_allowed", "message": message}],
    )


def require_image(session: Session, project_id: str, image: str) -> None:
    """As `require`, for the registry of an image."""
    require(session, project_id, ImageName.parse(image).registry, "/image")
