"""Users: people, who sign on or have API keys."""

from mooring_client.aio.paging import AsyncPages
from mooring_client.aio.resources.base import AsyncResource
from mooring_client.answers import model, nothing
from mooring_client.calls import UNSET, Call, Unset, body, changes, if_match, path
from mooring_client.schemas.projects import User, UserList


class AsyncUsers(AsyncResource):
    """People: `client.users`."""

    async def create(self, name: str, *, email: str | None = None, is_admin: bool | None = None) -> User:
        """Create a user."""
        return await self._transport.send(
            Call(
                operation="create_user",
                method="POST",
                path="/v1/users",
                read=model(User),
                body=body(name=name, email=email, is_admin=is_admin),
            )
        )

    def list(self, *, email: str | None = None, limit: int | None = None) -> AsyncPages[User]:
        """List users, newest first."""
        return AsyncPages(
            self._transport,
            Call(
                operation="list_users",
                method="GET",
                path="/v1/users",
                read=model(UserList),
                params={"email": email, "limit": limit},
            ),
        )

    async def get(self, user_id: str) -> User:
        """Get a user."""
        return await self._transport.send(
            Call(
                operation="get_user",
                method="GET",
                path=path("/v1/users/{}", user_id),
                read=model(User),
            )
        )

    async def update(
        self,
        user_id: str,
        *,
        name: str | Unset = UNSET,
        email: str | Unset | None = UNSET,
        is_admin: bool | Unset = UNSET,
        version: int | None = None,
    ) -> User:
        """Change a user.

        Args:
            version: change it only if it still has this version (PreconditionFailed).
        """
        return await self._transport.send(
            Call(
                operation="update_user",
                method="PATCH",
                path=path("/v1/users/{}", user_id),
                read=model(User),
                body=changes(name=name, email=email, is_admin=is_admin),
                headers=if_match(version),
            )
        )

    async def delete(self, user_id: str, *, version: int | None = None) -> None:
        """Delete a user with their keys and memberships.

        Args:
            version: delete it only if it still has this version (PreconditionFailed).
        """
        return await self._transport.send(
            Call(
                operation="delete_user",
                method="DELETE",
                path=path("/v1/users/{}", user_id),
                read=nothing,
                headers=if_match(version),
            )
        )
