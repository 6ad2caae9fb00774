# Generated from aio/resources/webhooks.py: change that file, and run `make client`.
"""Webhooks: where events are sent."""

from collections.abc import Sequence

from mooring_client.answers import model, nothing
from mooring_client.calls import UNSET, AppliedResource, Call, Unset, body, changes, if_match, path
from mooring_client.schemas.applying import ApplyPlan
from mooring_client.schemas.webhooks import (
    DeliveryStatus,
    NewWebhook,
    Webhook,
    WebhookDelivery,
    WebhookDeliveryList,
    WebhookEvent,
    WebhookFormat,
    WebhookList,
)
from mooring_client.sync.paging import Pages
from mooring_client.sync.resources.base import Resource


class Webhooks(Resource):
    """Where events are sent: `client.webhooks`."""

    def create(
        self,
        url: str,
        *,
        name: str | None = None,
        events: Sequence[WebhookEvent] = ("notices",),
        project_id: str | None = None,
        all_projects: bool = False,
        enabled: bool = True,
        format: WebhookFormat = "standard",
    ) -> NewWebhook:
        """Send events to a URL. The answer shows the secret once.

        Args:
            name: None: a generated name.
            all_projects: events of all projects, nodes and GPUs; only admins may request this.
        """
        return self._transport.send(
            Call(
                operation="create_webhook",
                method="POST",
                path="/v1/webhooks",
                read=model(NewWebhook),
                body=body(
                    name=name,
                    url=url,
                    events=list(events),
                    project_id=project_id,
                    all_projects=all_projects,
                    enabled=enabled,
                    format=format,
                ),
            )
        )

    def apply(
        self,
        name: str,
        *,
        url: str,
        events: Sequence[WebhookEvent] = ("notices",),
        project_id: str | None = None,
        all_projects: bool = False,
        enabled: bool = True,
        format: WebhookFormat = "standard",
        version: int | None = None,
    ) -> AppliedResource[Webhook]:
        """Create or change the webhook of this name. `rotate_secret` shows a secret.

        Args:
            version: only if the webhook has this version (PreconditionFailed).
        """
        return self._transport.apply(
            Call(
                operation="apply_webhook",
                method="PUT",
                path=path("/v1/webhooks/by-name/{}", name),
                read=model(Webhook),
                body=body(
                    url=url,
                    events=list(events),
                    project_id=project_id,
                    all_projects=all_projects,
                    enabled=enabled,
                    format=format,
                ),
                headers=if_match(version),
            )
        )

    def plan(
        self,
        name: str,
        *,
        url: str,
        events: Sequence[WebhookEvent] = ("notices",),
        project_id: str | None = None,
        all_projects: bool = False,
        enabled: bool = True,
        format: WebhookFormat = "standard",
        version: int | None = None,
    ) -> ApplyPlan:
        """What `apply` would do with these arguments. It changes nothing, and raises what `apply` would."""
        return self._transport.send(
            Call(
                operation="apply_webhook",
                method="PUT",
                path=path("/v1/webhooks/by-name/{}", name),
                read=model(ApplyPlan),
                params={"dry_run": True},
                body=body(
                    url=url,
                    events=list(events),
                    project_id=project_id,
                    all_projects=all_projects,
                    enabled=enabled,
                    format=format,
                ),
                headers=if_match(version),
            )
        )

    def list(
        self, *, name: str | None = None, project_id: str | None = None, limit: int | None = None
    ) -> Pages[Webhook]:
        """List webhooks, newest first, without their secrets."""
        return Pages(
            self._transport,
            Call(
                operation="list_webhooks",
                method="GET",
                path="/v1/webhooks",
                read=model(WebhookList),
                params={"name": name, "project_id": project_id, "limit": limit},
            ),
        )

    def get(self, webhook_id: str) -> Webhook:
        """Get a webhook, without its secret."""
        return self._transport.send(
            Call(
                operation="get_webhook",
                method="GET",
                path=path("/v1/webhooks/{}", webhook_id),
                read=model(Webhook),
            )
        )

    def update(
        self,
        webhook_id: str,
        *,
        name: str | Unset = UNSET,
        url: str | Unset = UNSET,
        events: Sequence[WebhookEvent] | Unset = UNSET,
        enabled: bool | Unset = UNSET,
        format: WebhookFormat | Unset = UNSET,
        version: int | None = None,
    ) -> Webhook:
        """Change a webhook.

        Args:
            version: change it only if it still has this version (PreconditionFailed).
        """
        return self._transport.send(
            Call(
                operation="update_webhook",
                method="PATCH",
                path=path("/v1/webhooks/{}", webhook_id),
                read=model(Webhook),
                body=changes(name=name, url=url, events=events, enabled=enabled, format=format),
                headers=if_match(version),
            )
        )

    def delete(self, webhook_id: str, *, version: int | None = None) -> None:
        """Delete a webhook with its deliveries.

        Args:
            version: delete it only if it still has this version (PreconditionFailed).
        """
        return self._transport.send(
            Call(
                operation="delete_webhook",
                method="DELETE",
                path=path("/v1/webhooks/{}", webhook_id),
                read=nothing,
                headers=if_match(version),
            )
        )

    def rotate_secret(self, webhook_id: str) -> NewWebhook:
        """Make a new secret, which the answer shows once. The former one signs for 24 hours too."""
        return self._transport.send(
            Call(
                operation="rotate_webhook_secret",
                method="POST",
                path=path("/v1/webhooks/{}/rotate-secret", webhook_id),
                read=model(NewWebhook),
            )
        )

    def test(self, webhook_id: str) -> WebhookDelivery:
        """Send an event of the type `webhook.ping`."""
        return self._transport.send(
            Call(
                operation="test_webhook",
                method="POST",
                path=path("/v1/webhooks/{}/test", webhook_id),
                read=model(WebhookDelivery),
            )
        )

    def deliveries(
        self, webhook_id: str, *, status: DeliveryStatus | None = None, limit: int | None = None
    ) -> Pages[WebhookDelivery]:
        """List the deliveries of a webhook, newest first."""
        return Pages(
            self._transport,
            Call(
                operation="list_webhook_deliveries",
                method="GET",
                path=path("/v1/webhooks/{}/deliveries", webhook_id),
                read=model(WebhookDeliveryList),
                params={"status": status, "limit": limit},
            ),
        )

    def replay(self, webhook_id: str, delivery_id: str) -> WebhookDelivery:
        """Send a delivery again at once, with the same id and body."""
        return self._transport.send(
            Call(
                operation="replay_webhook_delivery",
                method="POST",
                path=path("/v1/webhooks/{}/deliveries/{}/replay", webhook_id, delivery_id),
                read=model(WebhookDelivery),
            )
        )
