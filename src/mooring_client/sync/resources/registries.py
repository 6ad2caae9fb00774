# Generated from aio/resources/registries.py: change that file, and run `make client`.
"""Credentials for image registries."""

from mooring_client.answers import model, nothing
from mooring_client.calls import Call, body, path
from mooring_client.schemas.registries import Registry, RegistryList
from mooring_client.sync.paging import Pages
from mooring_client.sync.resources.base import Resource


class Registries(Resource):
    """Credentials for image registries: `client.registries`."""

    def create(self, server: str, username: str, password: str, *, project_id: str | None = None) -> Registry:
        """Store credentials for pulling images of a project."""
        return self._transport.send(
            Call(
                operation="create_registry",
                method="POST",
                path="/v1/registries",
                read=model(Registry),
                body=body(server=server, username=username, password=password, project_id=project_id),
            )
        )

    def list(self, *, project_id: str | None = None, limit: int | None = None) -> Pages[Registry]:
        """List credentials, newest first, without passwords."""
        return Pages(
            self._transport,
            Call(
                operation="list_registries",
                method="GET",
                path="/v1/registries",
                read=model(RegistryList),
                params={"project_id": project_id, "limit": limit},
            ),
        )

    def get(self, registry_id: str) -> Registry:
        """Get credentials, without the password."""
        return self._transport.send(
            Call(
                operation="get_registry",
                method="GET",
                path=path("/v1/registries/{}", registry_id),
                read=model(Registry),
            )
        )

    def replace(self, registry_id: str, password: str) -> Registry:
        """Replace the password."""
        return self._transport.send(
            Call(
                operation="replace_registry",
                method="PUT",
                path=path("/v1/registries/{}", registry_id),
                read=model(Registry),
                body=body(password=password),
            )
        )

    def delete(self, registry_id: str) -> None:
        """Delete credentials."""
        return self._transport.send(
            Call(
                operation="delete_registry",
                method="DELETE",
                path=path("/v1/registries/{}", registry_id),
                read=nothing,
            )
        )
