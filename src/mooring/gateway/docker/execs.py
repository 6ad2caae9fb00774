"""`exec`: commands beside the main process. They are kept in memory, by the gateway that created them."""

import re
from contextlib import suppress
from secrets import token_hex
from typing import Any

from pydantic import ValidationError

from mooring.auth.rate_limits import ActionClass
from mooring.control.instances.docker_containers import FoundContainer
from mooring.core.access import Permission
from mooring.gateway.docker import http, views
from mooring.gateway.docker.copying import RawClient
from mooring.gateway.docker.create import invalid, refused
from mooring.gateway.docker.http import ClientGone
from mooring.gateway.docker.lifecycle import window_of
from mooring.gateway.docker.shared import DockerCall, DockerExec, require_exec_room
from mooring.schemas.agent_streams import MAX_WINDOW, ExecRequest, StreamStatus, WindowSize
from mooring.streams.node_streams import NodeStream
from mooring_client.errors import BadRequest, Conflict, MooringError, NotFound
from mooring_client.stream_messages import Channel

_NOT_RUN = 126


async def create(call: DockerCall, match: re.Match[str]) -> None:
    """`POST /containers/{id}/exec`"""
    body = await call.connection.document()
    found = await call.find(match["id"], Permission.EXEC)
    if found.instance is None or not views.is_up(found.instance):
        raise Conflict(f"container {found.id} is not running")
    require_exec_room(call.shared, call.caller)
    made = DockerExec(
        token_hex(32), call.caller.id, call.caller.limited_as, found.id, found.instance.id, _request(body)
    )
    call.shared.execs[made.id] = made
    await call.connection.answer(201, {"Id": made.id})


def _request(body: dict[str, Any]) -> ExecRequest:
    if body.get("Privileged"):
        raise refused("exec --privileged", "instances share nodes with other projects")
    command = body.get("Cmd") or []
    if not isinstance(command, list) or not command:
        raise BadRequest("No exec command specified")
    env = [str(each) for each in body.get("Env") or ()]
    if unset := [each for each in env if "=" not in each]:
        raise refused(f"exec --env {unset[0]}", "give a value")
    try:
        return ExecRequest(
            command=command,
            env=dict(each.split("=", 1) for each in env),
            user=body.get("User") or None,
            working_dir=body.get("WorkingDir") or None,
            tty=bool(body.get("Tty")),
            stdin=bool(body.get("AttachStdin")),
        )
    except ValidationError as error:
        raise invalid(error) from None


def _of(call: DockerCall, exec_id: str) -> DockerExec:
    """Raises NotFound: there is none, or it is another caller's."""
    made = call.shared.execs.get(exec_id)
    if made is None or made.caller_id != call.caller.id:
        raise NotFound(f"No such exec instance: {exec_id}")
    return made


async def start(call: DockerCall, match: re.Match[str]) -> None:
    """`POST /exec/{id}/start`"""
    call.count(ActionClass.EXEC)
    body = await call.connection.document()
    made = _of(call, match["id"])
    if body.get("Detach"):
        raise refused(
            "exec --detach",
            "a command ends with its client; let a shell start it: docker exec NAME sh -c 'nohup … &'",
        )
    if made.has_started:
        raise Conflict(f"Error: Exec command {made.id} has already run")
    made.has_started = True
    size = body.get("ConsoleSize")
    if isinstance(size, list) and len(size) == 2 and all(isinstance(each, int) and each > 0 for each in size):
        made.window = WindowSize(width=min(size[1], MAX_WINDOW), height=min(size[0], MAX_WINDOW))
    tty = made.request.tty
    requested = made.request.model_copy(update={"window": made.window if tty else None})
    stream = await call.open_stream(made.instance_id, requested, "instance.exec")
    made.stream = stream
    try:
        if tty and made.window is not None and made.window != requested.window:
            # It came while the stream was opened.
            await stream.send(Channel.RESIZE, made.window.model_dump_json().encode())
        await _run(call, made, stream)
    finally:
        made.stream = None
        await stream.close()
    call.connection.end_output()


