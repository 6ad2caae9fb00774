"""Containers: create, start, stop, wait and remove, through the API."""

import asyncio
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from secrets import choice, token_hex
from typing import Any, Final

from mooring.control.instances import docker_containers
from mooring.control.instances.docker_containers import FoundContainer
from mooring.core.access import Permission
from mooring.db.tables import DockerContainer
from mooring.gateway.docker import views
from mooring.gateway.docker.changes import changes
from mooring.gateway.docker.create import converted, instance_name
from mooring.gateway.docker.shared import DockerCall, send_to_all, until_gone
from mooring.schemas.agent_streams import AttachRequest, Signal, StreamStatus, WindowSize
from mooring_client.errors import BadRequest, Conflict, MooringError, NotFound, Unavailable
from mooring_client.schemas.states import DesiredState, State
from mooring_client.stream_messages import Channel

# Less than the 60 s after which docker-py gives up. The instance stays in the queue.
STARTED_WITHIN_S: Final = 50.0
_REMOVED_WITHIN_S: Final = 30.0
_NAME: Final = re.compile(r"/?[a-zA-Z0-9][a-zA-Z0-9_.-]{0,127}")
_WORDS: Final = ("amber", "brisk", "calm", "deft", "eager", "fair", "keen", "lively", "merry", "swift")
_NOUNS: Final = ("anchor", "barge", "buoy", "cleat", "dock", "harbor", "jetty", "keel", "pier", "quay")
_SIGNALS: Final[Mapping[str, str]] = {
    "1": "HUP", "2": "INT", "3": "QUIT", "6": "ABRT", "9": "KILL", "10": "USR1", "12": "USR2", "15": "TERM",
}  # fmt: skip


async def create(call: DockerCall, _match: re.Match[str]) -> None:
    """`POST /containers/create`"""
    access = call.access(Permission.WRITE, "instance.create")
    name = call.request.params.get("name") or f"{choice(_WORDS)}-{choice(_NOUNS)}-{token_hex(2)}"
    if not _NAME.fullmatch(name):
        raise BadRequest(f"Invalid container name ({name[:128]}), only [a-zA-Z0-9][a-zA-Z0-9_.-] are allowed")
    if platform := call.request.params.get("platform"):
        raise BadRequest(f"mooring: --platform {platform} is not supported: nodes run linux/amd64")
    made = converted(name.removeprefix("/"), await call.connection.document())
    row = await call.shared.write(
        partial(
            docker_containers.create, access=access, project_id=made.project_id, name=name.removeprefix("/"),
            request=made.request, config=made.config, auto_remove=made.auto_remove,
        )
    )  # fmt: skip
    await call.connection.answer(201, {"Id": row.id, "Warnings": made.warnings})


async def start(call: DockerCall, match: re.Match[str]) -> None:
    """`POST /containers/{id}/start`"""
    await call.connection.body()
    found = await call.find(match["id"], Permission.WRITE)
    if found.instance is not None and not views.has_ended(found.instance):
        await call.connection.answer(304)
        return
    try:
        await _begin(call, found)
        await _until_started(call, found.id)
    except MooringError:
        await _auto_remove(call, found)
        raise
    await call.connection.answer(204)


async def _begin(call: DockerCall, found: FoundContainer) -> None:
    if found.instance is not None:
        await call.api("POST", f"/v1/instances/{found.instance.id}/start")
        return
    row = _row_of(found)
    clients = call.shared.attached.get(found.id)
    # The node keeps the first output only for a client that waits for it.
    body = {**row.request, "attach": clients is not None and clients.waiting > 0}
    made = await call.api("POST", "/v1/instances", json=body, idempotency_key=f"docker-{found.id}")
    instance_id = str(made["id"])
    started = partial(docker_containers.started, container_id=found.id, instance_id=instance_id)
    if not await call.shared.write(started):
        with suppress(NotFound):  # another start has done the same
            await call.api("DELETE", f"/v1/instances/{instance_id}")
        raise NotFound(f"No such container: {found.id}")


def _row_of(found: FoundContainer) -> DockerContainer:
    """The row of a container that has no instance."""
    assert found.row is not None
    return found.row


async def _until_started(call: DockerCall, container_id: str) -> None:
    """Raises MooringError: it failed to start."""
    async for found in changes(call, container_id, STARTED_WITHIN_S):
        if found is None or views.is_up(found.instance) or views.is_restarting(found.instance):
            return
        if (instance := found.instance) is not None and views.has_ended(instance):
            if instance.state is State.FAILED and instance.exit_code is None:
                raise _not_started(instance.reason or {})
            return


def _not_started(reason: Mapping[str, Any]) -> MooringError:
    message, code = str(reason.get("message") or "it did not start"), reason.get("code")
    # `docker run` exits with 127 or 126 if it finds these words.
    more = {
        "command_not_found": ": executable file not found in $PATH",
        "command_not_executable": ": permission denied",
    }.get(str(code), "")
    kind = NotFound if code == "image_not_found" else BadRequest
    return kind(f"mooring: {message}{more}")


