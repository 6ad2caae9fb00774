"""Waits for changes of a container, while its client may see it."""

import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Final

from mooring.auth.credentials import LiveAccess
from mooring.control.instances import docker_containers
from mooring.control.instances.docker_containers import FoundContainer
from mooring.core.access import RENEWED_S, Permission
from mooring.db.signals import Topic, Waiter
from mooring.gateway.docker.shared import DockerCall
from mooring_client.errors import NotFound

# A notification reports a change; reading at times covers a lost one.
_READ_EVERY_S: Final = 10.0


async def changes(
    call: DockerCall, container_id: str, within_s: float = float("inf")
) -> AsyncIterator[FoundContainer | None]:
    """The container now, and after each change; None, as the last: it was removed, or the time is over.

    Raises:
        Unauthorized, Forbidden: the caller lost access meanwhile.
    """
    live = call.live(Permission.READ, "")
    deadline = time.monotonic() + within_s
    instance_id: str | None = None
    while True:
        topics = [docker_containers.topic(container_id)]
        topics += [Topic.instance(instance_id)] if instance_id else []
        with call.shared.database.signals.subscribed(*topics) as waiter:
            access = await live.renewed()
            try:
                find = partial(docker_containers.find, access=access, reference=container_id)
                found = await call.shared.read(find)
            except NotFound:
                yield None
                return
            yield found
            known = found.instance.id if found.instance else None
            if known != instance_id:
                instance_id = known
                continue  # subscribe first, then read
            left = deadline - time.monotonic()
            if left <= 0 or call.shared.database.signals.closing:
                yield None
                return
            await _until_woken(live, waiter, min(left, _READ_EVERY_S))


async def _until_woken(live: LiveAccess, waiter: Waiter, within_s: float) -> None:
    until = time.monotonic() + within_s
    while (left := until - time.monotonic()) > 0:
        if await waiter.wait(min(left, RENEWED_S)):
            return
        await live.renewed()
