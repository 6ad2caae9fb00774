"""Projects, and their members."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack

from mooring_client.aio.paging import AsyncPages
from mooring_client.aio.resources.base import AsyncResource
from mooring_client.answers import model, nothing
from mooring_client.calls import UNSET, AppliedResource, Call, Unset, body, changes, if_match, path
from mooring_client.fields import ProjectFields
from mooring_client.schemas.applying import ApplyPlan
from mooring_client.schemas.projects import Member, MemberList, Project, ProjectList, ProjectMember, Role


class AsyncProjects(AsyncResource):
    """Projects and their members: `client.projects`."""

    async def create(self, name: str, *, labels: Mapping[str, str] | None = None) -> Project:
        """Create a project."""
        return await self._transport.send(
            Call(
                operation="create_project",
                method="POST",
                path="/v1/projects",
                read=model(Project),
                body=body(name=name, labels=labels),
            )
        )

    async def apply(
        self,
        name: str,
        *,
        members: Sequence[ProjectMember | Mapping[str, str]] | None = None,
        version: int | None = None,
        **fields: Unpack[ProjectFields],
    ) -> AppliedResource[Project]:
        """Create the project of this name, or change it to these settings.

        Args:
            members: all members, each with `role` and `user_id` or `email`; others are removed. None: the
                members stay as they are.
            version: change it only if it has this version (PreconditionFailed).
        """
        return await self._transport.apply(
            Call(
                operation="apply_project",
                method="PUT",
                path=path("/v1/projects/by-name/{}", name),
                read=model(Project),
                body=body(members=members, **fields),
                headers=if_match(version),
            )
        )

    async def plan(
        self,
        name: str,
        *,
        members: Sequence[ProjectMember | Mapping[str, str]] | None = None,
        version: int | None = None,
        **fields: Unpack[ProjectFields],
    ) -> ApplyPlan:
        """What `apply` would do with these arguments. It changes nothing, and raises what `apply` would."""
        return await self._transport.send(
            Call(
                operation="apply_project",
                method="PUT",
                path=path("/v1/projects/by-name/{}", name),
                read=model(ApplyPlan),
                params={"dry_run": True},
                body=body(members=members, **fields),
                headers=if_match(version),
            )
        )

    def list(self, *, name: str | None = None, limit: int | None = None) -> AsyncPages[Project]:
        """List projects, newest first."""
        return AsyncPages(
            self._transport,
            Call(
                operation="list_projects",
                method="GET",
                path="/v1/projects",
                read=model(ProjectList),
                params={"name": name, "limit": limit},
            ),
        )

    async def get(self, project_id: str) -> Project:
        """Get a project with its usage."""
        return await self._transport.send(
            Call(
                operation="get_project",
                method="GET",
                path=path("/v1/projects/{}", project_id),
                read=model(Project),
            )
        )

    async def update(
        self,
        project_id: str,
        *,
        name: str | Unset = UNSET,
        labels: Mapping[str, str] | Unset = UNSET,
        quotas: Mapping[str, Any] | Unset = UNSET,
        weight: float | Unset = UNSET,
        allowed_images: Sequence[str] | Unset | None = UNSET,
        security_profile: Literal["standard", "strict"] | Unset = UNSET,
        max_priority: int | Unset | None = UNSET,
        guaranteed_gpus: int | Unset | None = UNSET,
        gpu_sharing: bool | Unset = UNSET,
        host_network: bool | Unset = UNSET,
        node_selector: Mapping[str, str] | Unset = UNSET,
        local_images: bool | Unset = UNSET,
        require_disk_limits: bool | Unset = UNSET,
        public_ports: bool | Unset = UNSET,
        version: int | None = None,
    ) -> Project:
        """Change a project. `None` removes a limit.

        Args:
            quotas: the quotas to change; the others stay.
            version: change it only if it still has this version (PreconditionFailed).
        """
        return await self._transport.send(
            Call(
                operation="update_project",
                method="PATCH",
                path=path("/v1/projects/{}", project_id),
                read=model(Project),
                body=changes(
                    name=name,
                    labels=labels,
                    quotas=quotas,
                    weight=weight,
                    allowed_images=allowed_images,
                    security_profile=security_profile,
                    max_priority=max_priority,
                    guaranteed_gpus=guaranteed_gpus,
                    gpu_sharing=gpu_sharing,
                    host_network=host_network,
                    node_selector=node_selector,
                    local_images=local_images,
                    require_disk_limits=require_disk_limits,
                    public_ports=public_ports,
                ),
                headers=if_match(version),
            )
        )

    async def delete(self, project_id: str, *, version: int | None = None) -> None:
        """Delete a project without instances.

        Args:
            version: delete it only if it still has this version (PreconditionFailed).
        """
        return await self._transport.send(
            Call(
                operation="delete_project",
                method="DELETE",
                path=path("/v1/projects/{}", project_id),
                read=nothing,
                headers=if_match(version),
            )
        )

    def members(self, project_id: str, *, limit: int | None = None) -> AsyncPages[Member]:
        """List the members of a project."""
        return AsyncPages(
            self._transport,
            Call(
                operation="list_members",
                method="GET",
                path=path("/v1/projects/{}/members", project_id),
                read=model(MemberList),
                params={"limit": limit},
            ),
        )

    async def put_member(
        self, project_id: str, user_id: str, role: Role | Literal["viewer", "member", "owner"]
    ) -> Member:
        """Add a member, or change their role."""
        return await self._transport.send(
            Call(
                operation="put_member",
                method="PUT",
                path=path("/v1/projects/{}/members/{}", project_id, user_id),
                read=model(Member),
                body=body(role=role),
            )
        )

    async def delete_member(self, project_id: str, user_id: str) -> None:
        """Remove a member."""
        return await self._transport.send(
            Call(
                operation="delete_member",
                method="DELETE",
                path=path("/v1/projects/{}/members/{}", project_id, user_id),
                read=nothing,
            )
        )
