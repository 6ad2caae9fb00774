"""`docker events`: changes of containers, from the event log."""

import asyncio
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from mooring.control import event_order
from mooring.control import events as control_events
from mooring.control.instances import docker_containers
from mooring.core.access import Permission
from mooring.gateway.docker import filters, views
from mooring.gateway.docker.api import parsed
from mooring.gateway.docker.shared import DockerCall, until_gone
from mooring_client.errors import NotFound

_PAGE: Final = 200
# Docker's actions by the state that an instance has reached.
_ACTIONS: Final[Mapping[str, str]] = {
    "pending": "create", "running": "start", "stopping": "kill", "stopped": "die", "succeeded": "die",
    "failed": "die", "deleted": "destroy",
}  # fmt: skip


async def events(call: DockerCall, _match: re.Match[str]) -> None:
    """`GET /events`: those of containers, from `since` or now until `until` or forever."""
    params = call.request.params
    wanted = filters.parsed(params.get("filters"), {"container", "event", "type", "label", "image"})
    since, until = filters.time_of(params.get("since")), filters.time_of(params.get("until"))
    call.access(Permission.READ)
    complete_to = await call.shared.read(event_order.complete_to)
    last_seq = await call.shared.read(partial(control_events.newest_complete_seq, complete_to=complete_to))
    after = last_seq
    if since is not None:
        at = datetime.fromtimestamp(since, UTC)
        after = await call.shared.read(partial(control_events.seq_before, at=at))
    await call.connection.begin("application/json")
    if until is not None and until <= time.time():
        await _send_past(call, wanted, after, last_seq, (until if since is None else since, until))
        return
    work = asyncio.ensure_future(_send_events(call, wanted, after, since or 0.0))
    try:
        async with asyncio.timeout(None if until is None else max(0.0, until - time.time())):
            await until_gone(call, work)
    except TimeoutError:
        await call.connection.end()


async def _send_past(
    call: DockerCall, wanted: filters.Filters, after: int, last_seq: int, between: tuple[float, float]
) -> None:
    """Send what has happened between two times that are over, and end."""
    while after < last_seq:
        page: Any = await call.api("GET", f"/v1/events?after={after}&limit={_PAGE}")
        for event in page["items"]:
            if between[0] <= _time_of(event) <= between[1]:
                await _send(call, wanted, event)
        if not page["items"] or _time_of(page["items"][-1]) > between[1]:
            break
        after = page["items"][-1]["seq"]
    await call.connection.end()


def _time_of(event: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(str(event["at"])).timestamp()


async def _send_events(call: DockerCall, wanted: filters.Filters, after: int, since: float) -> None:
    async with call.shared.api.lines(call.secret, call.address, f"/v1/events?after={after}") as lines:
        async for event in parsed(lines):
            if _time_of(event) >= since:
                await _send(call, wanted, event)
    await call.connection.end()


async def _send(call: DockerCall, wanted: filters.Filters, event: Mapping[str, Any]) -> None:
    for document in await _events(call, event):
        if _is_wanted(document, wanted):
            await call.connection.write_document(document)


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
