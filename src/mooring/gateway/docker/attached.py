"""`attach`: the main process, from its first byte on if the client attaches before the start."""

import asyncio
import re
from contextlib import suppress
from typing import Final

from mooring.control.instances.docker_containers import FoundContainer
from mooring.core.access import Permission
from mooring.gateway.docker import http, lifecycle, views
from mooring.gateway.docker.changes import changes
from mooring.gateway.docker.copying import RawClient
from mooring.gateway.docker.http import ClientGone
from mooring.gateway.docker.shared import AttachedClients, CopiedStream, DockerCall
from mooring.schemas.agent_streams import AttachRequest, LogsRequest, StreamStatus
from mooring.streams.node_streams import NodeStream
from mooring.streams.tasks import cancelled
from mooring_client.errors import BadRequest, Conflict, MooringError, NotFound, NotRunning
from mooring_client.stream_messages import Channel

_EARLY_BYTES: Final = 64 * 1024
_INTERRUPT: Final = b"\x03"


async def attach(call: DockerCall, match: re.Match[str]) -> None:
    """`POST /containers/{id}/attach`"""
    await call.connection.body()
    found = await call.find(match["id"], Permission.EXEC)
    request = call.request
    if request.flag("logs") and not request.flag("stream"):
        raise BadRequest("mooring: attach with logs only is not supported: use docker logs")
    if views.has_ended(found.instance) and found.row is None:
        raise Conflict(f"container {found.id} is not running")
    tty = views.tty_of(found)
    content_type = http.RAW_STREAM if tty else http.MULTIPLEXED
    shown = {Channel.STDOUT} if request.flag("stdout") else set()
    shown |= {Channel.STDERR} if request.flag("stderr") else set()
    client = RawClient(call.connection, tty=tty, stdin=request.flag("stdin"), shown=frozenset(shown))
    clients = call.shared.clients_of(found.id)
    clients.waiting += 1
    is_waiting = True
    try:
        await call.connection.upgrade(content_type, is_asked=request.wants_upgrade)
        early = _EarlyInput(client, tty=tty)
        try:
            now = await _until_up(call, found, client, early)
        finally:
            await early.stop()
        if now is None or now.instance is None:
            return
        stream = await _opened(call, now.instance.id, clients, stdin=request.flag("stdin"))
        clients.waiting -= 1
        is_waiting = False
        await _copied(call, client, clients, stream, early.data)
    except NotFound:
        pass  # it was removed meanwhile: the answer to the start, or to the wait, says why it has ended
    except MooringError as error:
        with suppress(ClientGone):
            await client.say(error.message)
    finally:
        clients.waiting -= is_waiting
        call.shared.forget_clients(found.id)
    await _after(call, found.id)


async def _copied(
    call: DockerCall, client: RawClient, clients: AttachedClients, stream: CopiedStream, first: bytes
) -> None:
    clients.streams.append(stream)
    try:
        if clients.window is not None:  # it may have come while the stream was opened
            await stream.send(Channel.RESIZE, clients.window.model_dump_json().encode())
        status = await client.copy(stream, first)
        if status is not None and status.reason is not None:
            with suppress(ClientGone):
                await client.say(status.reason.message)
    finally:
        clients.streams.remove(stream)
        await stream.close()
    call.connection.end_output()


async def _opened(
    call: DockerCall, instance_id: str, clients: AttachedClients, *, stdin: bool
) -> CopiedStream:
    """Raises MooringError: the node cannot attach."""
    requested = AttachRequest(stdin=stdin, window=clients.window)
    try:
        return await call.open_stream(instance_id, requested, "instance.attach")
    except NotRunning:
        # It has ended, and its output is not kept: its log has the lines.
        return _Log(await call.open_stream(instance_id, LogsRequest(tail=None, since=None, follow=True), ""))


class _Log:
    """The lines of a log without their times, in place of an attached stream."""

    def __init__(self, log: NodeStream) -> None:
        self._log = log

    @property
    def revoked(self) -> asyncio.Event:
        return self._log.revoked

    async def receive(self) -> tuple[Channel, bytes] | StreamStatus:
        found = await self._log.receive()
        if isinstance(found, StreamStatus) or not found[1]:
            return found
        return found[0], found[1].partition(b" ")[2] + b"\n"

    async def send(self, channel: Channel, data: bytes) -> bool:
        return True

    async def close(self) -> None:
        await self._log.close()


async def _until_up(
    call: DockerCall, found: FoundContainer, client: RawClient, early: "_EarlyInput"
) -> FoundContainer | None:
    """Wait until the instance runs or has ended, and say why it waits. None: it was removed."""
    upcoming = changes(call, found.id)
    said = ""
    is_late = views.has_ended(found.instance)  # an attach before another start
    while True:
        change = asyncio.ensure_future(anext(upcoming, None))
        left = asyncio.ensure_future(early.given_up.wait())
        try:
            await asyncio.wait({change, left}, return_when=asyncio.FIRST_COMPLETED)
            if not change.done():
                await _give_up(call, found, client)
                return None
            now = change.result()
        finally:
            await cancelled(change, left)
        if now is None:
            return None
        instance = now.instance
        if instance is None or (is_late and views.has_ended(instance)):
            continue
        is_late = False
        if views.is_up(instance) or views.has_ended(instance):
            return now
        code = str((instance.reason or {}).get("code"))
        # On a node, messages show progress.
        why = views.waits_because(instance)
        key = why if instance.node_id is None else code
        if why and key != said and code not in _ORDINARY and instance.reason:
            said = key
            await client.say(f"waiting: {why}")


# Reasons that every instance has for a short time.
_ORDINARY: Final = frozenset({"queued", "creating", "starting", "waiting_for_node"})


async def _give_up(call: DockerCall, found: FoundContainer, client: RawClient) -> None:
    """Ctrl-C in a terminal whose program does not run yet: take the instance out of the queue."""
    now = await call.find(found.id, Permission.WRITE)
    await client.say("stopped waiting")
    if now.instance is not None and not views.has_ended(now.instance):
        await call.api("POST", f"/v1/instances/{now.instance.id}/stop", json={"timeout_s": 0})


async def _after(call: DockerCall, container_id: str) -> None:
    """Remove a container that was started with `--rm` and has ended."""
    if container_id in call.shared.attached:
        return
    with suppress(MooringError):
        async for now in changes(call, container_id, within_s=5.0):
            if now is None:
                return
            if views.has_ended(now.instance):
                await lifecycle.remove_ended(call, now)
                return


class _EarlyInput:
    """What the client types before the program runs. Ctrl-C in a terminal gives up."""

    def __init__(self, client: RawClient, *, tty: bool) -> None:
        self._client, self._tty = client, tty
        self.data = b""
        self.given_up = asyncio.Event()
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        while len(self.data) < _EARLY_BYTES and (data := await self._client.read()):
            self.data += data
            if self._tty and _INTERRUPT in data:
                self.given_up.set()

    async def stop(self) -> None:
        await cancelled(self._reading)
