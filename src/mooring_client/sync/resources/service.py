# Generated from aio/resources/service.py: change that file, and run `make client`.
"""The service itself, and the caller."""

from mooring_client.answers import model, text
from mooring_client.calls import Call
from mooring_client.schemas.api_keys import Me
from mooring_client.schemas.base import Status
from mooring_client.schemas.docker_context import DockerContext
from mooring_client.schemas.ssh_keys import SshAddress
from mooring_client.sync.resources.base import Resource


class Service(Resource):
    """Health of the service, and the identity of the caller: `client.service`."""

    def health(self) -> Status:
        """Whether the server process runs."""
        return self._transport.send(
            Call(
                operation="get_health",
                method="GET",
                path="/healthz",
                read=model(Status),
            )
        )

    def readiness(self) -> Status:
        """Whether the server can do its work."""
        return self._transport.send(
            Call(
                operation="get_readiness",
                method="GET",
                path="/readyz",
                read=model(Status),
            )
        )

    def metrics(self) -> str:
        """Metrics in the text format of Prometheus."""
        return self._transport.send(
            Call(
                operation="get_metrics",
                method="GET",
                path="/metrics",
                read=text,
            )
        )

    def me(self) -> Me:
        """Who the API key is: user, project, role and scopes."""
        return self._transport.send(
            Call(
                operation="get_me",
                method="GET",
                path="/v1/me",
                read=model(Me),
            )
        )

    def ssh(self) -> SshAddress:
        """Where SSH clients connect, and the keys of the gateway."""
        return self._transport.send(
            Call(
                operation="get_my_ssh",
                method="GET",
                path="/v1/me/ssh",
                read=model(SshAddress),
            )
        )

    def docker_context(self) -> DockerContext:
        """What Docker clients need to use instances as containers."""
        return self._transport.send(
            Call(
                operation="get_docker_context",
                method="GET",
                path="/v1/docker-context",
                read=model(DockerContext),
            )
        )
