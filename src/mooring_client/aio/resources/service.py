"""The service itself, and the caller."""

from mooring_client.aio.resources.base import AsyncResource
from mooring_client.answers import model, text
from mooring_client.calls import Call
from mooring_client.schemas.api_keys import Me
from mooring_client.schemas.base import Status
from mooring_client.schemas.docker_context import DockerContext
from mooring_client.schemas.ssh_keys import SshAddress


class AsyncService(AsyncResource):
    """Health of the service, and the identity of the caller: `client.service`."""

    async def health(self) -> Status:
        """Whether the server process runs."""
        return await self._transport.send(
            Call(
                operation="get_health",
                method="GET",
                path="/healthz",
                read=model(Status),
            )
        )

    async def readiness(self) -> Status:
        """Whether the server can do its work."""
        return await self._transport.send(
            Call(
                operation="get_readiness",
                method="GET",
                path="/readyz",
                read=model(Status),
            )
        )

    async def metrics(self) -> str:
        """Metrics in the text format of Prometheus."""
        return await self._transport.send(
            Call(
                operation="get_metrics",
                method="GET",
                path="/metrics",
                read=text,
            )
        )

    async def me(self) -> Me:
        """Who the API key is: user, project, role and scopes."""
        return await self._transport.send(
            Call(
                operation="get_me",
                method="GET",
                path="/v1/me",
                read=model(Me),
            )
        )

    async def ssh(self) -> SshAddress:
        """Where SSH clients connect, and the keys of the gateway."""
        return await self._transport.send(
            Call(
                operation="get_my_ssh",
                method="GET",
                path="/v1/me/ssh",
                read=model(SshAddress),
            )
        )

    async def docker_context(self) -> DockerContext:
        """What Docker clients need to use instances as containers."""
        return await self._transport.send(
            Call(
                operation="get_docker_context",
                method="GET",
                path="/v1/docker-context",
                read=model(DockerContext),
            )
        )