async def _auto_remove(call: DockerCall, found: FoundContainer) -> None:
    """Remove a container that was not started, if it was created with `--rm`."""
    if found.row is None or not found.row.auto_remove:
        return

    def act(session: Any) -> None:
        current = session.get(type(found.row), found.id)
        if current is not None and current.instance_id is None:
            docker_containers.remove(session, found.id, None)
        else:
            docker_containers.auto_remove(session, found.id)

    await call.shared.write(act)


async def stop(call: DockerCall, match: re.Match[str]) -> None:
    """`POST /containers/{id}/stop`"""
    await call.connection.body()
    found = await call.find(match["id"], Permission.WRITE)
    if found.instance is None or views.has_ended(found.instance):
        await call.connection.answer(304)
        return
    await _stop(call, found, _timeout_s(call, found))
    await call.connection.answer(204)


def _timeout_s(call: DockerCall, found: FoundContainer) -> int:
    default = found.row.config.get("StopTimeout") if found.row is not None else None
    timeout_s = call.request.number("t", default if isinstance(default, int) else 10, 3600)
    return 3600 if timeout_s < 0 else timeout_s


async def _stop(call: DockerCall, found: FoundContainer, timeout_s: int) -> None:
    assert found.instance is not None
    await call.api("POST", f"/v1/instances/{found.instance.id}/stop", json={"timeout_s": timeout_s})
    async for now in changes(call, found.id, timeout_s + _REMOVED_WITHIN_S):
        if now is None or views.has_ended(now.instance):
            return


async def restart(call: DockerCall, match: re.Match[str]) -> None:
    """`POST /containers/{id}/restart`"""
    await call.connection.body()
    found = await call.find(match["id"], Permission.WRITE)
    if views.is_up(found.instance):
        assert found.instance is not None
        attempt = found.instance.attempt
        await call.api("POST", f"/v1/instances/{found.instance.id}/restart")
        async for now in changes(call, found.id, STARTED_WITHIN_S):
            if now is None or now.instance is None or now.instance.attempt > attempt:
                break
    else:
        await _begin(call, found)
    await _until_started(call, found.id)
    await call.connection.answer(204)


async def kill(call: DockerCall, match: re.Match[str]) -> None:
    """`POST /containers/{id}/kill`"""
    await call.connection.body()
    found = await call.find(match["id"], Permission.WRITE)
    given = (call.request.params.get("signal") or "KILL").upper().removeprefix("SIG")
    signal = _SIGNALS.get(given, given)
    if not re.fullmatch(r"[A-Z][A-Z0-9]{1,15}", signal):
        raise BadRequest(f"Invalid signal: {given[:32]}")
    instance = found.instance
    if instance is None or views.has_ended(instance):
        raise Conflict(f"cannot kill container: {match['id']}: container {found.id} is not running")
    if not views.is_up(instance):
        # Nobody gets a signal yet: a client that gives up waiting takes the instance out of the queue.
        if signal in {"INT", "TERM", "KILL", "HUP", "QUIT"}:
            await _stop(call, found, 0)
    elif signal == "KILL":
        await _stop(call, found, 0)
    else:
        await _signal(call, found, signal)
    await call.connection.answer(204)


async def _signal(call: DockerCall, found: FoundContainer, signal: str) -> None:
    clients = call.shared.attached.get(found.id)
    data = Signal(signal=signal).model_dump_json().encode()
    if clients is not None and await send_to_all(clients, Channel.SIGNAL, data):
        return
    assert found.instance is not None
    stream = await call.open_stream(found.instance.id, AttachRequest(signal=signal), "instance.signal")
    try:
        while not isinstance(await stream.receive(), StreamStatus):
            pass
    finally:
        await stream.close()


async def resize(call: DockerCall, match: re.Match[str]) -> None:
    """`POST /containers/{id}/resize`"""
    await call.connection.body()
    found = await call.find(match["id"], Permission.EXEC)
    window = window_of(call)
    if window is not None:
        clients = call.shared.attached.get(found.id)
        if clients is not None:
            clients.window = window
            await send_to_all(clients, Channel.RESIZE, window.model_dump_json().encode())
    await call.connection.answer(200)


def window_of(call: DockerCall) -> WindowSize | None:
    """The size in the parameters; None: none, as clients without a terminal send it."""
    width, height = call.request.number("w", 0, 65_535), call.request.number("h", 0, 65_535)
    return WindowSize(width=width, height=height) if width > 0 and height > 0 else None


async def wait(call: DockerCall, match: re.Match[str]) -> None:
    """`POST /containers/{id}/wait`: the headers at once, because clients call it before the start."""
    await call.connection.body()
    found = await call.find(match["id"])
    condition = call.request.params.get("condition") or "not-running"
    if condition not in {"not-running", "next-exit", "removed"}:
        raise BadRequest(f"Invalid condition: {condition[:32]}")
    await call.connection.begin("application/json")
    await until_gone(call, asyncio.ensure_future(_send_exit_code(call, found, condition)))


