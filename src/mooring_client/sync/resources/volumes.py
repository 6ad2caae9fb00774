# Generated from aio/resources/volumes.py: change that file, and run `make client`.
"""Volumes: files that outlive the instances that mount them."""

from collections.abc import Mapping
from typing import Any

from mooring_client.answers import model
from mooring_client.calls import UNSET, AppliedResource, Call, Unset, body, changes, if_match, path
from mooring_client.schemas.applying import ApplyPlan
from mooring_client.schemas.volumes import Volume, VolumeDriver, VolumeList, VolumeOptions
from mooring_client.sync.paging import Pages
from mooring_client.sync.resources.base import Resource

Options = VolumeOptions | Mapping[str, Any] | None


class Volumes(Resource):
    """Files that outlive instances: `client.volumes`."""

    def create(
        self,
        name: str,
        *,
        driver: VolumeDriver = "local",
        size_mib: int | None = None,
        options: Options = None,
        node_selector: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        project_id: str | None = None,
    ) -> Volume:
        """Create a volume. Its node creates it when the first instance that mounts it starts there.

        Args:
            size_mib: None: 10 GiB; of nfs it must be None.
            options: of nfs: `server` and `path`.
            node_selector: of local: labels that its node must have.
        """
        return self._transport.send(
            Call(
                operation="create_volume",
                method="POST",
                path="/v1/volumes",
                read=model(Volume),
                body=body(
                    name=name,
                    driver=driver,
                    size_mib=size_mib,
                    options=options,
                    node_selector=node_selector,
                    labels=labels,
                    project_id=project_id,
                ),
            )
        )

    def apply(
        self,
        name: str,
        *,
        driver: VolumeDriver = "local",
        size_mib: int | None = None,
        options: Options = None,
        node_selector: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        project_id: str | None = None,
        version: int | None = None,
    ) -> AppliedResource[Volume]:
        """Create the volume of this name, or change its labels, and its size while no node has it.

        Args:
            version: only if the volume has this version (PreconditionFailed).

        Raises:
            RequiresReplacement: another field differs. Nothing was changed.
        """
        return self._transport.apply(
            Call(
                operation="apply_volume",
                method="PUT",
                path=path("/v1/volumes/by-name/{}", name),
                read=model(Volume),
                body=body(
                    driver=driver,
                    size_mib=size_mib,
                    options=options,
                    node_selector=node_selector,
                    labels=labels,
                    project_id=project_id,
                ),
                headers=if_match(version),
            )
        )

    def plan(
        self,
        name: str,
        *,
        driver: VolumeDriver = "local",
        size_mib: int | None = None,
        options: Options = None,
        node_selector: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        project_id: str | None = None,
        version: int | None = None,
    ) -> ApplyPlan:
        """What `apply` would do with these arguments. It changes nothing, and raises what `apply` would."""
        return self._transport.send(
            Call(
                operation="apply_volume",
                method="PUT",
                path=path("/v1/volumes/by-name/{}", name),
                read=model(ApplyPlan),
                params={"dry_run": True},
                body=body(
                    driver=driver,
                    size_mib=size_mib,
                    options=options,
                    node_selector=node_selector,
                    labels=labels,
                    project_id=project_id,
                ),
                headers=if_match(version),
            )
        )

    def put(
        self,
        volume_id: str,
        *,
        name: str | None = None,
        driver: VolumeDriver = "local",
        size_mib: int | None = None,
        options: Options = None,
        node_selector: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        project_id: str | None = None,
        version: int | None = None,
    ) -> AppliedResource[Volume]:
        """Apply all fields of a volume, found by its ID. Otherwise as `apply`.

        Raises:
            RequiresReplacement: a field differs that cannot be changed. Nothing was changed.
        """
        return self._transport.apply(
            Call(
                operation="put_volume",
                method="PUT",
                path=path("/v1/volumes/{}", volume_id),
                read=model(Volume),
                body=body(
                    name=name,
                    driver=driver,
                    size_mib=size_mib,
                    options=options,
                    node_selector=node_selector,
                    labels=labels,
                    project_id=project_id,
                ),
                headers=if_match(version),
            )
        )

    def list(
        self,
        *,
        name: str | None = None,
        driver: VolumeDriver | None = None,
        node_id: str | None = None,
        project_id: str | None = None,
        limit: int | None = None,
    ) -> Pages[Volume]:
        """List volumes, newest first, without those that are being deleted."""
        return Pages(
            self._transport,
            Call(
                operation="list_volumes",
                method="GET",
                path="/v1/volumes",
                read=model(VolumeList),
                params={
                    "name": name,
                    "driver": driver,
                    "node_id": node_id,
                    "project_id": project_id,
                    "limit": limit,
                },
            ),
        )

    def get(self, volume_id: str) -> Volume:
        """Get a volume."""
        return self._transport.send(
            Call(
                operation="get_volume",
                method="GET",
                path=path("/v1/volumes/{}", volume_id),
                read=model(Volume),
            )
        )

    def update(
        self,
        volume_id: str,
        *,
        labels: Mapping[str, str] | Unset = UNSET,
        size_mib: int | Unset = UNSET,
        version: int | None = None,
    ) -> Volume:
        """Change the labels of a volume, or its size while no node has it.

        Args:
            version: change it only if it still has this version (PreconditionFailed).
        """
        return self._transport.send(
            Call(
                operation="update_volume",
                method="PATCH",
                path=path("/v1/volumes/{}", volume_id),
                read=model(Volume),
                body=changes(labels=labels, size_mib=size_mib),
                headers=if_match(version),
            )
        )

    def delete(self, volume_id: str, *, version: int | None = None) -> Volume:
        """Delete a volume with its files. It is `deleting` until its nodes have removed it.

        Args:
            version: delete it only if it still has this version (PreconditionFailed).

        Raises:
            VolumeInUse: instances mount it, perhaps stopped ones.
        """
        return self._transport.send(
            Call(
                operation="delete_volume",
                method="DELETE",
                path=path("/v1/volumes/{}", volume_id),
                read=model(Volume),
                headers=if_match(version),
            )
        )
