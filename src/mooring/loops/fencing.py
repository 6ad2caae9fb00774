"""Runs the operator's fence command for lost nodes, outside of the loop's thread."""

import logging
import os
import shlex
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import Final

from mooring.control.nodes.node_loss import SilentNode

log = logging.getLogger(__name__)

_AT_ONCE: Final = 4
_RETRY_S: Final = 30.0
_MAX_SHOWN: Final = 500


@dataclass(slots=True)
class _Attempt:
    """One run of the command. Times are monotonic."""

    succeeded: bool = False
    ended_at: float | None = None


class Fencing:
    """Runs the command for each loss of a node until it succeeds.

    Args:
        command: as in a shell, without its operators. It gets the node's name as its last argument, and
            MOORING_NODE_ID, MOORING_NODE_NAME and MOORING_NODE_ADDRESS in its environment. Exit status 0 says
            that nothing runs on the node any more.
        timeout_s: then it is killed, and has failed.
    """

    def __init__(self, command: str, timeout_s: float) -> None:
        self._argv = shlex.split(command)
        self._timeout_s = timeout_s
        self._attempts: dict[tuple[str, int], _Attempt] = {}  # by node id and its heartbeat count

    def has_fenced(self, node: SilentNode) -> bool:
        """Whether the command has succeeded for this loss of the node. Begins to run it if it is due."""
        key = node.id, node.heartbeats
        attempt = self._attempts.get(key)
        if attempt is None or self._is_to_be_repeated(attempt):
            self._begin(key, node)
        return attempt is not None and attempt.succeeded

    def _is_to_be_repeated(self, attempt: _Attempt) -> bool:
        if attempt.succeeded or attempt.ended_at is None:
            return False
        return time.monotonic() >= attempt.ended_at + _RETRY_S

    def _begin(self, key: tuple[str, int], node: SilentNode) -> None:
        others = {other: each for other, each in self._attempts.items() if other[0] != node.id}
        if sum(each.ended_at is None for each in others.values()) < _AT_ONCE:
            attempt = _Attempt()
            self._attempts = {**others, key: attempt}
            # Not waited for when the server ends.
            threading.Thread(target=self._attempt, args=(attempt, node), name="fence", daemon=True).start()

    def _attempt(self, attempt: _Attempt, node: SilentNode) -> None:
        attempt.succeeded = self._run(node)
        attempt.ended_at = time.monotonic()

    def _run(self, node: SilentNode) -> bool:
        names = {"ID": node.id, "NAME": node.name, "ADDRESS": node.address or ""}
        environment = {**os.environ, **{f"MOORING_NODE_{name}": value for name, value in names.items()}}
        try:
            done = subprocess.run(  # noqa: S603 - set by the operator
                [*self._argv, node.name],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=self._timeout_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            log.exception("the fence command for %s failed, so nothing of it is replaced", node.name)
            return False
        if done.returncode:
            printed = done.stdout[-_MAX_SHOWN:].decode(errors="replace").strip()
            log.error(
                "the fence command for %s ended with %s, so nothing of it is replaced: %s",
                node.name, done.returncode, printed,
            )  # fmt: skip
        return done.returncode == 0
