"""API keys."""

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

from mooring_client.aio.paging import AsyncPages
from mooring_client.aio.resources.base import AsyncResource
from mooring_client.answers import model, nothing
from mooring_client.calls import Call, body, path
from mooring_client.schemas.api_keys import ApiKey, ApiKeyList, NewApiKey, Scope
from mooring_client.schemas.projects import Role


class AsyncApiKeys(AsyncResource):
    """API keys: `client.api_keys`."""

    async def create(
        self,
        name: str,
        *,
        project_id: str | None = None,
        user_id: str | None = None,
        role: Role | Literal["viewer", "member", "owner"] | None = None,
        scopes: Sequence[Scope] | None = None,
        expires_at: datetime | str | None = None,
    ) -> NewApiKey:
        """Create a key with a role, scopes, or both. The answer shows it once."""
        return await self._transport.send(
            Call(
                operation="create_api_key",
                method="POST",
                path="/v1/api-keys",
                read=model(NewApiKey),
                body=body(
                    name=name,
                    project_id=project_id,
                    user_id=user_id,
                    role=role,
                    scopes=scopes,
                    expires_at=expires_at,
                ),
            )
        )

    def list(
        self, *, project_id: str | None = None, user_id: str | None = None, limit: int | None = None
    ) -> AsyncPages[ApiKey]:
        """List keys, newest first, without the keys themselves."""
        return AsyncPages(
            self._transport,
            Call(
                operation="list_api_keys",
                method="GET",
                path="/v1/api-keys",
                read=model(ApiKeyList),
                params={"project_id": project_id, "user_id": user_id, "limit": limit},
            ),
        )

    async def get(self, key_id: str) -> ApiKey:
        """Get a key, without the key itself."""
        return await self._transport.send(
            Call(
                operation="get_api_key",
                method="GET",
                path=path("/v1/api-keys/{}", key_id),
                read=model(ApiKey),
            )
        )

    async def delete(self, key_id: str) -> None:
        """Revoke a key. Its open streams end too."""
        return await self._transport.send(
            Call(
                operation="delete_api_key",
                method="DELETE",
                path=path("/v1/api-keys/{}", key_id),
                read=nothing,
            )
        )
