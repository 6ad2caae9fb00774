"""What a container writes and uses: logs, processes and resources."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

from mooring.control.instances.docker_containers import FoundContainer
from mooring.core.access import Permission
from mooring.gateway.docker import filters, http, views
from mooring.gateway.docker.api import parsed
from mooring.gateway.docker.changes import changes
from mooring.gateway.docker.copying import frame
from mooring.gateway.docker.execs import open_script, run_in, script_failed
from mooring.gateway.docker.shared import DockerCall, until_gone
from mooring.schemas.agent_streams import StreamStatus
from mooring.streams.node_streams import NodeStream
from mooring_client.errors import BadRequest, Conflict, MooringError, NotRunning
from mooring_client.stream_messages import Channel

_MOST_LINES: Final = 1_000_000
_MAX_SAMPLE_BYTES: Final = 256 * 1024
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
    path, params = _log_path(call, follow=follow), call.request.params
    since = filters.nanoseconds_of(params.get("since"))
    until = filters.nanoseconds_of(params.get("until")) or None  # clients send 0 for none
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
                async for line in parsed(lines):
                    at = filters.nanoseconds_of(line["at"]) or 0
                    if until is not None and at > until:
                        break
                    # The API reads whole milliseconds.
                    if since is not None and at < since:
                        continue
                    if line["stream"] in shown or tty:
                        await _send_line(call, line, tty=tty)
        except NotRunning:
            pass  # it has no container, and so no log
    if not call.connection.has_answered:
        await call.connection.begin(content_type)
    await call.connection.end()


def _has_run(found: FoundContainer | None) -> bool:
    return found is not None and views.status_of(found) != "created"


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
