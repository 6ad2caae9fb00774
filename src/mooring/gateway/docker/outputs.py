"""What a container writes and uses: logs, events, processes and resources."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from mooring.control import events as control_events
from mooring.control.instances import docker_containers
from mooring.control.instances.docker_containers import FoundContainer
from mooring.core.access import Permission
from mooring.core.errors import BadRequest, Conflict, MooringError, NotFound, NotRunning
from mooring.core.stream_messages import Channel
from mooring.gateway.docker import filters, http, views
from mooring.gateway.docker.api import error_of
from mooring.gateway.docker.changes import changes
from mooring.gateway.docker.copying import frame
from mooring.gateway.docker.execs import open_script, run_in, script_failed
from mooring.gateway.docker.shared import DockerCall, until_gone
from mooring.schemas.agent_streams import StreamStatus
from mooring.streams.node_streams import NodeStream

_MOST_LINES: Final = 1_000_000
_MAX_SAMPLE_BYTES: Final = 256 * 1024
# Docker's actions by the state that an instance has reached.
_ACTIONS: Final[Mapping[str, str]] = {
    "pending": "create", "running": "start", "stopping": "kill", "stopped": "die", "succeeded": "die",
    "failed": "die", "deleted": "destroy",
}  # fmt: skip
# The cgroup as the container sees it, of version 2 or 1: one line for each name, every second.
_STATS: Final = """
cd /sys/fs/cgroup 2>/dev/null
first() { for each; do [ -r "$each" ] && { read -r value <"$each"; echo "$value"; return; }; done; echo 0; }
while :; do
echo "used $(first memory.current memory/memory.usage_in_bytes)"
echo "limit $(first memory.max memory/memory.limit_in_bytes)"
echo "pids $(first pids.current pids/pids.current)"
echo "cpu_ns $(first cpuacct/cpuacct.usage)"
cat cpu.stat io.stat /proc/net/dev 2>/dev/null
echo "cpus $(nproc)"
echo ---
sleep 1
done
"""
_SAMPLE_END: Final = b"---\n"
_NAMED: Final = re.compile(r"^(\w{1,40}) ([0-9]{1,19})$", re.MULTILINE)
_NUMBER: Final = "[0-9]{1,19}"
_NETWORK: Final = re.compile(
    rf"^\s*(eth[0-9]{{1,3}}):\s*({_NUMBER})\s+({_NUMBER})(?:\s+{_NUMBER}){{6}}\s+({_NUMBER})\s+({_NUMBER})",
    re.MULTILINE,
)
_IO: Final = re.compile(
    rf"^([0-9]{{1,9}}):([0-9]{{1,9}}) rbytes=({_NUMBER}) wbytes=({_NUMBER})", re.MULTILINE
)
_TOP: Final = """
for each in /proc/[0-9]*; do
    pid=${each#/proc/}
    user= parent=
    while read -r field value rest; do
        case $field in PPid:) parent=$value ;; Uid:) user=$value ;; esac
    done 2>/dev/null <$each/status || continue
    printf '%s\\t%s\\t%s\\t' "$user" "$pid" "$parent"
    tr '\\0\\n' '  ' <$each/cmdline 2>/dev/null
    echo
