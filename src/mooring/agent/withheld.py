"""Secrets and passwords, kept out of what the engine's and registries' errors quote (R16, R17)."""

import base64
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

from mooring.agent.docker_create import SECRET_ENV
from mooring.agent.docker_errors import EngineRefused
from mooring.agent.runtime import RuntimeUnavailable
from mooring.schemas.agent import Assignment

MASK = "[withheld]"
# A shorter one is only masked beside its variable's name: to mask every `1` in a message tells what it is.
_TELLING_LENGTH = 4


class Withheld:
    """What must not be said, in all the forms in which it may be quoted."""

    def __init__(self, env: Mapping[str, str], *, passwords: Mapping[str, str] | None = None) -> None:
        """Args: `env`: variables whose values are secrets. `passwords`: by user name."""
        words = [f"{name}={value}" for name, value in env.items() if value]
        words += [value for value in env.values() if len(value) >= _TELLING_LENGTH]
        for user, password in (passwords or {}).items():
            words += [password, base64.b64encode(f"{user}:{password}".encode()).decode()]
        quoted = {form for word in words for form in (word, *_escaped(word)) if form}
        # The longest first, so that no end of one is left over.
        self._pattern = re.compile("|".join(map(re.escape, sorted(quoted, key=len, reverse=True))) or r"(?!)")

    @classmethod
    def of(cls, assignment: Assignment) -> Self:
        registry = assignment.registry
        return cls(assignment.secrets, passwords={registry.username: registry.password} if registry else None)

    @classmethod
    def of_container(cls, inspected: Mapping[str, Any]) -> Self:
        """As a later agent knows it: the container's labels name its secret variables."""
        config = inspected["Config"]
        names = set(((config.get("Labels") or {}).get(SECRET_ENV) or "").split(","))
        variables = (entry.partition("=") for entry in config.get("Env") or ())
        return cls({name: value for name, _, value in variables if name in names})

    def mask(self, text: str) -> str:
        return self._pattern.sub(MASK, text)

    @contextmanager
    def masking(self) -> Iterator[None]:
        """Raises the engine's errors without what they quote, and without the errors behind them."""
        try:
            yield
        except EngineRefused as refusal:
            raise EngineRefused(refusal.status, self.mask(refusal.message)) from None
        except RuntimeUnavailable as away:
            raise RuntimeUnavailable(self.mask(str(away))) from None


def _escaped(word: str) -> tuple[str, str]:
    """As in Go's and JSON's quotes."""
    return json.dumps(word)[1:-1], json.dumps(word, ensure_ascii=False)[1:-1]
