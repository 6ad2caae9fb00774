"""Secrets: write-only values for environment variables."""

from mooring_client.aio.paging import AsyncPages
from mooring_client.aio.resources.base import AsyncResource
from mooring_client.answers import model, nothing
from mooring_client.calls import Call, body, path
from mooring_client.schemas.secrets import Secret, SecretList


class AsyncSecrets(AsyncResource):
    """Write-only values for environment variables: `client.secrets`."""

    async def create(self, name: str, value: str, *, project_id: str | None = None) -> Secret:
        """Create a secret."""
        return await self._transport.send(
            Call(
                operation="create_secret",
                method="POST",
                path="/v1/secrets",
                read=model(Secret),
                body=body(name=name, value=value, project_id=project_id),
            )
        )

    def list(
        self, *, name: str | None = None, project_id: str | None = None, limit: int | None = None
    ) -> AsyncPages[Secret]:
        """List secrets, newest first, without their values."""
        return AsyncPages(
            self._transport,
            Call(
                operation="list_secrets",
                method="GET",
                path="/v1/secrets",
                read=model(SecretList),
                params={"name": name, "project_id": project_id, "limit": limit},
            ),
        )

    async def get(self, secret_id: str) -> Secret:
        """Get a secret, without its value."""
        return await self._transport.send(
            Call(
                operation="get_secret",
                method="GET",
                path=path("/v1/secrets/{}", secret_id),
                read=model(Secret),
            )
        )

    async def replace(self, secret_id: str, value: str) -> Secret:
        """Replace the value of a secret. Instances get it at their next start."""
        return await self._transport.send(
            Call(
                operation="replace_secret",
                method="PUT",
                path=path("/v1/secrets/{}", secret_id),
                read=model(Secret),
                body=body(value=value),
            )
        )

    async def delete(self, secret_id: str) -> None:
        """Delete a secret."""
        return await self._transport.send(
            Call(
                operation="delete_secret",
                method="DELETE",
                path=path("/v1/secrets/{}", secret_id),
                read=nothing,
            )
        )
