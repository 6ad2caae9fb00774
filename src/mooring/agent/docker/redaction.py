"""Removes secrets and passwords from error messages of engines and registries (R16, R17)."""

import base64
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Self

from mooring.agent.docker.errors import EngineRefused
from mooring.agent.runtime import RuntimeUnavailable
from mooring.schemas.agent import Assignment

MASK = "[withheld]"
# A shorter value is masked only after its variable's name: masking every `1` of a text would reveal it.
_MIN_VALUE_LENGTH = 4
_PLACEHOLDER = "\0"  # replaces secrets first, because `MASK` itself could contain a secret; no secret has it


class SecretRedactor:
    """Replaces secrets in a text, in all forms in which they may be quoted.

    The forms are computed when the first text is masked, because few redactors mask any, and an instance may
    have half a megabyte of secrets.
    """

    def __init__(self, secrets: Callable[[], Iterator[str]]) -> None:
        self._secrets = secrets

    @classmethod
    def of(cls, assignment: Assignment) -> Self:
        registry = assignment.registry
        passwords = {registry.username: registry.password} if registry else {}
        return cls(lambda: _secret_texts(assignment.secrets, passwords))

    @classmethod
    def of_container(cls, inspected: Mapping[str, Any], secret_env: Collection[str] | None) -> Self:
        """Return the redactor of a container from its "inspect" answer.

        Args:
            secret_env: names of the secret variables; if None, all values count as secrets.
        """
        entries = inspected.get("Config", {}).get("Env") or ()
        variables = (entry.partition("=") for entry in entries)
        secret = {name: value for name, _, value in variables if secret_env is None or name in secret_env}
        return cls(lambda: _secret_texts(secret, {}))

    def mask(self, text: str) -> str:
        if not text:
            return text
        text = text.replace(_PLACEHOLDER, " ")
        for form in self._forms:
            text = text.replace(form, _PLACEHOLDER)
        return text.replace(_PLACEHOLDER, MASK)

    @cached_property
    def _forms(self) -> list[str]:
        """Return the longest forms first, so that no part of a form is left over."""
        forms = {form for secret in self._secrets() for form in (secret, *_escaped(secret))}
        return sorted((form for form in forms if form.strip(_PLACEHOLDER)), key=len, reverse=True)

    @contextmanager
    def masking(self) -> Iterator[None]:
        """Re-raise the engine's errors with masked messages, and without their causes."""
        try:
            yield
        except EngineRefused as refusal:
            raise EngineRefused(refusal.status, self.mask(refusal.message)) from None
        except RuntimeUnavailable as error:
            raise RuntimeUnavailable(self.mask(str(error))) from None


def _secret_texts(env: Mapping[str, str], passwords: Mapping[str, str]) -> Iterator[str]:
    """Yield the texts to mask, from variables with secret values, and from passwords by user name."""
    for name, value in env.items():
        if value:
            yield f"{name}={value}"
        if len(value) >= _MIN_VALUE_LENGTH:
            yield value
    for user, password in passwords.items():
        yield password
        yield base64.b64encode(f"{user}:{password}".encode()).decode()


def _escaped(secret: str) -> tuple[str, str]:
    """Return the secret as JSON and Go quote it."""
    return json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]
