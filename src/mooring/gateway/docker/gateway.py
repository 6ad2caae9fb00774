"""The Docker side of the gateway's process: the listener, and the removal of ended containers."""

import asyncio
import logging
from functools import partial
from typing import Final

from mooring.auth.credentials import Credentials
from mooring.control.instances import docker_containers
from mooring.db import failures
from mooring.db.session import Database
from mooring.gateway.docker.api import ApiClient
from mooring.gateway.docker.listener import DockerListener
from mooring.gateway.docker.shared import DockerShared
from mooring.gateway.open_connections import CONNECTIONS
from mooring.settings import Settings
from mooring.streams.node_streams import StreamOpener
from mooring_client.errors import Unavailable

_SWEEP_EVERY_S: Final = 10.0

log = logging.getLogger(__name__)


class DockerGateway:
    """Off if no port is set: then nothing listens, and nothing is removed."""

    def __init__(
        self, settings: Settings, database: Database, credentials: Credentials, opener: StreamOpener
    ) -> None:
        self._settings = settings
        # A connection makes one call at a time, so no tenant waits for the calls of another.
        self._api = ApiClient(settings.resolved_api_url, calls=CONNECTIONS)
        self._shared = DockerShared(
            database, credentials, opener, self._api, rate_limits=settings.rate_limits == "on"
        )
        self._listener = DockerListener(self._shared)

    async def listen(self) -> None:
        """Raises OSError: cannot use the address."""
        await self._listener.listen(self._settings.docker_host, self._settings.docker_port)

    async def run(self) -> None:
        """Remove containers that have ended, also those of clients that are gone. Runs until cancelled."""
        if not self._settings.docker_port:
            await asyncio.Event().wait()
        while True:
            try:
                await self._sweep()
            except (Unavailable, *failures.DATABASE_ERRORS) as error:
                log.warning("cannot remove ended containers of Docker clients: %s", error)
            await asyncio.sleep(_SWEEP_EVERY_S)

    async def _sweep(self) -> None:
        await self._shared.write(docker_containers.sweep)
        for container_id in await self._shared.read(docker_containers.due):
            if container_id not in self._shared.attached:
                await self._shared.write(partial(docker_containers.auto_remove, container_id=container_id))

    def close(self) -> None:
        """Accept no more clients."""
        self._listener.close()

    async def end(self) -> None:
        """End all connections."""
        self.close()
        await self._listener.end()
        await self._api.close()
