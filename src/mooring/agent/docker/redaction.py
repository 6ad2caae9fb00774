"""Secrets and passwords, kept out of what the engine's and registries' errors quote (R16, R17)."""

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
# A shorter one is only masked beside its variable's name: to mask every `1` in a message tells what it is.
_TELLING_LENGTH = 4
_MASKED = "\0"  # in no text and no secret; the mask itself might hold a word that is a secret


class SecretRedactor:
    """What must not be said, in all the forms in which it may be quoted.

    The forms are built when there is a text to be masked: that is seldom, and the secrets of one instance may
    be half a megabyte.
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
        """As a later agent knows it.

        Args:
            secret_env: the names of the variables whose values are secrets; null: all may be.
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
        """The longest first, so that no end of one is left over."""
        quoted = {form for word in self._words() for form in (word, *_escaped(word)) if form.strip(_MASKED)}
        return sorted(quoted, key=len, reverse=True)

    @contextmanager
    def masking(self) -> Iterator[None]:
        """Raises the engine's errors without what they quote, and without the errors behind them."""
        try:
            yield
        except EngineRefused as refusal:
            raise EngineRefused(refusal.status, self.mask(refusal.message)) from None
        except RuntimeUnavailable as away:
            raise RuntimeUnavailable(self.mask(str(away))) from None


def _words(env: Mapping[str, str], passwords: Mapping[str, str]) -> Iterator[str]:
    """Args: `env`: variables whose values are secrets. `passwords`: by user name."""
    for name, value in env.items():
        if value:
            yield f"{name}={value}"
        if len(value) >= _TELLING_LENGTH:
            yield value
    for user, password in passwords.items():
        yield password
        yield base64.b64encode(f"{user}:{password}".encode()).decode()


def _escaped(word: str) -> tuple[str, str]:
    """As in Go's and JSON's quotes."""
    return json.dumps(word)[1:-1], json.dumps(word, ensure_ascii=False)[1:-1]