done
"""


async def logs(call: DockerCall, match: re.Match[str]) -> None:
    """`GET /containers/{id}/logs`"""
    found = await call.find(match["id"])
    request = call.request
    if request.flag("details"):
        raise BadRequest("mooring: logs --details is not supported: logs have no details")
    shown = {name for name in ("stdout", "stderr") if request.flag(name)}
    if not shown:
        raise BadRequest("Bad parameters: you must choose at least one stream")
    await until_gone(call, asyncio.ensure_future(_send_logs(call, found, shown)))


async def _send_logs(call: DockerCall, found: FoundContainer, shown: set[str]) -> None:
    tty, follow = views.tty_of(found), call.request.flag("follow")
    content_type = http.RAW_STREAM if tty else http.MULTIPLEXED
    path, until = _log_path(call, follow=follow), filters.time_of(call.request.params.get("until"))
    now: FoundContainer | None = found
    if not _has_run(now):
        await call.connection.begin(content_type)
        if follow:
            now = await _until_it_has_run(call, found)
    if now is not None and now.instance is not None:
        try:
            url = f"/v1/instances/{now.instance.id}/{path}"
            async with call.shared.api.lines(call.secret, call.address, url) as lines:
                # Not before, because a client may remove the container as soon as it has the headers.
                if not call.connection.has_answered:
                    await call.connection.begin(content_type)
                async for line in _parsed(lines):
                    if until is not None and datetime.fromisoformat(line["at"]).timestamp() > until:
                        break
                    if line["stream"] in shown or tty:
                        await _send_line(call, line, tty=tty)
        except NotRunning:
            pass  # it has no container, and so no log
    if not call.connection.has_answered:
        await call.connection.begin(content_type)
    await call.connection.end()


def _has_run(found: FoundContainer | None) -> bool:
    return found is not None and (views.is_up(found.instance) or views.has_ended(found.instance))


async def _until_it_has_run(call: DockerCall, found: FoundContainer) -> FoundContainer | None:
    async for now in changes(call, found.id):
        if now is None or _has_run(now):
            return now
    return None


async def _send_line(call: DockerCall, line: dict[str, str], *, tty: bool) -> None:
    at = f"{line['at']} " if call.request.flag("timestamps") else ""
    data = f"{at}{line['line']}".encode() + (b"\r\n" if tty else b"\n")
    channel = Channel.STDERR if line["stream"] == "stderr" else Channel.STDOUT
    await call.connection.write(data if tty else frame(channel, data))


def _log_path(call: DockerCall, *, follow: bool) -> str:
    given = call.request.params.get("tail") or "all"
    if given != "all" and not re.fullmatch(r"\d{1,7}", given):
        given = "all"  # as Docker does
    tail = _MOST_LINES if given == "all" else min(int(given), _MOST_LINES)
    query = f"follow={str(follow).lower()}&tail={tail}"
    if (since := filters.time_of(call.request.params.get("since"))) is not None:
        query += f"&since={datetime.fromtimestamp(since, UTC).isoformat().replace('+00:00', 'Z')}"
    return f"logs?{query}"


async def _parsed(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    """The data of events. Raises MooringError: the stream has ended early."""
    async for text in lines:
        if text.startswith("data: "):
            event: dict[str, Any] = json.loads(text[6:])
            if "error" in event:
                raise error_of(str(event["error"]["code"]), str(event["error"]["message"]))
            yield event


async def events(call: DockerCall, _match: re.Match[str]) -> None:
    """`GET /events`: those of containers, from now on."""
    wanted = filters.parsed(
        call.request.params.get("filters"), {"container", "event", "type", "label", "image"}
    )
    if call.request.params.get("since"):
        raise BadRequest("mooring: events --since is not supported: see GET /v1/events")
    until = filters.time_of(call.request.params.get("until"))
    call.access(Permission.READ)
    last_seq = await call.shared.read(control_events.last_seq)
    await call.connection.begin("application/json")
    work = asyncio.ensure_future(_send_events(call, wanted, last_seq))
    try:
        async with asyncio.timeout(None if until is None else max(0.0, until - time.time())):
            await until_gone(call, work)
    except TimeoutError:
        await call.connection.end()


async def _send_events(call: DockerCall, wanted: filters.Filters, after: int) -> None:
    async with call.shared.api.lines(call.secret, call.address, f"/v1/events?after={after}") as lines:
        async for event in _parsed(lines):
            for document in await _events(call, event):
                if _is_wanted(document, wanted):
                    await call.connection.write_document(document)
    await call.connection.end()


async def _events(call: DockerCall, event: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Docker's events. A program that ends at once was never seen running, and still has started."""
    document = await _event(call, event)
    if document is None:
        return []
    has_skipped = document["Action"] == "die" and event["data"].get("from") in {"scheduled", "starting"}
    if has_skipped and document["Actor"]["Attributes"].get("exitCode") not in {None, "125", "126", "127"}:
        return [{**document, "Action": "start", "status": "start"}, document]
    return [document]


async def _event(call: DockerCall, event: Mapping[str, Any]) -> dict[str, Any] | None:
    data = event.get("data") or {}
    action = _ACTIONS.get(str(data.get("to")))
    instance_id = data.get("instance_id")
    if action is None or not instance_id:
        return None
    access = call.access(Permission.READ)
    try:
        found = await call.shared.read(
            partial(docker_containers.find, access=access, reference=str(instance_id))
        )
        attributes = {"name": found.name, "image": views.listed(found)["Image"], **views.labels_of(found)}
        container_id = found.id
        if action == "die" and found.instance is not None:
            attributes["exitCode"] = str(views.exit_code(found.instance))
    except NotFound:
        attributes, container_id = {}, docker_containers.id_of(str(instance_id))
    at = datetime.fromisoformat(str(event["at"]))
    return {
        "Type": "container",
        "Action": action,
        "Actor": {"ID": container_id, "Attributes": attributes},
        "scope": "local",
        "status": action,
        "id": container_id,
        "from": attributes.get("image", ""),
        "time": int(at.timestamp()),
        "timeNano": int(at.timestamp() * 1_000_000) * 1000,
    }


def _is_wanted(document: Mapping[str, Any], wanted: filters.Filters) -> bool:
    attributes, container_id = document["Actor"]["Attributes"], document["id"]
    named = wanted.get("container", [])
    return (
        (not named or any(container_id.startswith(each) or attributes.get("name") == each for each in named))
        and document["Action"] in (wanted.get("event") or [document["Action"]])
        and "container" in (wanted.get("type") or ["container"])
        and attributes.get("image", "") in (wanted.get("image") or [attributes.get("image", "")])
        and filters.has_labels(attributes, wanted.get("label", []))
    )