async def _run(call: DockerCall, made: DockerExec, stream: NodeStream) -> None:
    tty = made.request.tty
    content_type = http.RAW_STREAM if tty else http.MULTIPLEXED
    await call.connection.upgrade(content_type, is_asked=call.request.wants_upgrade)
    shown = frozenset({Channel.STDOUT, Channel.STDERR})
    client = RawClient(call.connection, tty=tty, stdin=made.request.stdin, shown=shown)
    status = await client.copy(stream)
    if status is None:
        return
    made.exit_code = _NOT_RUN if status.exit_code is None else status.exit_code
    if status.reason is not None:
        with suppress(ClientGone):
            await client.say(status.reason.message)


async def inspect(call: DockerCall, match: re.Match[str]) -> None:
    """`GET /exec/{id}/json`"""
    made = _of(call, match["id"])
    is_running = made.stream is not None
    document = {
        "ID": made.id,
        "Running": is_running,
        "ExitCode": None if is_running or not made.has_started else made.exit_code,
        "ContainerID": made.container_id,
        "OpenStdin": made.request.stdin,
        "OpenStdout": True,
        "OpenStderr": True,
        "CanRemove": not is_running,
        "DetachKeys": "",
        "Pid": 0,
        "ProcessConfig": {
            "entrypoint": made.request.command[0],
            "arguments": made.request.command[1:],
            "tty": made.request.tty,
            "privileged": False,
            "user": made.request.user or "",
        },
    }
    await call.connection.answer(200, document)


async def resize(call: DockerCall, match: re.Match[str]) -> None:
    """`POST /exec/{id}/resize`"""
    await call.connection.body()
    made = _of(call, match["id"])
    window = window_of(call)
    if window is not None:
        made.window = window
        if made.stream is not None:
            await made.stream.send(Channel.RESIZE, window.model_dump_json().encode())
    await call.connection.answer(200)


async def run_in(
    call: DockerCall, found: FoundContainer, script: str, *arguments: str, timeout_s: int = 30
) -> bytes:
    """Run a script of our own in a shell of the container, and return its output.

    Raises:
        MooringError: it cannot run, or fails.
    """
    stream = await open_script(call, found, script, *arguments, timeout_s=timeout_s)
    output, errors = bytearray(), bytearray()
    try:
        while not isinstance(found_ := await stream.receive(), StreamStatus):
            channel, data = found_
            (errors if channel is Channel.STDERR else output).extend(data)
    finally:
        await stream.close()
    if found_.exit_code != 0:
        raise script_failed(found_, bytes(errors))
    return bytes(output)


# At most this much output of a script is kept.
_MAX_OUTPUT = 1024 * 1024
# The toolbox of the node has what the image lacks.
_PATH = 'PATH="$PATH:/.mooring/bin:/.mooring/applets"\n'


async def open_script(
    call: DockerCall, found: FoundContainer, script: str, *arguments: str, timeout_s: int = 0,
    stdin: bool = False, max_output_bytes: int = _MAX_OUTPUT,
) -> NodeStream:  # fmt: skip
    """Open the stream of a script. Raises MooringError: it cannot run."""
    call.count(ActionClass.EXEC)
    if found.instance is None or not views.is_up(found.instance):
        raise Conflict(f"container {found.id} is not running")
    requested = ExecRequest(
        command=["/bin/sh", "-c", _PATH + script, "sh", *arguments],
        any_shell=True,
        stdin=stdin,
        timeout_s=timeout_s,
        max_output_bytes=max_output_bytes,
    )
    return await call.open_stream(found.instance.id, requested, "instance.exec")


def script_failed(status: StreamStatus, errors: bytes) -> MooringError:
    if status.reason is not None:
        return Conflict(f"mooring: {status.reason.message}")
    text = errors.decode(errors="replace").strip()[-1000:]
    if status.exit_code == 44:
        return NotFound(text or "Could not find the file in the container")
    return Conflict(f"mooring: {text or f'the script ended with {status.exit_code}'}")
