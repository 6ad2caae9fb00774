"""The network between agents or users and the replicas: it drops, repeats, delays and misdelivers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import httpx

from tests.simulation.replicas import Answer, Replica
from tests.simulation.virtual import Event, hub

if TYPE_CHECKING:
    from tests.simulation.world import World

T = TypeVar("T")


class NoAnswer(Exception):
    """The request or its response was lost: it may have had its effect or not."""


@dataclass
class Link:
    """One machine's way to the control plane.

    Attributes:
        loses_requests, loses_answers: everything in this direction.
        loss: the part of messages that are lost, in each direction.
        delay_s: the longest delay of a message.
        repeats: whether some requests arrive twice, the second time late.
    """

    loses_requests: bool = False
    loses_answers: bool = False
    loss: float = 0.0
    delay_s: float = 0.01
    repeats: bool = False

    def heal(self) -> None:
        self.loses_requests = self.loses_answers = self.repeats = False
        self.loss, self.delay_s = 0.0, 0.01

    def loses(self, *, answer: bool) -> bool:
        if self.loses_answers if answer else self.loses_requests:
            return True
        return bool(self.loss) and hub().random.random() < self.loss


class _Pending(Generic[T]):
    def __init__(self) -> None:
        self.done = Event()
        self.answer: T | None = None


def call(world: "World", link: Link, handle: Callable[[Replica], T], timeout_s: float) -> T:
    """Send a request to one of the replicas, and return its response.

    Raises:
        NoAnswer: within `timeout_s`, or the replica ended.
    """
    up = [replica for replica in world.replicas if replica.is_up]
    hub().step(link.delay_s)
    if not up:
        raise NoAnswer("refused")
    replica = hub().random.choice(up)
    pending: _Pending[T] = _Pending()
    if not link.loses(answer=False):
        _deliver(replica, handle, pending, 0)
    if link.repeats and hub().random.random() < 0.3:
        _deliver(replica, handle, _Pending(), hub().random.random() * 20)
    process = replica.process
    until = hub().now + timeout_s
    while pending.answer is None:
        if process is None or not process.is_alive:
            raise NoAnswer("the connection was reset")
        if hub().now >= until:
            raise NoAnswer("no answer in time")
        pending.done.wait(min(1.0, until - hub().now))
    hub().step(link.delay_s)
    if link.loses(answer=True):
        raise NoAnswer("the answer was lost")
    return pending.answer


def _deliver(replica: Replica, handle: Callable[[Replica], T], pending: _Pending[T], late_s: float) -> None:
    def serve() -> None:
        if late_s:
            hub().sleep(late_s)
        pending.answer = handle(replica)
        pending.done.set()

    if replica.process is not None and replica.process.is_alive:
        replica.process.spawn(serve, "request")


class AgentHttp:
    """What a ControlPlaneClient uses of `httpx.Client`."""

    def __init__(self, world: "World", link: Link, node: str) -> None:
        self._world, self._link, self._node = world, link, node

    def post(
        self, url: str, *, content: bytes, headers: dict[str, str], timeout: httpx.Timeout
    ) -> httpx.Response:
        """Raises httpx.ReadTimeout without an answer."""
        path = "/" + url.split("/", 3)[3]
        credential = headers.get("Authorization", "").removeprefix("Bearer ")
        try:
            answer: Answer = call(
                self._world,
                self._link,
                lambda replica: replica.handle(path, credential, content),
                timeout.read or 10.0,
            )
        except NoAnswer as error:
            raise httpx.ReadTimeout(str(error)) from error
        status, body = self._world.misdelivered(self._node, path, answer)
        return httpx.Response(status, content=body)

    def close(self) -> None:
        """Nothing to close."""
