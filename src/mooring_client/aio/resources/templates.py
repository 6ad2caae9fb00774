"""Templates: named specs of instances with parameters."""

from collections.abc import Mapping
from typing import Any, Literal

from mooring_client.aio.paging import AsyncPages
from mooring_client.aio.resources.base import AsyncResource
from mooring_client.answers import model, nothing
from mooring_client.calls import AppliedResource, Call, body, if_match, path
from mooring_client.schemas.applying import ApplyPlan
from mooring_client.schemas.templates import (
    ParameterValue,
    RenderedTemplate,
    Template,
    TemplateList,
    TemplateParameter,
)

Parameters = Mapping[str, TemplateParameter | Mapping[str, Any]]
Scope = Literal["project", "global"]


class AsyncTemplates(AsyncResource):
    """Named specs of instances with parameters: `client.templates`."""

    async def create(
        self,
        name: str,
        *,
        spec: Mapping[str, Any],
        parameters: Parameters | None = None,
        description: str | None = None,
        scope: Scope | None = None,
        project_id: str | None = None,
    ) -> Template:
        """Create a template.

        Args:
            spec: fields of an instance; `${name}` in a text stands for the value of a parameter.
            scope: `global`: all projects see it, and only admins create it. None: `project`.
        """
        return await self._transport.send(
            Call(
                operation="create_template",
                method="POST",
                path="/v1/templates",
                read=model(Template),
                body=body(
                    name=name,
                    spec=spec,
                    parameters=parameters,
                    description=description,
                    scope=scope,
                    project_id=project_id,
                ),
            )
        )

    async def apply(
        self,
        name: str,
        *,
        spec: Mapping[str, Any],
        parameters: Parameters | None = None,
        description: str | None = None,
        scope: Scope | None = None,
        project_id: str | None = None,
        version: int | None = None,
    ) -> AppliedResource[Template]:
        """Create the template of this name, or change it.

        Args:
            version: only if the template has this version (PreconditionFailed).
        """
        return await self._transport.apply(
            Call(
                operation="apply_template",
                method="PUT",
                path=path("/v1/templates/by-name/{}", name),
                read=model(Template),
                body=body(
                    spec=spec,
                    parameters=parameters,
                    description=description,
                    scope=scope,
                    project_id=project_id,
                ),
                headers=if_match(version),
            )
        )

    async def plan(
        self,
        name: str,
        *,
        spec: Mapping[str, Any],
        parameters: Parameters | None = None,
        description: str | None = None,
        scope: Scope | None = None,
        project_id: str | None = None,
        version: int | None = None,
    ) -> ApplyPlan:
        """What `apply` would do with these arguments. It changes nothing, and raises what `apply` would."""
        return await self._transport.send(
            Call(
                operation="apply_template",
                method="PUT",
                path=path("/v1/templates/by-name/{}", name),
                read=model(ApplyPlan),
                params={"dry_run": True},
                body=body(
                    spec=spec,
                    parameters=parameters,
                    description=description,
                    scope=scope,
                    project_id=project_id,
                ),
                headers=if_match(version),
            )
        )

    def list(
        self, *, name: str | None = None, project_id: str | None = None, limit: int | None = None
    ) -> AsyncPages[Template]:
        """List the templates of your projects and the global ones, newest first.

        Args:
            project_id: templates of this project, and global ones.
        """
        return AsyncPages(
            self._transport,
            Call(
                operation="list_templates",
                method="GET",
                path="/v1/templates",
                read=model(TemplateList),
                params={"name": name, "project_id": project_id, "limit": limit},
            ),
        )

    async def get(self, template_id: str) -> Template:
        """Get a template."""
        return await self._transport.send(
            Call(
                operation="get_template",
                method="GET",
                path=path("/v1/templates/{}", template_id),
                read=model(Template),
            )
        )

    async def render(
        self, template_id: str, parameters: Mapping[str, ParameterValue] | None = None
    ) -> RenderedTemplate:
        """Fill in the parameters: `client.instances.create(**client.templates.render(id).spec)`.

        Raises:
            InvalidParameters: a value is missing, unknown or not allowed.
        """
        return await self._transport.send(
            Call(
                operation="render_template",
                method="POST",
                path=path("/v1/templates/{}/render", template_id),
                read=model(RenderedTemplate),
                body=body(parameters=parameters or {}),
            )
        )

    async def delete(self, template_id: str, *, version: int | None = None) -> None:
        """Delete a template. Instances that were created with it stay as they are.

        Args:
            version: delete it only if it still has this version (PreconditionFailed).
        """
        return await self._transport.send(
            Call(
                operation="delete_template",
                method="DELETE",
                path=path("/v1/templates/{}", template_id),
                read=nothing,
                headers=if_match(version),
            )
        )
