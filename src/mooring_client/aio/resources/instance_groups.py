"""Instance groups: instances that are placed together."""

from collections.abc import Mapping
from typing import Any, Literal

from mooring_client.aio.paging import AsyncPages
from mooring_client.aio.resources.base import AsyncResource
from mooring_client.answers import model
from mooring_client.calls import AppliedResource, Call, body, if_match, path
from mooring_client.schemas.applying import ApplyPlan
from mooring_client.schemas.instance_groups import GroupExplanation, InstanceGroup, InstanceGroupList


class AsyncInstanceGroups(AsyncResource):
    """Instances that are placed together, for distributed jobs: `client.instance_groups`."""

    async def create(
        self,
        count: int,
        template: Mapping[str, Any],
        *,
        name: str | None = None,
        project_id: str | None = None,
        labels: Mapping[str, str] | None = None,
        on_member_failure: Literal["fail_group", "restart_member"] | None = None,
        network: Mapping[str, Any] | None = None,
        master_port: int | None = None,
    ) -> InstanceGroup:
        """Create a group. All its members start together, or none.

        Args:
            template: what each member runs: the fields of an instance.
        """
        return await self._transport.send(
            Call(
                operation="create_instance_group",
                method="POST",
                path="/v1/instance-groups",
                read=model(InstanceGroup),
                body=body(
                    count=count,
                    template=template,
                    name=name,
                    project_id=project_id,
                    labels=labels,
                    on_member_failure=on_member_failure,
                    network=network,
                    master_port=master_port,
                ),
            )
        )

    async def apply(
        self,
        name: str,
        *,
        count: int,
        template: Mapping[str, Any],
        project_id: str | None = None,
        labels: Mapping[str, str] | None = None,
        on_member_failure: Literal["fail_group", "restart_member"] | None = None,
        network: Mapping[str, Any] | None = None,
        master_port: int | None = None,
        version: int | None = None,
    ) -> AppliedResource[InstanceGroup]:
        """Create the group of this name, unless there is one with these fields.

        Args:
            version: only if the group has this version (PreconditionFailed).

        Raises:
            RequiresReplacement: a field differs; none can be changed.
        """
        return await self._transport.apply(
            Call(
                operation="apply_instance_group",
                method="PUT",
                path=path("/v1/instance-groups/by-name/{}", name),
                read=model(InstanceGroup),
                body=body(
                    count=count,
                    template=template,
                    project_id=project_id,
                    labels=labels,
                    on_member_failure=on_member_failure,
                    network=network,
                    master_port=master_port,
                ),
                headers=if_match(version),
            )
        )

    async def plan(
        self,
        name: str,
        *,
        count: int,
        template: Mapping[str, Any],
        project_id: str | None = None,
        labels: Mapping[str, str] | None = None,
        on_member_failure: Literal["fail_group", "restart_member"] | None = None,
        network: Mapping[str, Any] | None = None,
        master_port: int | None = None,
        version: int | None = None,
    ) -> ApplyPlan:
        """What `apply` would do with these arguments. It changes nothing, and raises what `apply` would."""
        return await self._transport.send(
            Call(
                operation="apply_instance_group",
                method="PUT",
                path=path("/v1/instance-groups/by-name/{}", name),
                read=model(ApplyPlan),
                params={"dry_run": True},
                body=body(
                    count=count,
                    template=template,
                    project_id=project_id,
                    labels=labels,
                    on_member_failure=on_member_failure,
                    network=network,
                    master_port=master_port,
                ),
                headers=if_match(version),
            )
        )

    def list(
        self,
        *,
        name: str | None = None,
        project_id: str | None = None,
        label: str | None = None,
        limit: int | None = None,
    ) -> AsyncPages[InstanceGroup]:
        """List instance groups, newest first."""
        return AsyncPages(
            self._transport,
            Call(
                operation="list_instance_groups",
                method="GET",
                path="/v1/instance-groups",
                read=model(InstanceGroupList),
                params={"name": name, "project_id": project_id, "label": label, "limit": limit},
            ),
        )

    async def get(self, group_id: str) -> InstanceGroup:
        """Get an instance group with its members."""
        return await self._transport.send(
            Call(
                operation="get_instance_group",
                method="GET",
                path=path("/v1/instance-groups/{}", group_id),
                read=model(InstanceGroup),
            )
        )

    async def delete(self, group_id: str, *, version: int | None = None) -> InstanceGroup:
        """Stop a group and delete it with its members.

        Args:
            version: delete it only if it still has this version (PreconditionFailed).
        """
        return await self._transport.send(
            Call(
                operation="delete_instance_group",
                method="DELETE",
                path=path("/v1/instance-groups/{}", group_id),
                read=model(InstanceGroup),
                headers=if_match(version),
            )
        )

    async def start(self, group_id: str) -> InstanceGroup:
        """Start an ended group again."""
        return await self._transport.send(
            Call(
                operation="start_instance_group",
                method="POST",
                path=path("/v1/instance-groups/{}/start", group_id),
                read=model(InstanceGroup),
            )
        )

    async def stop(self, group_id: str, *, timeout_s: int | None = None) -> InstanceGroup:
        """Stop all members of a group.

        Args:
            timeout_s: from SIGTERM to SIGKILL; None: 10.
        """
        return await self._transport.send(
            Call(
                operation="stop_instance_group",
                method="POST",
                path=path("/v1/instance-groups/{}/stop", group_id),
                read=model(InstanceGroup),
                body=body(timeout_s=timeout_s),
            )
        )

    async def explain(self, group_id: str) -> GroupExplanation:
        """Why a group waits, and when it will start."""
        return await self._transport.send(
            Call(
                operation="explain_instance_group",
                method="GET",
                path=path("/v1/instance-groups/{}/explain", group_id),
                read=model(GroupExplanation),
            )
        )