async def _send_exit_code(call: DockerCall, found: FoundContainer, condition: str) -> None:
    try:
        document = await _exit_code(call, found, condition)
    except MooringError as error:
        document = {"StatusCode": 125, "Error": {"Message": error.message}}
    await call.connection.write_document(document)
    await call.connection.end()


async def _exit_code(call: DockerCall, found: FoundContainer, condition: str) -> dict[str, Any]:
    code, began = 0, condition == "not-running"
    attempt = found.instance.attempt if views.has_ended(found.instance) and found.instance else -1
    async for now in changes(call, found.id):
        if now is None:
            break
        instance = now.instance
        if views.has_ended(instance) and instance is not None:
            code = views.exit_code(instance)
            is_next = began or instance.attempt > attempt
            await remove_ended(call, now)
            if condition != "removed" and is_next:
                break
        elif condition == "not-running" and instance is None:
            break
    return {"StatusCode": code}


async def remove_ended(call: DockerCall, found: FoundContainer) -> None:
    """Remove a container that was started with `--rm`, unless a client still reads its output."""
    if found.row is None or not found.row.auto_remove or found.id in call.shared.attached:
        return
    await call.shared.write(partial(docker_containers.auto_remove, container_id=found.id))


async def remove(call: DockerCall, match: re.Match[str]) -> None:
    """`DELETE /containers/{id}`"""
    await call.connection.body()
    found = await call.find(match["id"], Permission.WRITE)
    instance = found.instance
    if (views.is_up(instance) or views.is_restarting(instance)) and not call.request.flag("force"):
        raise Conflict(
            f'cannot remove container "/{found.name}": container is {views.status_of(found)}: '
            "stop the container before removing or force remove"
        )
    if instance is not None:
        if instance.desired_state is DesiredState.RUNNING and not views.has_ended(instance):
            with suppress(MooringError):  # it has just ended
                await call.api("POST", f"/v1/instances/{instance.id}/stop", json={"timeout_s": 0})
        await call.api("DELETE", f"/v1/instances/{instance.id}")
        await _until_deleted(call, found)
    known = found.row.instance_id if found.row is not None else None
    gone = await call.shared.write(
        partial(docker_containers.remove, container_id=found.id, instance_id=known)
    )
    if not gone:
        raise Conflict(f'cannot remove container "/{found.name}": it was started meanwhile; try again')
    await call.connection.answer(204)


async def _until_deleted(call: DockerCall, found: FoundContainer) -> None:
    """Wait, so that the name is free again."""
    async for now in changes(call, found.id, _REMOVED_WITHIN_S):
        if now is None or now.instance is None:
            return


async def rename(call: DockerCall, match: re.Match[str]) -> None:
    """`POST /containers/{id}/rename`"""
    await call.connection.body()
    found = await call.find(match["id"], Permission.WRITE)
    given = call.request.params.get("name", "")
    if not _NAME.fullmatch(given):
        raise BadRequest("Invalid container name: only [a-zA-Z0-9][a-zA-Z0-9_.-] are allowed")
    name = given.removeprefix("/")
    if name == found.name:
        raise BadRequest("Renaming a container with the same name as its current name")
    if found.row is None and name != instance_name(name):
        raise BadRequest(f"mooring: {name} is not valid: the name of this container is a DNS label")
    # So `/v1`, SSH clients and the host name of a later start use the new name too.
    current = found.instance.name if found.instance is not None else str(_row_of(found).request["name"])
    renamed = instance_name(name) if current == instance_name(found.name) else None
    # Both or none, also if the gateway ends.
    await asyncio.shield(_rename(call, found, name, None if renamed == current else renamed))
    await call.connection.answer(204)


async def _rename(call: DockerCall, found: FoundContainer, name: str, renamed: str | None) -> None:
    """Rename the row of a container, if it has one, and its instance, if that gets a new name."""
    if found.row is None:
        free = partial(docker_containers.require_free, project_id=found.project_id, name=name)
        await call.shared.read(free)
    else:
        await _rename_row(call, found.id, name, renamed)
    if found.instance is None or renamed is None:
        return
    try:
        await call.api("PATCH", f"/v1/instances/{found.instance.id}", json={"name": renamed})
    except Unavailable:
        raise  # it may be renamed all the same
    except MooringError:
        if found.row is not None:
            await _rename_back(call, found, name)
        raise


async def _rename_back(call: DockerCall, before: FoundContainer, name: str) -> None:
    with suppress(MooringError):  # such as: another container has taken the name
        if (await call.find(before.id)).name == name:  # it was not renamed again
            await _rename_row(call, before.id, before.name, str(_row_of(before).request["name"]))


async def _rename_row(call: DockerCall, container_id: str, name: str, instance_name: str | None) -> None:
    await call.shared.write(
        partial(docker_containers.rename, container_id=container_id, name=name, instance_name=instance_name)
    )
