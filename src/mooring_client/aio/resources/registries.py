"""Credentials for image registries."""

from mooring_client.aio.paging import AsyncPages
from mooring_client.aio.resources.base import AsyncResource
from mooring_client.answers import model, nothing
from mooring_client.calls import Call, body, path
from mooring_client.schemas.registries import Registry, RegistryList


class AsyncRegistries(AsyncResource):
    """Credentials for image registries: `client.registries`."""

    async def create(
        self, server: str, username: str, password: str, *, project_id: str | None = None
    ) -> Registry:
        """Store credentials for pulling images of a project."""
        return await self._transport.send(
            Call(
                operation="create_registry",
                method="POST",
                path="/v1/registries",
                read=model(Registry),
                body=body(server=server, username=username, password=password, project_id=project_id),
            )
        )

    def list(self, *, project_id: str | None = None, limit: int | None = None) -> AsyncPages[Registry]:
        """List credentials, newest first, without passwords."""
        return AsyncPages(
            self._transport,
            Call(
                operation="list_registries",
                method="GET",
                path="/v1/registries",
                read=model(RegistryList),
                params={"project_id": project_id, "limit": limit},
            ),
        )

    async def get(self, registry_id: str) -> Registry:
        """Get credentials, without the password."""
        return await self._transport.send(
            Call(
                operation="get_registry",
                method="GET",
                path=path("/v1/registries/{}", registry_id),
                read=model(Registry),
            )
        )

    async def replace(self, registry_id: str, password: str) -> Registry:
        """Replace the password."""
        return await self._transport.send(
            Call(
                operation="replace_registry",
                method="PUT",
                path=path("/v1/registries/{}", registry_id),
                read=model(Registry),
                body=body(password=password),
            )
        )

    async def delete(self, registry_id: str) -> None:
        """Delete credentials."""
        return await self._transport.send(
            Call(
                operation="delete_registry",
                method="DELETE",
                path=path("/v1/registries/{}", registry_id),
                read=nothing,
            )
        )