async def top(call: DockerCall, match: re.Match[str]) -> None:
    """`GET /containers/{id}/top`"""
    found = await call.find(match["id"], Permission.EXEC)
    if call.request.params.get("ps_args") not in (None, "", "-ef"):
        raise BadRequest("mooring: options of ps are not supported with docker top")
    text = (await run_in(call, found, _TOP)).decode(errors="replace")
    rows = [line.rstrip().split("\t", 3) for line in text.splitlines() if line.count("\t") == 3]
    own = [row for row in rows if len(row) == 4 and row[3] and "case $field in PPid:)" not in row[3]]
    await call.connection.answer(200, {"Titles": ["UID", "PID", "PPID", "CMD"], "Processes": own})


async def stats(call: DockerCall, match: re.Match[str]) -> None:
    """`GET /containers/{id}/stats`"""
    found = await call.find(match["id"], Permission.EXEC)
    if not views.is_up(found.instance):
        await call.connection.answer(200, {**_NO_STATS, "name": f"/{found.name}", "id": found.id})
        return
    # One command for all samples: each command is a row of the audit log.
    stream = await open_script(call, found, _STATS, max_output_bytes=0)
    try:
        samples = _samples(stream, found)
        first = await anext(samples)
        await call.connection.begin("application/json")
        is_stream = call.request.flag("stream", default=True)
        work = asyncio.ensure_future(_send_stats(call, samples, first, is_stream=is_stream))
        await until_gone(call, work)
    finally:
        await stream.close()


async def _samples(stream: NodeStream, found: FoundContainer) -> AsyncIterator[dict[str, Any]]:
    """Raises MooringError: the command cannot run, or has ended."""
    text = b""
    while not isinstance(part := await stream.receive(), StreamStatus):
        text += part[1] if part[0] is Channel.STDOUT else b""
        *complete, text = text.split(_SAMPLE_END)
        for sample in complete:
            yield usage_of(sample.decode(errors="replace"), found)
        if len(text) > _MAX_SAMPLE_BYTES:
            raise Conflict("mooring: the container's resources cannot be read")
    raise script_failed(part, b"")


_NO_STATS: Final[Mapping[str, Any]] = {
    "read": "0001-01-01T00:00:00Z", "preread": "0001-01-01T00:00:00Z", "pids_stats": {}, "blkio_stats": {},
    "num_procs": 0, "storage_stats": {}, "cpu_stats": {},
    "precpu_stats": {}, "memory_stats": {}, "networks": {},
}  # fmt: skip


async def _send_stats(
    call: DockerCall, samples: AsyncIterator[dict[str, Any]], first: dict[str, Any], *, is_stream: bool
) -> None:
    if not is_stream and call.request.flag("one-shot"):
        await call.connection.write_document({**first, "precpu_stats": {}, "preread": _NO_STATS["preread"]})
        await call.connection.end()
        return
    before = first
    with suppress(MooringError):  # the container has ended
        async for current in samples:
            shown = {**current, "precpu_stats": before["cpu_stats"], "preread": before["read"]}
            await call.connection.write_document(shown)
            if not is_stream:
                break
            before = current
    await call.connection.end()


def usage_of(text: str, found: FoundContainer) -> dict[str, Any]:
    """Docker's sample. The container may have printed anything, numbers of any length included."""
    named = {key: int(value) for key, value in _NAMED.findall(text)}
    network, io = _NETWORK.findall(text), _IO.findall(text)
    cpus, used_ns = named.get("cpus", 1), named.get("cpu_ns") or named.get("usage_usec", 0) * 1000
    return {
        **_NO_STATS,
        "id": found.id,
        "name": f"/{found.name}",
        "read": datetime.now(UTC).isoformat().replace("+00:00", "Z"),
        "pids_stats": {"current": named.get("pids", 0)},
        "cpu_stats": {
            "cpu_usage": {
                "total_usage": used_ns,
                "usage_in_usermode": named.get("user_usec", 0) * 1000,
                "usage_in_kernelmode": named.get("system_usec", 0) * 1000,
            },
            "system_cpu_usage": int(time.monotonic() * cpus * 1e9),
            "online_cpus": cpus,
        },
        "memory_stats": {"usage": named.get("used", 0), "limit": named.get("limit", 0), "stats": {}},
        "networks": {
            name: {"rx_bytes": int(rx), "rx_packets": int(rp), "tx_bytes": int(tx), "tx_packets": int(tp)}
            for name, rx, rp, tx, tp in network
        },
        "blkio_stats": {
            "io_service_bytes_recursive": [
                {"major": int(major), "minor": int(minor), "op": op, "value": int(value)}
                for major, minor, read, written in io
                for op, value in (("read", read), ("write", written))
            ]
        },
    }
