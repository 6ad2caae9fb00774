"""`docker cp`: tar, in the container."""

import base64
import json
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from posixpath import basename, dirname, normpath

from mooring.control.instances.docker_containers import FoundContainer
from mooring.core.access import Permission
from mooring.gateway.docker import views
from mooring.gateway.docker.execs import open_script, run_in, script_failed
from mooring.gateway.docker.http import ClientGone
from mooring.gateway.docker.shared import DockerCall
from mooring.schemas.agent_streams import StreamStatus
from mooring.streams.node_streams import NodeStream
from mooring_client.errors import BadRequest, Conflict, NotFound
from mooring_client.stream_messages import MAX_DATA_BYTES, STDIN_CLOSED, Channel

_STAT = """
[ -e "$1" ] || [ -L "$1" ] || { echo "Could not find the file $1 in container" >&2; exit 44; }
stat -c '%s %f %Y' "$1" && { readlink "$1" || :; }
"""
_STATED = re.compile(r"(?P<size>[0-9]{1,19}) (?P<mode>[0-9a-f]{1,8}) (?P<modified>-?[0-9]{1,11})")
_LONGEST_TARGET = 4096
_READ = 'tar -c -f - -C "$1" "$2"'
_WRITE = """
[ -d "$1" ] || { echo "Could not find the directory $1 in container" >&2; exit 44; }
tar -x -f - -C "$1"
"""
# Go's bits of a file mode, by the type in `st_mode`.
_GO_TYPES = {0o040000: 1 << 31, 0o120000: 1 << 27, 0o060000: 1 << 26, 0o020000: 1 << 26 | 1 << 21,
             0o010000: 1 << 25, 0o140000: 1 << 24}  # fmt: skip


async def stat(call: DockerCall, match: re.Match[str]) -> None:
    """`HEAD /containers/{id}/archive`"""
    found, path = await _found(call, match)
    await call.connection.answer_bytes(200, b"", "application/json", [await _stat_header(call, found, path)])


async def read(call: DockerCall, match: re.Match[str]) -> None:
    """`GET /containers/{id}/archive`"""
    found, path = await _found(call, match)
    header = await _stat_header(call, found, path)
    folder, name = (path, ".") if path == "/" else (dirname(path), basename(path))
    stream = await open_script(call, found, _READ, folder, name, max_output_bytes=0)
    try:
        await call.connection.begin("application/x-tar", [header])
        while not isinstance(part := await stream.receive(), StreamStatus):
            channel, data = part
            if channel is Channel.STDOUT:
                await call.connection.write(data)
        if part.exit_code != 0:
            raise ClientGone  # an answer that is cut off is the only way to say so
        await call.connection.end()
    finally:
        await stream.close()


async def write(call: DockerCall, match: re.Match[str]) -> None:
    """`PUT /containers/{id}/archive`"""
    found, path = await _found(call, match)
    if call.request.headers.get("content-encoding", "identity") != "identity":
        raise BadRequest("mooring: compressed archives are not supported")
    stream = await open_script(call, found, _WRITE, path, stdin=True)
    try:
        await _send(stream, call.connection.chunks())
        errors = bytearray()
        while not isinstance(part := await stream.receive(), StreamStatus):
            errors += part[1]
        if part.exit_code != 0:
            raise script_failed(part, bytes(errors))
    finally:
        await stream.close()
    await call.connection.answer(200)


async def _send(stream: NodeStream, chunks: AsyncIterator[bytes]) -> None:
    async for chunk in chunks:
        for at in range(0, len(chunk), MAX_DATA_BYTES):
            await stream.send(Channel.STDIN, chunk[at : at + MAX_DATA_BYTES])
    await stream.send(Channel.CLOSE, STDIN_CLOSED[1:])


async def _found(call: DockerCall, match: re.Match[str]) -> tuple[FoundContainer, str]:
    given = call.request.params.get("path")
    if not given:
        raise BadRequest("bad parameter: path cannot be empty")
    found = await call.find(match["id"], Permission.EXEC)
    if not views.is_up(found.instance):
        raise Conflict(f"mooring: container {found.id} is not running: files are copied while it runs")
    return found, normpath("/" + given).replace("//", "/")


async def _stat_header(call: DockerCall, found: FoundContainer, path: str) -> tuple[str, str]:
    try:
        text = (await run_in(call, found, _STAT, path)).decode(errors="replace")
    except NotFound:
        raise NotFound(f"Could not find the file {path} in container {found.id}") from None
    encoded = base64.b64encode(json.dumps(stat_document(path, text)).encode()).decode()
    return "X-Docker-Container-Path-Stat", encoded


def stat_document(path: str, text: str) -> dict[str, object]:
    """What Docker says of a path. The `stat` of the container may have printed anything.

    Raises:
        Conflict: it is not what `stat` prints.
    """
    first, _, rest = text.partition("\n")
    found = _STATED.fullmatch(first)
    if found is None:
        raise Conflict(f"mooring: the container's stat does not work; it printed {first[:100]!r}")
    bits = int(found["mode"], 16)
    # A time before 1970 is shown as 1970.
    modified = datetime.fromtimestamp(max(0, int(found["modified"])), UTC)
    return {
        "name": basename(path) or "/",
        "size": int(found["size"]),
        "mode": (bits & 0o777) | _GO_TYPES.get(bits & 0o170000, 0),
        "mtime": modified.isoformat().replace("+00:00", "Z"),
        "linkTarget": rest.partition("\n")[0][:_LONGEST_TARGET],
    }
