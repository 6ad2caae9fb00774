# Generated from aio/resources/instance_applies.py: change that file, and run `make client`.
"""Applying instances: requests with all fields, which change nothing if nothing differs."""

from typing import Unpack

from mooring_client.answers import model
from mooring_client.calls import AppliedResource, Call, body, if_match, path
from mooring_client.fields import InstanceFields, TemplateFields, spec_of
from mooring_client.schemas.applying import ApplyPlan
from mooring_client.schemas.instances import Instance
from mooring_client.sync.resources.base import Resource


class InstanceApplies(Resource):
    """The operations of `client.instances` that apply all fields."""

    def apply(
        self,
        name: str,
        image: str,
        *,
        project_id: str | None = None,
        version: int | None = None,
        **fields: Unpack[TemplateFields],
    ) -> AppliedResource[Instance]:
        """Create the instance of this name, or change it to these fields. Omitted fields have their defaults.

        Args:
            version: change it only if it has this version (PreconditionFailed).

        Raises:
            RequiresReplacement: a field differs that cannot be changed. Nothing was changed.
        """
        return self._transport.apply(
            Call(
                operation="apply_instance",
                method="PUT",
                path=path("/v1/instances/by-name/{}", name),
                read=model(Instance),
                body=body(image=image, project_id=project_id, **spec_of(fields)),
                headers=if_match(version),
            )
        )

    def plan(
        self,
        name: str,
        image: str,
        *,
        project_id: str | None = None,
        version: int | None = None,
        **fields: Unpack[TemplateFields],
    ) -> ApplyPlan:
        """What `apply` would do with these arguments. It changes nothing, and raises what `apply` would."""
        return self._transport.send(
            Call(
                operation="apply_instance",
                method="PUT",
                path=path("/v1/instances/by-name/{}", name),
                read=model(ApplyPlan),
                params={"dry_run": True},
                body=body(image=image, project_id=project_id, **spec_of(fields)),
                headers=if_match(version),
            )
        )

    def put(
        self, instance_id: str, image: str, *, version: int | None = None, **fields: Unpack[InstanceFields]
    ) -> AppliedResource[Instance]:
        """Change an instance to these fields. An omitted name stays; others have their defaults.

        Args:
            version: change it only if it still has this version (PreconditionFailed).

        Raises:
            RequiresReplacement: a field differs that cannot be changed. Nothing was changed.
        """
        return self._transport.apply(
            Call(
                operation="put_instance",
                method="PUT",
                path=path("/v1/instances/{}", instance_id),
                read=model(Instance),
                body=body(image=image, **spec_of(fields)),
                headers=if_match(version),
            )
        )
