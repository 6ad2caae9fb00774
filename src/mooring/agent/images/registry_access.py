"""Asks registries which digest a tag has, and whether an assignment may use an image."""

import logging
from dataclasses import dataclass, replace

from docker.auth import encode_header

from mooring.agent.docker.client import Engine
from mooring.agent.docker.errors import EngineRefused, image_pull_failed, is_denial, pull_failure
from mooring.agent.docker.redaction import SecretRedactor
from mooring.agent.images.registry_check import RegistryCheck
from mooring.agent.runtime import RuntimeUnavailable, StartDelayed, StartRefused
from mooring.core.images import ImageName, registry_host
from mooring.schemas.agent import Assignment, RegistryAuth
from mooring_client.schemas.states import Reason

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The image of an assignment: `shown` is the user's spelling, `name` is what runs."""

    shown: str
    name: ImageName
    auth: RegistryAuth | None  # the project's credentials of one registry
    redactor: SecretRedactor
    local_images: bool
    registry_listed: bool  # an admin has allowed the registry
    project_id: str
    authorized: bool = False  # the registry has just granted access to `name`

    @classmethod
    def of(cls, assignment: Assignment) -> "Wanted":
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
        """Return the project's credentials if they are for this registry."""
        auth = self.auth
        return auth if auth is not None and registry_host(auth.server) == registry else None


class RegistryAccess:
    """Sends requests to registries through the engine, which connects as root from the node's network."""

    def __init__(self, engine: Engine, check: RegistryCheck) -> None:
        self._engine, self._check = engine, check

    def authorize(self, wanted: Wanted) -> Wanted:
        """Check that the registry grants access, and resolve a tag to its current digest.

        Raises:
            StartRefused: the registry denies access, or has no such image.
            StartDelayed: the registry does not answer, or returned an unexpected answer.
        """
        credentials = wanted.credentials_for(wanted.name.registry)
        try:
            digest = self._ask(wanted, wanted.name, credentials)
        except EngineRefused as refusal:
            raise pull_error(wanted, refusal, credentials) from refusal
        name = wanted.name if wanted.name.digest else wanted.name.pinned(digest)
        return replace(wanted, name=name, authorized=True)

    def _ask(self, wanted: Wanted, name: ImageName, credentials: RegistryAuth | None) -> str:
        self.require_allowed(wanted, name)
        try:
            with wanted.redactor.masking():
                return self._engine.registry_digest(str(name), headers(name, credentials))
        except EngineRefused:
            raise
        except RuntimeUnavailable as error:
            self._engine.ping()  # if the engine answers, the registry does not
            raise registry_unavailable(wanted.shown) from error

    def require_allowed(self, wanted: Wanted, name: ImageName) -> None:
        """Check that a user's registry is on the public internet (R25).

        Raises:
            StartRefused: it is not, or its name does not exist.
            StartDelayed: its name could not be resolved.
        """
        if wanted.registry_listed or name.registry != wanted.name.registry:
            return
        info = self._engine.info()
        try:
            self._check.require_public(name.registry, proxied=bool(info.get("HttpsProxy")))
        except OSError as error:
            raise registry_unavailable(wanted.shown) from error

    def is_granted(self, source: ImageName, wanted: Wanted) -> bool:
        """Return whether the registry of `source` grants access. Raises StartDelayed: it does not answer."""
        try:
            self._ask(wanted, source, wanted.credentials_for(source.registry))
        except EngineRefused as refusal:
            if _is_denied(refusal):
                return False
            raise registry_unavailable(wanted.shown) from refusal
        return True


def headers(name: ImageName, credentials: RegistryAuth | None) -> dict[str, str]:
    """Return the header with the project's credentials, or with none; never with the operator's."""
    auth: dict[str, str] = {}
    if credentials is not None:
        auth = {
            "username": credentials.username,
            "password": credentials.password,
            "serveraddress": name.registry,
        }
    return {"X-Registry-Auth": encode_header(auth).decode()}


def _is_denied(refusal: EngineRefused) -> bool:
    """Return whether the registry denied access, or has no such image: often an error with status 500."""
    missing = "not found" in refusal.message or "manifest unknown" in refusal.message
    return refusal.status in {400, 404} or missing or is_denial(refusal.message, refusal.status)


def pull_error(
    wanted: Wanted, refusal: EngineRefused, credentials: RegistryAuth | None
) -> StartRefused | StartDelayed:
    """Return the error for a failed request to a registry. The registry's answer is only logged.

    All answers without a known meaning have the same effect: a registry can redirect the engine, and a
    difference would show its owner which ports of the node's network are open.
    """
    log.info("%s could not be pulled: %r", wanted.shown, refusal.message[:500])
    reason = pull_failure(refusal.message, wanted.shown, refusal.status, credentials=credentials is not None)
    return registry_unavailable(wanted.shown) if reason is None else StartRefused(reason)


def registry_unavailable(image: str) -> StartDelayed:
    why = "a registry that it needs does not answer, or returned an unexpected answer"
    waiting = Reason(code="registry_unavailable", message=f"{image}: {why}; the node retries")
    return StartDelayed(waiting, refusal=image_pull_failed(image, why))
