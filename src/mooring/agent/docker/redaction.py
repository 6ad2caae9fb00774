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
# Shorter values are masked only after their variable's name: masking every `1` of a message would reveal it.
_TELLING_LENGTH = 4
_MASKED = "\0"  # in no text and no secret; the text of the mask could contain a secret


class SecretRedactor:
    """Replaces secrets in a text, in all forms in which they may be quoted.

    The forms are computed at the first text, because texts are rare, and an instance may have half a megabyte
    of secrets.
    """

    def __init__(self, words: Callable[[], Iterator[str]]) -> None:
        self._words = words

    @classmethod
    def of(cls, assignment: Assignment) -> Self:
        registry = assignment.registry
        passwords = {registry.username: registry.password} if registry else {}
        return cls(lambda: _words(assignment.secrets, passwords))

    @classmethod
    def of_container(cls, inspected: Mapping[str, Any], secret_env: Collection[str] | None) -> Self:
        """Return the redactor of a container from its "inspect" answer.

        Args:
            secret_env: names of the secret variables; if None, all values count as secrets.
        """
        entries = inspected.get("Config", {}).get("Env") or ()
        variables = (entry.partition("=") for entry in entries)
        secret = {name: value for name, _, value in variables if secret_env is None or name in secret_env}
        return cls(lambda: _words(secret, {}))

    def mask(self, text: str) -> str:
        if not text:
            return text
        text = text.replace(_MASKED, " ")
        for form in self._forms:
            text = text.replace(form, _MASKED)
        return text.replace(_MASKED, MASK)

    @cached_property
    def _forms(self) -> list[str]:
        """Return the longest forms first, so that no part of one is left over."""
        quoted = {form for word in self._words() for form in (word, *_escaped(word)) if form.strip(_MASKED)}
        return sorted(quoted, key=len, reverse=True)

    @contextmanager
    def masking(self) -> Iterator[None]:
        """Re-raise the engine's errors with masked messages, and without their causes."""
        try:
            yield
        except EngineRefused as refusal:
            raise EngineRefused(refusal.status, self.mask(refusal.message)) from None
        except RuntimeUnavailable as error:
            raise RuntimeUnavailable(self.mask(str(error))) from None


def _words(env: Mapping[str, str], passwords: Mapping[str, str]) -> Iterator[str]:
    """Args: env: variables with secret values. passwords: by user name."""
    for name, value in env.items():
        if value:
            yield f"{name}={value}"
        if len(value) >= _TELLING_LENGTH:
            yield value
    for user, password in passwords.items():
        yield password
        yield base64.b64encode(f"{user}:{password}".encode()).decode()


def _escaped(word: str) -> tuple[str, str]:
    """Return the word as it is quoted in JSON and Go."""
    return json.dumps(word)[1:-1], json.dumps(word, ensure_ascii=False)[1:-1]
