"""What registries are asked in the name of an assignment: what a tag is, and who may have an image."""

import logging
from dataclasses import dataclass, replace

from docker.auth import encode_header

from mooring.agent.docker.client import Engine
from mooring.agent.docker.errors import EngineRefused, is_denial, pull_failure
from mooring.agent.docker.redaction import SecretRedactor
from mooring.agent.images.registry_check import RegistryCheck
from mooring.agent.runtime import RuntimeUnavailable, StartDelayed, StartRefused
from mooring.core.images import ImageName, registry_host
from mooring.core.instance.state import Reason
from mooring.schemas.agent import Assignment, RegistryAuth

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an assignment asks for: `shown` is what its user wrote, `name` what runs."""

    shown: str
    name: ImageName
    registry: RegistryAuth | None
    withheld: SecretRedactor
    local_images: bool
    registry_listed: bool
    project_id: str
    vouched: bool = False  # the registry has just said that this assignment may have `name`

    @classmethod
    def by(cls, assignment: Assignment) -> "Wanted":
        shown = assignment.spec.image
        name = ImageName.parse(shown).pinned(assignment.image_digest)
        return cls(
            shown,
            name,
            assignment.registry,
            SecretRedactor.of(assignment),
            assignment.local_images,
            assignment.registry_listed,
            assignment.project_id,
        )

    def credentials_for(self, registry: str) -> RegistryAuth | None:
        """The project's own, which only their own registry gets to see."""
        given = self.registry
        return given if given is not None and registry_host(given.server) == registry else None


class RegistryAccess:
    """Every question goes through the engine, which connects from the node's network as root."""

    def __init__(self, engine: Engine, check: RegistryCheck) -> None:
        self._engine, self._check = engine, check

    def resolved(self, wanted: Wanted) -> Wanted:
        """Once the registry lets the assignment have it; a tag becomes the digest that it is there now.

        Raises:
            StartRefused: it has none for this assignment.
            StartDelayed: it does not answer.
        """
        credentials = wanted.credentials_for(wanted.name.registry)
        try:
            digest = self._ask(wanted, wanted.name, credentials)
        except EngineRefused as refusal:
            raise StartRefused(failure(wanted, refusal, credentials)) from refusal
        except RuntimeUnavailable as error:
            self._engine.ping()  # if it answers, what did not is the registry
            raise StartDelayed(_registry_away(wanted)) from error
        name = wanted.name if wanted.name.digest else wanted.name.pinned(digest)
        return replace(wanted, name=name, vouched=True)

    def _ask(self, wanted: Wanted, name: ImageName, credentials: RegistryAuth | None) -> str:
        self.require_allowed(wanted, name)
        with wanted.withheld.masking():
            return self._engine.ask_registry(str(name), headers(name, credentials))

    def require_allowed(self, wanted: Wanted, name: ImageName) -> None:
        """Raises StartRefused: the registry that the user names is not where it may be (R25)."""
        if wanted.registry_listed or name.registry != wanted.name.registry:
            return
        info = self._engine.info()
        self._check.require_public(name.registry, proxied=bool(info.get("HttpsProxy")))

    def gives(self, source: ImageName, wanted: Wanted) -> bool:
        """Whether the registry that an image came from lets this assignment have it."""
        own = wanted.credentials_for(source.registry)
        try:
            self._ask(wanted, source, own)
        except EngineRefused as refusal:
            if _is_no(refusal):
                return False
            raise StartDelayed(_registry_away(wanted)) from refusal
        except RuntimeUnavailable as error:
            self._engine.ping()  # if it answers, what did not is the registry
            raise StartDelayed(_registry_away(wanted)) from error
        return True


def headers(name: ImageName, credentials: RegistryAuth | None) -> dict[str, str]:
    """Whom the registry is to see: the project or nobody, never the node's operator."""
    shown: dict[str, str] = {}
    if credentials is not None:
        shown = {
            "username": credentials.username,
            "password": credentials.password,
            "serveraddress": name.registry,
        }
    return {"X-Registry-Auth": encode_header(shown).decode()}


def _is_no(refusal: EngineRefused) -> bool:
    """Whether the registry answered; the engine makes most of what it says a 500."""
    missing = "not found" in refusal.message or "manifest unknown" in refusal.message
    return refusal.status in {400, 404} or missing or is_denial(refusal.message, refusal.status)


def failure(wanted: Wanted, refusal: EngineRefused, credentials: RegistryAuth | None) -> Reason:
    """What the user is told; what the registry said is for the operator."""
    log.info("%s could not be pulled: %r", wanted.shown, refusal.message[:500])
    return pull_failure(refusal.message, wanted.shown, refusal.status, credentials=credentials is not None)


def _registry_away(wanted: Wanted) -> Reason:
    message = f"a registry must be asked for {wanted.shown}, and does not answer; it is tried again"
    return Reason(code="registry_unavailable", message=message)
